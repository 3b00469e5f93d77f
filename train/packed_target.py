"""The target's forward pass over documents that lie one behind the other: no padding, and as many kernels for a thousand as for one.

transformers looks its attention up by name and hands on keyword arguments that it does not know, so the offsets of a pass reach
the attention function without a change to any model. The name is in force for the pass alone: generation and evaluation go on
with what the model was loaded with.

Legend: T packed tokens, H query heads, K key/value heads, D head size.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from itertools import pairwise
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface

from longdraft.draft_models.target import FAMILIES
from longdraft.kernels.packed_attention import packed_causal_attention

NAME = "longdraft_packed"


def _attend(
    module: torch.nn.Module,
    q_1HTD: torch.Tensor,
    k_1KTD: torch.Tensor,
    v_1KTD: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    document_offsets: Sequence[int],
    scaling: float,
    sliding_window: int | None = None,
    dropout: float = 0.0,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """What transformers calls in the place of its own attention; its sliding window counts a token's own key, as ours does."""
    assert attention_mask is None and dropout == 0.0 and len(q_1HTD) == 1
    assert math.isclose(scaling, q_1HTD.shape[-1] ** -0.5)
    q, k, v = (x[0].transpose(0, 1) for x in (q_1HTD, k_1KTD, v_1KTD))
    return packed_causal_attention(q, k, v, document_offsets, sliding_window)[None], None


def no_mask(**arguments: Any) -> None:
    """Offsets and windows say which keys a row sees."""


AttentionInterface.register(NAME, _attend)
AttentionMaskInterface.register(NAME, no_mask)


def can_pack(model: Any) -> bool:
    """Whether a transformers model is one whose attention we know: not one whose code came with its weights."""
    config = model.config
    ours = config.model_type in FAMILIES and type(model).__module__.startswith("transformers.models.")
    return ours and all(layer.self_attn.config is config for layer in model.get_decoder().layers)


def packed_attention(model: Any) -> AbstractContextManager[None]:
    """While open, passes of the model are over ``[1, T]`` packed tokens and need ``document_offsets``, from 0 to T."""
    return under_attention(model, NAME)


@contextmanager
def under_attention(model: Any, name: str) -> Iterator[None]:
    """While open, the model's attention is the one registered by this name."""
    before = model.config._attn_implementation
    model.config._attn_implementation = name
    try:
        yield
    finally:
        model.config._attn_implementation = before


def spans(cu: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Offsets of the documents that go through the target together: in order, at most ``max_tokens`` or one document."""
    found: list[list[int]] = []
    for a, b in pairwise(cu):
        if found and b - found[-1][0] <= max_tokens:
            found[-1].append(b)
        elif b > a:
            found.append([a, b])
    return found
