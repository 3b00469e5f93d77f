# mypy: allow-untyped-defs, allow-untyped-decorators, allow-incomplete-defs
"""Our Triton kernel of :func:`longdraft.kernels.view_pages.view_pages`: a program gathers TILE columns of one list.

Legend: L lists, R rows of the page table, C its columns, B requests, V chosen columns at most, W columns of a page list.
"""

import torch
import triton
import triton.language as tl

from longdraft.kernels.view_pages import Lists

TILE = 1024  # columns of a program


@triton.jit(do_not_specialize=["width", "wide", "columns", "sinks"])
def _pages_kernel(
    column_ptr, count_ptr, start_ptr, table_ptr, row_ptr, length_ptr, everything_ptr, slot_ptr, read_ptr,
    column_list, column_row, count_list, table_row, width, wide, columns, kept, sinks,
    EVERYTHING: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    tile, b, at_list = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    row = tl.load(row_ptr + b)
    length = tl.load(length_ptr + b)
    count = tl.load(count_ptr + at_list * count_list + row)
    start = tl.load(start_ptr + row)
    grown = (count == 0) & (start == 0) & (length > width)
    count = tl.where(grown, tl.minimum(sinks, width), count)
    start = tl.maximum(start, length + count - width)
    if EVERYTHING:
        all_of_it = tl.load(everything_ptr + b).to(tl.int1)
        count = tl.where(all_of_it, 0, count)
        start = tl.where(all_of_it, 0, start)
    at = tile * TILE + tl.arange(0, TILE)
    there = at < wide
    chosen_at = column_ptr + at_list.to(tl.int64) * column_list + row * column_row
    chosen = tl.load(chosen_at + at, mask=there & (at < count) & (at < kept), other=0).to(tl.int64)
    chosen = tl.where(grown, at.to(tl.int64), chosen)
    column = tl.where(at < count, chosen, start + at - count)
    slot = tl.load(table_ptr + row * table_row + tl.maximum(column, 0), mask=there & (column < columns), other=0)
    out = (at_list * tl.num_programs(1) + b).to(tl.int64)
    tl.store(slot_ptr + out * wide + at, slot, mask=there)
    if tile == 0:
        tl.store(read_ptr + out, (count + length - start).to(tl.int32))


def triton_view_pages(
    lists: Lists,
    table_RC: torch.Tensor,
    row_B: torch.Tensor,
    length_B: torch.Tensor,
    everything_B: torch.Tensor | None,
    width: int,
    count: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """:func:`longdraft.kernels.view_pages.view_pages` in Triton."""
    number, batch, wide = len(lists.column_LRV), len(row_B), width + count
    slot_LBW = torch.empty(number, batch, wide, dtype=torch.int32, device=row_B.device)
    read_LB = torch.empty(number, batch, dtype=torch.int32, device=row_B.device)
    if not slot_LBW.numel():
        return slot_LBW, read_LB
    _, columns = table_RC.shape
    _pages_kernel[(triton.cdiv(wide, TILE), batch, number)](
        lists.column_LRV, lists.count_LR, lists.start_R, table_RC, row_B, length_B,
        row_B if everything_B is None else everything_B, slot_LBW, read_LB,
        *lists.column_LRV.stride()[:2], lists.count_LR.stride(0), table_RC.stride(0),
        width, wide, columns, lists.column_LRV.shape[2], lists.sinks,
        EVERYTHING=everything_B is not None, TILE=TILE,
    )  # fmt: skip
    return slot_LBW, read_LB
