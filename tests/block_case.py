"""What float64 says of the blocks of a page list, one block, row and head at a time.

Legend: T query rows, H query heads, N blocks, D head size.
"""

import math

import torch
from prefix_case import PrefixCase


def _blocks(case: PrefixCase, block: int, blocks: int) -> list[list[list[int]]]:
    """Cache slots of each block of each request."""
    return [[slots[n * block : (n + 1) * block] for n in range(blocks)] for slots in case.slots]


def _filled(case: PrefixCase, block: int, blocks: int, value: object) -> torch.Tensor:
    """``value(q_D, k_CD)`` of every row, head and block that has a column; -inf elsewhere. On the CPU."""
    rows, heads, _ = case.q.shape
    group, q, k = heads // case.k.shape[1], case.q.double().cpu(), case.k.double().cpu()
    found_THN = torch.full((rows, heads, blocks), float("-inf"), dtype=torch.float64)
    for b, listed in enumerate(_blocks(case, block, blocks)):
        at = case.plan.rows_of(b)
        for t in range(at.start, at.stop):
            for h in range(heads):
                for n, slots in enumerate(listed):
                    if slots:
                        found_THN[t, h, n] = value(q[t, h], k[slots, h // group])  # type: ignore[operator]
    return found_THN


def expected_lse(case: PrefixCase, block: int, blocks: int) -> torch.Tensor:
    """Float64 log-sum-exp of each block's scores."""
    scale = case.scale * case.kv_scales[0]

    def lse(q_D: torch.Tensor, k_CD: torch.Tensor) -> float:
        scores = [float(q_D @ k_D) * scale for k_D in k_CD]
        top = max(scores)
        return top + math.log(sum(math.exp(s - top) for s in scores))

    return _filled(case, block, blocks, lse)


def expected_bound(case: PrefixCase, block: int, blocks: int, rule: str = "quest") -> torch.Tensor:
    """Float64 bounds as Quest or SpecPV writes them."""

    def bound(q_D: torch.Tensor, k_CD: torch.Tensor) -> float:
        low, high = k_CD.amin(0), k_CD.amax(0)
        if rule == "specpv":
            return max(float(q_D @ low), float(q_D @ high))
        return float(torch.maximum(q_D * low, q_D * high).sum())

    return _filled(case, block, blocks, bound)


def largest_scores(case: PrefixCase, block: int, blocks: int) -> torch.Tensor:
    """Each block's largest unscaled score."""
    return _filled(case, block, blocks, lambda q_D, k_CD: float((k_CD @ q_D).max()))


def close(found: torch.Tensor, want: torch.Tensor, dtype: torch.dtype = torch.float32, looser: float = 1.0) -> None:
    """Products of 16-bit numbers are exact in float32, so scores are as good as the order of adding; float8 queries round."""
    rtol, atol = {torch.float64: (1e-12, 1e-12), torch.float32: (1e-5, 1e-5)}.get(dtype, (1e-5, 1e-4))
    torch.testing.assert_close(found.cpu().double(), want, rtol=rtol * looser, atol=atol * looser)
