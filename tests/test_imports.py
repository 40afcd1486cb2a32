"""Who may import whom, read from the files; and what importing must not drag in."""

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from omegaconf import OmegaConf
from runs import SELECTIVE_COPY, command

ROOT = Path(__file__).parent.parent
OURS = ("seqmix", "seqmix_kernels")
# what a file may import of ours; a longer path wins over a shorter one
ARROWS = {
    "kernels/seqmix_kernels": ("seqmix_kernels",),
    "src/seqmix/mixers/base.py": (),
    "src/seqmix/mixers": ("seqmix.mixers.base", "seqmix_kernels"),
    "src/seqmix/mixers/s4.py": ("seqmix.mixers.base", "seqmix.mixers.s4d", "seqmix_kernels"),  # one layer, another kernel
    "src/seqmix/channel_mixers.py": ("seqmix_kernels",),
    "src/seqmix/model.py": ("seqmix.mixers.base", "seqmix_kernels"),
    "src/seqmix/module.py": ("seqmix.metrics", "seqmix.optim", "seqmix.sharding", "seqmix.step"),
    "src/seqmix/step.py": ("seqmix.graphs", "seqmix.measure", "seqmix.metrics"),
    "src/seqmix/graphs.py": (),
    "src/seqmix/sharding.py": (),
    "src/seqmix/identity.py": (),
    "src/seqmix/signatures.py": (),
    "src/seqmix/display.py": (),
    "src/seqmix/folders.py": ("seqmix.display",),
    "src/seqmix/claim.py": ("seqmix.config", "seqmix.display", "seqmix.folders", "seqmix.identity", "seqmix.sweep"),
    "src/seqmix/build.py": ("seqmix.model", "seqmix.module", "seqmix.tasks.base"),
    "src/seqmix/lengths.py": (
        "seqmix.build",
        "seqmix.memory",
        "seqmix.metrics",
        "seqmix.model",
        "seqmix.state",
        "seqmix.tasks.base",
    ),
    "src/seqmix/config.py": (
        "seqmix.lengths",
        "seqmix.build",
        "seqmix.folders",
        "seqmix.identity",
        "seqmix.model",
        "seqmix.module",
        "seqmix.optim",
        "seqmix.signatures",
        "seqmix.sweep.names",
    ),
    "src/seqmix/command_line.py": (
        "seqmix.build",
        "seqmix.config",
        "seqmix.display",
        "seqmix.signatures",
        "seqmix.sweep.names",
    ),
    "src/seqmix/sweep": (
        "seqmix.build",
        "seqmix.display",
        "seqmix.folders",
        "seqmix.fork_server",
        "seqmix.identity",
        "seqmix.preload",
        "seqmix.signatures",
        "seqmix.sweep",
        "seqmix.tracking",
    ),
    "src/seqmix/fork_server.py": (),
    "src/seqmix/preload.py": (),
    "src/hydra_plugins": ("seqmix.sweep",),
    "src/seqmix/callbacks": (
        "seqmix.callbacks",
        "seqmix.costs",
        "seqmix.display",
        "seqmix.measure",
        "seqmix.memory",
        "seqmix.state",
    ),
    "src/seqmix/tasks": ("seqmix.tasks", "seqmix.graphs"),
    "src/seqmix/metrics.py": (),
    "src/seqmix/optim.py": (),
    "src/seqmix/measure.py": (),
    "src/seqmix/memory.py": (),
    "src/seqmix/state.py": ("seqmix.mixers.base",),
    "src/seqmix/decode.py": ("seqmix.mixers.base", "seqmix.state"),
    "src/seqmix/costs.py": ("seqmix.decode", "seqmix.measure", "seqmix.memory", "seqmix.mixers.base", "seqmix.state"),
    "src/seqmix/bench/kernels.py": ("seqmix.costs", "seqmix.measure", "seqmix.memory", "seqmix_kernels.benchmark"),
    "src/seqmix/bench": (
        "seqmix.bench",
        "seqmix.build",
        "seqmix.command_line",
        "seqmix.config",
        "seqmix.costs",
        "seqmix.decode",
        "seqmix.display",
        "seqmix.figures",
        "seqmix.folders",
        "seqmix.fork_server",
        "seqmix.measure",
        "seqmix.memory",
        "seqmix.optim",
        "seqmix.preload",
        "seqmix.quick_lightning",
        "seqmix.tracking",
        "seqmix_kernels.ops.attention",
        "seqmix_kernels.frame",  # its choices, which one point hands on to the next
    ),
    "src/seqmix/tracking.py": (),
    "src/seqmix/startup.py": (),
    "src/seqmix/quick_lightning.py": ("seqmix.startup",),
    "src/seqmix/figures.py": (),
    "src/seqmix/report": ("seqmix.display", "seqmix.figures", "seqmix.folders", "seqmix.identity", "seqmix.report"),
    "src/seqmix/reproduce.py": ("seqmix.display", "seqmix.folders", "seqmix.report"),
    "src/seqmix/__init__.py": (),
}
FILES = sorted(path.relative_to(ROOT).as_posix() for path in [*ROOT.glob("src/**/*.py"), *ROOT.glob("kernels/**/*.py")])


