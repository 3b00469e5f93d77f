"""Prompts of a length in tokens. Texts are cut where the tokenizer ends a token, never decoded again: what stays is the original."""

from typing import Any

from longdraft.errors import UserError


class Cutter:
    """Cuts texts for one tokenizer and one length of prompts.

    Args:
        tokenizer: a fast tokenizer of transformers: cuts need its character offsets.
        prompt_tokens: tokens that a prompt has at most, those of a chat template and at a text's start not counted.

    Raises:
        UserError: no length.
    """

    def __init__(self, tokenizer: Any, prompt_tokens: int) -> None:
        if prompt_tokens < 1:
            raise UserError(f"prompt_tokens={prompt_tokens}: give how many tokens a prompt has at most, 1 or more")
        self.tokenizer = tokenizer
        self.prompt_tokens = prompt_tokens

    def ends(self, text: str) -> list[int]:
        """Where each token of a text ends, in characters."""
        found = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        return [end for _, end in found["offset_mapping"]]

    def count(self, text: str) -> int:
        """Tokens of a text by itself."""
        return len(self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])

    def first(self, text: str, tokens: int) -> str:
        """The first so many tokens of a text, up to the end of a word; all of a text that has no more."""
        ends = self.ends(text)
        if len(ends) <= tokens:
            return text
        cut = ends[tokens - 1]
        while cut and not (text[cut].isspace() or text[cut - 1].isspace()):
            cut -= 1
        return text[: cut or ends[tokens - 1]].rstrip()

    def start(self, text: str) -> tuple[str, str] | None:
        """A prompt's length of a text and what follows it; None for a text that has no more than that."""
        if self.count(text) <= self.prompt_tokens:
            return None
        first = self.first(text, self.prompt_tokens)
        return first, text[len(first) :]

    def around(self, before: str, text: str, after: str) -> str:
        """``before + text + after`` in a prompt's length: what is too much goes out of the middle of ``text``.

        As LongBench cuts, but never into the instructions, which stand before and after.

        Raises:
            UserError: the instructions alone are longer than the prompt.
        """
        whole = before + text + after
        over = self.count(whole) - self.prompt_tokens
        if over <= 0:
            return whole
        ends = self.ends(text)
        keep = len(ends)
        while over > 0:  # tokens at the seams may differ from those of the parts
            keep -= over
            if keep < 2:
                raise UserError(
                    f"prompt_tokens={self.prompt_tokens}: what stands round the text alone takes "
                    f"{self.count(before + after)} tokens, give more"
                )
            head, tail = ends[keep // 2 - 1], ends[len(ends) - (keep - keep // 2) - 1]
            whole = f"{before}{text[:head].rstrip()}\n{text[tail:].lstrip()}{after}"
            over = self.count(whole) - self.prompt_tokens
        return whole
