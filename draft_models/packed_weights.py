"""Weights of several linear layers as one matrix of which they are parts: one product in place of several, and nothing twice in memory.

Legend: O output size of all layers, I input size.
"""

from collections.abc import Sequence

import torch
from torch import nn


@torch.no_grad()
def packed(*layers: nn.Linear) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Weight ``[O, I]`` and bias ``[O]`` (None for layers without) of the layers one below the other.

    The layers' own parameters become views of them, under their own names: what is written to one is written to both. Layers
    that are packed already stay where they lie. A later move to another device or dtype would part them again.
    """
    weight_OI = _stacked([layer.weight for layer in layers])
    biases = [layer.bias for layer in layers]
    return weight_OI, None if biases[0] is None else _stacked(biases)


def _stacked(parameters: Sequence[torch.Tensor]) -> torch.Tensor:
    first, ends = parameters[0], parameters[0].data_ptr()
    together = True
    for p in parameters:
        together &= p.is_contiguous() and p.data_ptr() == ends
        together &= p.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        ends += p.nbytes
    rows = [len(p) for p in parameters]
    if together:
        shape = (sum(rows), *first.shape[1:])
        return first.detach().as_strided(shape, first.stride())
    whole = torch.cat([p.detach() for p in parameters])
    for p, part in zip(parameters, whole.split(rows), strict=True):
        p.data = part
    return whole
