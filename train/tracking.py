"""What a run reports: JSON lines always, progress on the terminal, Weights & Biases when asked."""

import contextlib
import json
import os
import re
import sys
import time
from pathlib import Path
from typing import Any, TextIO

from longdraft.errors import UserError
from longdraft.train.config import TrainSettings
from longdraft.train.wandb_log import WandbRun, best_taus, evaluation_metrics, step_metrics

METRICS, EVALUATIONS = "metrics.jsonl", "evaluations.jsonl"
SHARES = {"MFU": "mfu", "data wait": "data_wait_share"}
SECRET_KEY = re.compile(r"token(?!s|izer)|secret|password|api_?key|credential", re.IGNORECASE)
SECRET_VALUE = re.compile(r"hf_\w{8,}|sk-[\w-]{8,}|(?<=://)[^/\s:@]+:[^/\s@]+(?=@)|(?<=key=)[^&\s]+|(?<=token=)[^&\s]+")


def redact(value: Any) -> Any:
    """A copy of plain data in which values of secret names, and secrets inside strings, read ``***``."""
    if isinstance(value, dict):
        return {k: "***" if SECRET_KEY.search(str(k)) and v else redact(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [redact(item) for item in value]
    return SECRET_VALUE.sub("***", value) if isinstance(value, str) else value


class JsonLines:
    """One JSON object a line, flushed. Rows behind the step that a run resumes from are dropped."""

    def __init__(self, path: Path, resumed_step: int) -> None:
        self.path, self._cut = path, False
        path.parent.mkdir(parents=True, exist_ok=True)
        kept = [row for row in read_rows(path) if row["step"] <= resumed_step] if resumed_step else []
        work = path.with_name(f".{path.name}.{os.getpid()}")  # beside it: a full disk must not cost the log so far
        try:
            work.write_text("".join(json.dumps(row) + "\n" for row in kept))
            work.replace(path)
        except OSError as error:
            raise UserError(
                f"{path} cannot be written ({error.strerror}): make room, or choose another run.output_dir"
            ) from None
        finally:
            work.unlink(missing_ok=True)

    def write(self, row: dict[str, Any]) -> None:
        """Append a row. On a full disk it is lost and the run goes on: whether it may is for the next checkpoint to say."""
        try:
            with self.path.open("a") as file:
                file.write(("\n" if self._cut else "") + json.dumps(row) + "\n")
            self._cut = False
        except OSError:
            self._cut = True  # perhaps in the middle of a line: the next row starts a new one


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Rows of a log that have a step; a last line that a killed run left half-written, or a damaged one, is skipped."""
    rows = []
    for line in path.read_text(errors="replace").split("\n") if path.is_file() else []:
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(row, dict) and type(row.get("step")) is int:
            rows.append(row)
    return rows


def tell(text: str, out: TextIO) -> None:
    """Print a line for people. Output that goes to a file on a full disk is lost rather than the training."""
    with contextlib.suppress(OSError):
        print(text, file=out, flush=True)


class Tracker:
    """Rank 0's reports. ``tracked`` False (other ranks) makes every call a no-op."""

    def __init__(self, settings: TrainSettings, resumed_step: int, tracked: bool, out: TextIO | None = None) -> None:
        self.tracked = tracked
        if not tracked:
            return
        self.settings, self.resumed = settings, resumed_step > 0
        self.out = out or sys.stdout
        self.metrics = JsonLines(settings.folder / METRICS, resumed_step)
        self.evaluations = JsonLines(settings.folder / EVALUATIONS, resumed_step)
        self.progress = ProgressLine(settings.schedule.max_steps, resumed_step, self.out)
        self.wandb: WandbRun | None = None

    def record(self, provenance: dict[str, Any]) -> None:
        """What made the run, as in ``run.yaml``; W&B, when asked for, starts with it.

        Raises:
            UserError: W&B is asked for and not installed.
        """
        s = self.settings
        if not self.tracked or s.tracking.wandb == "off":
            return
        config = {key: value for key, value in provenance.items() if key not in ("settings", "commit")}
        config |= {**provenance["settings"], "code_commit": provenance["commit"]}
        self.wandb = WandbRun(
            s.folder, s.tracking.project, s.run.name, s.tracking.wandb, config, self.resumed, self.say
        )

    def say(self, text: str) -> None:
        """One line for people."""
        if self.tracked:
            self.progress.pause()
            tell(text, self.out)

    def step(self, row: dict[str, Any]) -> None:
        """Figures of a step, with ``step``, ``loss``, ``accuracy`` and ``tokens_per_s``."""
        if self.tracked:
            self.metrics.write(row)
            self.progress.show(row)
            if self.wandb is not None:
                self.wandb.log(row["step"], step_metrics(row))

    def evaluation(self, row: dict[str, Any]) -> None:
        """Accept lengths of a step by bucket."""
        if not self.tracked:
            return
        self.evaluations.write(row)
        for name, figures in row["buckets"].items():
            self.say(f"eval step {row['step']}  {name:>6}  {evaluation_text(figures)}")
        if self.wandb is not None:
            self.wandb.log(row["step"], evaluation_metrics(row))
            self.wandb.summary(best_taus(read_rows(self.evaluations.path)))

    def close(self) -> None:
        if self.tracked:
            self.progress.pause()
            if self.wandb is not None:
                self.wandb.finish()


def evaluation_text(figures: dict[str, Any]) -> str:
    """A bucket's figures for people."""
    looping = f"  looping {figures['looping']}, not counted" if figures["looping"] else ""
    if figures["tau"] is None:
        return f"no tau: every output loops  prompts {figures['prompts']}"
    depths = " ".join(f"{share:.2f}" for share in figures["reached_depth"])
    return (
        f"tau {figures['tau']:.3f} (without bonus {figures['tau_without_bonus']:.3f})"
        f"  reached depth {depths}  prompts {figures['prompts']}{looping}"
    )


class ProgressLine:
    """A rich bar on a terminal, plain lines elsewhere; both with tokens a second and the time that is left."""

    def __init__(self, total: int, done: int, out: TextIO) -> None:
        self.total, self.first, self.out = total, done, out
        self.began = time.monotonic()
        self.bar: Any = None
        self.task: Any = None

    def show(self, row: dict[str, Any]) -> None:
        done = row["step"]
        left = (time.monotonic() - self.began) / max(done - self.first, 1) * (self.total - done)
        text = f"loss {row['loss']:.4f}  acc {row['accuracy']:.1%}  {row['tokens_per_s']:,.0f} tok/s"
        text += "".join(f"  {name} {row[key]:.1%}" for name, key in SHARES.items() if key in row)
        if not self.out.isatty():
            tell(f"step {done}/{self.total}  {text}  ETA {clock(left)}", self.out)
            return
        if self.bar is None:
            self.bar = self._new_bar()
            self.task = self.bar.add_task("", total=self.total, text="", eta="")
            self.bar.start()
        self.bar.update(self.task, completed=done, text=text, eta=clock(left))

    def _new_bar(self) -> Any:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

        columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[text]}  ETA {task.fields[eta]}"))
        return Progress(*columns, console=Console(file=self.out))

    def pause(self) -> None:
        """Take the bar down, so that other lines can be printed; the next step puts it up again."""
        if self.bar is not None:
            self.bar.stop()
            self.bar = None


def clock(seconds: float) -> str:
    """``h:mm:ss``, or ``m:ss`` below an hour."""
    minutes, s = divmod(int(seconds), 60)
    hours, m = divmod(minutes, 60)
    return f"{hours}:{m:02d}:{s:02d}" if hours else f"{m}:{s:02d}"
