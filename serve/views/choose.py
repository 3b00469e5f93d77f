"""From scores of blocks to the columns that a KV view holds, on the device.

Legend: B requests, N blocks of columns, K blocks that a list has room for, V columns of it (K times the block).
"""

from typing import NamedTuple

import torch

from longdraft.kernels.stable_topk import stable_topk
from longdraft.kernels.top_set import LARGEST, top_set
from longdraft.serve.views.budget import Budget


class Chosen(NamedTuple):
    """KV views: of request b the columns ``column_BV[b, :count_B[b]]``, ascending, and every column from ``start_B[b]`` on.

    Attributes:
        column_BV: int32; zeros behind the count.
        count_B: int32, whole blocks.
        start_B: int64 first column of the window, which grows as columns are added behind it.
    """

    column_BV: torch.Tensor
    count_B: torch.Tensor
    start_B: torch.Tensor


def choose_columns(score_BN: torch.Tensor, length_B: torch.Tensor, budget: Budget) -> Chosen:
    """Sinks, window and the blocks of highest score in between; of equal ones the first. Nothing waits for the device.

    Args:
        score_BN: of each block of ``budget.block`` columns, float; NaN and -inf rank last. There may be more blocks than a
            request has columns; what is scored there does not matter. With ``budget.mass`` these are shares of attention or
            any multiple of them.
        length_B: int64 columns of each request. Up to ``budget.tokens`` of them are all read: no list, a window from 0 on.
        budget: what may be read of ``length_B`` columns.

    Returns:
        Lists of the fixed width ``budget.columns``, whatever the lengths are.
    """
    block, device = budget.block, score_BN.device
    blocks = score_BN.shape[1]
    start_B = (length_B - budget.recent).clamp(min=0) // block * block
    start_B = torch.where(length_B <= budget.tokens, 0, start_B)
    # Where a context is longer than the budget there are more blocks before the window than room for them.
    room_B = torch.where(start_B > 0, (budget.tokens - (length_B - start_B)) // block, 0)

    width = budget.columns // block
    sinks, end_B = budget.sinks // block, (start_B // block).clamp(max=blocks)
    if budget.mass is None:
        count_B = torch.minimum(room_B, end_B)
        chosen_BK = top_set(score_BN, count_B, end_B, width, sinks)
    else:
        chosen_BK, count_B = _fewest(score_BN, room_B, end_B, length_B, width, budget)
    place_KC = torch.arange(width * block, dtype=torch.int32, device=device).view(width, block)
    column_BKC = chosen_BK[..., None] * block + place_KC[:1]
    column_BKC = column_BKC.masked_fill(place_KC >= (count_B * block)[:, None, None], 0)
    return Chosen(column_BKC.flatten(1), (count_B * block).int(), start_B)


def _fewest(
    score_BN: torch.Tensor,
    room_B: torch.Tensor,
    end_B: torch.Tensor,
    length_B: torch.Tensor,
    width: int,
    budget: Budget,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Of the blocks that there is room for, those without which a view would stay below ``budget.mass``, ascending, and how many.

    What the window holds counts, and sinks are always in. Where no block has any mass, nothing is known, and all are needed.
    """
    assert budget.mass is not None
    block_N = torch.arange(score_BN.shape[1], device=score_BN.device)
    free_BN, sinks = block_N < end_B[:, None], budget.sinks // budget.block
    # Ranked by score, sinks before all, and blocks of the window behind.
    key_BN = score_BN.float().nan_to_num(-LARGEST, LARGEST, -LARGEST)
    key_BN = torch.where(block_N < sinks, float("inf"), key_BN).masked_fill(~free_BN, float("-inf"))
    _, index_BK = stable_topk(key_BN, min(width, len(block_N)))
    there_BN = block_N * budget.block < length_B[:, None]
    mass_BN = score_BN.double().nan_to_num(0.0, LARGEST, 0.0).clamp(min=0).masked_fill(~there_BN, 0.0)
    total_B1 = mass_BN.sum(-1, keepdim=True)
    ranked_BK = mass_BN.gather(1, index_BK)
    window_B1 = mass_BN.masked_fill(free_BN, 0.0).sum(-1, keepdim=True)
    before_BK = window_B1 + ranked_BK.cumsum(-1) - ranked_BK
    rank_K = torch.arange(index_BK.shape[1], device=score_BN.device)
    taken_BK = (before_BK < budget.mass * total_B1) | (rank_K < sinks) | (total_B1 == 0)
    taken_BK &= rank_K < room_B[:, None]
    # Blocks that are not taken sort behind those that are.
    chosen_BK = torch.where(taken_BK, index_BK, len(block_N)).sort(-1).values.int()
    return torch.nn.functional.pad(chosen_BK, (0, width - chosen_BK.shape[1])), taken_BK.sum(-1)
