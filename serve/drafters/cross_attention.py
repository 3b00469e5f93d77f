"""Cross-attention of a LongSpec draft over the target's cache pools, read in place.

Legend: B requests, R query rows, W page-list width, F features, H query heads of all layers, S cache slots, K key/value heads, D head size.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from longdraft.draft_models.longspec import LongSpecDraft
from longdraft.kernels.plan import AttentionPlan
from longdraft.kernels.prefix_attention import prefix_output
from longdraft.serve.ranks import ALONE, Ranks


class Cache(NamedTuple):
    """Keys and values of one layer, and what they are to be multiplied by (of a float8 pool)."""

    k_SKD: torch.Tensor
    v_SKD: torch.Tensor
    scales: tuple[float, float] = (1.0, 1.0)


def read_layers(
    q_RHD: torch.Tensor, layers: Sequence[Cache], plan: AttentionPlan, attention: str | None
) -> torch.Tensor:
    """Output ``[R, H, D]`` in the queries' dtype.

    Args:
        q_RHD: rotated queries, those of the first layer first.
        layers: keys and values of each layer that the draft reads.
        plan: slots that each row sees, the same in every layer.
        attention: backend.
    """
    scale, heads = q_RHD.shape[-1] ** -0.5, q_RHD.shape[1] // len(layers)
    outs = [
        prefix_output(q.contiguous(), layer.k_SKD, layer.v_SKD, plan, scale, attention, layer.scales)
        for q, layer in zip(q_RHD.split(heads, 1), layers, strict=True)
    ]
    return outs[0] if len(outs) == 1 else torch.cat(outs, 1)


def newest_rows(
    draft: LongSpecDraft,
    layers: Sequence[Cache],
    pages_BW: torch.Tensor,
    lens_B: torch.Tensor,
    position_B: torch.Tensor,
    ranks: Ranks = ALONE,
) -> torch.Tensor | None:
    """Features ``[B, F]`` of the newest cached token of each request, zeros where there is none; None as the draft's ``read_newest``.

    Args:
        draft: that reads them.
        layers: as in :func:`read_layers`.
        pages_BW, lens_B: slots that the draft sees, the newest last, int32.
        position_B: of the token behind it.
        ranks: that have the key heads together; where they are more than key heads, several have the same one.
    """
    if draft.newest is None:
        return None
    slot_B = pages_BW.gather(1, (lens_B - 1).clamp_min(0).long()[:, None]).squeeze(1).long()
    dtype = draft.newest.proj.weight.dtype
    keys, values = (
        torch.cat([_every_head(_rows(x, slot_B).to(dtype) * scale, draft, ranks) for x, scale in read], 1)
        for read in zip(*(((c.k_SKD, c.scales[0]), (c.v_SKD, c.scales[1])) for c in layers), strict=True)
    )
    newest_BF = draft.read_newest(keys, values, position_B - 1)
    assert newest_BF is not None
    return newest_BF.where(lens_B[:, None] > 0, 0)


def _every_head(row_BKD: torch.Tensor, draft: LongSpecDraft, ranks: Ranks) -> torch.Tensor:
    """Rows of one layer with the key heads of all ranks."""
    return ranks.joined(row_BKD, 1)[:, :: max(1, ranks.size // draft.config.target.num_kv_heads)]


def _rows(cache_SKD: torch.Tensor, slot_B: torch.Tensor) -> torch.Tensor:
    """Slots of a cache; not every device gathers float8."""
    if cache_SKD.dtype.itemsize > 1:
        return cache_SKD[slot_B]
    return cache_SKD.view(torch.uint8)[slot_B].view(cache_SKD.dtype)
