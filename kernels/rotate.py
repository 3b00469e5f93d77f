"""Rotary embedding of a packed projection's heads, and the place of its keys and values in a cache, in one pass.

Legend: T tokens, C columns of a packed projection, S cache slots, H query heads, K key/value heads, N heads, D head size, A = D / 2 angles.
"""

from typing import NamedTuple

import torch


class Into(NamedTuple):
    """Where keys and values go: slot ``slot_T[t]``, integers, of ``[S, K, D]``."""

    k_SKD: torch.Tensor
    v_SKD: torch.Tensor
    slot_T: torch.Tensor


def rotate(x_TND: torch.Tensor, cos_TA: torch.Tensor, sin_TA: torch.Tensor) -> torch.Tensor:
    """``x`` rotated in the rotate-half layout, in float32 or, where it is that, in float64; same shape and dtype."""
    work = torch.float64 if x_TND.dtype == torch.float64 else torch.float32
    a, b = x_TND.to(work).chunk(2, -1)
    cos, sin = cos_TA[:, None], sin_TA[:, None]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(x_TND.dtype)


def torch_rotate_heads(
    x_TC: torch.Tensor, cos_TA: torch.Tensor, sin_TA: torch.Tensor, into: Into | None
) -> torch.Tensor:
    """The torch twin of :func:`rotate_heads`."""
    x_TND = x_TC.unflatten(-1, (-1, 2 * cos_TA.shape[1]))
    kept = 0 if into is None else into.k_SKD.shape[1]
    q, k, v = x_TND.split([x_TND.shape[1] - 2 * kept, kept, kept], 1)
    if into is not None:
        slot_T = into.slot_T.long()
        into.k_SKD[slot_T], into.v_SKD[slot_T] = rotate(k, cos_TA, sin_TA), v
    return rotate(q, cos_TA, sin_TA)


def rotate_heads(
    x_TC: torch.Tensor,
    cos_TA: torch.Tensor,
    sin_TA: torch.Tensor,
    into: Into | None = None,
    backend: str | None = None,
) -> torch.Tensor:
    """Rotated queries ``[T, H, D]``, contiguous, of a projection ``[q heads, k heads, v heads]``; keys, rotated, and values are put away.

    Args:
        x_TC: any float dtype; ``(H + 2 K) * D`` columns, or ``H * D`` where nothing is put away. H may be 0.
        cos_TA, sin_TA: float32 cosine and sine of each token's angles.
        into: where keys and values go, of the projection's dtype; of two tokens for one slot either may stay.
        backend: ``"triton"`` or ``"torch"``; None takes Triton on a GPU (float64: the twin).
    """
    if backend is None:
        backend = "triton" if x_TC.is_cuda and x_TC.dtype != torch.float64 else "torch"
    if backend == "torch":
        return torch_rotate_heads(x_TC, cos_TA, sin_TA, into)
    from longdraft.kernels.triton_rotate import triton_rotate_heads  # no Triton, no harm

    return triton_rotate_heads(x_TC, cos_TA, sin_TA, into)
