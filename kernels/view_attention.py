"""Attention over a view of the cache, for training: sinks, random blocks and a recent window, within a budget of keys a row.

Legend: T packed tokens, R query rows of a chunk, L tokens of a document, N gathered keys, H query heads, K key/value heads,
D head size. Document i is tokens ``cu[i] .. cu[i + 1]``.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch.nn.attention import sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

from longdraft.kernels.packed_attention import BACKENDS, lagged_attention, ranges

ROWS = 256  # query rows that share one draw of blocks, so that a chunk is one call over at most budget + ROWS keys


@dataclass(frozen=True)
class View:
    """What a query may read of a long cache: the first ``sinks`` keys, the last ``window`` and whole blocks in between.

    ``budget`` counts every key, sinks and window included; what sinks and window leave of it goes to blocks of ``block``
    keys. A cache of ``budget`` keys or fewer is read whole. ``seed`` decides the blocks of a document in training.
    """

    budget: int
    sinks: int
    window: int
    block: int
    seed: int = 0

    def __post_init__(self) -> None:
        assert self.sinks >= 0 and self.window >= 1 and self.block >= 1 and self.sinks + self.window <= self.budget, (
            self
        )

    @property
    def blocks(self) -> int:
        """How many blocks the budget has room for."""
        return (self.budget - self.sinks - self.window) // self.block

    def between(self, end: int) -> range:
        """Numbers of the blocks that hold a key behind the sinks and before ``end``; block j is keys ``j * block`` and on."""
        return range(self.sinks // self.block, max(-(-end // self.block), self.sinks // self.block))

    def picked(self, length: int, block_M: torch.Tensor) -> torch.Tensor:
        """Bool ``[length]``: keys that are sinks or in one of the blocks ``block_M`` (int64)."""
        keys = block_M.cpu()[:, None] * self.block + torch.arange(self.block)
        picked_L = torch.zeros(length, dtype=torch.bool)
        picked_L[: self.sinks] = True
        picked_L[keys[keys < length]] = True
        return picked_L


def view_attention(
    q_THD: torch.Tensor,
    k_TKD: torch.Tensor,
    v_TKD: torch.Tensor,
    cu: list[int],
    lag: int,
    views: Sequence[View | None],
    rows: int = ROWS,
) -> torch.Tensor:
    """:func:`lagged_attention` whose rows each read at most their document's budget of the keys 0 .. t - lag.

    A row that has no more keys than the budget reads them all. Of a later row t the window ends at t - lag and moves with it,
    as a served draft's does; the random blocks are drawn anew for every ``rows`` queries, from all that lies before the
    last row's window. Nothing in a document's draw depends on the documents that it is packed with. Memory is linear in T:
    gathered keys and masks exist for one chunk at a time and are made again in the backward pass.

    Args:
        q_THD, k_TKD, v_TKD, cu, lag: as in :func:`lagged_attention`.
        views: one a document; None reads everything.
        rows: query rows that share a draw.

    Returns:
        ``[T, H, D]``; the first ``lag`` rows of each document are zero.
    """
    documents = list(zip(pairwise(cu), views, strict=True))
    if all(view is None or b - a - lag <= view.budget for (a, b), view in documents):
        return lagged_attention(q_THD, k_TKD, v_TKD, cu, lag)
    partial = [
        b if view is None else min(b, a + view.budget + lag) for (a, b), view in documents
    ]  # first row of a part
    whole = [end - a for end, (a, _) in zip(partial, pairwise(cu), strict=True)]
    rest = [b - end for end, (_, b) in zip(partial, pairwise(cu), strict=True)]
    outs = [
        part
        for ((a, b), view), left in zip(documents, rest, strict=True)
        if view is not None and left
        for part in _partial_rows(q_THD[a:b], k_TKD[a:b], v_TKD[a:b], lag, view, rows)
    ]
    row_T, rest_T = ranges(cu[:-1], whole, q_THD.device), ranges(partial, rest, q_THD.device)
    q, k, v = (x.index_select(0, row_T) for x in (q_THD, k_TKD, v_TKD))
    first = lagged_attention(q, k, v, [0, *accumulate(whole)], lag)
    return torch.zeros_like(q_THD).index_copy(0, torch.cat([row_T, rest_T]), torch.cat([first, *outs]))


def _partial_rows(
    q_LHD: torch.Tensor, k_LKD: torch.Tensor, v_LKD: torch.Tensor, lag: int, view: View, rows: int
) -> Iterator[torch.Tensor]:
    """Rows ``budget + lag`` and on of one document, a chunk at a time."""
    generator = torch.Generator().manual_seed(view.seed)
    for start in range(view.budget + lag, len(q_LHD), rows):
        stop = min(start + rows, len(q_LHD))
        keys = stop - lag  # that the chunk's last row may read
        choices = view.between(keys - view.window)
        block_M = torch.randperm(len(choices), generator=generator)[: view.blocks] + choices.start
        picked_L = view.picked(keys, block_M)
        seen_L = picked_L.clone()
        seen_L[start - lag - view.window + 1 :] = True
        key_N = seen_L.nonzero().flatten()
        picked_N = picked_L[key_N].to(q_LHD.device, non_blocking=True)
        args = q_LHD[start:stop], k_LKD, v_LKD, key_N.to(q_LHD.device, non_blocking=True), picked_N
        yield checkpoint(
            _attend, *args, start - lag, view.window, use_reentrant=False, preserve_rng_state=False
        )  # without it the copies of keys would be many times the cache


def _attend(
    q_RHD: torch.Tensor,
    k_LKD: torch.Tensor,
    v_LKD: torch.Tensor,
    key_N: torch.Tensor,
    picked_N: torch.Tensor,
    newest: int,
    window: int,
) -> torch.Tensor:
    """Row i reads of the keys ``key_N`` those up to ``newest + i`` that are picked or among the last ``window``."""
    # With a mask, grouped heads would leave a GPU nothing but the kernel that writes all scores to memory.
    group = q_RHD.shape[1] // k_LKD.shape[1]
    k, v = (x.index_select(0, key_N).repeat_interleave(group, 1).transpose(0, 1)[None] for x in (k_LKD, v_LKD))
    distance_RN = torch.arange(newest, newest + len(q_RHD), device=key_N.device)[:, None] - key_N
    mask_RN = (distance_RN >= 0) & (picked_N | (distance_RN < window))
    with sdpa_kernel(BACKENDS):
        out = scaled_dot_product_attention(q_RHD.transpose(0, 1)[None], k, v, attn_mask=mask_RN)
    return out[0].transpose(0, 1)
