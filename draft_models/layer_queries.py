"""Queries of some layers of a transformers model, before their rotation: what the target looks for."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch


@contextmanager
def layer_queries(model: Any, layers: Sequence[int]) -> Iterator[dict[int, torch.Tensor]]:
    """While it is open, the queries ``[B, L, H D]`` of the latest pass by layer.

    Args:
        model: a causal language model with separate query projections.
        layers: from 0.
    """
    seen: dict[int, torch.Tensor] = {}

    def keep(layer: int, module: Any, args: Any, out: torch.Tensor) -> None:
        seen[layer] = out if out.dim() == 3 else out.flatten(-2)  # a norm of heads keeps them apart

    hooks = []
    for layer in layers:
        attention = model.get_decoder().layers[layer].self_attn
        last = getattr(attention, "q_norm", None) or attention.q_proj
        hooks.append(last.register_forward_hook(partial(keep, layer)))
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()
