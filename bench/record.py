"""Records of measurements: one JSON object a run in ``bench/results/``, with what is needed to run it again."""

import json
import os
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

from longdraft.bench.provenance import device_name, git_commit, versions
from longdraft.errors import UserError


def make_record(
    name: str, settings: dict[str, Any], figures: dict[str, float], checks: dict[str, bool], **more: Any
) -> dict[str, Any]:
    """A record: figures are flat, their units in their names; checks say whether the outputs were right.

    The commit comes from git or, on a machine that got the files without the history, from ``LONGDRAFT_COMMIT``.
    """
    return {
        "name": name,
        "command": command(sys.orig_argv[1:]),
        "commit": os.environ.get("LONGDRAFT_COMMIT") or git_commit(),
        "date": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "device": device_name(),
        "versions": versions(),
        "settings": settings,
        "figures": figures,
        "checks": checks,
        **more,
    }


def command(words: Sequence[str]) -> str:
    """A process's arguments as they are typed: the installed script by its name, without the folder of an environment."""
    if words and Path(words[0]).name == "longdraft":
        return " ".join(["longdraft", *words[1:]])
    return " ".join(["python", *words])


def check_record(path: Path) -> None:
    """Make a record's folder and see that files can be written there, before what the record is to hold takes its time.

    Raises:
        UserError: that cannot be done, or the record's name is a folder's.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        folder = path.is_dir()
        with TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise UserError(f"record {str(path)!r} cannot be written ({error.strerror}): give another file") from None
    if folder:
        raise UserError(f"record {str(path)!r} is a folder: give a file")


def write_record(record: dict[str, Any], path: Path) -> None:
    """Write a record as readable JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
