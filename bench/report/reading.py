"""Reads records: those with rows of the harness as they are, older ones through :mod:`longdraft.bench.report.adapters`."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from longdraft.bench.report.adapters import ADAPTERS
from longdraft.bench.report.rows import KINDS, Acceptance, Excluded, Row
from longdraft.errors import UserError, shown

R = TypeVar("R", bound=Row)
FACTS = ("context", "batch", "rate", "task", "bucket", "budget")  # what tells a row from others of its system


@dataclass(frozen=True)
class Source:
    """Where a record was made, for the report's last table; ``name``: as rows call it; ``used``: how many of its rows count."""

    path: Path
    name: str
    record: dict[str, Any]
    used: int

    @property
    def model(self) -> str:
        """What was served, by the settings' own words."""
        settings = self.record.get("settings", {})
        target = settings.get("target")
        named = target.get("path") if isinstance(target, dict) else target
        return str(settings.get("shape") or settings.get("model") or named or "a model that its record does not name")


@dataclass
class Book:
    """All rows of all records."""

    sources: list[Source] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    excluded: list[Excluded] = field(default_factory=list)

    def of(self, kind: type[R]) -> list[R]:
        """Rows of one kind that count."""
        return [row for row in self.rows if isinstance(row, kind)]

    def about(self, rows: Iterable[Row]) -> list[Source]:
        """The records that rows came from."""
        names = {row.source for row in rows}
        return [source for source in self.sources if source.name in names]

    def where(self, rows: Iterable[Row]) -> str:
        """Models and devices of rows, for captions."""
        found = dict.fromkeys(f"{s.model} on {s.record.get('device', 'an unnamed device')}" for s in self.about(rows))
        return "; ".join(found) or "no record"


def record_files(given: Sequence[Path]) -> list[Path]:
    """The files, and those ending in .json of the folders, each once.

    Raises:
        UserError: there is no such file or folder, or a folder has no record.
    """
    found: dict[Path, Path] = {}
    for path in given:
        if not path.exists():
            raise UserError(f"--records {str(path)!r}: there is no such file or folder")
        inside = sorted(path.glob("*.json")) if path.is_dir() else [path]
        if not inside:
            raise UserError(f"--records {str(path)!r} has no file that ends in .json: give a folder with records")
        found |= {each.resolve(): each for each in inside}
    return list(found.values())


def read_book(given: Sequence[Path]) -> Book:
    """Records of files and folders.

    Raises:
        UserError: a file is missing, no JSON, no record, or a row of it holds what no row may.
    """
    book = Book()
    files = record_files(given)
    for path, source in zip(files, _sources(files), strict=True):
        record = read_record(path)
        before = len(book.rows)
        rows = [_harness_row(path, source, number, row, book) for number, row in enumerate(_rows(record), 1)]
        book.rows += [row for row in rows if row is not None]
        if adapt := ADAPTERS.get(record["name"]):
            try:
                rows_found, excluded = adapt(record, source)
            except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
                raise UserError(
                    f"{path} is a broken record of {record['name']!r} ({_line(error)}): measure anew"
                ) from None
            book.rows += rows_found
            book.excluded += excluded
        book.sources.append(Source(path, source, record, len(book.rows) - before))
    return book


def _sources(files: Sequence[Path]) -> list[str]:
    """Names of records: the files', with their folders' where two are alike."""
    stems = [path.stem for path in files]
    found = [
        stem if stems.count(stem) == 1 else f"{path.resolve().parent.name}/{stem}"
        for path, stem in zip(files, stems, strict=True)
    ]
    return [name if found.count(name) == 1 else f"{name}, {number}" for number, name in enumerate(found, 1)]


def read_record(path: Path) -> dict[str, Any]:
    """One record.

    Raises:
        UserError: it cannot be read or is none.
    """
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}): give a readable record") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is no JSON ({_line(error)}): the record is corrupted, measure anew") from None
    if not isinstance(record, dict) or not isinstance(record.get("name"), str):
        raise UserError(f"{path} is no record: it has no name; give files of longdraft bench")
    for name, kind in (("settings", dict), ("figures", dict), ("checks", dict), ("versions", dict), ("rows", list)):
        if not isinstance(record.get(name, kind()), kind):
            raise UserError(f"{path} is a corrupted record: {name}={shown(record[name])}; measure anew")
    return record


def _rows(record: dict[str, Any]) -> list[Any]:
    """The harness's rows: other records have rows of their own kinds, which say no system."""
    rows = record.get("rows", [])
    own = record.get("kind") in KINDS or any(isinstance(row, dict) and "system" in row for row in rows)
    return rows if own else []


def _harness_row(path: Path, source: str, number: int, row: Any, book: Book) -> Row | None:
    where = f"{path}, row {number}"
    if not isinstance(row, dict) or not isinstance(row.get("ok"), bool) or not isinstance(row.get("system"), str):
        raise UserError(f"{where} is corrupted ({shown(row, 60)}): it says no system or not whether it is ok")
    if not row["ok"]:
        facts = ", ".join(f"{name} {row[name]}" for name in FACTS if row.get(name) is not None)
        why = str(row.get("why") or "no reason given")
        name = str(row.get("label") or row["system"])
        book.excluded.append(Excluded(source=source, name=name, where=facts, why=why))
        return None
    found = next((kind for kind, mark in KINDS.values() if mark in row), None)
    if found is None:
        raise UserError(
            f"{where} has none of {', '.join(m for _, m in KINDS.values())}: it is of no kind that is known"
        )
    if found is Acceptance and "tau_micro" not in row:
        return None  # plain decoding verifies nothing
    try:
        return found.model_validate(row | {"source": source})
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        name = ".".join(map(str, first["loc"]))
        said = "" if first["type"] == "missing" else f"={shown(first['input'], 40)}"
        raise UserError(f"{where} is corrupted: {name}{said}: {first['msg']}; measure anew") from None


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:160]
