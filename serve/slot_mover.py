"""Moves of cache slots in every layer at once: what a tree keeps goes to where a chain would have written it.

A layer's move is two small kernels, which a launch from the host takes longer than; so they are one CUDA graph on a card.

Legend: B requests, D1 nodes of the deepest path, P slots that are moved.
"""

from collections.abc import Sequence
from typing import Any

import torch

from longdraft.serve.graph_runner import CudaGraphRunner, make_runner


def move_slots(pool: Any, to_P: torch.Tensor, from_P: torch.Tensor) -> None:
    """Copy cache slots in every layer. A target may be another one's source: all of them are read before any is written."""
    for layer in range(pool.layer_num):
        for buffer in (pool.get_key_buffer(layer), pool.get_value_buffer(layer)):
            numbers = (
                buffer.view(torch.uint8) if buffer.itemsize == 1 else buffer
            )  # as SGLang does: few kernels take float8
            numbers[to_P] = numbers[from_P]


class SlotMover:
    """:func:`move_slots` over static lists of slots, filled up by moves of slot 0, which nobody owns, onto itself."""

    def __init__(self, pool: Any, sizes: Sequence[int], width: int) -> None:
        """Take the pool and, on a card, capture.

        Args:
            pool: the target's cache pool.
            sizes: of batches, at least one; a larger batch is moved as it is.
            width: most slots that are moved of one request.
        """
        self.pool, self.width = pool, width
        device = pool.get_key_buffer(0).device
        self.moves_2P = torch.zeros(2, max(sizes) * width, dtype=torch.int64, device=device)
        self.runner = make_runner(self._move, sizes, device)
        if isinstance(self.runner, CudaGraphRunner):
            self.runner.capture()

    def move(self, requests: int, to_P: torch.Tensor, from_P: torch.Tensor) -> None:
        """Move slots of a batch of ``requests``, int64, none of which is named twice as a target."""
        size, count = self.runner.padded(requests), len(to_P)
        if size not in self.runner.sizes:
            move_slots(self.pool, to_P, from_P)
            return
        self.moves_2P[0, :count], self.moves_2P[1, :count] = to_P, from_P
        self.moves_2P[:, count : size * self.width] = 0
        self.runner.run(requests)

    def _move(self, size: int, variant: Any) -> None:
        to_P, from_P = self.moves_2P[:, : size * self.width]
        move_slots(self.pool, to_P, from_P)
