"""Documents from JSONL files and Hugging Face data sets: one rendering to token ids and a loss mask by character offsets.

A record is a conversation, a plain text, or already tokenised: ``{"input_ids": [...], "supervised_from": 7}``, as
`longdraft generate` writes it, or ``{"input_ids": [...], "loss_mask": [0, 1, ...]}``, as SpecForge reads it.

Legend: L tokens of a document.
"""

import hashlib
import json
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, Protocol

from longdraft.errors import UserError
from longdraft.train.config import DataSettings, as_list
from longdraft.train.specforge_seam.templates import template_renderer

TOKENS, FROM, MASK = "input_ids", "supervised_from", "loss_mask"
ROLES = {
    "human": "user",
    "gpt": "assistant",
    "user": "user",
    "assistant": "assistant",
    "system": "system",
    "tool": "tool",
}


@dataclass(frozen=True)
class Document:
    """Token ids and, for each, whether the draft is trained to predict it; ``name`` says where it came from."""

    ids: list[int]
    supervised: list[bool]
    name: str


class Rows(Protocol):
    """Raw records by index, each with a name for messages."""

    @property
    def fingerprint(self) -> str:
        """Of the records: a file's SHA-256, or a data set's own fingerprint."""
        ...

    def __len__(self) -> int: ...

    def row(self, index: int) -> tuple[dict[str, Any], str]: ...

    def description(self) -> dict[str, Any]:
        """Name, fingerprint and size as plain values, for the run's records."""
        ...


class JsonlRows:
    """A JSONL file, read once to find and check its lines, then line by line as they are needed.

    Raises:
        UserError: no such file, an empty one, or a line that is no JSON object or has neither field; with file:line.
    """

    def __init__(self, path: str, settings: DataSettings) -> None:
        self.path = path
        self.lines: list[tuple[int, int]] = []  # byte offset, line number
        digest = hashlib.sha256()  # of what was checked here, at the price of no second reading
        try:
            with Path(path).open("rb") as file:
                offset = 0
                for number, raw in enumerate(file, 1):
                    digest.update(raw)
                    if raw.strip():
                        check_row(_parse(raw, f"{path}:{number}"), f"{path}:{number}", settings)
                        self.lines.append((offset, number))
                    offset += len(raw)
        except OSError as error:
            raise UserError(
                f"data file {path!r} cannot be read ({error.strerror}): give an existing JSONL file"
            ) from None
        self.fingerprint, self.bytes = digest.hexdigest(), offset
        if not self.lines:
            raise UserError(f"data file {path!r} is empty: give one JSON object a line")

    def __len__(self) -> int:
        return len(self.lines)

    def row(self, index: int) -> tuple[dict[str, Any], str]:
        offset, number = self.lines[index]
        with Path(self.path).open("rb") as file:
            file.seek(offset)
            return _parse(file.readline(), f"{self.path}:{number}"), f"{self.path}:{number}"

    def description(self) -> dict[str, Any]:
        return {"source": self.path, "documents": len(self), "bytes": self.bytes, "sha256": self.fingerprint}


class HuggingFaceRows:
    """A data set by name, or a folder that ``datasets`` wrote (``save_to_disk``) or can load.

    Raises:
        UserError: no such data set or split, with the library's reason; a data set without either field.
    """

    def __init__(self, name: str, settings: DataSettings) -> None:
        self.name = f"{name}[{settings.split}]"
        self.data = _load_hugging_face(name, settings)
        if not len(self.data):
            raise UserError(f"data set {self.name} is empty: choose another data.split")
        check_row(self.data[0], f"{self.name}:0", settings)

    def __len__(self) -> int:
        return len(self.data)

    @property
    def fingerprint(self) -> str:  # it changes with the data and with every step that made it
        return str(self.data._fingerprint)

    def row(self, index: int) -> tuple[dict[str, Any], str]:
        return self.data[index], f"{self.name}:{index}"

    def description(self) -> dict[str, Any]:
        size = self.data.info.dataset_size
        return {"source": self.name, "documents": len(self), "bytes": size, "fingerprint": self.fingerprint}


def _load_hugging_face(name: str, settings: DataSettings) -> Any:
    import datasets

    try:
        if (Path(name) / "state.json").is_file():
            return datasets.load_from_disk(name)
        if (Path(name) / "dataset_dict.json").is_file():
            splits = datasets.load_from_disk(name)
            if settings.split not in splits:
                raise UserError(
                    f"data set {name!r} has no split {settings.split!r}: set data.split to one of {list(splits)}"
                )
            return splits[settings.split]
        return datasets.load_dataset(name, settings.subset, split=settings.split)
    except UserError:
        raise
    except Exception as error:  # the library raises its own, the file systems' and the hub's errors
        reason = " ".join(str(error).split())[:200]
        raise UserError(f"data set {name!r} cannot be loaded ({type(error).__name__}: {reason})") from None


