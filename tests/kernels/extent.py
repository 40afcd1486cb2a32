"""How many of its cases a script runs: all, or every third where slow tests are left out (conftest.py)."""

import os


def some(cases):
    return list(cases)[:: 3 if os.environ.get("SHORT") else 1]
