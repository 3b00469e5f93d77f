# mypy: allow-untyped-defs, allow-untyped-decorators, allow-incomplete-defs
"""Our Triton kernels of :func:`longdraft.kernels.head_mass.head_mass`: scores, then their sums.

The first kernel is bound by the reading of keys, 256 bytes a column and key head in 16 bit. It writes the scores of the rows and
heads that count (4 bytes each) and, for each span of columns, their log-sum-exp; the second makes a row's own log-sum-exp of
those, reads the scores once, and sums probabilities over rows and heads. With one row and four heads of one key head that is 6 %
of the keys' bytes written and as many read again, from L2. Nothing is added up in an order that differs from run to run.

The chosen query heads of a key head and all query rows are one tile, as in the other kernels; key heads without a chosen query head
have no program. Lengths and the rows that count stay on the device and the grid depends on shapes alone.

Legend: B requests, T query rows of all requests, S cache slots, W page-list width, H query heads, A chosen ones of them, J key heads
that those read, O chosen heads of one key head at most, D head size, N columns. In the kernels: M rows of a tile (heads of
a group x query rows), N columns of a tile, C columns and P rows and heads of a tile of the sums.
"""

from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from longdraft.kernels.plan import AttentionPlan

LOG2E = 1.4426950408889634
PROGRAMS = 528  # that fill an H200: four for each of its 132 multiprocessors


class MassTile(NamedTuple):
    """How the scores' kernel is built; what suits a card best is for the benchmark to say."""

    rows: int
    columns: int
    turns: int  # tiles of columns that a program goes through
    warps: int
    stages: int


