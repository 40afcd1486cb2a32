"""Loggers: every run writes metrics.csv in its folder; with logger=wandb it also logs to wandb.

The report reads the local file; wandb has a copy. So a failing wandb never stops a run, but a failing disk does.
Only the following leaves the machine through wandb: the resolved config, metrics, tables, GPU and CPU load, the commit and
the diff of tracked files. Environment variables, keys, host and user names, and home paths do not.
"""

from __future__ import annotations

import contextlib
import csv
import enum
import hashlib
import logging
import math
import netrc
import os
import re
import subprocess
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

import lightning as L
from lightning.pytorch.loggers.csv_logs import ExperimentWriter
from lightning.pytorch.loggers.logger import rank_zero_experiment
from lightning.pytorch.utilities import rank_zero_only

log = logging.getLogger(__name__)

STEP = "trainer/global_step"  # the x-axis of every chart, under the name that Lightning's logger gives it
# the value of each curve that wandb's summary keeps; each name is spelled out because wandb takes no `*/loss`
BEST = {
    f"val/{name}": keep
    for name, keep in {
        "loss": "min",
        "perplexity": "min",
        "bits_per_byte": "min",
        "token_accuracy": "max",
        "sequence_accuracy": "max",
    }.items()
}
MAX_DIFF_BYTES = 2**20


# Local file


class CSVLogger(L.pytorch.loggers.CSVLogger):
    """`<save_dir>/metrics.csv`: one row per logging step, one column per metric; `step` counts from 0.

    A run that resumes in its own folder continues its file: when it logs a metric again, it replaces that metric's values
    from that step on, and keeps the rest. ValueError, with file and line, if a row of the file has no step.
    """

    def __init__(self, save_dir: str | os.PathLike):
        super().__init__(save_dir=save_dir, name="", version="")
        if (path := Path(save_dir) / "metrics.csv").exists():
            _read_rows(path)  # reports an error in it before training

    @property
    @rank_zero_experiment
    def experiment(self) -> _MetricsFile:
        if self._experiment is None:
            self._experiment = _MetricsFile(self.save_dir)
        return self._experiment

    @rank_zero_only
    def log_hyperparams(self, params: Mapping) -> None:
        """Write nothing, because .hydra/config.yaml has the config."""


class _MetricsFile(ExperimentWriter):
    def __init__(self, log_dir: str):
        super().__init__(log_dir)
        self._replaced: set[str] = {"step", "epoch"}  # metrics whose earlier values are already replaced
        path = Path(self.metrics_file_path)
        self.metrics_keys = sorted(_read_rows(path)[0]) if path.exists() else []

    def _check_log_dir_exists(self) -> None:
        """Do nothing: Lightning's method would delete an existing file."""

    def log_metrics(self, metrics_dict: Mapping, step: int | None = None) -> None:
        super().log_metrics(metrics_dict, step)
        again = metrics_dict.keys() - self._replaced
        self._replaced |= again
        if again & set(self.metrics_keys):
            self._forget(again, self.metrics[-1]["step"])

    def _forget(self, names: set[str], step: int) -> None:
        path = Path(self.metrics_file_path)
        header, rows = _read_rows(path)
        for row in rows:
            if int(row["step"]) >= step:
                row.update(dict.fromkeys(names & row.keys(), ""))
        kept = [row for row in rows if any(row[name] for name in row.keys() - {"step", "epoch"})]
        part = path.with_suffix(".part")
        with part.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, header)
            writer.writeheader()
            writer.writerows(kept)
        os.replace(part, path)


def _read_rows(path: Path) -> tuple[list[str], list[dict[str, str]]]:
    """Header and rows; an incomplete last line (of a killed run) is skipped. ValueError, with file and line, for a file of
    another kind."""
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not a file of metrics: {error}") from error
    reader = csv.DictReader(text[: text.rfind("\n") + 1].splitlines())
    rows = []
    try:
        for row in reader:
            int(row["step"])
            rows.append({name: row[name] or "" for name in reader.fieldnames})
    except (KeyError, TypeError, ValueError, csv.Error) as error:
        reason = f"{type(error).__name__}: {error}"
        raise ValueError(f"{path}, line {reader.line_num}, is not a row of metrics with a step ({reason})") from error
    return list(reader.fieldnames or []), rows


