"""What a run has measured so far: rows by cell, kept in the record, so that a killed run goes on where it stopped.

A cell's digest is of all that decides its rows: another file, model or device is another cell.
"""

import hashlib
import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from longdraft.bench.harness.answers import Answer
from longdraft.bench.record import check_record, make_record, write_record
from longdraft.errors import UserError

PROVENANCE = ("command", "commit", "date", "device", "versions")


def digest(facts: Any) -> str:
    """Sixteen hexadecimal digits of plain data."""
    return hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()[:16]


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
        check_record(path)
        self.path, self.kind, self.settings = path, kind, settings
        self.rows: list[dict[str, Any]] = []
        self.sittings: list[dict[str, Any]] = []
        if path.exists():
            self._go_on()
        self.answers = dict(self._read_answers())

    def _go_on(self) -> None:
        foreign = f"record {str(self.path)!r} is not one that `longdraft bench {self.kind}` can go on with"
        try:
            before = json.loads(self.path.read_text())
            self.rows, self.sittings = list(before["rows"]), list(before["sittings"])
            fits = before["kind"] == self.kind and all(isinstance(row["cell"], str) for row in self.rows)
        except (ValueError, KeyError, TypeError):
            raise UserError(f"{foreign} (broken JSON, or another benchmark's): move it away, or give another") from None
        if not fits:
            raise UserError(f"{foreign} (it is of {before['kind']!r}): move it away, or give another")

    @property
    def answers_path(self) -> Path:
        return self.path.with_suffix(".answers.jsonl")

    def _read_answers(self) -> Iterable[tuple[str, list[Answer]]]:
        """By cell; a line that a kill cut short is no line."""
        if not self.answers_path.exists():
            return
        for line in self.answers_path.read_text().splitlines():
            try:
                found = json.loads(line)
                yield found["cell"], [Answer(**each) for each in found["answers"]]
            except (ValueError, KeyError, TypeError):
                continue

    def finished(self, cell: str, retry: bool = False) -> bool:
        """Whether a cell's rows are there; with ``retry`` failed ones are measured again."""
        own = [row for row in self.rows if row["cell"] == cell]
        return bool(own) and not (retry and not all(row["ok"] for row in own))

    def forget_others(self, cells: Iterable[str]) -> int:
        """Drop rows of cells that the file no longer asks for; says how many."""
        wanted, before = set(cells), len(self.rows)
        self.rows = [row for row in self.rows if row["cell"] in wanted]
        return before - len(self.rows)

    def begin(self) -> None:
        """A sitting: where the rows that follow were measured."""
        made = make_record(self.kind, {}, {}, {})
        self.sittings.append({key: made[key] for key in PROVENANCE})

    def add(self, cell: str, rows: Sequence[dict[str, Any]], answers: Sequence[Answer] = ()) -> None:
        """A cell's rows in place of earlier ones, and its answers."""
        if answers:
            self.answers[cell] = list(answers)
            line = json.dumps({"cell": cell, "answers": [a.as_row() for a in answers]})
            with self.answers_path.open("a") as file:
                file.write(line + "\n")
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
        aside = self.path.with_suffix(".part")
        write_record(made, aside)
        os.replace(aside, self.path)
