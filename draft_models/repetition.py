"""How much of an output repeats itself: a looping output flatters every draft."""

from collections.abc import Sequence

ALLOWED = 0.30  # outputs above this are left out of measurements


def repeated_share(tokens: Sequence[int], n: int = 4) -> float:
    """Share of the n-grams that occurred before in the same output; 0 for outputs shorter than n."""
    grams = [tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1)]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0
