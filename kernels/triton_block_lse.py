# mypy: allow-untyped-defs, allow-untyped-decorators, allow-incomplete-defs
"""Our Triton kernel of :func:`longdraft.kernels.block_lse.block_lse`: one pass over the keys, no values.

What bounds it is the reading of the keys. All query rows and heads of one key/value head are one tile (GQA packing). A tile of
columns is not a run of consecutive keys but the j-th column of N blocks, for j = 0, 1, ...: so a block's log-sum-exp grows in
one place of one register tile, no number crosses threads, a block may have any size, and N results lie together when they are
written. (A key of one head is 256 bytes in a cache row of kilobytes; consecutive or not, no two lie together.)

Programs that read the same columns for other heads stand side by side in the grid. Lengths stay on the device and the grid
depends on shapes alone, so that one captured CUDA graph serves any lengths: programs beyond a length write -inf and end.

Legend: B requests, T query rows of all requests, S cache slots, W page-list width, H query heads, K key/value heads, D head size,
N blocks. In the kernel: M rows of a tile (heads of a group x query rows), N blocks of a tile.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from longdraft.kernels.plan import AttentionPlan

LOG2E = 1.4426950408889634
COLUMNS = (
    1024  # that a program reads, about: 256 KiB of keys in 16 bit, of which an H200's multiprocessor reads 32 KiB a us
)


class BlockTile(NamedTuple):
    """How the kernel is built; what suits a card best is for the benchmark to say."""

    rows: int
    blocks: int
    turns: int  # tiles of blocks that a program goes through
    warps: int
    stages: int


def block_tile_for(rows: int, size: int, element: int, block: int) -> BlockTile:
    """The tile for ``rows`` packed rows (heads of a group x query rows), heads of ``size``, ``element`` bytes a number, and
    blocks of ``block`` columns: 2 to 4 programs fit a multiprocessor, each with two tiles of keys (16 KiB each) in flight.
    """
    most = 32 if element == 4 else 64
    blocks = max(16, min(most // (2 if size > 128 else 1), triton.next_power_of_2(max(1, COLUMNS // block))))
    tall = min(max(16, triton.next_power_of_2(rows)), 32 if element == 4 else 128)
    turns = max(1, COLUMNS // (blocks * block))
    return BlockTile(tall, blocks, turns, 8 if tall == 128 else 4, 2 if element == 4 else 3)


@triton.jit(do_not_specialize=["blocks", "pages_row"])
def _lse_kernel(
    q_ptr, k_ptr, pages_ptr, lens_ptr, cu_ptr, lse_ptr, blocks, scale,
    q_row, q_head, k_slot, k_head, pages_row,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, SIZE: tl.constexpr, PAGE: tl.constexpr, BLOCK: tl.constexpr,
    TILES: tl.constexpr, TURNS: tl.constexpr, M: tl.constexpr, N: tl.constexpr, D: tl.constexpr, EIGHT: tl.constexpr,
):  # fmt: skip
    """TURNS tiles of N blocks for one request, one key/value head and one tile of rows."""
    head = tl.program_id(0) // TILES
    b = tl.program_id(2)
    first = tl.program_id(1) * (TURNS * N)
    m = tl.arange(0, M)
    n = tl.arange(0, N)
    d = tl.arange(0, D)
    length = tl.minimum(tl.load(lens_ptr + b), blocks * BLOCK)
    begin = tl.load(cu_ptr + b)
    packed = (tl.program_id(0) % TILES) * M + m
    row = begin + packed // GROUP
    query_head = head * GROUP + packed % GROUP
    mine = row < tl.load(cu_ptr + b + 1)
    in_head = d < SIZE
    q_at = row.to(tl.int64) * q_row + query_head * q_head
    q = tl.load(q_ptr + q_at[:, None] + d[None, :], mask=mine[:, None] & in_head[None, :], other=0.0)
    if EIGHT:
        # As in the prefix kernel: float8 widens to float16 in one instruction. Scaled queries are far from float16's end.
        q = (q.to(tl.float32) * scale).to(tl.float16)
    lse_at = lse_ptr + (row.to(tl.int64) * (KV_HEADS * GROUP) + query_head)[:, None] * blocks + n[None, :]

    top = tl.full([M, N], float("-inf"), tl.float32)
    total = tl.zeros([M, N], tl.float32)
    turns = tl.minimum(tl.maximum((length - first * BLOCK + (N * BLOCK - 1)) // (N * BLOCK), 0), TURNS)
    # A tile's pages are read a step before its keys: as a load that waits for a load the compiler would keep one tile in
    # flight instead of STAGES - 1.
    list_ptr = pages_ptr + b.to(tl.int64) * pages_row
    token = (first + n) * BLOCK
    page = tl.load(list_ptr + token // PAGE, mask=token < length, other=0)
    for step in tl.range(0, turns * BLOCK):
        start = first + (step // BLOCK) * N
        column = step % BLOCK
        token = (start + n) * BLOCK + column
        there = token < length
        slot = page.to(tl.int64) * PAGE + token % PAGE
        token = (first + ((step + 1) // BLOCK) * N + n) * BLOCK + (step + 1) % BLOCK
        page = tl.load(list_ptr + token // PAGE, mask=token < length, other=0)
        k_at = slot * k_slot + head * k_head
        k = tl.load(k_ptr + k_at[:, None] + d[None, :], mask=there[:, None] & in_head[None, :], other=0.0)
        score = tl.dot(q, tl.trans(k.to(q.dtype)), input_precision="ieee")
        if not EIGHT:
            score *= scale
        score = tl.where(there[None, :], score, float("-inf"))
        # A block's first column is there if any is, so a maximum is finite; blocks without one are NaN here and -inf below.
        old = tl.where(column == 0, float("-inf"), top)
        top = tl.maximum(old, score)
        total = tl.where(column == 0, 0.0, total * tl.exp2(old - top)) + tl.exp2(score - top)
        if column == BLOCK - 1:
            lse = (top + tl.log2(total)) * 0.6931471805599453
            lse = tl.where(((start + n) * BLOCK < length)[None, :], lse, float("-inf"))
            tl.store(lse_at + start, lse, mask=mine[:, None] & (start + n < blocks)[None, :])
    for turn in range(turns, TURNS):
        start = first + turn * N
        tl.store(lse_at + start, float("-inf"), mask=mine[:, None] & (start + n < blocks)[None, :])


def triton_block_lse(
    q_THD: torch.Tensor,
    k_SKD: torch.Tensor,
    plan: AttentionPlan,
    scale: float,
    block: int,
    blocks: int,
    tile: BlockTile | None = None,
) -> torch.Tensor:
    """:func:`longdraft.kernels.block_lse.block_lse` in Triton; ``tile`` None takes :func:`block_tile_for`'s.

    Needs queries of bfloat16, float16 or float32 and keys of their dtype or of float8 (e4m3).
    """
    rows, heads, size = q_THD.shape
    kv_heads = k_SKD.shape[1]
    lse_THN = torch.empty(rows, heads, blocks, dtype=torch.float32, device=q_THD.device)
    if not lse_THN.numel():
        return lse_THN
    q_THD, k_SKD = (x if x.stride(-1) == 1 else x.contiguous() for x in (q_THD, k_SKD))
    group = heads // kv_heads
    tile = tile or block_tile_for(plan.max_rows * group, size, k_SKD.element_size(), block)
    tiles = triton.cdiv(plan.max_rows * group, tile.rows)
    grid = kv_heads * tiles, triton.cdiv(blocks, tile.turns * tile.blocks), len(plan)
    _lse_kernel[grid](
        q_THD, k_SKD, plan.pages_BW, plan.lens_B, plan.cu_rows_B1, lse_THN, blocks, scale * LOG2E,
        *q_THD.stride()[:2], *k_SKD.stride()[:2], plan.pages_BW.stride(0),
        KV_HEADS=kv_heads, GROUP=group, SIZE=size, PAGE=plan.page_size, BLOCK=block, TILES=tiles, TURNS=tile.turns,
        M=tile.rows, N=tile.blocks, D=max(16, triton.next_power_of_2(size)), EIGHT=k_SKD.dtype == torch.float8_e4m3fn,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return lse_THN
