"""What made a run: its command, versions and resolved settings, beside its results."""

import os
import platform
import shlex
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import yaml

from longdraft.draft_models.checkpoint import library_versions
from longdraft.train.config import TrainSettings
from longdraft.train.tracking import redact


def commit() -> str | None:
    """The working copy's git commit, with ``+`` if it has changes; outside of one ``LONGDRAFT_COMMIT``, or None."""
    try:
        return _git("rev-parse", "HEAD") + ("+" if _git("status", "--porcelain", "-uno") else "")
    except (OSError, subprocess.SubprocessError):
        return os.environ.get("LONGDRAFT_COMMIT") or None


def _git(*words: str) -> str:
    here = Path(__file__).resolve().parent
    done = subprocess.run(["git", *words], cwd=here, capture_output=True, text=True, check=True, timeout=10)
    return done.stdout.strip()


def origin(command: list[str]) -> dict[str, Any]:
    """Where and by what something is made: command, date, commit, machine, versions; without secrets."""
    return {
        "command": redact(shlex.join(command)),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "python": sys.version.split()[0],
        "machine": platform.platform(),
        "versions": library_versions(),
    }


def write_run_file(
    settings: TrainSettings, command: list[str], facts: dict[str, Any], resumed_step: int = 0
) -> dict[str, Any]:
    """Write ``run.yaml`` into the run's folder; its ``settings`` section is a recipe that repeats the run.

    A resumed run writes ``run-from-<step>.yaml`` beside it.

    Args:
        settings: as resolved.
        command: the words of the command line.
        facts: devices, sizes, data fingerprints and whatever else was found at start.
        resumed_step: where the run continues; 0 for a new one.

    Returns:
        What was written, without secrets.
    """
    record = {**origin(command), "facts": redact(facts), "settings": redact(settings.model_dump(mode="json"))}
    settings.folder.mkdir(parents=True, exist_ok=True)
    path = settings.folder / (f"run-from-{resumed_step}.yaml" if resumed_step else "run.yaml")
    path.write_text(yaml.safe_dump(record, sort_keys=False, allow_unicode=True))
    return record
