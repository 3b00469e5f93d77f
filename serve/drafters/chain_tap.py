"""Queries of a few draft layers in every step of a chain, for scoring contexts with them (Dustin, section 4.1).

Legend: B requests, K steps, M new tokens of a request in a step, H query heads, D head size.
"""

import torch

from longdraft.serve.views.query_tap import QueryTap


class ChainTap(QueryTap):
    """Keeps the query of the newest token of each step in buffers of fixed addresses, since a CUDA graph may compute it."""

    def __init__(self) -> None:
        super().__init__((), 0)
        self.step, self.count = 0, 0
        self.kept: dict[int, torch.Tensor] = {}

    def keep(self, layer: int, shape: tuple[int, int, int, int], dtype: torch.dtype, device: torch.device) -> None:
        """Keep a layer's from now on; ``shape`` is ``[B, K, H, D]`` for the largest batch."""
        self.kept[layer] = torch.zeros(*shape, dtype=dtype, device=device)

    def begin(self, step: int, count: int) -> None:
        """The forward that follows is this step of so many chains."""
        self.step, self.count = step, count

    def verification(self, layer: int, q_THD: torch.Tensor) -> None:
        kept = self.kept.get(layer)
        if kept is not None:
            q_BMHD = q_THD.unflatten(0, (self.count, -1))
            kept[: self.count, self.step] = q_BMHD[:, -1]
