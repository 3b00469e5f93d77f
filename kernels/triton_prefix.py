# mypy: allow-untyped-defs, allow-untyped-decorators, allow-incomplete-defs
"""Our Triton kernel of the prefix part: a few query rows a request over a paged cache, split over the context.

What bounds it is the reading of the cache, so everything serves that. The query heads of one key/value head and the rows of a
request are one tile (GQA packing): a key is read once for all of them. All (request, head, tile) units are laid behind one
another in blocks of keys, and every program takes an equal share of that line, whatever the lengths are: it may begin in the
middle of one request's context and end in another's. Each piece of a unit leaves its unnormalised state; a second kernel
merges the pieces of a row. Lengths stay on the device and the grids depend on shapes alone, so that one captured CUDA graph
serves any lengths.

Legend: B requests, T query rows of all requests, S cache slots, W page-list width, H query heads, K key/value heads,
D head size, G = H / K. In kernels: M rows of a tile (G heads x query rows), N keys of a block, P pieces.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from longdraft.kernels.plan import AttentionPlan

LOG2E = 1.4426950408889634
FULL = 2048  # keys of a share; longer ones call for another wave, so that the last programs to end do not end late
PIECES = 16  # pieces that the merging kernel holds at a time


class Tile(NamedTuple):
    """How the first kernel is built; what suits a card best is for the benchmark to say."""

    rows: int
    keys: int
    warps: int
    stages: int
    resident: int  # programs that a multiprocessor holds at a time
    waves: int  # how often the card is filled with programs, at most


def tile_for(rows: int, size: int, element: int) -> Tile:
    """The tile for ``rows`` packed rows (heads of a group x query rows), heads of ``size`` and ``element`` bytes a number.

    Keys and stages are such that an H100's multiprocessor holds two programs (one of 128 rows), each with a block or two of
    keys in flight: 64 KB and more, where 32 KB hide a microsecond of latency at full bandwidth.
    """
    narrow = 2 if size > 128 else 1
    if element == 4:
        return Tile(16 if rows <= 16 else 32, 32 // narrow, 4, 2, 2, 4)
    if rows <= 32:
        return Tile(16 if rows <= 16 else 32, 64 // narrow, 4, 4 if element == 1 else 3, 2, 4)
    return Tile(64, 64 // narrow, 4, 2, 2, 4) if rows <= 64 else Tile(128, 64 // narrow, 8, 2, 1, 4)


@triton.jit
def _line(
    lens_ptr, cu_ptr, batch, KV_HEADS: tl.constexpr, GROUP: tl.constexpr, BATCH: tl.constexpr, M: tl.constexpr,
    N: tl.constexpr, WAVE: tl.constexpr, WAVES: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    """Where each request's blocks lie on the line: blocks of a unit, tiles of a head, end on the line; and a program's share."""
    at = tl.arange(0, BATCH)
    there = at < batch
    lens = tl.load(lens_ptr + at, mask=there, other=0)
    rows = tl.load(cu_ptr + at + 1, mask=there, other=0) - tl.load(cu_ptr + at, mask=there, other=0)
    blocks = (lens + (N - 1)) // N
    tiles = (rows * GROUP + (M - 1)) // M
    work = blocks * tiles * KV_HEADS
    ends = tl.cumsum(work, 0)
    total = tl.sum(work, 0)
    # Whole waves of programs: one more program than the card holds would take as long as twice as many.
    waves = tl.minimum(tl.maximum((total + (WAVE * (FULL // N) - 1)) // (WAVE * (FULL // N)), 1), WAVES)
    share = tl.maximum((total + (WAVE * waves - 1)) // (WAVE * waves), 1)
    return at, blocks, tiles, work, ends, total, share


@triton.jit(do_not_specialize=["batch", "pages_row"])  # a batch of another size compiles nothing
def _pieces_kernel(
    q_ptr, k_ptr, v_ptr, pages_ptr, lens_ptr, cu_ptr, part_ptr, top_ptr, sum_ptr, batch, scale,
    q_row, q_head, k_slot, k_head, v_slot, v_head, pages_row,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, SIZE: tl.constexpr, PAGE: tl.constexpr, TILES: tl.constexpr,
    BATCH: tl.constexpr, M: tl.constexpr, N: tl.constexpr, D: tl.constexpr,
    EIGHT: tl.constexpr, WAVE: tl.constexpr, WAVES: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    """One program's share of the line; a state for each unit that it touches."""
    at, blocks_B, tiles_B, work_B, ends_B, total, share = _line(
        lens_ptr, cu_ptr, batch, KV_HEADS, GROUP, BATCH, M, N, WAVE, WAVES, FULL
    )
    program = tl.program_id(0)
    place = program * share
    end = tl.minimum(place + share, total)
    m = tl.arange(0, M)
    n = tl.arange(0, N)
    d = tl.arange(0, D)
    in_head = d < SIZE
    while place < end:
        b = tl.sum((ends_B <= place).to(tl.int32), 0)
        mine = at == b
        blocks = tl.sum(tl.where(mine, blocks_B, 0), 0)
        tiles = tl.sum(tl.where(mine, tiles_B, 0), 0)
        local = place - tl.sum(tl.where(mine, ends_B - work_B, 0), 0)
        unit = local // blocks
        first = local % blocks
        last = tl.minimum(first + end - place, blocks)
        head = unit // tiles
        length = tl.load(lens_ptr + b)
        begin = tl.load(cu_ptr + b)
        packed = (unit % tiles) * M + m
        row = begin + packed // GROUP
        q_mask = (row < tl.load(cu_ptr + b + 1))[:, None] & in_head[None, :]
        q_at = row.to(tl.int64) * q_row + (head * GROUP + packed % GROUP) * q_head
        q = tl.load(q_ptr + q_at[:, None] + d[None, :], mask=q_mask, other=0.0)
        if EIGHT:
            # Float8 widens to float16 in one instruction, to bfloat16 in three, and float16 holds it exactly. Scaled queries
            # are far from float16's end.
            q = (q.to(tl.float32) * scale).to(tl.float16)

        top = tl.full([M], float("-inf"), tl.float32)
        total_weight = tl.zeros([M], tl.float32)
        acc = tl.zeros([M, D], tl.float32)
        # A block's pages are read an iteration before its keys: as a load that waits for a load the compiler would keep one
        # block in flight instead of STAGES - 1.
        list_ptr = pages_ptr + b.to(tl.int64) * pages_row
        token = first * N + n
        page = tl.load(list_ptr + token // PAGE, mask=token < length, other=0)
        for block in tl.range(first, last):
            token = block * N + n
            there = token < length
            slot = page.to(tl.int64) * PAGE + token % PAGE
            page = tl.load(list_ptr + (token + N) // PAGE, mask=token + N < length, other=0)
            # What is behind the length is read as zeros: a weight of zero times whatever lies there could be NaN.
            seen = there[:, None] & in_head[None, :]
            k = tl.load(k_ptr + (slot * k_slot + head * k_head)[:, None] + d[None, :], mask=seen, other=0.0)
            v = tl.load(v_ptr + (slot * v_slot + head * v_head)[:, None] + d[None, :], mask=seen, other=0.0)
            score = tl.dot(q, tl.trans(k.to(q.dtype)), input_precision="ieee")
            if not EIGHT:
                score *= scale
            score = tl.where(there[None, :], score, float("-inf"))
            new_top = tl.maximum(top, tl.max(score, 1))
            weight = tl.exp2(score - new_top[:, None])
            fade = tl.exp2(top - new_top)
            total_weight = total_weight * fade + tl.sum(weight, 1)
            acc = acc * fade[:, None]
            acc = tl.dot(weight.to(q.dtype), v.to(q.dtype), acc, input_precision="ieee")
            top = new_top

        # Programs and units both grow along the line, so their sum names a piece.
        piece = (program + b * (KV_HEADS * TILES) + unit).to(tl.int64)
        tl.store(part_ptr + (piece * M + m)[:, None] * D + d[None, :], acc)
        tl.store(top_ptr + piece * M + m, top)
        tl.store(sum_ptr + piece * M + m, total_weight)
        place += last - first


@triton.jit(do_not_specialize=["batch"])
def _merge_kernel(
    part_ptr, top_ptr, sum_ptr, lens_ptr, cu_ptr, out_ptr, lse_ptr, batch, value_scale, out_row, out_head,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, SIZE: tl.constexpr, TILES: tl.constexpr, BATCH: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, D: tl.constexpr, PIECES: tl.constexpr,
    WAVE: tl.constexpr, WAVES: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    """The pieces of one row and head as one softmax; zeros and -inf where there are none."""
    at, blocks_B, tiles_B, work_B, ends_B, _, share = _line(
        lens_ptr, cu_ptr, batch, KV_HEADS, GROUP, BATCH, M, N, WAVE, WAVES, FULL
    )
    row = tl.program_id(0)
    query_head = tl.program_id(1)
    # Requests without rows share their offset with the next one: the last that begins here or before is the owner.
    begins_B = tl.load(cu_ptr + at + 1, mask=at < batch, other=2147483647)
    b = tl.sum((begins_B <= row).to(tl.int32), 0)
    mine = at == b
    blocks = tl.sum(tl.where(mine, blocks_B, 0), 0)
    tiles = tl.sum(tl.where(mine, tiles_B, 0), 0)
    packed = (row - tl.load(cu_ptr + b)) * GROUP + query_head % GROUP
    unit = (query_head // GROUP) * tiles + packed // M
    begin = tl.sum(tl.where(mine, ends_B - work_B, 0), 0) + unit * blocks
    first = begin // share
    count = tl.where(blocks > 0, (begin + blocks - 1) // share - first + 1, 0)
    piece = (first + b * (KV_HEADS * TILES) + unit).to(tl.int64)
    d = tl.arange(0, D)
    p = tl.arange(0, PIECES)
    top = tl.full([], float("-inf"), tl.float32)
    total = tl.zeros([], tl.float32)
    acc = tl.zeros([D], tl.float32)
    for start in range(0, count, PIECES):
        there = start + p < count
        at_P = (piece + start + p) * M + packed % M
        top_P = tl.load(top_ptr + at_P, mask=there, other=float("-inf"))
        sum_P = tl.load(sum_ptr + at_P, mask=there, other=0.0)
        part_PD = tl.load(part_ptr + at_P[:, None] * D + d[None, :], mask=there[:, None], other=0.0)
        new_top = tl.maximum(top, tl.max(top_P, 0))
        weight_P = tl.exp2(top_P - new_top)
        fade = tl.exp2(top - new_top)
        total = total * fade + tl.sum(sum_P * weight_P, 0)
        acc = acc * fade + tl.sum(part_PD * weight_P[:, None], 0)
        top = new_top
    empty = count == 0
    total = tl.where(empty, 1.0, total)
    out = acc / total * value_scale
    lse = tl.where(empty, float("-inf"), (top + tl.log2(total)) * 0.6931471805599453)
    out_at = row.to(tl.int64) * out_row + query_head * out_head
    tl.store(out_ptr + out_at + d, out.to(out_ptr.dtype.element_ty), mask=d < SIZE)
    tl.store(lse_ptr + row.to(tl.int64) * (KV_HEADS * GROUP) + query_head, lse)


def multiprocessors(device: torch.device) -> int:
    """Of a GPU; a few where Triton's interpreter stands in for one."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 3


def triton_prefix_attention(
    q_THD: torch.Tensor,
    k_SKD: torch.Tensor,
    v_SKD: torch.Tensor,
    plan: AttentionPlan,
    scale: float,
    kv_scales: tuple[float, float] = (1.0, 1.0),
    tile: Tile | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """:func:`longdraft.kernels.prefix_attention.prefix_attention` in Triton; ``tile`` None takes :func:`tile_for`'s.

    Needs queries of bfloat16, float16 or float32 and a cache of their dtype or of float8 (e4m3).
    """
    rows, heads, size = q_THD.shape
    kv_heads, device = k_SKD.shape[1], q_THD.device
    out_THD = torch.empty(rows, heads, size, dtype=q_THD.dtype, device=device)
    lse_TH = torch.empty(rows, heads, dtype=torch.float32, device=device)
    if not rows:
        return out_THD, lse_TH
    q_THD, k_SKD, v_SKD = (x if x.stride(-1) == 1 else x.contiguous() for x in (q_THD, k_SKD, v_SKD))
    batch, group = len(plan), heads // kv_heads
    tile = tile or tile_for(plan.max_rows * group, size, k_SKD.element_size())
    tiles, wide = triton.cdiv(plan.max_rows * group, tile.rows), max(16, triton.next_power_of_2(size))
    units, slots = batch * kv_heads * tiles, plan.pages_BW.shape[1] * plan.page_size
    wave = multiprocessors(device) * tile.resident
    programs = min(wave * tile.waves, max(units * triton.cdiv(slots, tile.keys), 1))
    part_PMD = torch.empty(programs + units, tile.rows, wide, dtype=torch.float32, device=device)
    top_PM, sum_PM = torch.empty(2, programs + units, tile.rows, dtype=torch.float32, device=device)
    shape: dict[str, Any] = {
        "KV_HEADS": kv_heads, "GROUP": group, "SIZE": size, "TILES": tiles, "BATCH": max(16, triton.next_power_of_2(batch)),
        "M": tile.rows, "N": tile.keys, "D": wide, "WAVE": wave, "WAVES": tile.waves, "FULL": FULL,
    }  # fmt: skip
    lengths = plan.lens_B, plan.cu_rows_B1
    _pieces_kernel[(programs,)](
        q_THD, k_SKD, v_SKD, plan.pages_BW, *lengths, part_PMD, top_PM, sum_PM, batch, scale * kv_scales[0] * LOG2E,
        *q_THD.stride()[:2], *k_SKD.stride()[:2], *v_SKD.stride()[:2], plan.pages_BW.stride(0),
        **shape, PAGE=plan.page_size, EIGHT=k_SKD.dtype == torch.float8_e4m3fn, num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    _merge_kernel[(rows, heads)](
        part_PMD, top_PM, sum_PM, *lengths, out_THD, lse_TH, batch, kv_scales[1], *out_THD.stride()[:2],
        **shape, PIECES=PIECES, num_warps=2,
    )  # fmt: skip
    return out_THD, lse_TH
