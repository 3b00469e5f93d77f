"""Lengths in tokens as records, reports and boards say them: ``512``, ``2K``, ``7.6K``, and back."""

import re

K = 1024
SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KM]?)")
UNITS = {"": 1.0, "K": float(K), "M": float(K * K)}


def tokens_word(tokens: int) -> str:
    """A length as tables say it: 32,000 and 32,768 are 32K, 7,600 is 7.6K, 500 is 500."""
    if tokens < 1000:
        return str(tokens)
    return f"{tokens / (K if tokens % K == 0 else 1000):.1f}K".replace(".0K", "K")


def lengths_in(words: str) -> list[float]:
    """All lengths that a text names, in tokens: of ``2K-8K`` 2,048 and 8,192. A K counts as 1,024."""
    return [float(number) * UNITS[unit] for number, unit in SIZE.findall(words)]
