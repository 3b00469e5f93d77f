"""The cache slots that a KV view reads, as a page list: chosen columns first, then everything from the window's start on.

Made anew for every draft and every partial verification, since both windows and page tables grow. In torch that is some twenty
kernels a list, in Triton one.

Legend: L lists, R rows of the page table, C its columns, B requests, V chosen columns at most, W columns of a page list.
"""

from dataclasses import dataclass

import torch

from longdraft.kernels.twin import simple_backend


@dataclass(frozen=True)
class Lists:
    """What is chosen, by row of the page table.

    Attributes:
        column_LRV: int32 chosen columns, ascending.
        count_LR: int64, how many.
        start_R: int64 first column of the window.
        sinks: leading columns that are read of a request without chosen ones that has become too long to be read whole.
    """

    column_LRV: torch.Tensor
    count_LR: torch.Tensor
    start_R: torch.Tensor
    sinks: int


def torch_view_pages(
    lists: Lists,
    table_RC: torch.Tensor,
    row_B: torch.Tensor,
    length_B: torch.Tensor,
    everything_B: torch.Tensor | None,
    width: int,
    count: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The torch twin of :func:`view_pages`."""
    columns, kept_LBV = table_RC.shape[1], lists.column_LRV[:, row_B]
    count_LB, start_B = lists.count_LR[:, row_B], lists.start_R[row_B]
    grown_LB = (count_LB == 0) & (start_B == 0) & (length_B > width)  # no list, and too long to be read whole
    count_LB = torch.where(grown_LB, min(lists.sinks, width), count_LB)
    start_LB = torch.maximum(start_B, length_B + count_LB - width)  # the oldest recent tokens make room
    if everything_B is not None:
        count_LB, start_LB = (torch.where(everything_B, 0, x) for x in (count_LB, start_LB))
    at_W = torch.arange(width + count, device=row_B.device)
    chosen_LBW = torch.nn.functional.pad(kept_LBV, (0, max(0, width + count - kept_LBV.shape[2])))
    chosen_LBW = torch.where(grown_LB[..., None], at_W.int(), chosen_LBW[..., : width + count])
    later_LBW = start_LB[..., None] + at_W - count_LB[..., None]
    column_LBW = torch.where(at_W < count_LB[..., None], chosen_LBW.long(), later_LBW)
    slot_LBW = table_RC[row_B[:, None], column_LBW.clamp(0, columns - 1)]
    slot_LBW = torch.where(column_LBW < columns, slot_LBW, 0).int()
    return slot_LBW, (count_LB + length_B - start_LB).int()


def view_pages(
    lists: Lists,
    table_RC: torch.Tensor,
    row_B: torch.Tensor,
    length_B: torch.Tensor,
    everything_B: torch.Tensor | None,
    width: int,
    count: int,
    backend: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Page lists of a batch.

    Args:
        lists: what is chosen.
        table_RC: int32 page table.
        row_B: int64 row of each request.
        length_B: int64 cached tokens of each.
        everything_B: bool, requests that read their whole cache; None: nobody.
        width: columns that are read at most; of a longer window the oldest make room.
        count: new tokens of each request, whose slots follow.
        backend: ``"triton"`` or ``"torch"``; None takes Triton on a GPU.

    Returns:
        int32 slots ``[L, B, width + count]`` and the int32 number of cached tokens that each request reads ``[L, B]``. What has
        no slot is 0.
    """
    if simple_backend(table_RC, backend) == "torch":
        return torch_view_pages(lists, table_RC, row_B, length_B, everything_B, width, count)
    from longdraft.kernels.triton_view_pages import triton_view_pages  # no Triton, no harm

    return triton_view_pages(lists, table_RC, row_B, length_B, everything_B, width, count)
