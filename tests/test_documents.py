"""What the documents say can be typed and followed: their commands are accepted, their links lead somewhere."""

import re
import shlex
from pathlib import Path

import pytest
from hydra._internal.utils import get_args_parser

from seqmix.bench.__main__ import compose_bench
from seqmix.command_line import _composed
from seqmix.config import register_resolvers

ROOT = Path(__file__).parent.parent
CONF = ROOT / "conf"
DOCUMENTS = sorted(
    path
    for pattern in ("*.md", "conf/*.md", "src/**/*.md", "kernels/**/*.md", "outputs/*.md", "outputs/report/*/*.md")
    for path in ROOT.glob(pattern)
)


def commands(path: Path) -> list[list[str]]:
    """The words of each command in an indented or fenced block, without its comment; not those with a `...` to be filled in."""
    found = []
    for line in path.read_text().replace("\\\n", " ").splitlines():
        if re.match(r"\s*(python |torchrun )", line) and "..." not in line:
            found.append(shlex.split(line, comments=True))
    return found


def test_every_command_is_accepted():
    """Its keys, values and choices; what they describe may need two GPUs. Reports are left out: they are of older code."""
    register_resolvers()
    documents = [path for path in DOCUMENTS if ROOT / "outputs/report" not in path.parents]
    for words in {tuple(words) for document in documents for words in commands(document)}:
        if "train.py" in words:
            _composed(get_args_parser().parse_args(words[words.index("train.py") + 1 :]), CONF)
        elif words[:3] == ("python", "-m", "seqmix.bench"):
            compose_bench([*words[3:]], CONF)
        elif words[1] != "-m":
            assert (ROOT / words[1]).is_file(), words


@pytest.mark.parametrize("document", DOCUMENTS, ids=[path.relative_to(ROOT).as_posix() for path in DOCUMENTS])
def test_every_link_leads_to_a_file_and_a_heading(document):
    for target in re.findall(r"\]\(([^)\s]+)\)", re.sub(r"```.*?```", "", document.read_text(), flags=re.DOTALL)):
        if target.startswith(("http://", "https://")):
            continue
        name, _, anchor = target.partition("#")
        file = document.parent / name if name else document
        assert file.exists(), target
        headings = re.findall(r"^#+ (.*)$", file.read_text(), re.MULTILINE) if anchor else []
        anchors = [re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings]
        assert not anchor or anchor in anchors, target


def test_the_readme_is_read_in_one_sitting():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150
