# mypy: allow-untyped-defs, allow-untyped-decorators, allow-incomplete-defs
"""Our Triton kernel that merges attention parts by their log-sum-exp: every number is read once and written once.

Legend: P parts, T query rows, H heads, D head size; in the kernel X = T * H rows of all heads, M of them in a tile.
"""

import torch
import triton
import triton.language as tl

ELEMENTS = 2048  # of a tile: 128 threads with 16 numbers each


@triton.jit
def _merge_kernel(
    out_ptr, lse_ptr, into_ptr, into_lse_ptr, count, heads,
    out_part, out_row, out_head, lse_part, lse_row, lse_head,
    PARTS: tl.constexpr, SIZE: tl.constexpr, M: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """One tile of rows: their largest log-sum-exp first, then the weighted outputs."""
    x = tl.program_id(0).to(tl.int64) * M + tl.arange(0, M)
    there = x < count
    row = x // heads
    head = x % heads
    d = tl.arange(0, D)
    here = there[:, None] & (d < SIZE)[None, :]
    lse_at = row * lse_row + head * lse_head
    out_at = (row * out_row + head * out_head)[:, None] + d[None, :]
    top = tl.full([M], float("-inf"), tl.float32)
    for part in tl.static_range(PARTS):
        top = tl.maximum(top, tl.load(lse_ptr + part * lse_part + lse_at, mask=there, other=float("-inf")))
    top = tl.where(top == float("-inf"), 0.0, top)
    total = tl.zeros([M], tl.float32)
    acc = tl.zeros([M, D], tl.float32)
    for part in tl.static_range(PARTS):
        lse = tl.load(lse_ptr + part * lse_part + lse_at, mask=there, other=float("-inf"))
        weight = tl.exp(lse - top)
        total += weight
        # A part without keys has weight zero and is not computed with, whatever it holds; a NaN weight is no zero and shows.
        out = tl.load(out_ptr + part * out_part + out_at, mask=here & (weight != 0)[:, None], other=0.0)
        acc += out.to(tl.float32) * weight[:, None]
    merged = acc / tl.where(total == 0, 1.0, total)[:, None]
    tl.store(into_ptr + x[:, None] * SIZE + d[None, :], merged.to(into_ptr.dtype.element_ty), mask=here)
    tl.store(into_lse_ptr + x, top + tl.log(total), mask=there)


def triton_merge_attention(out_PTHD: torch.Tensor, lse_PTH: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """:func:`longdraft.kernels.merge.merge_attention` in Triton, for log-sum-exps in float32 and parts no wider."""
    assert lse_PTH.dtype == torch.float32 and out_PTHD.dtype != torch.float64
    parts, rows, heads, size = out_PTHD.shape
    into_THD = torch.empty(rows, heads, size, dtype=out_PTHD.dtype, device=out_PTHD.device)
    into_lse_TH = torch.empty(rows, heads, dtype=torch.float32, device=out_PTHD.device)
    if out_PTHD.stride(-1) != 1:
        out_PTHD = out_PTHD.contiguous()
    wide = triton.next_power_of_2(size)
    tile = max(1, ELEMENTS // wide)
    if rows * heads:
        _merge_kernel[(triton.cdiv(rows * heads, tile),)](
            out_PTHD, lse_PTH, into_THD, into_lse_TH, rows * heads, heads, *out_PTHD.stride()[:3], *lse_PTH.stride(),
            PARTS=parts, SIZE=size, M=tile, D=wide, num_warps=4,
        )  # fmt: skip
    return into_THD, into_lse_TH
