"""PyTorch's own FlashAttention over packed documents: one launch forward and one backward, however many documents there are.

Legend: T packed tokens, H query heads, K key/value heads, D head size, N documents, none empty.
"""

from functools import cache
from typing import Any

import torch

from longdraft.kernels import span_flash
from longdraft.kernels.span_flash import Sequences

HALF = (torch.bfloat16, torch.float16)


@cache
def _card_has_flash(device: torch.device) -> bool:
    return torch.backends.cuda.is_flash_attention_available() and torch.cuda.get_device_capability(device) >= (8, 0)


def takes_flash(q_THD: torch.Tensor) -> bool:
    """Whether FlashAttention takes these queries: 16 bit, on a card from Ampere on, and a head size that it has."""
    size = q_THD.shape[-1]
    return q_THD.is_cuda and q_THD.dtype in HALF and size % 8 == 0 and size <= 256 and _card_has_flash(q_THD.device)


def flash_documents(
    q_THD: torch.Tensor,
    k_TKD: torch.Tensor,
    v_TKD: torch.Tensor,
    offset_N1: torch.Tensor,
    longest: int,
    left: int | None,
) -> torch.Tensor:
    """Causal attention inside each document, scores scaled by ``D ** -0.5``; see :func:`takes_flash`.

    Args:
        q_THD, k_TKD, v_TKD: packed documents, 16 bit.
        offset_N1: int32 on their device, strictly ascending from 0 to T. A document that is empty, or a longest one of a
            single token, would send the kernel another way, on which gradients are not known to be right.
        longest: tokens of the longest document, 2 or more.
        left: keys that a row sees before its own, 1 or more and below ``longest``; None for all.

    Returns:
        ``[T, H, D]``, differentiable in all three inputs.
    """
    assert longest > 1 and (left is None or 0 < left < longest), (longest, left)
    out_THD: torch.Tensor = _FlashDocuments.apply(*map(_rows, (q_THD, k_TKD, v_TKD)), offset_N1, longest, left)
    return out_THD


def _rows(x: torch.Tensor) -> torch.Tensor:
    """The kernel takes any strides but that of a row's figures."""
    return x if x.stride(-1) == 1 else x.contiguous()


class _FlashDocuments(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        offset_N1: torch.Tensor,
        longest: int,
        left: int | None,
    ) -> torch.Tensor:
        sequences = Sequences(offset_N1, offset_N1, longest, longest)
        out, lse, *random = span_flash.flash_varlen_forward(q, k, v, sequences, left, q.shape[-1] ** -0.5)
        ctx.longest, ctx.left = longest, left
        ctx.save_for_backward(q, k, v, out, lse, offset_N1, *random)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, k, v, out, lse, offset_N1, *random = ctx.saved_tensors
        sequences = Sequences(offset_N1, offset_N1, ctx.longest, ctx.longest)
        given = grads[0].contiguous(), q, k, v, out, lse, sequences, ctx.left, q.shape[-1] ** -0.5, random
        return *span_flash.flash_varlen_backward(*given), None, None, None
