"""Forced acceptance for timing runs with random weights: independent for each request and position."""

import random
from functools import cache

_random = random.Random(0)


@cache
def hit_rate(length: float, steps: int) -> float:
    """Chance q of each draft for which a chain of ``steps`` gains ``length`` tokens on average, bonus in."""
    low, high = 0.0, 1.0
    for _ in range(60):
        q = (low + high) / 2
        if 1 + sum(q**i for i in range(1, steps + 1)) < length:
            low = q
        else:
            high = q
    return high


def forced_acceptance(drafted: list[int], length: float) -> list[int]:
    """Drafts that each request keeps."""
    kept = []
    for steps in drafted:
        rate, count = hit_rate(length, steps) if steps else 0.0, 0
        while count < steps and _random.random() < rate:
            count += 1
        kept.append(count)
    return kept