# wandb


class _Finished(RuntimeError):
    """A bug in our code: something was logged after the end of the run."""


class WandbLogger(L.pytorch.loggers.WandbLogger):
    """A wandb run in `save_dir`, which is opened at the first use and closed only by `finish(exit_code)`.

    mode: online, offline, disabled, or auto: WANDB_MODE if it is set, else online if there is a key (WANDB_API_KEY, or
    netrc), else offline. The chosen mode and the reason are logged once. There is never a prompt. If the server cannot be
    reached within `init_timeout` seconds, the run continues offline, with a warning; `wandb sync` uploads it later.
    project, group, name, tags: as in wandb. run_id: of the wandb run to resume, or None for a new one.
    log_diff: also upload the diff of tracked files against the commit (`source.diff`, at most 1 MiB).

    ValueError for an unknown mode, for mode=online without a key, and if wandb is not installed.
    """

    def __init__(
        self,
        save_dir: str | os.PathLike,
        project: str = "seqmix",
        group: str | None = None,
        name: str | None = None,
        tags: Iterable[str] = (),
        mode: str = "auto",
        run_id: str | None = None,
        log_diff: bool = True,
        init_timeout: float = 20.0,
    ):
        try:
            import wandb  # noqa: F401
        except ImportError as error:
            raise ValueError(
                f"logger=wandb needs wandb ({error}): pip install wandb, or use logger=csv, which only writes metrics.csv"
            ) from error
        super().__init__(name=name, save_dir=save_dir, project=project, version=run_id)
        self.mode, self._why = resolve_mode(mode)
        self.group = group
        self.tags = list(tags)
        self.log_diff = log_diff
        self.init_timeout = init_timeout
        self._finished = False
        self._broken = False

    @property
    @rank_zero_experiment
    def experiment(self):
        """The wandb run."""
        if self._experiment is None:
            if self._finished:
                raise _Finished("the wandb run is finished; nothing can be logged to it")
            self._experiment = self._open()
        return self._experiment

    def _open(self):
        import wandb

        # a second init would return the open run, so that two jobs of a sweep would share it
        assert wandb.run is None, f"wandb run {wandb.run.id} is still open: finish it before opening another"
        run = None
        while run is None:
            try:
                run = self._init(self.mode)
            except (wandb.Error, OSError) as error:
                if self.mode == "disabled":
                    raise
                wandb.teardown()
                failed, self.mode = self.mode, "offline" if self.mode == "online" else "disabled"
                self._why = f"{failed} failed"
                log.warning("wandb: mode %s failed (%s); continuing %s", failed, _one_line(error), self.mode)
        run.define_metric(STEP)
        run.define_metric("*", step_metric=STEP, step_sync=True)
        for metric, keep in BEST.items():
            run.define_metric(metric, step_metric=STEP, summary=keep)
        later = f"; upload later with: wandb sync {_tidy(str(Path(run.dir).parent))}" if self.mode == "offline" else ""
        log.info("wandb: %s, %s%s", self.mode, self._why, f", {run.url}" if self.mode == "online" else later)
        return run

    def _init(self, mode: str):
        import wandb

        if mode != "disabled":
            Path(self.save_dir).mkdir(parents=True, exist_ok=True)
        return wandb.init(
            project=self._project,
            group=self.group,
            name=self._name,
            tags=self.tags,
            id=self._id,
            resume="allow" if self._id is not None else None,
            dir=self.save_dir,
            mode=mode,
            settings=wandb.Settings(
                init_timeout=self.init_timeout,
                login_timeout=1,
                silent=True,  # `_open` reports the mode and the address
                console="off",  # the output contains paths, and control codes of the progress bar
                save_code=False,
                disable_code=True,
                disable_git=True,  # log_hyperparams logs commit and diff
                disable_job_creation=True,
                host="",  # by default the name of the machine
                x_disable_meta=True,
                x_disable_machine_info=True,
                x_save_requirements=False,
                symlink=False,
            ),
        )

    @rank_zero_only
    def log_hyperparams(self, params: Mapping) -> None:
        """Log the resolved config, nested, without secrets and home paths, and with it the commit and the diff."""
        source = source_state()
        config = plain_config(params)
        if source is not None:
            config["source"] = source_facts(source)
        self._safely("config", lambda: self.experiment.config.update(config, allow_val_change=True))
        if source is not None and source.diff and self.log_diff:
            self._safely("diff", lambda: self._save_diff(source.diff))

    def _save_diff(self, diff: str) -> None:
        path = Path(self.experiment.dir) / "source.diff"
        path.write_text(diff, encoding="utf-8")
        self.experiment.save(str(path), base_path=str(path.parent), policy="now")

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        self._safely("metrics", lambda: super(WandbLogger, self).log_metrics(metrics, step))

    @rank_zero_only
    def log_summary(self, values: Mapping[str, object]) -> None:
        """Log values of the whole run. Non-finite values become None, because dashboards silently omit a NaN."""
        finite = {name: None if _not_finite(value) else value for name, value in values.items()}
        finite = {name: _tidy(value) if isinstance(value, str) else value for name, value in finite.items()}
        self._safely("summary", lambda: self.experiment.summary.update(finite))

    @rank_zero_only
    def finish(self, exit_code: int = 0) -> None:
        """Close the run, if it was opened. Exit code 0 is a success; any other shows as failed."""
        run, self._experiment, self._finished = self._experiment, None, True
        if run is not None:
            self._broken = False
            self._safely("the end of the run", lambda: run.finish(exit_code=exit_code))

    def _safely(self, what: str, write: Callable[[], object]) -> None:
        """Write to wandb; if that fails (disk full, service gone), warn and stop logging to wandb, and let the run continue."""
        if self._broken:
            return
        try:
            write()
        except _Finished:
            raise
        except Exception as error:
            self._broken = True
            log.warning("wandb: could not log %s (%s); only metrics.csv is written from here on", what, _one_line(error))