def _parse(raw: bytes, where: str) -> dict[str, Any]:
    try:
        row = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where}: not valid JSON ({error})") from None
    if not isinstance(row, dict):
        raise UserError(f"{where}: holds a {type(row).__name__}: write one JSON object a line")
    return row


def check_row(row: Mapping[str, Any], where: str, settings: DataSettings) -> None:
    """Raise :class:`UserError` naming the place and the field, if a record cannot become a document."""
    if row.get(TOKENS) is not None:
        tokenised(row, where)
    elif row.get(settings.conversation_field) is not None:
        conversation(row, where, settings)
    elif not isinstance(row.get(settings.text_field), str):
        found = type(row.get(settings.text_field)).__name__
        wanted = f"a string in {settings.text_field!r} or a list in {settings.conversation_field!r} or {TOKENS!r}"
        raise UserError(f"{where}: {settings.text_field} is {found}: a record needs {wanted} (it has {sorted(row)})")
    else:
        _check_characters(row[settings.text_field], f"{where}: {settings.text_field}")


def tokenised(row: Mapping[str, Any], where: str, vocab_size: int | None = None) -> Document:
    """A record of token ids as a document.

    Args:
        row: ``input_ids`` with ``supervised_from``, the first token that is supervised, or with a ``loss_mask``.
        where: for messages.
        vocab_size: the target's, if it is known yet.

    Raises:
        UserError: the fields do not fit each other or the vocabulary.
    """
    ids = row[TOKENS]
    if not isinstance(ids, list) or not ids or not all(type(token) is int for token in ids):
        raise UserError(f"{where}: {TOKENS} must be a list of token ids that is not empty")
    if min(ids) < 0 or (vocab_size is not None and max(ids) >= vocab_size):
        bad = next(token for token in ids if token < 0 or (vocab_size is not None and token >= vocab_size))
        limit = "0 or more" if vocab_size is None else f"below the target's vocabulary of {vocab_size}"
        raise UserError(f"{where}: {TOKENS} holds {bad}, not {limit}: tokenise with the target's own tokenizer")
    begin, mask = row.get(FROM), row.get(MASK)
    if (begin is None) == (mask is None):
        raise UserError(f"{where}: {TOKENS} needs one of {FROM!r} and {MASK!r} (it has {sorted(row)})")
    if mask is None:
        if type(begin) is not int or not 0 <= begin <= len(ids):
            raise UserError(f"{where}: {FROM}={begin!r}: give a position in 0 .. {len(ids)}, the number of {TOKENS}")
        return Document(ids, [i >= begin for i in range(len(ids))], where)
    if not isinstance(mask, list) or not all(value in (0, 1) for value in mask):
        raise UserError(f"{where}: {MASK} must be a list of 0 and 1")
    if len(mask) != len(ids):
        raise UserError(f"{where}: {MASK} has {len(mask)} entries for {len(ids)} {TOKENS}: give one for each")
    return Document(ids, [bool(value) for value in mask], where)


