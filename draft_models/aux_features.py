"""Features of a transformers target for an EAGLE-3 draft, by hooks on three layers: nothing else of the pass is kept.

``output_hidden_states`` would keep every layer's rows, which at 32K tokens is gigabytes. Legend: B documents, L tokens,
E hidden size, A three times E.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch


class AuxFeatures:
    """What the hooks saw in the target's latest forward pass."""

    def __init__(self, layers: Sequence[int]) -> None:
        self.layers = tuple(layers)
        self._seen: dict[int, torch.Tensor] = {}

    def keep(self, layer: int, output: Any) -> None:
        self._seen[layer] = output[0] if isinstance(output, tuple) else output

    def take(self) -> torch.Tensor:
        """``[B, L, A]`` features of the latest pass, low layer first; forgets them."""
        assert self._seen.keys() == set(self.layers), "run the target before taking its features"
        rows = torch.cat([self._seen[layer] for layer in self.layers], -1)
        self._seen.clear()
        return rows


@contextmanager
def aux_features(model: Any, layers: Sequence[int]) -> Iterator[AuxFeatures]:
    """Keep the outputs of some decoder layers while the context is open.

    Args:
        model: a transformers causal language model.
        layers: ids as :mod:`longdraft.draft_models.eagle3_config` counts them.
    """
    seen, blocks = AuxFeatures(layers), model.get_decoder().layers
    hooks = [
        blocks[layer].register_forward_hook(lambda _, __, output, layer=layer: seen.keep(layer, output))
        for layer in layers
    ]
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()
