"""Random views and scores, for the kernels that make page lists and sum masses: on a CPU in the interpreter, and on a card."""

import random
from typing import Any

import torch

from longdraft.kernels.view_pages import Lists


def any_views(seed: int, device: str = "cpu") -> tuple[Any, ...]:
    """Arguments of ``view_pages``: lists of any length, requests that are short, long, grown or read whole."""
    rng, draw = random.Random(seed), torch.Generator().manual_seed(seed)
    rows, columns, batch, lists = rng.randint(1, 6), rng.randint(20, 1500), rng.randint(1, 5), rng.randint(1, 3)
    kept = rng.randint(1, 40)
    column_LRV = torch.randint(0, columns, (lists, rows, kept), generator=draw).sort(-1).values.int()
    count_LR = torch.randint(0, kept + 1, (lists, rows), generator=draw) * torch.randint(
        0, 2, (1, rows), generator=draw
    )
    start_R = torch.randint(0, columns, (rows,), generator=draw) * torch.randint(0, 2, (rows,), generator=draw)
    row_B = torch.randint(0, rows, (batch,), generator=draw)
    length_B = start_R[row_B] + torch.randint(0, columns, (batch,), generator=draw)
    length_B = length_B.clamp_max(columns)
    everything_B = torch.randint(0, 2, (batch,), generator=draw).bool() if rng.random() < 0.5 else None
    table_RC = torch.randint(1, 9999, (rows, columns), generator=draw).int()
    width = columns if everything_B is not None else rng.randint(1, columns)
    tensors = (column_LRV, count_LR, start_R, table_RC, row_B, length_B)
    column_LRV, count_LR, start_R, table_RC, row_B, length_B = (x.to(device) for x in tensors)
    own = Lists(column_LRV, count_LR, start_R, rng.randint(0, 40))
    whole_B = None if everything_B is None else everything_B.to(device)
    return own, table_RC, row_B, length_B, whole_B, width, rng.randint(0, 30)


def any_scores(seed: int, device: str = "cpu") -> tuple[torch.Tensor, int]:
    """Arguments of ``mass_sum``: ends without columns, a row that reads nothing."""
    rng, draw = random.Random(seed), torch.Generator().manual_seed(seed)
    batch, rows, heads, blocks = rng.randint(1, 4), rng.randint(1, 6), rng.randint(1, 9), rng.randint(1, 300)
    lse_THN = 8 * torch.randn(batch * rows, heads, blocks, generator=draw)
    lse_THN[:rows, :, rng.randint(0, blocks) :] = float("-inf")
    lse_THN[-1] = float("-inf")
    return lse_THN.to(device), batch


def any_chains(seed: int, device: str = "cpu") -> tuple[torch.Tensor, ...]:
    """Arguments of ``chain_inputs``: chains of any length and limit, a page table of just the right width for the longest."""
    rng, draw = random.Random(seed), torch.Generator().manual_seed(seed)
    rows, batch, steps = rng.randint(1, 7), rng.randint(1, 6), rng.randint(0, 25)
    limit_B = torch.randint(0, steps + 1, (batch,), generator=draw)
    length_B = torch.randint(0, 90, (batch,), generator=draw)
    columns = int((length_B + limit_B).max()) + 1
    both = torch.randint(0, 128_256, (batch, steps + 2), generator=draw)
    row_B = torch.randint(0, rows, (batch,), generator=draw)
    table_RC = torch.randint(1, 9999, (rows, columns), generator=draw).int()
    tensors = (both[:, 0], both[:, 1 : 1 + steps], limit_B, length_B, row_B, table_RC)
    return tuple(x.to(device) for x in tensors)


def any_ring(seed: int, device: str = "cpu") -> tuple[torch.Tensor, ...]:
    """Arguments of ``remember``."""
    rng, draw = random.Random(seed), torch.Generator().manual_seed(seed)
    rows, ring = rng.randint(1, 7), rng.randint(1, 40)
    batch, count = rng.randint(1, rows), rng.randint(0, ring)
    row_B = torch.randperm(rows, generator=draw)[:batch]
    position_B = torch.randint(0, 200, (batch,), generator=draw)
    id_BN = torch.randint(0, 128_256, (count, batch), generator=draw).t()
    return tuple(x.to(device) for x in (torch.full((rows, ring), -1), row_B, position_B, id_BN))