def imports(path: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            package = path.relative_to(ROOT).parts[1 : len(path.relative_to(ROOT).parts) - node.level]
            module = ".".join([*package, node.module or ""]).strip(".") if node.level else node.module
            names |= {f"{module}.{alias.name}" for alias in node.names}
    return names


@pytest.mark.parametrize("file", FILES)
def test_arrows(file):
    rule = max((prefix for prefix in ARROWS if file.startswith(prefix)), key=len, default=None)
    assert rule is not None, f"{file} stands in no layer: name what it may import in ARROWS"
    for name in imports(ROOT / file):
        if name.split(".")[0] in OURS:
            allowed = any(name == ok or name.startswith(f"{ok}.") for ok in ARROWS[rule])
            assert allowed, f"{file} imports {name}; {rule} may import {ARROWS[rule]}"


def of_group(group: str) -> tuple[set[str], set[str], set[str]]:
    """The files of the targets in a group of conf; the names of its choices and their classes; the arguments of the classes."""
    files, names, arguments = set(), set(), set()
    for path in (ROOT / "conf" / group).glob("*.yaml"):
        config = OmegaConf.load(path)
        part = config.get(group, config)
        module, cls = part._target_.rsplit(".", 1)
        files.add(f"src/{module.replace('.', '/')}.py")
        names |= {path.stem, cls}
        arguments |= {key for key in part if not key.startswith("_")}
    return files, names, arguments


def words(path: Path) -> tuple[set[str], set[str]]:
    """The identifiers of a file, and the parts of its strings that look like keys or paths, docstrings left out."""
    identifiers, strings = set(), set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Name | ast.Attribute):
            identifiers.add(node.id if isinstance(node, ast.Name) else node.attr)
        elif isinstance(node, ast.alias):
            identifiers |= {*node.name.split("."), node.asname}
        elif isinstance(node, ast.Constant) and re.fullmatch(r"[\w.]+", str(node.value)):
            strings |= {*str(node.value).split(".")}
    return identifiers, strings


def test_shared_code_names_no_architecture_and_no_task():
    """Nor an argument of a mixer: what the rest must know about one, its class says (mixers/base.py)."""
    of_mixers, mixers, arguments = of_group("model")
    of_tasks, tasks, _ = of_group("task")
    names = mixers | tasks - {"copy"}  # which a module of Python is called, too
    arguments -= {"decode"}  # a part of the benchmark
    shared = {file for file in FILES if file.startswith("src/")} - of_mixers - of_tasks | {"train.py"}
    assert len(shared) > 60 and "src/seqmix/mixers/base.py" in shared
    for file in sorted(shared):
        identifiers, strings = words(ROOT / file)
        named = names & (identifiers | strings) | arguments & strings
        assert not named, f"{file} names {', '.join(sorted(named))}"


