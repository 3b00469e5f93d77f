"""Needles in haystacks: questions whose answer stands once in a long text, and what a model's heads look at while it answers.

CompressKV's way to find semantic retrieval heads, which Dustin follows (section 4.2.1). Sentences, questions and answers are our own.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from longdraft.errors import UserError
from longdraft.train.calibration.settings import NeedleSettings

SENTENCE_ENDS = (".", "!", "?", "\n")
PLACE = "\x00HAYSTACK\x00"  # what a chat template is rendered with in place of the text
# Some templates tell the model today's date, or let it think first, which no answer of fifty tokens survives.
TEMPLATE: dict[str, Any] = {"date_string": "1 Jan 2026", "enable_thinking": False}


@dataclass(frozen=True)
class Needle:
    """A sentence that no document holds, a question about it and the answer in the sentence's own words."""

    sentence: str
    question: str
    answer: str


NEEDLES = (
    Needle(
        "The spare key to the greenhouse hangs behind the blue clock in the kitchen.",
        "Where does the spare key to the greenhouse hang?",
        "behind the blue clock in the kitchen",
    ),
    Needle(
        "On rainy Sundays the lighthouse keeper repairs old radios with her nephew in the attic.",
        "What does the lighthouse keeper do on rainy Sundays?",
        "repairs old radios with her nephew in the attic",
    ),
    Needle(
        "The baker on Willow Street puts roasted barley and orange peel into every loaf.",
        "What does the baker on Willow Street put into every loaf?",
        "roasted barley and orange peel",
    ),
)


@dataclass(frozen=True)
class Trial:
    """A prompt that hides a needle: ``span`` of its ids is the needle's sentence."""

    needle: int
    haystack: int
    length: int
    depth: float
    ids: list[int]
    span: range

    @property
    def name(self) -> str:
        return f"length {self.length:,}, depth {self.depth:.0%}, haystack {self.haystack + 1}, needle {self.needle + 1}"


class Prompter:
    """Builds prompts in the tokenizer's chat template, or plain where it has none or ``needles.chat`` is off."""

    def __init__(self, tokenizer: Any, chat: bool) -> None:
        self.tokenizer = tokenizer
        self.chat = chat and bool(tokenizer.chat_template)

    def encode(self, text: str) -> list[int]:
        """Tokens of a part of a prompt, without any that begin or end a text."""
        return list(self.tokenizer(text, add_special_tokens=False, verbose=False).input_ids)

    def around(self, question: str) -> tuple[list[int], list[int]]:
        """What stands before and behind the haystack."""
        asked = f"{PLACE}\n\nAnswer in the words of the text above. {question}"
        if self.chat:
            chat = [{"role": "user", "content": f"Read this text.\n\n{asked}"}]
            text = self.tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True, **TEMPLATE)
        else:
            text = f"{self.tokenizer.bos_token or ''}{asked}\nAnswer:"
        before, _, behind = text.partition(PLACE)
        return self.encode(before), self.encode(behind)

    def hide(self, needle: Needle, hay: Sequence[int], depth: float, length: int) -> tuple[list[int], range]:
        """A prompt of ``length`` tokens with the needle at a depth, and where in it the needle stands.

        Raises:
            UserError: a length that question and needle alone fill.
        """
        before, behind = self.around(needle.question)
        sentence = self.encode(f" {needle.sentence}")
        room = length - len(before) - len(behind) - len(sentence)
        if room < 1:
            raise UserError(
                f"needles.lengths={length}: question and needle alone take {length - room} tokens, give lengths above that"
            )
        hay = hay[:room]
        at = len(before) + self._sentence_break(hay, round(depth * len(hay)))
        ids = [*before, *hay]
        return ids[:at] + sentence + ids[at:] + behind, range(at, at + len(sentence))

    def _sentence_break(self, hay: Sequence[int], at: int) -> int:
        """The last place up to ``at`` behind the end of a sentence; the front where there is none."""
        while at > 0 and not self.tokenizer.decode(hay[at - 1]).rstrip(" ").endswith(SENTENCE_ENDS):
            at -= 1
        return at


def haystacks(texts: Sequence[Sequence[int]], count: int, length: int, start_token: int | None) -> list[list[int]]:
    """``count`` texts of ``length`` tokens or more, each of whole documents in turn: every count-th one, one behind the other.

    Args:
        texts: of documents.
        count: how many.
        length: tokens that each needs.
        start_token: what the tokenizer puts before a text and a haystack's inside must not hold; None: nothing.

    Raises:
        UserError: the documents hold too few tokens.
    """
    bare = [text[1:] if text[:1] == [start_token] else text for text in texts]
    found = [[token for text in bare[first::count] for token in text] for first in range(count)]
    if (least := min(map(len, found))) < length:
        raise UserError(
            f"documents make a haystack of {least:,} tokens only, needles.lengths wants {length:,} of each of "
            f"needles.haystacks={count}: give more text, shorter lengths or fewer haystacks"
        )
    return found


def trials(settings: NeedleSettings, prompter: Prompter, hay: Sequence[Sequence[int]]) -> Iterator[Trial]:
    """All prompts in a fixed order: lengths, then depths, haystacks and needles."""
    for length in settings.lengths:
        for depth in settings.depth_shares:
            for h, text in enumerate(hay):
                for n, needle in enumerate(NEEDLES[: settings.count]):
                    yield Trial(n, h, length, depth, *prompter.hide(needle, text, depth, length))
