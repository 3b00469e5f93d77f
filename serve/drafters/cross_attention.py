"""Cross-attention of a LongSpec draft over the target's cache pools, read in place.

Legend: R query rows, H query heads of all layers, S cache slots, K key/value heads, D head size.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from longdraft.kernels.plan import AttentionPlan
from longdraft.kernels.prefix_attention import prefix_attention


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
        prefix_attention(q.contiguous(), layer.k_SKD, layer.v_SKD, plan, scale, attention, layer.scales)[0]
        for q, layer in zip(q_RHD.split(heads, 1), layers, strict=True)
    ]
    return outs[0] if len(outs) == 1 else torch.cat(outs, 1)
