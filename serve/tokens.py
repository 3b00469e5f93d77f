"""A request's tokens without copying its prompt every step."""

from typing import Any


class Tokens:
    """Prompt and output ids of an SGLang request as one sequence. The last token has no target cache yet."""

    def __init__(self, req: Any) -> None:
        self.prompt: list[int] = req.origin_input_ids
        self.output: list[int] = req.output_ids

    def __len__(self) -> int:
        return len(self.prompt) + len(self.output)

    @property
    def cached(self) -> int:
        """Tokens that the target's cache holds: all but the newest."""
        return len(self) - 1

    @property
    def newest(self) -> int:
        return self.output[-1] if self.output else self.prompt[-1]

    def slice(self, start: int, end: int) -> list[int]:
        """Tokens ``start .. end``."""
        split = len(self.prompt)
        if start >= split:
            return list(self.output[start - split : end - split])
        return list(self.prompt[start:end]) + list(self.output[: max(0, end - split)])
