"""Attention scores of a few rows and heads of a transformers model, while its own output comes from a fused kernel.

A fused kernel keeps no scores, and transformers' ``eager`` attention keeps those of every row and head, which no long context
allows. transformers looks its attention up by name and hands on keyword arguments that it does not know; so ours runs SDPA for the
output and computes the scores that a pass asks for beside it.

Legend: L tokens of a pass, R rows of it that are looked at, N keys, H query heads that are looked at, K key/value heads, D head size.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from longdraft.draft_models.target import FAMILIES

NAME = "longdraft_rows_seen"


@dataclass(frozen=True)
class Look:
    """What one pass shows.

    Attributes:
        row_R: int64 rows of the pass.
        see: told layer by layer its number and scores ``[H, R, N]`` in float32, scaled, -inf where a row sees no key.
        heads: query heads of each layer to look at; None: all heads of all layers.
    """

    row_R: torch.Tensor
    see: Callable[[int, torch.Tensor], None]
    heads: Mapping[int, Sequence[int]] | None = None


def grouped_scores(q_HRD: torch.Tensor, k_KND: torch.Tensor, heads: Sequence[int], scale: float) -> torch.Tensor:
    """Scaled scores of some query heads on their groups' keys, float32 ``[len(heads), R, N]``, one key head at a time.

    Args:
        q_HRD: rotated queries of all heads.
        k_KND: rotated keys; H is a multiple of K.
        heads: query heads, in any order.
        scale: factor of the scores.
    """
    group = len(q_HRD) // len(k_KND)
    out = q_HRD.new_empty(len(heads), q_HRD.shape[1], k_KND.shape[1], dtype=torch.float32)
    for key_head in sorted({head // group for head in heads}):
        places = [i for i, head in enumerate(heads) if head // group == key_head]
        q = q_HRD[[heads[i] for i in places]].float() * scale
        out[places] = q @ k_KND[key_head].float().T
    return out


def _attend(
    module: Any,
    q_1HLD: torch.Tensor,
    k_1KND: torch.Tensor,
    v_1KND: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float,
    look: Look | None = None,
    sliding_window: int | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """What transformers calls in the place of its own attention, of one text."""
    if look is not None and (look.heads is None or module.layer_idx in look.heads):
        assert len(q_1HLD) == 1
        heads = range(q_1HLD.shape[1]) if look.heads is None else look.heads[module.layer_idx]
        score_HRN = grouped_scores(q_1HLD[0][:, look.row_R], k_1KND[0], heads, scaling)
        keys = k_1KND.shape[2]
        own_R1 = (look.row_R + keys - q_1HLD.shape[2])[:, None]  # a row's own key
        key_N = torch.arange(keys, device=look.row_R.device)
        hidden_RN = key_N > own_R1
        if sliding_window is not None:
            hidden_RN |= key_N <= own_R1 - sliding_window
        look.see(module.layer_idx, score_HRN.masked_fill_(hidden_RN, float("-inf")))
    return sdpa_attention_forward(
        module, q_1HLD, k_1KND, v_1KND, attention_mask, scaling=scaling, sliding_window=sliding_window, **others
    )


AttentionInterface.register(NAME, _attend)
AttentionMaskInterface.register(NAME, sdpa_mask)


def can_look(model: Any) -> bool:
    """Whether a transformers model is one whose attention we know: not one whose code came with its weights."""
    return model.config.model_type in FAMILIES and type(model).__module__.startswith("transformers.models.")


@torch.no_grad()
def run_looking(model: Any, id_L: torch.Tensor, cache: Any, look: Look | None, **more: Any) -> torch.Tensor:
    """Run a pass behind a cache, which grows, and show its scores; logits ``[L, V]`` of all rows, or of the last alone.

    Args:
        model: of a family that :func:`can_look` knows.
        id_L: int64 tokens of one text, behind those of the cache.
        cache: a transformers cache.
        look: what to show; None: nothing.
        more: further arguments of the model, such as ``logits_to_keep=1``.
    """
    before = model.config._attn_implementation
    model.config._attn_implementation = NAME
    try:
        told = {} if look is None else {"look": look}
        logits: torch.Tensor = model(id_L[None], past_key_values=cache, use_cache=True, **told, **more).logits
    finally:
        model.config._attn_implementation = before
    return logits[0]