def test_importing_seqmix_is_light():
    code = (
        "import sys, time; start = time.process_time(); import seqmix, seqmix_kernels; "
        "import seqmix.model, seqmix.optim, seqmix.mixers.mamba, seqmix.mixers.s4d, seqmix.mixers.attention; "
        "heavy = {'wandb', 'triton', 'flash_attn', 'datasets'} & set(sys.modules); "
        "assert not heavy, heavy; assert time.process_time() - start < 3"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_parts_import_without_optional_packages():
    """Case H01: no wandb, no Triton, no flash-attn; every module of ours still imports."""
    modules = [f.removeprefix("src/").removeprefix("kernels/").removesuffix(".py").replace("/", ".") for f in FILES]
    plain = [m.removesuffix(".__init__") for m in modules if "bench" not in m and "report" not in m]
    # but for what launches Triton's kernels, and what measures them
    plain = [m for m in plain if m != "seqmix_kernels.launch" and not m.endswith("_gpu")]
    code = (
        "import sys, importlib\n"
        "for name in ('wandb', 'triton', 'flash_attn', 'datasets', 'tokenizers'): sys.modules[name] = None\n"
        f"for name in {[m for m in plain if 'fused' not in m and 'gluon' not in m and 'triton' not in m]!r}: "
        "importlib.import_module(name)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


# packages that other packages import where they are installed; here each is a stand-in that is
INSTALLED = ("torchvision", "transformers", "scipy", "matplotlib", "pandas", "sklearn", "tensorboard", "IPython", "psutil")
NEVER = {*INSTALLED, "torchmetrics.functional", "torch.utils.flop_counter", "wandb", "datasets", "tokenizers", "seqmix.bench"}
COMPILERS = {"torch._dynamo", "torch._inductor", "sympy", "triton", "torch.distributed.fsdp", "torch.distributed.tensor"}


@pytest.fixture
def environment(tmp_path):
    for name in INSTALLED:
        (tmp_path / "site" / name).mkdir(parents=True)
        (tmp_path / "site" / name / "__init__.py").touch()
        metadata = tmp_path / "site" / f"{name}-99.dist-info" / "METADATA"
        metadata.parent.mkdir()
        metadata.write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 99\n")
    return {"PYTHONPATH": os.pathsep.join([str(tmp_path / "site"), os.environ.get("PYTHONPATH", "")])}


def loaded(done: subprocess.CompletedProcess) -> set[str]:
    """Modules that a process has imported, of its standard error under `python -X importtime`."""
    assert done.returncode == 0, done.stderr[-2000:]
    return {line.rsplit("|", 1)[1].strip() for line in done.stderr.splitlines() if line.startswith("import time:")}


def test_a_run_imports_nothing_that_it_does_not_use(tmp_path, environment):
    done = command(tmp_path, *SELECTIVE_COPY, "logger=csv", env=environment, launcher=("-X", "importtime"))
    modules = loaded(done)
    assert "seqmix.module" in modules and not NEVER & modules


@pytest.mark.parametrize(
    ("arguments", "used", "unused"),
    [
        (["train.py", "--cfg", "job"], "hydra", NEVER | COMPILERS),
        (["-c", "import seqmix.bench.__main__"], "seqmix.bench.point", NEVER - {"seqmix.bench"} | COMPILERS),
        (["-m", "seqmix.report", "--help"], "seqmix.report.page", NEVER | COMPILERS | {"torch", "lightning", "hydra"}),
    ],
)
def test_a_command_that_trains_nothing_imports_no_compiler(environment, arguments, used, unused):
    command = [sys.executable, "-X", "importtime", *arguments]
    modules = loaded(subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=os.environ | environment))
    assert used in modules and not unused & modules