def mass_tile_for(rows: int, size: int, element: int, columns: int) -> MassTile:
    """The tile for ``rows`` packed rows (chosen heads of a key head x query rows), heads of ``size``, ``element`` bytes a number,
    and ``columns`` of all requests and key heads together: programs of 256 to 1024 columns, few enough partial results and
    enough programs for a card.
    """
    wide = (32 if element == 4 else 64) // (2 if size > 128 else 1)
    tall = min(max(16, triton.next_power_of_2(rows)), 32 if element == 4 else 128)
    span = min(max(triton.next_power_of_2(columns // PROGRAMS + 1), 256), 1024)
    return MassTile(tall, wide, span // wide, 4 if tall == 16 else 8, 2 if element == 4 else 3)


@lru_cache(maxsize=1024)
def head_places(heads: tuple[int, ...], group: int, device: torch.device) -> torch.Tensor:
    """int32 ``[J, O, 2]``: of every key head that is read, the chosen query heads and their places in the scores; -1: none."""
    of_key = dict[int, list[int]]()
    for head in sorted(heads):
        of_key.setdefault(head // group, []).append(head)
    most, place, rows = max(map(len, of_key.values())), 0, []
    for own in of_key.values():
        rows.append([(h, place + i) for i, h in enumerate(own)] + [(-1, -1)] * (most - len(own)))
        place += len(own)
    return torch.tensor(rows, dtype=torch.int32).to(device)


@triton.jit(do_not_specialize=["columns", "splits", "pages_row", "valid_row"])
def _score_kernel(
    q_ptr, k_ptr, pages_ptr, lens_ptr, cu_ptr, heads_ptr, valid_ptr, score_ptr, part_ptr, columns, wide, splits, scale,
    q_row, q_head, k_slot, k_head, pages_row, valid_row,
    CHOSEN: tl.constexpr, OWN: tl.constexpr, GROUP: tl.constexpr, SIZE: tl.constexpr, PAGE: tl.constexpr, TILES: tl.constexpr,
    TURNS: tl.constexpr, M: tl.constexpr, N: tl.constexpr, D: tl.constexpr, EIGHT: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """TURNS tiles of N columns for one request, one key head and one tile of rows; scores and results are base 2."""
    own = heads_ptr + (tl.program_id(0) // TILES) * (OWN * 2)
    split = tl.program_id(1)
    b = tl.program_id(2)
    first = split * (TURNS * N)
    m = tl.arange(0, M)
    n = tl.arange(0, N)
    d = tl.arange(0, D)
    length = tl.minimum(tl.load(lens_ptr + b), columns)
    begin = tl.load(cu_ptr + b)
    packed = (tl.program_id(0) % TILES) * M + m
    row = begin + packed // OWN
    query_head = tl.load(own + packed % OWN * 2)
    mine = (row < tl.load(cu_ptr + b + 1)) & (query_head >= 0)
    if MASKED:
        mine = mine & (tl.load(valid_ptr + b.to(tl.int64) * valid_row + packed // OWN, mask=mine, other=0) != 0)
    in_head = d < SIZE
    q_at = row.to(tl.int64) * q_row + query_head * q_head
    q = tl.load(q_ptr + q_at[:, None] + d[None, :], mask=mine[:, None] & in_head[None, :], other=0.0)
    if EIGHT:
        # As in the prefix kernel: float8 widens to float16 in one instruction. Scaled queries are far from float16's end.
        q = (q.to(tl.float32) * scale).to(tl.float16)
    result = row.to(tl.int64) * CHOSEN + tl.load(own + packed % OWN * 2 + 1)
    score_at = score_ptr + (result * wide)[:, None] + n[None, :]
    key_head = tl.load(own) // GROUP

    top = tl.full([M, N], float("-inf"), tl.float32)
    total = tl.zeros([M, N], tl.float32)
    turns = tl.minimum(tl.maximum((length - first + (N - 1)) // N, 0), TURNS)
    turns = turns * tl.max(mine.to(tl.int32), 0)  # where no row counts, no key is read
    # A tile's pages are read a step before its keys: as a load that waits for a load the compiler would keep one tile in
    # flight instead of STAGES - 1.
    list_ptr = pages_ptr + b.to(tl.int64) * pages_row
    page = tl.load(list_ptr + (first + n) // PAGE, mask=(first + n < length) & (turns > 0), other=0)
    for step in tl.range(0, turns):
        start = first + step * N
        token = start + n
        there = token < length
        slot = page.to(tl.int64) * PAGE + token % PAGE
        page = tl.load(list_ptr + (token + N) // PAGE, mask=token + N < length, other=0)
        k_at = slot * k_slot + key_head * k_head
        k = tl.load(k_ptr + k_at[:, None] + d[None, :], mask=there[:, None] & in_head[None, :], other=0.0)
        score = tl.dot(q, tl.trans(k.to(q.dtype)), input_precision="ieee")
        if not EIGHT:
            score *= scale
        tl.store(score_at + start, score, mask=mine[:, None] & there[None, :])
        # Every place of the tile has a sum of its own, so that no number crosses threads before the end.
        score = tl.where(there[None, :], score, float("-inf"))
        old = top
        top = tl.maximum(old, score)
        base = tl.where(top == float("-inf"), 0.0, top)
        total = total * tl.exp2(old - base) + tl.exp2(score - base)
    highest = tl.max(top, 1)
    base = tl.where(highest == float("-inf"), 0.0, highest)
    part = base + tl.log2(tl.sum(total * tl.exp2(top - base[:, None]), 1))
    tl.store(part_ptr + result * splits + split, part, mask=mine & (turns > 0))


@triton.jit(do_not_specialize=["columns", "splits", "valid_row"])
def _sum_kernel(
    score_ptr, part_ptr, lens_ptr, cu_ptr, valid_ptr, out_ptr, columns, wide, splits, span, out_row, valid_row,
    CHOSEN: tl.constexpr, P: tl.constexpr, C: tl.constexpr, S: tl.constexpr,
    ADD: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Probabilities of C columns, summed over a request's rows and heads."""
    b = tl.program_id(1)
    at = tl.program_id(0) * C + tl.arange(0, C)
    length = tl.minimum(tl.load(lens_ptr + b), columns)
    begin = tl.load(cu_ptr + b)
    rows = (tl.load(cu_ptr + b + 1) - begin) * CHOSEN
    rows = tl.where(tl.program_id(0) * C < length, rows, 0)
    used = (length + span - 1) // span
    total = tl.zeros([C], tl.float32)
    for start in range(0, rows, P):
        p = start + tl.arange(0, P)
        mine = p < rows
        if MASKED:
            mine = mine & (tl.load(valid_ptr + b.to(tl.int64) * valid_row + p // CHOSEN, mask=mine, other=0) != 0)
        result = begin.to(tl.int64) * CHOSEN + p
        top = tl.full([P], float("-inf"), tl.float32)
        mass = tl.zeros([P], tl.float32)
        for split in range(0, used, S):
            s = split + tl.arange(0, S)
            there = mine[:, None] & (s < used)[None, :]
            part = tl.load(part_ptr + (result * splits)[:, None] + s[None, :], mask=there, other=float("-inf"))
            old = top
            top = tl.maximum(old, tl.max(part, 1))
            base = tl.where(top == float("-inf"), 0.0, top)
            mass = mass * tl.exp2(old - base) + tl.sum(tl.exp2(part - base[:, None]), 1)
        # A row that reads nothing has shares of zero, not of -inf - -inf.
        lse = tl.where(mine & (top > float("-inf")), top + tl.log2(mass), 0.0)
        there = mine[:, None] & (at < length)[None, :]
        score = tl.load(score_ptr + (result * wide)[:, None] + at[None, :], mask=there, other=float("-inf"))
        total += tl.sum(tl.exp2(score - lse[:, None]), 0)
    out_at = out_ptr + b.to(tl.int64) * out_row + at
    if ADD:
        total += tl.load(out_at, mask=at < columns, other=0.0)
    tl.store(out_at, total, mask=at < columns)


def triton_head_mass(
    q_THD: torch.Tensor,
    k_SKD: torch.Tensor,
    plan: AttentionPlan,
    scale: float,
    heads: tuple[int, ...],
    rows_valid_BR: torch.Tensor | None,
    out_BN: torch.Tensor | None,
    columns: int,
    tile: MassTile | None = None,
) -> torch.Tensor:
    """:func:`longdraft.kernels.head_mass.head_mass` in Triton; ``tile`` None takes :func:`mass_tile_for`'s.

    Needs queries of bfloat16, float16 or float32 and keys of their dtype or of float8 (e4m3).
    """
    rows, query_heads, size = q_THD.shape
    group, add = query_heads // k_SKD.shape[1], out_BN is not None
    if out_BN is None:
        out_BN = torch.empty(len(plan), columns, dtype=torch.float32, device=q_THD.device)
    if not out_BN.numel():
        return out_BN
    q_THD, k_SKD = (x if x.stride(-1) == 1 else x.contiguous() for x in (q_THD, k_SKD))
    rows_valid_BR = None if rows_valid_BR is None else rows_valid_BR.contiguous()
    place_JO2 = head_places(heads, group, q_THD.device)
    keys, own = place_JO2.shape[:2]
    packed = plan.max_rows * own
    tile = tile or mass_tile_for(packed, size, k_SKD.element_size(), len(plan) * keys * columns)
    span = tile.columns * tile.turns
    tiles, splits = triton.cdiv(packed, tile.rows), triton.cdiv(columns, span)
    # Rows of a width that 16 divides are written in wider steps.
    score_TAN = torch.empty(rows, len(heads), -(-columns // 16) * 16, dtype=torch.float32, device=q_THD.device)
    part_TAS = torch.empty(rows, len(heads), splits, dtype=torch.float32, device=q_THD.device)
    valid = out_BN if rows_valid_BR is None else rows_valid_BR
    if packed:
        _score_kernel[keys * tiles, splits, len(plan)](
            q_THD, k_SKD, plan.pages_BW, plan.lens_B, plan.cu_rows_B1, place_JO2, valid, score_TAN, part_TAS,
            columns, score_TAN.shape[2], splits, scale * LOG2E, *q_THD.stride()[:2], *k_SKD.stride()[:2],
            plan.pages_BW.stride(0), valid.stride(0),
            CHOSEN=len(heads), OWN=own, GROUP=group, SIZE=size, PAGE=plan.page_size, TILES=tiles, TURNS=tile.turns,
            M=tile.rows, N=tile.columns, D=max(16, triton.next_power_of_2(size)),
            EIGHT=k_SKD.dtype == torch.float8_e4m3fn, MASKED=rows_valid_BR is not None,
            num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip
    places = min(max(1, triton.next_power_of_2(plan.max_rows * len(heads))), 32)
    width = min(8192 // places, 512)
    _sum_kernel[triton.cdiv(columns, width), len(plan)](
        score_TAN, part_TAS, plan.lens_B, plan.cu_rows_B1, valid, out_BN, columns, score_TAN.shape[2], splits, span,
        out_BN.stride(0), valid.stride(0),
        CHOSEN=len(heads), P=places, C=width, S=64, ADD=add, MASKED=rows_valid_BR is not None, num_warps=4,
    )  # fmt: skip
    return out_BN