def _check_characters(text: str, at: str) -> None:
    """JSON can write half of a surrogate pair, which no tokenizer takes."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UserError(f"{at} has half of a surrogate pair at character {error.start}: replace it") from None


def conversation(row: Mapping[str, Any], where: str, settings: DataSettings) -> list[dict[str, str]]:
    """The messages as ``{role, content}``, from that or from ``{from, value}``."""
    field = settings.conversation_field
    turns = row[field]
    if not isinstance(turns, list) or not turns:
        raise UserError(f"{where}: {field} must be a list of messages that is not empty")
    messages = []
    for i, turn in enumerate(turns):
        at = f"{where}: {field}[{i}]"
        if not isinstance(turn, dict):
            raise UserError(f"{at} is {type(turn).__name__}: write {{'role': …, 'content': …}}")
        role, content = turn.get("role", turn.get("from")), turn.get("content", turn.get("value"))
        if not isinstance(role, str) or role not in ROLES:
            raise UserError(f"{at}.role={role!r}: use one of {', '.join(ROLES)}")
        if not isinstance(content, str):
            raise UserError(f"{at}.content is {type(content).__name__}: write a string")
        _check_characters(content, f"{at}.content")
        messages.append({"role": ROLES[role], "content": content})
    return messages


class Renderer:
    """Turns a record into a :class:`Document` with the target's own tokenizer and its chat template, or a named one.

    Raises:
        UserError: ``data.template`` names one that does not exist.
    """

    def __init__(self, tokenizer: Any, settings: DataSettings, vocab_size: int | None = None) -> None:
        self.tokenizer = tokenizer
        self.settings = settings
        self.vocab_size = len(tokenizer) if vocab_size is None else vocab_size
        self._named = None if settings.template == "auto" else template_renderer(settings.template, tokenizer)

    def question(self, row: Mapping[str, Any], where: str) -> list[int] | None:
        """Token ids of a conversation up to where its last answer begins, the template's prompt for it included.

        Returns:
            Empty if nothing comes before the answer; None if the record is no conversation.

        Raises:
            UserError: the record does not fit.
        """
        check_row(row, where, self.settings)
        if row.get(TOKENS) is not None or row.get(self.settings.conversation_field) is None:
            return None
        messages = conversation(row, where, self.settings)
        while messages and messages[-1]["role"] == "assistant":
            messages.pop()
        if not messages:
            return []
        text = self._template(messages, where, add_generation_prompt=True)
        ids: list[int] = self.tokenizer(text, add_special_tokens=False, verbose=False).input_ids
        return ids

    def render(self, row: Mapping[str, Any], where: str) -> Document:
        """One record. A plain text is supervised throughout, a conversation on the assistant's turns with their end marks.

        Raises:
            UserError: the record does not fit, or its answers cannot be found in the rendered template.
        """
        if row.get(TOKENS) is not None:
            return tokenised(row, where, self.vocab_size)
        check_row(row, where, self.settings)
        if row.get(self.settings.conversation_field) is None:
            ids = self.tokenizer(row[self.settings.text_field], verbose=False).input_ids
            return Document(ids, [True] * len(ids), where)
        messages = conversation(row, where, self.settings)
        if self._named is not None:
            ids, supervised = self._named(messages, where)
            return Document(ids, supervised, where)
        text = self._template(messages, where)
        encoded = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        spans = self.answer_spans(messages, text, where)
        return Document(encoded.input_ids, mask_by_offsets(encoded.offset_mapping, spans), where)

    def answer_spans(self, messages: list[dict[str, str]], text: str, where: str) -> list[tuple[int, int]]:
        """Character ranges of the assistant's turns in the rendered text.

        A turn begins where the conversation before it ends with the template's prompt for an answer. Templates that
        rewrite earlier turns (hidden thoughts, dates) break that; there the turn's content is searched for, in order.
        """
        spans, cursor = [], 0
        for i, message in enumerate(messages):
            if message["role"] != "assistant":
                found = text.find(message["content"].strip(), cursor)
                cursor = cursor if found < 0 else found + len(message["content"].strip())
                continue
            before = self._template(messages[:i], where, add_generation_prompt=True) if i else ""
            after = self._template(messages[: i + 1], where)
            if i and text.startswith(before) and text.startswith(after) and len(after) > len(before):
                spans.append((len(before), len(after)))
            elif (found := text.find(message["content"].strip(), cursor)) >= 0:
                spans.append((found, found + len(message["content"].strip())))
            else:
                field = f"{self.settings.conversation_field}[{i}]"
                raise UserError(
                    f"{where}: {field} is not in the chat template's text: give it as the template prints it"
                )
            cursor = spans[-1][1]
        return spans

    def _template(self, messages: list[dict[str, str]], where: str, add_generation_prompt: bool = False) -> str:
        try:
            return str(
                self.tokenizer.apply_chat_template(
                    messages, tokenize=False, add_generation_prompt=add_generation_prompt
                )
            )
        except Exception as error:  # templates raise their own, for roles in a wrong order and the like
            raise UserError(f"{where}: the target's chat template refuses the conversation ({error})") from None


def mask_by_offsets(offsets: Sequence[tuple[int, int]], spans: Sequence[tuple[int, int]]) -> list[bool]:
    """True for tokens that share a character with a span; ``[L]``."""
    return [any(a < end and b > begin for begin, end in spans) for a, b in offsets]


class Documents(Protocol):
    """Documents by index, from wherever."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Document: ...

    def fingerprints(self) -> list[dict[str, Any]]: ...


class Corpus:
    """Several sources as one, by index.

    Args:
        names: of the sources.
        settings: how they are read.
        tokenizer: the target's.
        vocab_size: the target's, which bounds records of token ids; None: the tokenizer's.

    Raises:
        UserError: from the sources.
    """

    def __init__(
        self, names: list[str] | str, settings: DataSettings, tokenizer: Any, vocab_size: int | None = None
    ) -> None:
        self.renderer = Renderer(tokenizer, settings, vocab_size)
        self.sources: list[Rows] = [open_rows(name, settings) for name in as_list(names)]
        self.ends = list(accumulate(len(source) for source in self.sources))

    def __len__(self) -> int:
        return self.ends[-1]

    def fingerprints(self) -> list[dict[str, Any]]:
        """One a source, in order: its name, number of documents, bytes, and its hash."""
        return [source.description() for source in self.sources]

    def __getitem__(self, index: int) -> Document:
        return self.renderer.render(*self._row(index))

    def question(self, index: int) -> tuple[list[int] | None, str]:
        """:meth:`Renderer.question` of a record, and its name."""
        row, where = self._row(index)
        return self.renderer.question(row, where), where

    def _row(self, index: int) -> tuple[dict[str, Any], str]:
        which = bisect_right(self.ends, index)
        return self.sources[which].row(index - (self.ends[which - 1] if which else 0))


def open_rows(name: str, settings: DataSettings) -> Rows:
    """A source by its name: ``.jsonl`` and ``.json`` are files of lines, anything else is ``datasets``' business."""
    return JsonlRows(name, settings) if name.endswith((".jsonl", ".json")) else HuggingFaceRows(name, settings)
