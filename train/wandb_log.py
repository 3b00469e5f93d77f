"""Weights & Biases: one run there for one run folder here. Whatever goes wrong on the way there, the training goes on."""

import os
import secrets
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

from longdraft.errors import UserError

RUN_ID_FILE = "wandb_run_id"
START_SECONDS, FINISH_SECONDS = 30, 60  # what a server that does not answer may cost at either end
# Names that W&B can sort and filter by hold letters, digits and underscores.
BUCKETS_THERE = {"<2K": "under_2K", "2K-8K": "2K_to_8K", "8K-32K": "8K_to_32K", ">32K": "over_32K"}


def flat(value: Any, name: str = "") -> dict[str, Any]:
    """Nested figures as ``a/b/1`` names; lists count from 1, and None is left out."""
    if isinstance(value, dict | list):
        pairs = value.items() if isinstance(value, dict) else enumerate(value, 1)
        parts = (flat(item, f"{name}/{key}" if name else str(key)) for key, item in pairs)
        return {key: item for part in parts for key, item in part.items()}
    return {} if value is None else {name: value}


def step_metrics(row: dict[str, Any]) -> dict[str, Any]:
    """A log row under W&B's names: ``train/loss``, ``train/accuracy_by_depth/1``."""
    return flat({"train": {k: v for k, v in row.items() if k != "step"}})


def evaluation_metrics(row: dict[str, Any]) -> dict[str, Any]:
    """An evaluation under W&B's names: ``eval/2K_to_8K/tau``, ``eval/all/reached_depth/1``."""
    return flat({"eval": {BUCKETS_THERE.get(name, name): figures for name, figures in row["buckets"].items()}})


def best_taus(evaluations: list[dict[str, Any]]) -> dict[str, Any]:
    """For the run's summary: each bucket's largest τ over its evaluations, and the step of it."""
    best: dict[str, Any] = {}
    for row in evaluations:
        for name, figures in row["buckets"].items():
            key = f"best/{BUCKETS_THERE.get(name, name)}"
            if figures["tau"] is not None and figures["tau"] > best.get(f"{key}/tau", 0.0):
                best |= {f"{key}/tau": figures["tau"], f"{key}/step": row["step"]}
    return best


def run_id(folder: Path, resumed: bool) -> str:
    """The folder's run there: made with a run's first step and kept by all that resume it."""
    path = folder / RUN_ID_FILE
    if not (resumed and path.is_file() and path.read_text().strip()):
        path.write_text(secrets.token_hex(4) + "\n")
    return path.read_text().strip()


class WandbRun:
    """A started run, or none after the first error of W&B's, which is said and not raised.

    Rows carry the training's own step. W&B ignores rows up to a step that it has, so what a resumed run does again,
    with the same bits, is in its charts once.

    Args:
        folder: the training's own; W&B keeps its files there.
        project, name: how the run is filed.
        asked: ``online``, ``offline``, or ``auto``: offline without a key.
        config: settings and provenance, without secrets.
        resumed: this training continues an earlier one of the folder.
        say: prints one line for people.

    Raises:
        UserError: wandb is not installed.
    """

    def __init__(
        self,
        folder: Path,
        project: str,
        name: str,
        asked: str,
        config: dict[str, Any],
        resumed: bool,
        say: Callable[[str], None],
    ) -> None:
        try:
            wandb: Any = import_module("wandb")
        except ImportError:
            raise UserError(
                "tracking.wandb is on but wandb is not installed: pip install wandb, or tracking.wandb=off"
            ) from None
        self.say = say
        self.run: Any = None
        online = asked == "online" or (asked == "auto" and bool(os.environ.get("WANDB_API_KEY")))
        where = {"id": run_id(folder, resumed), "dir": str(folder), "project": project, "name": name}
        # What W&B would gather by itself (the terminal's lines, the command's words, the checkout) is not redacted.
        quiet: dict[str, Any] = {
            "console": "off",
            "x_disable_meta": True,
            "disable_git": True,
            "disable_code": True,
            "init_timeout": START_SECONDS,
            "finish_timeout": FINISH_SECONDS,
        }
        mode = {"mode": "online", "resume": "allow"} if online else {"mode": "offline"}
        problem = self._start(lambda: wandb.init(**where, **mode, config=config, settings=quiet))
        if online and problem:
            say(f"W&B could not start online ({problem}); the run goes on offline: wandb sync sends it later")
            wandb.teardown()  # the failed start still holds the run's name
            problem = self._start(lambda: wandb.init(**where, mode="offline", config=config, settings=quiet))
        if problem:
            say(f"W&B could not start ({problem}); the run goes on without it")
        self._call(
            "define metrics", lambda run: [run.define_metric(f"{g}/*", step_metric="step") for g in ("train", "eval")]
        )

    def _start(self, start: Callable[[], Any]) -> str | None:
        try:
            self.run = start()
        except Exception as error:  # W&B's, the network's and the file system's; none is worth a training
            return _reason(error)
        return None

    def _call(self, what: str, call: Callable[[Any], Any]) -> None:
        if self.run is None:
            return
        try:
            call(self.run)
        except Exception as error:  # as above
            self.run = None
            self.say(f"W&B could not {what} ({_reason(error)}); the run goes on without it")

    def define(self, names: str, x: str) -> None:
        """Figures of these names (``group/*``) go over another one, not over the step."""
        self._call("define metrics", lambda run: run.define_metric(names, step_metric=x))

    def log(self, step: int, metrics: dict[str, Any]) -> None:
        """Figures of a step."""
        self._call("log", lambda run: run.log({**metrics, "step": step}, step=step))

    def summary(self, values: dict[str, Any]) -> None:
        """Figures of the whole run."""
        self._call("set the summary", lambda run: run.summary.update(values))

    def finish(self) -> None:
        self._call("finish", lambda run: run.finish())


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
