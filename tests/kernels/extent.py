"""How many of its cases a script runs: all, or where slow tests are left out (conftest.py) those that cover every kernel, dtype
and option."""

import os

SHORT = bool(os.environ.get("SHORT"))


def some(cases, first):
    """All cases, or the first so many, which the scripts put in front for what they cover."""
    return list(cases)[: first if SHORT else None]
