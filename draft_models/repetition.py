"""How much of an output repeats itself: a looping output flatters every draft."""

from collections.abc import Sequence

ALLOWED = 0.30  # outputs above this are left out of measurements


def repeated_share(tokens: Sequence[int], n: int = 4) -> float:
    """Share of the n-grams that occurred before in the same output; 0 for outputs shorter than n."""
    grams = [tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1)]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


def unlooped(tokens: Sequence[int], limit: float = ALLOWED, step: int = 32) -> int:
    """How many leading tokens of an output come before it loops: whole steps, until one ends above the limit.

    Args:
        tokens: the output.
        limit: largest share of repeated 4-grams.
        step: tokens between two looks.

    Returns:
        ``len(tokens)`` for an output that never loops.
    """
    for end in range(step, len(tokens) + step, step):
        if repeated_share(tokens[:end]) > limit:
            return end - step
    return len(tokens)
