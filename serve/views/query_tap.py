"""Queries of a few target layers, kept as the target computes them, for what chooses views.

Legend: T tokens of a forward, B requests, Q query rows of a request, H query heads, D head size.
"""

from typing import Any

import torch


class QueryTap:
    """The rotated queries of some layers in the latest forward.

    A verification's are copied into buffers of fixed addresses, since a CUDA graph may have computed them; of a prefill each
    request's last rows are kept.
    """

    def __init__(self, layers: tuple[int, ...], rows: int) -> None:
        """Say what to keep.

        Args:
            layers: numbers of the target's layers.
            rows: of a prefill, of each request.
        """
        self.layers, self.rows = layers, rows
        self.buffers: dict[int, torch.Tensor] = {}
        self.prefill: dict[int, torch.Tensor] = {}

    def allocate(self, most: int, heads: int, size: int, dtype: torch.dtype, device: torch.device) -> None:
        """Buffers for verifications of up to ``most`` tokens."""
        self.buffers = {layer: torch.zeros(most, heads, size, dtype=dtype, device=device) for layer in self.layers}

    def verification(self, layer: int, q_THD: torch.Tensor) -> None:
        """A layer of a verification has these queries."""
        buffer = self.buffers.get(layer)
        if buffer is not None and len(q_THD) <= len(buffer):
            buffer[: len(q_THD)] = q_THD

    def extend(self, layer: int, q_THD: torch.Tensor, forward: Any) -> None:
        """A layer of a prefill has these queries; of each request the last rows are kept, the first of them again where it has fewer."""
        if layer not in self.layers or forward.extend_seq_lens is None:
            return
        end_B = forward.extend_seq_lens.long().cumsum(0)
        start_B = end_B - forward.extend_seq_lens
        back_Q = torch.arange(-self.rows, 0, device=end_B.device)
        row_BQ = torch.maximum(end_B[:, None] + back_Q, start_B[:, None])
        self.prefill[layer] = q_THD[row_BQ.clamp(0, max(len(q_THD) - 1, 0)).flatten()]

    def of_prefill(self) -> list[torch.Tensor]:
        """``[B * Q, H, D]`` of each layer; taken once."""
        taken = [self.prefill.pop(layer) for layer in self.layers]
        self.prefill.clear()
        return taken

    def of_verification(self, width: int, last_B: torch.Tensor, rows: int | None = None) -> list[torch.Tensor]:
        """``[B * Q, H, D]`` of each layer.

        Args:
            width: tokens of each request in the forward.
            last_B: the last of them that counts; the rows end with it.
            rows: Q; None: as many as of a prefill.
        """
        batch = len(last_B)
        back_Q = torch.arange(1 - (rows or self.rows), 1, device=last_B.device)
        row_BQ = (last_B[:, None] + back_Q).clamp_min(0) + width * torch.arange(batch, device=last_B.device)[:, None]
        return [self.buffers[layer][row_BQ.flatten()] for layer in self.layers]


class QueryTaps(QueryTap):
    """Several taps on the same forwards; each is asked for its own queries."""

    def __init__(self, *taps: QueryTap) -> None:
        super().__init__((), 0)
        self.taps = taps

    def verification(self, layer: int, q_THD: torch.Tensor) -> None:
        for tap in self.taps:
            tap.verification(layer, q_THD)

    def extend(self, layer: int, q_THD: torch.Tensor, forward: Any) -> None:
        for tap in self.taps:
            tap.extend(layer, q_THD, forward)
