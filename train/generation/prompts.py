"""Prompts from records: a conversation up to where its last answer begins, or seeded cuts of a plain text.

Legend: L tokens of a document.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from longdraft.train.documents import Corpus
from longdraft.train.generation.settings import PromptSettings
from longdraft.train.positions import draw, seeded
from longdraft.train.samples import answer_start


@dataclass(frozen=True)
class Prompt:
    """Token ids, the record and the cut in it, a name for messages, and the seed of the answer's sampling."""

    ids: list[int]
    record: int
    cut: int
    name: str
    seed: int


class PromptStream:
    """The prompts of a corpus in a fixed order, from any record and cut on.

    ``skipped`` counts by reason what gave no prompt: ``too_long`` conversations (prompt and answer do not fit the target),
    ``too_short`` texts (shorter than every length), ``no_question`` conversations (nothing before the answer).

    Args:
        settings: sources and cuts.
        tokenizer: the target's.
        room: tokens that a prompt may have.
        seed: of the cuts.
        vocab_size: of the target, for records that hold token ids.
    """

    def __init__(self, settings: PromptSettings, tokenizer: Any, room: int, seed: int, vocab_size: int) -> None:
        self.corpus = Corpus(settings.sources, settings.data, tokenizer, vocab_size)
        self.settings, self.room, self.seed = settings, room, seed
        self.start_token: int | None = tokenizer.bos_token_id
        self.skipped = {"too_long": 0, "too_short": 0, "no_question": 0}

    def prompts(self, record: int = 0, cut: int = 0) -> Iterator[Prompt]:
        """Prompts from this cut of this record on."""
        for index in range(record, len(self.corpus)):
            for at, ids, name in self._of_record(index, cut):
                seed = seeded("answer", self.seed, index, at).initial_seed()
                yield Prompt(ids, index, at, name, seed)
            cut = 0

    def _of_record(self, index: int, first: int) -> Iterator[tuple[int, list[int], str]]:
        question, name = self.corpus.question(index)
        if question is None:
            document = self.corpus[index]
            begin = answer_start(document.supervised)
            if begin == 0:
                yield from ((at, ids, name) for at, ids in self._cuts(document.ids, index, first))
                return
            question = document.ids[:begin]
        if first > 0:
            return
        if not question or len(question) > self.room:
            self.skipped["too_long" if question else "no_question"] += 1
        else:
            yield 0, question, name

    def _cuts(self, ids: list[int], index: int, first: int) -> Iterator[tuple[int, list[int]]]:
        lengths = [n for n in self.settings.lengths if n <= min(len(ids), self.room)]
        if not lengths:
            self.skipped["too_short" if min(self.settings.lengths) > len(ids) else "too_long"] += 1
            return
        for at in range(first, self.settings.per_document):
            length = lengths[draw(0, len(lengths) - 1, "length", self.seed, index, at)]
            begin = draw(0, len(ids) - length, "cut", self.seed, index, at)
            window = ids[begin : begin + length]
            if begin > 0 and ids[0] == self.start_token:  # the target reads no text without it
                window = [ids[0], *window[1:]]
            yield at, window
