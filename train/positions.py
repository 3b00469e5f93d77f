"""Anchor-Offset Indices and seeded draws (LongSpec, section 3.2): short documents train large positions.

Legend: L tokens of a document.
"""

import hashlib

import torch


def seeded(*key: int | str) -> torch.Generator:
    """A CPU generator whose stream is a function of ``key`` alone: the same on every rank and after a resume."""
    digest = hashlib.sha256("/".join(str(part) for part in key).encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)


def draw(low: int, high: int, *key: int | str) -> int:
    """A uniform integer in ``low .. high``, both included, decided by ``key``."""
    return int(torch.randint(low, high + 1, (), generator=seeded(*key)))


def anchor_offset_positions(length: int, anchors: int, max_position: int, *key: int | str) -> torch.Tensor:
    """Positions ``0 .. a - 1, a + o .. L - 1 + o`` with one uniform offset o in ``0 .. max_position - L``.

    Args:
        length: L.
        anchors: a, leading positions that stay, so that attention sinks are where the target learned them.
        max_position: exclusive limit of a position; a longer document gets plain positions.
        key: decides the offset.

    Returns:
        int64 ``[L]``, strictly increasing.
    """
    position_L = torch.arange(length)
    if (room := max_position - length) > 0:
        position_L[anchors:] += draw(0, room, "offset", *key)
    return position_L


def lag_of_step(step: int, low: int, high: int, seed: int) -> int:
    """Flash Noisy Training's lag of a global step, uniform in ``low .. high`` (LongSpec, section 3.2)."""
    return draw(low, high, "lag", seed, step)
