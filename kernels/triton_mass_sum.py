# mypy: allow-untyped-defs, allow-untyped-decorators, allow-incomplete-defs
"""Our Triton kernels of :func:`longdraft.kernels.mass_sum.mass_sum`: each row's log-sum-exp, then shares and their sum.

The rows of a request are summed one after the other, so the sum is the same at every call.

Legend: B requests, M rows of a request (query rows times heads), N blocks.
"""

import torch
import triton
import triton.language as tl

WIDE = 2048  # blocks that a program of the first kernel looks at in a turn
NARROW = 64  # blocks of a program of the second
ROWS = 32  # that it adds up in a turn


@triton.jit(do_not_specialize=["blocks"])
def _total_kernel(lse_ptr, total_ptr, blocks, WIDE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, WIDE)
    top = tl.full([WIDE], float("-inf"), tl.float32)
    total = tl.zeros([WIDE], tl.float32)
    for first in tl.range(0, blocks, WIDE):
        lse = tl.load(lse_ptr + row * blocks + first + at, mask=first + at < blocks, other=float("-inf"))
        higher = tl.maximum(top, lse)
        # exp(-inf - 0) = 0 where -inf - -inf would be NaN
        base = tl.where(higher == float("-inf"), 0.0, higher)
        total = total * tl.exp(top - base) + tl.exp(lse - base)
        top = higher
    most = tl.max(top, 0)
    base = tl.where(most == float("-inf"), 0.0, most)
    whole = tl.sum(total * tl.exp(top - base), 0)
    tl.store(total_ptr + row, tl.where(whole > 0, base + tl.log(whole), 0.0))


@triton.jit(do_not_specialize=["blocks", "rows"])
def _mass_kernel(lse_ptr, total_ptr, score_ptr, blocks, rows, ROWS: tl.constexpr, NARROW: tl.constexpr):
    b = tl.program_id(1).to(tl.int64)
    at = tl.program_id(0) * NARROW + tl.arange(0, NARROW)
    m = tl.arange(0, ROWS)
    score = tl.zeros([ROWS, NARROW], tl.float32)
    for first in tl.range(0, rows, ROWS):
        there = first + m < rows
        row = b * rows + first + m
        total = tl.load(total_ptr + row, mask=there, other=0.0)
        lse_at = lse_ptr + row[:, None] * blocks + at[None, :]
        lse = tl.load(lse_at, mask=there[:, None] & (at < blocks)[None, :], other=float("-inf"))
        score += tl.exp(lse - total[:, None])
    tl.store(score_ptr + b * blocks + at, tl.sum(score, 0), mask=at < blocks)


def triton_mass_sum(lse_THN: torch.Tensor, batch: int) -> torch.Tensor:
    """:func:`longdraft.kernels.mass_sum.mass_sum` in Triton."""
    lse_THN = lse_THN.contiguous()
    rows, blocks = lse_THN.shape[0] * lse_THN.shape[1], lse_THN.shape[2]
    score_BN = torch.empty(batch, blocks, dtype=torch.float32, device=lse_THN.device)
    if not score_BN.numel():
        return score_BN
    total = torch.empty(rows, dtype=torch.float32, device=lse_THN.device)
    _total_kernel[(rows,)](lse_THN, total, blocks, WIDE=WIDE, num_warps=8)
    grid = triton.cdiv(blocks, NARROW), batch
    _mass_kernel[grid](lse_THN, total, score_BN, blocks, rows // batch, ROWS=ROWS, NARROW=NARROW)
    return score_BN