@contextlib.contextmanager
def closing(loggers: Iterable[L.pytorch.loggers.Logger]) -> Iterator[None]:
    """On exit, finish the wandb runs among `loggers`, with exit code 0 or that of the exception that is raised."""
    code = 1
    try:
        yield
        code = 0
    except KeyboardInterrupt:
        code = 130
        raise
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
        raise
    finally:
        for logger in loggers:
            if isinstance(logger, WandbLogger):
                logger.finish(code)


def resolve_mode(mode: str) -> tuple[str, str]:
    """(online, offline or disabled; the reason) for a configured mode. ValueError as for WandbLogger."""
    modes = ("online", "offline", "disabled")
    if mode == "auto":
        asked = os.environ.get("WANDB_MODE", "").lower()
        asked = {"dryrun": "offline", "run": "online"}.get(asked, asked)
        if asked not in (*modes, ""):
            raise ValueError(f"WANDB_MODE={asked!r} must be one of {', '.join(modes)}")
        if asked == "online" and not has_key():
            return "offline", "WANDB_MODE is online, but there is no key"
        if asked:
            return asked, "set by WANDB_MODE"
        return ("online", "a key was found") if has_key() else ("offline", "there is no key")
    if mode not in modes:
        raise ValueError(f"wandb mode must be auto, {', '.join(modes)}, got {mode!r}")
    if mode == "online" and not has_key():
        raise ValueError("wandb mode=online needs a key (WANDB_API_KEY, or `wandb login`); use mode=auto or offline")
    return mode, "as configured"


def has_key() -> bool:
    """Whether wandb can log in without a prompt: by WANDB_API_KEY, WANDB_IDENTITY_TOKEN_FILE, or its host in netrc."""
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    import wandb

    hosts = {urlsplit(str(wandb.Settings().base_url)).netloc, "api.wandb.ai"}
    named = os.environ.get("NETRC")
    candidates = [Path(named)] if named else [Path.home() / ".netrc", Path.home() / "_netrc"]
    for path in candidates:
        if path.is_file():
            try:
                return any(netrc.netrc(str(path)).authenticators(host) for host in hosts)
            except (netrc.NetrcParseError, OSError) as error:
                log.warning("wandb: could not read %s (%s)", _tidy(str(path)), _one_line(error))
    return False


