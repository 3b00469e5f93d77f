"""Data sets on the disk: JSONL, or one JSON list, in the data set's own fields."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from longdraft.errors import UserError, shown

IDS = ("_id", "id", "unique_id")


@dataclass(frozen=True)
class Record:
    """One record and where it stands, for messages; ``fields`` are as the file has them."""

    where: str
    number: int
    fields: dict[str, Any]

    @property
    def id(self) -> str:
        """The data set's own id, or the record's number from 1."""
        return next((str(self.fields[name]) for name in IDS if name in self.fields), str(self.number))

    def text(self, *names: str) -> str:
        """The first of these fields that there is.

        Raises:
            UserError: there is none, or it holds no text.
        """
        for name in names:
            if name in self.fields:
                value = self.fields[name]
                if not isinstance(value, str):
                    raise UserError(f"{self.where}: {name}={shown(value)} is no text: give the data set's own file")
                return whole(value)
        raise UserError(f"{self.where} has no field {' or '.join(map(repr, names))}: give the data set's own file")

    def texts(self, name: str) -> tuple[str, ...]:
        """A field with a list of texts, at least one.

        Raises:
            UserError: it holds something else.
        """
        value = self.fields.get(name)
        if not isinstance(value, list) or not value or not all(isinstance(text, str) for text in value):
            raise UserError(
                f"{self.where}: {name}={shown(value)} is no list of texts: give the data set's own file"
            ) from None
        return tuple(whole(text) for text in value)


def whole(text: str) -> str:
    """A text with question marks for halves of characters, which JSON may hold and no tokenizer takes."""
    return text.encode(errors="replace").decode()


def find_file(task: str, folder: Path | None, files: Sequence[str], fields: Sequence[str], source: str) -> Path:
    """The data set's file in a folder.

    Raises:
        UserError: no folder was named, or it has none of the files; says which file with which fields belongs there.
    """
    wanted = f"{' or '.join(files)} with the fields {', '.join(fields)} ({source})"
    if folder is None:
        raise UserError(f"task {task!r} needs data: put {wanted} into a folder and name the folder")
    for name in files:
        if (folder / name).is_file():
            return folder / name
    raise UserError(f"task {task!r}: {str(folder)!r} has no {' or '.join(files)}: put {wanted} there")


def read_records(path: Path) -> list[Record]:
    """Records of a JSONL file, or of a ``.json`` file that holds one list.

    Raises:
        UserError: the file cannot be read, is no JSON, holds no record or something that is none.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise UserError(f"{str(path)!r} cannot be read ({error.strerror}): give a readable file") from None
    except UnicodeDecodeError:
        raise UserError(f"{str(path)!r} is not UTF-8 text: give the data set's own file") from None
    values = _json_list(path, text) if path.suffix == ".json" else _json_lines(path, text)
    if not values:
        raise UserError(f"{str(path)!r} holds no record: give the data set's own file")
    for where, value in values:
        if not isinstance(value, dict):
            raise UserError(f"{where} holds {shown(value)}: every record is an object with fields")
    return [Record(where, number, value) for number, (where, value) in enumerate(values, 1)]


def _json_lines(path: Path, text: str) -> list[tuple[str, Any]]:
    values = []
    # Not splitlines(): a text may hold separators that only JSON's own rules keep inside a line.
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            try:
                values.append((f"{path}:{number}", json.loads(line)))
            except ValueError:
                raise UserError(
                    f"{path}:{number} is no JSON ({shown(line, 40)}): every line is one object, is the file whole?"
                ) from None
    return values


def _json_list(path: Path, text: str) -> list[tuple[str, Any]]:
    try:
        loaded = json.loads(text)
    except ValueError as error:
        raise UserError(f"{str(path)!r} is no JSON ({error}): give the data set's own file, is it whole?") from None
    if not isinstance(loaded, list):
        raise UserError(f"{str(path)!r} holds a {type(loaded).__name__}: give a list of records")
    return [(f"{path}, record {number}", value) for number, value in enumerate(loaded, 1)]
