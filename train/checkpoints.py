"""Checkpoints of a run: ``step-00000100/draft`` is what serving loads, beside it what a bitwise resume needs.

A checkpoint appears whole or not at all: it is written under a hidden name, then renamed; ``latest`` is a symbolic link that
is replaced in one move. Only safetensors and JSON are read back, so a foreign checkpoint cannot run code.
"""

import fcntl
import json
import os
import shutil
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any

import torch
from safetensors.torch import save_file

from longdraft.draft_models.checkpoint import read_weights, save_draft
from longdraft.draft_models.config import TrainingFacts
from longdraft.draft_models.longspec import LongSpecDraft
from longdraft.errors import UserError

STATE, PROGRESS, LATEST = "state.safetensors", "progress.json", "latest"


@dataclass
class Progress:
    """Where a run stands. ``cursors`` are the ranks' data positions, ``trajectory`` the settings that decide weights."""

    step: int = 0
    tokens: int = 0
    supervised: int = 0
    seconds: float = 0.0
    cursors: list[int] = field(default_factory=lambda: [0])
    max_length: int = 0
    max_position: int = 0
    trajectory: dict[str, Any] = field(default_factory=dict)


class Checkpoints:
    """The folder ``checkpoints/`` of a run."""

    def __init__(self, run_folder: Path, keep: int) -> None:
        self.folder = run_folder / "checkpoints"
        self.keep = keep

    def latest(self) -> Path | None:
        """The newest whole checkpoint, by number: a process killed between the two moves leaves the link one behind."""
        whole = self.all()
        return whole[-1] if whole else None

    def all(self) -> list[Path]:
        """Whole checkpoints, oldest first."""
        return sorted(path.parent for path in self.folder.glob(f"step-*/{PROGRESS}"))

    def save(
        self,
        draft: LongSpecDraft,
        weights: dict[str, torch.Tensor],
        state: dict[str, torch.Tensor],
        progress: Progress,
        target_name: str,
        facts: TrainingFacts,
    ) -> Path:
        """Write one checkpoint, point ``latest`` at it, then drop the oldest beyond ``keep``. Rank 0 only."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self.clean()
        name = f"step-{progress.step:08d}"
        work, final = self.folder / f".{name}.{os.getpid()}", self.folder / name
        work.mkdir()
        save_draft(draft, work / "draft", target_name, facts, weights)
        rng = {"rng.torch": torch.get_rng_state()}
        save_file({k: v.to("cpu").contiguous() for k, v in (state | rng).items()}, work / STATE)
        (work / PROGRESS).write_text(json.dumps(asdict(progress), indent=1) + "\n")
        for path in (*work.rglob("*"), work):
            _flush(path)
        work.rename(final)
        self._point_to(name)
        for old in self.all()[: -self.keep]:
            shutil.rmtree(old)
        return final

    def _point_to(self, name: str) -> None:
        fresh = self.folder / f".{LATEST}.{os.getpid()}"
        fresh.unlink(missing_ok=True)
        fresh.symlink_to(name)
        fresh.replace(self.folder / LATEST)
        _flush(self.folder)

    def clean(self) -> None:
        """Remove what a killed save left behind."""
        for path in self.folder.glob(".*"):
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()

    @staticmethod
    def progress(path: Path) -> Progress:
        """Where a checkpoint stands.

        Raises:
            UserError: a damaged file, with the remedy.
        """
        try:
            return Progress(**json.loads((path / PROGRESS).read_text()))
        except (OSError, ValueError, TypeError) as error:
            raise UserError(
                f"{path / PROGRESS} is damaged ({error}): remove {path} to resume from the one before"
            ) from None

    @staticmethod
    def read(path: Path) -> tuple[dict[str, torch.Tensor], Progress]:
        """The resume state of a checkpoint; raises as :meth:`progress` does."""
        return read_weights(path / STATE), Checkpoints.progress(path)


def lock_folder(
    folder: Path, kind: str = "run folder", place: str = "run.output_dir", name: str = "run.name"
) -> IO[str]:
    """Hold a run's folder until the returned file is closed or the process ends.

    Args:
        folder: made if missing.
        kind, place, name: what messages call it, and the settings that would choose another one.

    Raises:
        UserError: another process trains there (two would overwrite each other's checkpoints), or nothing can be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / ".lock").open("a")
    except OSError as error:
        raise UserError(
            f"{kind} {str(folder)!r} cannot be written ({error.strerror}): choose another {place}"
        ) from None
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise UserError(
            f"{kind} {str(folder)!r} is in use by another process: wait for it, or use another {name}"
        ) from None
    except OSError:  # a file system without locks
        pass
    return file


def check_trajectory(then: dict[str, Any], now: dict[str, Any], run_name: str) -> None:
    """Raise :class:`UserError` naming the first setting in which a resumed run would part from its own past."""
    now = json.loads(json.dumps(now))
    for key in sorted(then.keys() | now.keys()):
        if then.get(key) != now.get(key):
            raise UserError(
                f"{key}={now.get(key)!r}, but run {run_name!r} was started with {then.get(key)!r}: "
                "give it another run.name, or the former value"
            )


def _flush(path: Path) -> None:
    """Have the disk hold a file or folder before anything points at it."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
