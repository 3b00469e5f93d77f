"""Page lists of sliding windows over rings of cache slots, for all steps of a chain at once.

Legend: B requests, S steps, W window, Q rings.
"""

from typing import NamedTuple

import torch

from longdraft.kernels.twin import simple_backend


class RingWindows(NamedTuple):
    """Where a chain's tokens stand, int64, and what each sees: slots ``ring * size + position % size``, int32, and how many, int32.

    A token's own slot is the first of its list, older ones follow.
    """

    at_SB: torch.Tensor
    pages_SBW: torch.Tensor
    lens_SB: torch.Tensor


def torch_ring_windows(
    row_B: torch.Tensor, position_B: torch.Tensor, first_Q: torch.Tensor, steps: int, window: int, size: int
) -> RingWindows:
    """The torch twin of :func:`ring_windows`."""
    device = position_B.device
    at_SB = position_B + torch.arange(steps, device=device)[:, None]
    slot_SBW = (at_SB[..., None] - torch.arange(window, device=device)) % size
    lens_SB = (at_SB + 1 - first_Q[row_B]).clamp(0, window).int()
    return RingWindows(at_SB, (row_B[:, None] * size + slot_SBW).int(), lens_SB)


def ring_windows(
    row_B: torch.Tensor,
    position_B: torch.Tensor,
    first_Q: torch.Tensor,
    steps: int,
    window: int,
    size: int,
    backend: str | None = None,
) -> RingWindows:
    """Windows of the tokens at ``position .. position + steps - 1`` of each request.

    Args:
        row_B: ring of each request, int64.
        position_B: int64.
        first_Q: position of the oldest token that a ring was given, int64; all behind it were stored one after the other.
        steps: how many tokens.
        window: tokens that one sees, itself included.
        size: slots of a ring, at least ``window``.
        backend: ``"triton"`` or ``"torch"``; None takes Triton on a GPU.
    """
    if simple_backend(row_B, backend) == "torch":
        return torch_ring_windows(row_B, position_B, first_Q, steps, window, size)
    from longdraft.kernels.triton_ring_windows import triton_ring_windows  # no Triton, no harm

    return triton_ring_windows(row_B, position_B, first_Q, steps, window, size)