# Config and source

# keys with these names hold secrets; whole words are matched, since n_tokens, vocab_key and pad_token hold none
SECRET_NAME = re.compile(
    r"(^|_)(api_?key|access_?key|secret(_key)?|password|passwd|credentials?)$|^(hf|auth|access|api)_token$"
)
SECRET_VARIABLE = re.compile(r"(^|_)(API_?KEY|KEY|TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIALS?)$", re.IGNORECASE)
HIDDEN = "<hidden>"


def plain_config(config: Mapping) -> dict:
    """A copy in plain nested dicts, lists, numbers and strings, with secrets hidden and the home directory written as `~`.

    A secret is a text whose key is named like a secret, or one that contains the value of an environment variable that is.
    ValueError for a key with a dot, which wandb would show beside the nested key of the same name.
    """
    secrets = {value for name, value in os.environ.items() if SECRET_VARIABLE.search(name) and len(value) >= 8}
    return {key: _plain(key, value, secrets) for key, value in _items(config)}


def _items(config: Mapping) -> Iterator[tuple[str, object]]:
    for key, value in config.items():
        if "." in str(key):
            raise ValueError(f"config key {key!r} has a dot; use nested mappings instead")
        yield str(key), value


def _plain(key: str, value: object, secrets: set[str]) -> object:
    if isinstance(value, Mapping):
        return {k: _plain(k, v, secrets) for k, v in _items(value)}
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(key, item, secrets) for item in value]
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, enum.Enum):
        return value.name
    text = str(value)
    if SECRET_NAME.search(key) or any(secret in text for secret in secrets):
        return HIDDEN
    return _tidy(text)


def _tidy(text: str) -> str:
    home = str(Path.home())
    return text if home == "/" else re.sub(rf"(?<![\w./-]){re.escape(home)}(?=/|$)", "~", text)


class SourceState(NamedTuple):
    commit: str
    diff: str  # of tracked files against the commit; "" if clean


def source_state(file: Path = Path(__file__)) -> SourceState | None:
    """The commit that `file` belongs to and the changes since, or None if no git repository tracks `file`.

    It is not enough that the file lies inside a repository: an installed package may lie inside a foreign one.
    """
    folder = file.resolve().parent
    try:
        _git(folder, "ls-files", "--error-unmatch", file.name)
        commit = _git(folder, "rev-parse", "HEAD").strip()
        root = _git(folder, "rev-parse", "--show-toplevel").strip()
        diff = _git(Path(root), "diff", "--no-ext-diff", "--no-textconv", "--no-color", "HEAD")
    except (OSError, subprocess.SubprocessError):
        return None
    if len(diff) > MAX_DIFF_BYTES:
        diff = diff[:MAX_DIFF_BYTES] + f"\n[cut: {len(diff)} characters in all]\n"
    return SourceState(commit, diff)


def source_facts(source: SourceState | None) -> dict[str, str | None] | None:
    """What distinguishes two versions of the code: the commit, and the hash of the diff against it (None: no diff)."""
    if source is None:
        return None
    diff = hashlib.sha256(source.diff.encode()).hexdigest()[:16] if source.diff else None
    return {"commit": source.commit, "diff_sha256": diff}


def _git(folder: Path, *arguments: str) -> str:
    done = subprocess.run(
        ["git", *arguments], cwd=folder, check=True, capture_output=True, stdin=subprocess.DEVNULL, timeout=30
    )
    return done.stdout.decode("utf-8", errors="replace")


def _not_finite(value: object) -> bool:
    return isinstance(value, float) and not math.isfinite(value)


def _one_line(error: BaseException) -> str:
    return _tidy(" ".join(f"{type(error).__name__}: {error}".split()))
