"""Checkpoints of a run: ``step-00000100/draft`` is what serving loads, beside it what a bitwise resume needs.

A checkpoint appears whole or not at all: it is written under a hidden name, then renamed; ``latest`` is a symbolic link that
is replaced in one move. Only safetensors and JSON are read back, so a foreign checkpoint cannot run code.
"""

import contextlib
import fcntl
import json
import os
import shutil
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any

import torch
from pydantic import TypeAdapter
from safetensors import SafetensorError
from safetensors.torch import save_file

from longdraft.draft_models.checkpoint import CheckpointError, read_weights, save_draft
from longdraft.draft_models.config import TrainingFacts
from longdraft.draft_models.longspec import LongSpecDraft
from longdraft.errors import UserError


class SaveFailed(RuntimeError):
    """A checkpoint that could not be written; the message names the folder, the space and the last good checkpoint."""


STATE, PROGRESS, LATEST, RNG = "state.safetensors", "progress.json", "latest", "rng.torch"


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
        """Write one checkpoint, point ``latest`` at it, then drop the oldest beyond ``keep``. Rank 0 only.

        Raises:
            SaveFailed: a full disk, a quota, or a folder that can no longer be written. Nothing half-written stays, and
                the checkpoints before it are as they were.
        """
        name = f"step-{progress.step:08d}"
        work, final = self.folder / f".{name}.{os.getpid()}", self.folder / name
        rng = {RNG: torch.get_rng_state()}
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self.clean()
            work.mkdir()
            save_draft(draft, work / "draft", target_name, facts, weights)
            save_file({k: v.to("cpu").contiguous() for k, v in (state | rng).items()}, work / STATE)
            (work / PROGRESS).write_text(json.dumps(asdict(progress), indent=1) + "\n")
            for path in (*work.rglob("*"), work):
                _flush(path)
            work.rename(final)
            self._point_to(name)
        except (OSError, SafetensorError) as error:
            shutil.rmtree(work, ignore_errors=True)
            raise SaveFailed(self._unwritten(name, error, [*weights.values(), *state.values()])) from None
        for old in self.all()[: -self.keep]:
            shutil.rmtree(old)
        return final

    def _unwritten(self, name: str, error: Exception, tensors: list[torch.Tensor]) -> str:
        """What to tell people of a save that failed; the space is measured once the half-written files are gone."""
        needed = sum(t.nbytes for t in tensors)
        with contextlib.suppress(OSError):
            free = shutil.disk_usage(existing(self.folder)).free
            reason = " ".join(str(error).split())[:200]
            return (
                f"checkpoint {name} cannot be written in {self.folder} ({reason}): it needs about {mib(needed)}, "
                f"{mib(free)} are free there; the last good checkpoint is {self.latest() or 'none'}: free some space, or "
                "lower schedule.keep, and start the same command again"
            )
        return (
            f"checkpoint {name} cannot be written in {self.folder} ({error}); the folder is gone: start again elsewhere"
        )

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
            found = TypeAdapter(Progress).validate_json((path / PROGRESS).read_bytes(), strict=True)
            counts = (found.step, found.tokens, found.supervised, *found.cursors)
            if not found.cursors or min(counts) < 0 or max(counts) >= 1 << 62:
                raise ValueError("counts that no run has")
            return found
        except (OSError, ValueError) as error:
            reason = " ".join(str(error).split())[:200]
            raise UserError(
                f"{path / PROGRESS} is damaged ({reason}): remove {path} to resume from the one before"
            ) from None

    @staticmethod
    def read(path: Path) -> tuple[dict[str, torch.Tensor], Progress]:
        """The resume state of a checkpoint; raises as :meth:`progress` does, weights that are not finite included."""
        try:
            state = read_weights(path / STATE)
            own = state.get(RNG)
            if own is None or (own.dtype, own.shape) != (torch.uint8, torch.get_rng_state().shape):
                raise UserError(f"{path / STATE} is damaged ({RNG} is missing or of another size)")
            if bad := [name for name, x in state.items() if not bool(torch.isfinite(x).all())]:
                raise UserError(f"{path / STATE} is damaged ({bad[0]} is not finite)")
        except UserError as error:
            told = str(error).rpartition(": ")[0] if isinstance(error, CheckpointError) else error
            raise UserError(f"{told}: remove {path} to resume from the one before") from None
        return state, Checkpoints.progress(path)


def existing(folder: Path) -> Path:
    """The folder, or its nearest parent that exists."""
    return next(path for path in (folder, *folder.absolute().parents) if path.exists())


def mib(count: int) -> str:
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.1f} MiB"


def check_room(folder: Path, needed: int) -> None:
    """Refuse a run before its first step where not even one checkpoint fits.

    Args:
        folder: of the run.
        needed: bytes of a checkpoint.

    Raises:
        UserError: less is free there.
    """
    free = shutil.disk_usage(existing(folder)).free
    if free < needed:
        raise UserError(
            f"run folder {str(folder)!r} has {mib(free)} of free space, a checkpoint needs about {mib(needed)}: "
            "free some, or choose another run.output_dir"
        )


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
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        reason = error.strerror if isinstance(error, OSError) else error
        raise UserError(f"{kind} {str(folder)!r} cannot be written ({reason}): choose another {place}") from None
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
