# mypy: allow-untyped-defs, allow-untyped-decorators, allow-incomplete-defs
"""Our Triton kernel of :func:`longdraft.kernels.block_bound.block_bound`: one pass over the keys, no values, no summaries kept.

As in :mod:`longdraft.kernels.triton_block_lse`, a tile of columns is the j-th column of N blocks, so that the smallest and the
largest numbers of N blocks grow in registers, number by number; all query rows and heads then meet them in two products.

Legend: B requests, T query rows of all requests, S cache slots, H query heads, K key/value heads, D head size, N blocks. In the
kernel: M rows of a tile (heads of a group x query rows), N blocks of a tile.
"""

import torch
import triton
import triton.language as tl

from longdraft.kernels.plan import AttentionPlan
from longdraft.kernels.triton_block_lse import COLUMNS, BlockTile


def bound_tile_for(rows: int, size: int, element: int, block: int) -> BlockTile:
    """The tile for ``rows`` packed rows, heads of ``size``, ``element`` bytes a number and blocks of ``block`` columns: the
    extremes of 16 or 32 blocks are 64 registers a thread.
    """
    blocks = 16 if size > 128 or element == 4 else 32
    tall = min(max(16, triton.next_power_of_2(rows)), 32 if element == 4 else 64)
    return BlockTile(tall, blocks, max(1, COLUMNS // (blocks * block)), 4, 4)


@triton.jit(do_not_specialize=["blocks", "pages_row"])
def _bound_kernel(
    q_ptr, k_ptr, pages_ptr, lens_ptr, cu_ptr, bound_ptr, blocks, scale,
    q_row, q_head, k_slot, k_head, pages_row,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, SIZE: tl.constexpr, PAGE: tl.constexpr, BLOCK: tl.constexpr,
    TILES: tl.constexpr, TURNS: tl.constexpr, M: tl.constexpr, N: tl.constexpr, D: tl.constexpr, EIGHT: tl.constexpr,
    PRODUCTS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """TURNS tiles of N blocks for one request, one key/value head and one tile of rows."""
    head = tl.program_id(0) // TILES
    b = tl.program_id(2)
    first = tl.program_id(1) * (TURNS * N)
    m = tl.arange(0, M)
    n = tl.arange(0, N)
    d = tl.arange(0, D)
    length = tl.minimum(tl.load(lens_ptr + b), blocks * BLOCK)
    packed = (tl.program_id(0) % TILES) * M + m
    row = tl.load(cu_ptr + b) + packed // GROUP
    query_head = head * GROUP + packed % GROUP
    mine = row < tl.load(cu_ptr + b + 1)
    in_head = d < SIZE
    q_at = row.to(tl.int64) * q_row + query_head * q_head
    q = tl.load(q_ptr + q_at[:, None] + d[None, :], mask=mine[:, None] & in_head[None, :], other=0.0)
    if EIGHT:
        q = q.to(tl.float16)  # the narrowest that holds float8 exactly
    up, down = q, q
    if not PRODUCTS:
        # The larger of q * low and q * high is q * high for a positive q and q * low for a negative one.
        up = tl.where(q > 0, q, 0.0).to(q.dtype)
        down = tl.where(q < 0, q, 0.0).to(q.dtype)
    bound_at = bound_ptr + (row.to(tl.int64) * (KV_HEADS * GROUP) + query_head)[:, None] * blocks + n[None, :]
    list_ptr = pages_ptr + b.to(tl.int64) * pages_row
    turns = tl.minimum(tl.maximum((length - first * BLOCK + (N * BLOCK - 1)) // (N * BLOCK), 0), TURNS)
    for turn in range(turns):
        start = first + turn * N
        begin = (start + n) * BLOCK
        there = begin < length
        low = tl.full([N, D], float("inf"), tl.float32)
        high = tl.full([N, D], float("-inf"), tl.float32)
        page = tl.load(list_ptr + begin // PAGE, mask=there, other=0)
        for column in tl.range(0, BLOCK, num_stages=STAGES):
            # Behind the length a block's first column is read once more, which changes no extreme.
            token = tl.where(begin + column < length, begin + column, begin)
            slot = page.to(tl.int64) * PAGE + token % PAGE
            ahead = tl.where(begin + column + 1 < length, begin + column + 1, begin)
            page = tl.load(list_ptr + ahead // PAGE, mask=there & (column + 1 < BLOCK), other=0)
            k_at = slot * k_slot + head * k_head
            k = tl.load(k_ptr + k_at[:, None] + d[None, :], mask=there[:, None] & in_head[None, :], other=0.0)
            low = tl.minimum(low, k.to(tl.float32))
            high = tl.maximum(high, k.to(tl.float32))
        above = tl.dot(up, tl.trans(high.to(q.dtype)), input_precision="ieee")
        below = tl.dot(down, tl.trans(low.to(q.dtype)), input_precision="ieee")
        bound = (tl.maximum(above, below) if PRODUCTS else above + below) * scale
        bound = tl.where(there[None, :], bound, float("-inf"))
        tl.store(bound_at + start, bound, mask=mine[:, None] & (start + n < blocks)[None, :])
    for turn in range(turns, TURNS):
        start = first + turn * N
        tl.store(bound_at + start, float("-inf"), mask=mine[:, None] & (start + n < blocks)[None, :])


def triton_block_bound(
    q_THD: torch.Tensor,
    k_SKD: torch.Tensor,
    plan: AttentionPlan,
    block: int,
    blocks: int,
    scale: float,
    rule: str,
    tile: BlockTile | None = None,
) -> torch.Tensor:
    """:func:`longdraft.kernels.block_bound.block_bound` in Triton; ``tile`` None takes :func:`bound_tile_for`'s."""
    rows, heads, size = q_THD.shape
    kv_heads = k_SKD.shape[1]
    bound_THN = torch.empty(rows, heads, blocks, dtype=torch.float32, device=q_THD.device)
    if not bound_THN.numel():
        return bound_THN
    q_THD, k_SKD = (x if x.stride(-1) == 1 else x.contiguous() for x in (q_THD, k_SKD))
    group = heads // kv_heads
    tile = tile or bound_tile_for(plan.max_rows * group, size, k_SKD.element_size(), block)
    tiles = triton.cdiv(plan.max_rows * group, tile.rows)
    grid = kv_heads * tiles, triton.cdiv(blocks, tile.turns * tile.blocks), len(plan)
    _bound_kernel[grid](
        q_THD, k_SKD, plan.pages_BW, plan.lens_B, plan.cu_rows_B1, bound_THN, blocks, scale,
        *q_THD.stride()[:2], *k_SKD.stride()[:2], plan.pages_BW.stride(0),
        KV_HEADS=kv_heads, GROUP=group, SIZE=size, PAGE=plan.page_size, BLOCK=block, TILES=tiles, TURNS=tile.turns,
        M=tile.rows, N=tile.blocks, D=max(16, triton.next_power_of_2(size)), EIGHT=k_SKD.dtype == torch.float8_e4m3fn,
        PRODUCTS=rule == "specpv", STAGES=tile.stages, num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return bound_THN
