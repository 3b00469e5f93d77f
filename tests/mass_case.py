"""What float64 says of attention probabilities over the columns of a page list, one row and head at a time.

Legend: B requests, R query rows of a request, N columns.
"""

import math

import torch
from prefix_case import PrefixCase


def expected_mass(
    case: PrefixCase, heads: list[int], columns: int | None = None, valid: torch.Tensor | None = None
) -> torch.Tensor:
    """Float64 ``score_BN`` on the CPU: softmax of every chosen row and head in plain words, summed (U3)."""
    columns = case.plan.pages_BW.shape[1] * case.plan.page_size if columns is None else columns
    q, k, scale = case.q.double().cpu(), case.k.double().cpu(), case.scale * case.kv_scales[0]
    group = q.shape[1] // k.shape[1]
    score_BN = torch.zeros(len(case.slots), columns, dtype=torch.float64)
    for b, slots in enumerate(case.slots):
        own = case.plan.rows_of(b)
        for r, t in enumerate(range(own.start, own.stop)):
            if not slots or (valid is not None and not valid[b, r]):
                continue
            for h in heads:
                scores = [float(q[t, h] @ k[slot, h // group]) * scale for slot in slots]
                top = max(scores)
                weights = [math.exp(s - top) for s in scores]
                score_BN[b, : len(slots)] += torch.tensor([w / sum(weights) for w in weights], dtype=torch.float64)
    return score_BN


def some_rows(case: PrefixCase, seed: int = 0) -> torch.Tensor:
    """Rows that count, bool ``[B, R]``, and NaN in the queries of the others."""
    shape = len(case.plan), max(case.plan.max_rows, 1) + 1
    valid_BR = torch.rand(shape, generator=torch.Generator().manual_seed(seed)) < 0.5
    for b in range(len(case.plan)):
        own = case.plan.rows_of(b)
        for r, t in enumerate(range(own.start, own.stop)):
            if not valid_BR[b, r]:
                case.q[t] = float("nan")
    return valid_BR.to(case.q.device)
