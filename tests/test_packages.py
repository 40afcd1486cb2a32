"""The two distributions: seqmix, which holds the kernels, and seqmix-kernels, which is the kernels alone."""

import importlib
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

import seqmix_kernels

ROOT = Path(__file__).parent.parent
KERNELS = ROOT / "kernels"
SOURCES = {ROOT: ["src/seqmix", "src/hydra_plugins", "kernels/seqmix_kernels"], KERNELS: ["seqmix_kernels"]}
over_distributions = pytest.mark.parametrize("project", SOURCES, ids=["seqmix", "seqmix-kernels"])


def facts(project: Path) -> dict:
    return tomllib.loads((project / "pyproject.toml").read_text())["project"]


def wheel(project: Path, folder: Path) -> zipfile.ZipFile:
    pytest.importorskip("hatchling", reason="the extra dev has it")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    done = subprocess.run(command, cwd=project, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return zipfile.ZipFile(next(folder.glob("*.whl")))


def test_both_distributions_and_the_citation_state_the_same_facts():
    whole, kernels = facts(ROOT), facts(KERNELS)
    for key in ("requires-python", "license", "license-files", "authors", "classifiers"):
        assert whole[key] == kernels[key], key
    assert {*kernels["dependencies"]} < {*whole["dependencies"]}
    assert whole["dynamic"] == kernels["dynamic"] == ["version"]  # both read it in seqmix_kernels/__init__.py
    assert (ROOT / "LICENSE").read_bytes() == (KERNELS / "LICENSE").read_bytes()
    citation = (ROOT / "CITATION.cff").read_text()
    assert re.search(r"^version: (.*)$", citation, re.MULTILINE)[1] == seqmix_kernels.__version__
    assert re.search(r"^license: (.*)$", citation, re.MULTILINE)[1] == whole["license"]


@over_distributions
def test_a_wheel_holds_every_file_of_its_packages_and_the_licence(project, tmp_path):
    names = {name for name in wheel(project, tmp_path).namelist() if ".dist-info/" not in name}
    files = [path for source in SOURCES[project] for path in (project / source).rglob("*") if path.is_file()]
    roots = [(project / source).parent for source in SOURCES[project]]
    wanted = {path.relative_to(next(r for r in roots if r in path.parents)).as_posix() for path in files}
    assert names == {name for name in wanted if "__pycache__" not in name}
    assert "seqmix_kernels/py.typed" in names and ("seqmix/py.typed" in names) == (project == ROOT)
    assert any(name.endswith("licenses/LICENSE") for name in zipfile.ZipFile(next(tmp_path.glob("*.whl"))).namelist())


def test_the_example_of_the_kernels_readme_runs_with_the_kernels_wheel_and_imports_no_triton(tmp_path):
    wheel(KERNELS, tmp_path).extractall(tmp_path / "site")
    example = re.search(r"```python\n(.*?)```", (KERNELS / "README.md").read_text(), re.DOTALL)[1]
    (tmp_path / "example.py").write_text(
        "import sys\n"
        f"sys.path.insert(0, {str(tmp_path / 'site')!r})\n"
        "sys.modules['seqmix'] = None\n"
        f"{example}\n"
        "assert y.shape == x.shape and state.shape == (8, 256, 16)\n"
        "print(selective_scan.__code__.co_filename, 'triton' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "example.py"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [str(tmp_path / "site/seqmix_kernels/ops/selective_scan/op.py"), "False"]


def test_every_public_operator_is_exported_by_the_package():
    source = (KERNELS / "seqmix_kernels/__init__.py").read_text()
    typed = re.findall(r"^    from \.ops\.(\w+) import (\w+) as \2$", source, re.MULTILINE)
    assert {name: folder for folder, name in typed} == seqmix_kernels.FOLDERS
    for name, folder in seqmix_kernels.FOLDERS.items():
        function, module = getattr(seqmix_kernels, name), importlib.import_module(f"seqmix_kernels.ops.{folder}")
        assert function is getattr(module, name) and name in dir(seqmix_kernels) and function.__doc__
    with pytest.raises(AttributeError, match="has no attribute 'scan'"):
        seqmix_kernels.scan  # noqa: B018
