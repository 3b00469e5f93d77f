"""What a run has measured so far: rows by cell, kept in the record, so that a killed run goes on where it stopped.

A cell's digest is of all that decides its rows: another file, model or device is another cell.
"""

import fcntl
import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from longdraft.bench.harness.answers import Answer
from longdraft.bench.record import check_record, make_record, write_record
from longdraft.errors import UserError

PROVENANCE = ("command", "commit", "date", "device", "versions")


def digest(facts: Any) -> str:
    """Sixteen hexadecimal digits of plain data."""
    return hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()[:16]


@contextmanager
def alone(path: Path) -> Iterator[None]:
    """Hold a record while a run adds to it: of two runs each would write away what the other measured.

    Raises:
        UserError: another run holds it, or its folder cannot be written to.
    """
    check_record(path)
    lock = path.with_name(f".{path.name}.lock")
    with lock.open("w") as file:
        try:
            fcntl.flock(
                file, fcntl.LOCK_EX | fcntl.LOCK_NB
            )  # which the system lets go when the process ends, however it ends
            lock_is_ours = os.path.samestat(os.fstat(file.fileno()), lock.stat())
        except OSError:
            lock_is_ours = False  # held, or gone since it was opened, with a run that ended just now
        if not lock_is_ours:
            raise UserError(f"another run writes record {str(path)!r}: wait for its end, or give another record")
        try:
            yield
        finally:
            lock.unlink(missing_ok=True)


def append_line(path: Path, value: Any) -> None:
    """Add a line of JSON to a file, on a line of its own where a kill cut the last one short."""
    with path.open("ab+") as file:
        if end := file.seek(0, os.SEEK_END):
            file.seek(end - 1)
            if file.read(1) != b"\n":
                file.write(b"\n")
        file.write(json.dumps(value).encode() + b"\n")


class Ledger:
    """A record under way.

    Args:
        path: of the record; answers lie beside it.
        kind: speed, acceptance or quality: the measurement's.
        settings: the file's.

    Raises:
        UserError: there is something else under that name.
    """

    def __init__(self, path: Path, kind: str, settings: dict[str, Any]) -> None:
        self.path, self.kind, self.settings = path, kind, settings
        self.rows: list[dict[str, Any]] = []
        self.sittings: list[dict[str, Any]] = []
        if path.exists():
            self._go_on()
        self.answers = dict(self._read_answers())

    def _go_on(self) -> None:
        foreign = f"record {str(self.path)!r} is not one that `longdraft bench {self.kind}` can go on with"
        try:
            before = json.loads(self.path.read_text(encoding="utf-8"))
            self.rows, self.sittings = list(before["rows"]), list(before["sittings"])
            kind, name = before["kind"], before["name"]
            sound = all(self._sound(row) for row in self.rows) and all(isinstance(each, dict) for each in self.sittings)
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            raise UserError(f"{foreign} (broken JSON, or another benchmark's): move it away, or give another") from None
        if kind != self.kind:
            raise UserError(f"{foreign} (it is of {kind!r}): move it away, or give another")
        if not sound:
            raise UserError(f"{foreign} (a row of it is damaged): move it away, or give another")
        if name != self.settings.get("name", name):
            own = self.settings["name"]
            raise UserError(f"{foreign}: it is of a file named {name!r}, this one is {own!r}; give each its own record")

    def _sound(self, row: dict[str, Any]) -> bool:
        sitting = row["sitting"]
        told = isinstance(row["cell"], str) and isinstance(row["ok"], bool) and isinstance(row["label"], str)
        return told and type(sitting) is int and 0 <= sitting < len(self.sittings)

    @property
    def answers_path(self) -> Path:
        return self._beside("answers.jsonl")

    @property
    def dropped_path(self) -> Path:
        return self._beside("dropped.jsonl")

    def _beside(self, ending: str) -> Path:
        return self.path.with_name(f"{self.path.name.removesuffix('.json')}.{ending}")

    def _read_answers(self) -> Iterable[tuple[str, list[Answer]]]:
        """By cell; a line that a kill cut short is no line."""
        if not self.answers_path.exists():
            return
        for line in self.answers_path.read_bytes().splitlines():
            try:
                found = json.loads(line)
                yield found["cell"], [Answer(**each) for each in found["answers"]]
            except (ValueError, KeyError, TypeError):
                continue

    def finished(self, cell: str, retry: bool = False) -> bool:
        """Whether a cell's rows are there; with ``retry`` failed ones are measured again."""
        return self.sound(cell) or (not retry and any(row["cell"] == cell for row in self.rows))

    def sound(self, cell: str) -> bool:
        """Whether a cell has rows and all of them count."""
        own = [row for row in self.rows if row["cell"] == cell]
        return bool(own) and all(row["ok"] for row in own)

    def forget_others(self, cells: Iterable[str]) -> int:
        """Move rows of cells that the file no longer asks for into a file beside the record; says how many."""
        wanted = set(cells)
        others = [row for row in self.rows if row["cell"] not in wanted]
        for row in others:
            append_line(self.dropped_path, row | {"sitting": self.sittings[row["sitting"]]})
        self.rows = [row for row in self.rows if row["cell"] in wanted]
        return len(others)

    def begin(self) -> None:
        """A sitting: where the rows that follow were measured."""
        made = make_record(self.kind, {}, {}, {})
        self.sittings.append({key: made[key] for key in PROVENANCE})

    def add(self, cell: str, rows: Sequence[dict[str, Any]], answers: Sequence[Answer] = ()) -> None:
        """A cell's rows in place of earlier ones, and its answers."""
        if answers:
            self.answers[cell] = list(answers)
            append_line(self.answers_path, {"cell": cell, "answers": [a.as_row() for a in answers]})
        self.rows = [row for row in self.rows if row["cell"] != cell]
        self.rows += [{"cell": cell, "sitting": len(self.sittings) - 1, **row} for row in rows]

    def write(self, name: str, figures: dict[str, float], checks: dict[str, bool], order: Sequence[str]) -> None:
        """The record, rows in the order of the cells; another file takes its place at once, so that a kill leaves a whole one."""
        place = {cell: number for number, cell in enumerate(order)}
        self.rows.sort(key=lambda row: place.get(row["cell"], len(place)))
        used = sorted({row["sitting"] for row in self.rows} | {len(self.sittings) - 1})
        sittings = [self.sittings[number] for number in used]
        rows = [{**row, "sitting": used.index(row["sitting"])} for row in self.rows]
        made = make_record(name, self.settings, figures, checks, kind=self.kind, sittings=sittings, rows=rows)
        aside = self._beside("part")
        write_record(made, aside)
        os.replace(aside, self.path)
