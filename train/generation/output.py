"""What a generation leaves: one JSONL file that grows a batch at a time, and a JSON file that says how far it is and of what.

The JSON file is replaced, in one move, after a batch lies on the disk, and counts the bytes that hold; a killed process leaves
at most bytes behind them, which the next one cuts off.
"""

import contextlib
import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from longdraft.errors import UserError
from longdraft.train.checkpoints import lock_folder

DATA, PROVENANCE = "generated.jsonl", "provenance.json"


@dataclass
class Counts:
    """Progress: the next prompt (``record``, ``cut``), the bytes of the file that hold, and what became of the prompts."""

    record: int = 0
    cut: int = 0
    bytes: int = 0
    prompts: int = 0
    answers: int = 0
    repetitive: int = 0
    stopped: int = 0
    prompt_tokens: int = 0
    new_tokens: int = 0
    skipped: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0
    finished: bool = False


class Output:
    """The folder of a generation, held by this process until :meth:`close`.

    Args:
        folder: made if missing.
        identity: settings that decide the output.
        facts: what else the JSON file says; the newest process's hold.

    Raises:
        UserError: another process writes there, or the folder was begun with other settings.
    """

    def __init__(self, folder: Path, identity: dict[str, Any], facts: dict[str, Any]) -> None:
        self.folder, self.identity, self.facts = folder, json.loads(json.dumps(identity)), facts
        self._lock = lock_folder(folder, "output folder", "out", "out")
        self.counts = self._resume()
        self._file = (folder / DATA).open("ab")
        self._file.truncate(self.counts.bytes)
        self.say()  # before the first record: a file of records without it is not ours

    def _resume(self) -> Counts:
        path = self.folder / PROVENANCE
        if not path.exists():
            if (self.folder / DATA).exists():
                raise UserError(f"out={str(self.folder)!r} holds {DATA} without {PROVENANCE}: give another folder")
            return Counts()
        try:
            found = json.loads(path.read_text())
            counts, then = Counts(**found["counts"]), found["identity"]
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise UserError(f"{path} is damaged ({error}): give another out, or remove the folder") from None
        for key in sorted(then.keys() | self.identity.keys()):
            if then.get(key) != self.identity.get(key):
                raise UserError(
                    f"{key}={self.identity.get(key)!r}, but out={str(self.folder)!r} was begun with {then.get(key)!r}: "
                    "give another out, or the former value"
                )
        if not (self.folder / DATA).exists() or (self.folder / DATA).stat().st_size < counts.bytes:
            raise UserError(f"{self.folder / DATA} is shorter than {PROVENANCE} says: give another out")
        return counts

    def save(self, rows: list[dict[str, Any]]) -> None:
        """Append records, then say so; ``counts`` is what the next process starts from.

        Raises:
            UserError: a full disk; what was saved before holds, and the next process cuts off the rest.
        """
        try:
            self._file.write("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode())
            self._file.flush()
            os.fsync(self._file.fileno())
            self.counts.bytes = self._file.tell()
            self.say()
        except OSError as error:
            raise UserError(
                f"out={str(self.folder)!r} cannot be written ({error.strerror}): make room and run the same command, it "
                "continues behind the last batch"
            ) from None

    def say(self) -> None:
        """Replace the JSON file."""
        record = {**self.facts, "identity": self.identity, "counts": asdict(self.counts)}
        work = self.folder / f".{PROVENANCE}.{os.getpid()}"
        with work.open("w") as file:
            file.write(json.dumps(record, indent=1, ensure_ascii=False) + "\n")
            file.flush()
            os.fsync(file.fileno())
        work.replace(self.folder / PROVENANCE)

    def close(self) -> None:
        with contextlib.suppress(OSError):  # what a full disk kept in the buffer
            self._file.close()
        self._lock.close()
