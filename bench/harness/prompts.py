"""Prompts of an exact number of tokens for measuring speed, the same for every system."""

import random
import tempfile
from pathlib import Path
from typing import Any

from longdraft.bench.demo_text import write_long_text
from longdraft.bench.tasks.reading import read_records
from longdraft.errors import UserError

LIBRARY = "library"
FIRST = 1000  # smallest random token where the vocabulary is large: those before are often special


def random_prompts(vocabulary: int, tokens: int, count: int, seed: int) -> list[list[int]]:
    """Random token ids."""
    draw = random.Random(f"{seed} {tokens}")
    first = FIRST if vocabulary > 2 * FIRST else 0
    return [[draw.randrange(first, vocabulary) for _ in range(tokens)] for _ in range(count)]


def read_texts(path: Path) -> list[str]:
    """Texts of a JSONL file.

    Raises:
        UserError: no such file, or a line without a text.
    """
    try:
        return [record.text("text") for record in read_records(path)]
    except UserError as error:
        raise UserError(f"prompts: {error}; or give random, {LIBRARY}, or another JSONL file with text") from None


def text_prompts(source: str, tokenizer: Any, tokens: int, count: int) -> list[list[int]]:
    """The first tokens of documents that have as many.

    Args:
        source: ``library``, which every machine has, or a JSONL file with text.
        tokenizer: the target's.
        tokens: of each prompt.
        count: prompts.

    Raises:
        UserError: too few documents are as long.
    """
    if source == LIBRARY:
        with tempfile.TemporaryDirectory() as folder:
            write_long_text(Path(folder) / "texts.jsonl", 64)
            texts = read_texts(Path(folder) / "texts.jsonl")
    else:
        texts = read_texts(Path(source))
    found: list[list[int]] = []
    for text in texts:
        ids = list(tokenizer(text, verbose=False).input_ids)[:tokens]
        if len(ids) == tokens:
            found.append(ids)
        if len(found) == count:
            return found
    raise UserError(
        f"prompts={source!r} has {len(found)} documents of {tokens:,} tokens, {count} are needed: lower contexts or batches, "
        "give longer documents, or take random"
    )
