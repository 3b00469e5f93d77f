"""Cross-entropy through a frozen output head, in row chunks: never a full [rows, vocabulary] tensor.

Legend: N rows, E hidden size, V vocabulary.
"""

from typing import Any

import torch
from torch.nn.functional import cross_entropy

IGNORED = -100
CHUNK = 1024


class _ChunkedLinearCrossEntropy(torch.autograd.Function):
    """The head is frozen, so the gradient of the hidden rows is all there is, and the forward pass can make it."""

    @staticmethod
    def forward(
        ctx: Any, hidden_NE: torch.Tensor, weight_VE: torch.Tensor, label_N: torch.Tensor, chunk: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        grad_NE = torch.zeros_like(hidden_NE)
        loss = hidden_NE.new_zeros((), dtype=torch.float32)
        correct = torch.zeros((), dtype=torch.int64, device=hidden_NE.device)
        kept_N = (label_N != IGNORED).nonzero().flatten()
        for rows in kept_N.split(chunk):
            labels = label_N[rows]
            logits = (hidden_NE[rows] @ weight_VE.t()).float()
            loss += cross_entropy(logits, labels, reduction="sum")
            correct += (logits.argmax(-1) == labels).sum()
            error = torch.softmax(logits, -1)
            error[torch.arange(len(rows), device=rows.device), labels] -= 1.0
            grad_NE[rows] = error.to(weight_VE.dtype) @ weight_VE
        ctx.save_for_backward(grad_NE)
        ctx.mark_non_differentiable(correct)
        return loss, correct

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        (grad_NE,) = ctx.saved_tensors
        # One over a step's tokens, as a row: a scalar would be rounded to 16 bit and tilt all of the gradient alike.
        return (grad_NE * grads[0].reshape(1)).to(grad_NE.dtype), None, None, None


def linear_cross_entropy(
    hidden_NE: torch.Tensor, weight_VE: torch.Tensor, label_N: torch.Tensor, chunk: int = CHUNK
) -> tuple[torch.Tensor, torch.Tensor]:
    """Summed cross-entropy of ``hidden @ weight.T`` against labels.

    Args:
        hidden_NE: rows before the head, float.
        weight_VE: the frozen head; gets no gradient.
        label_N: int64 token ids; -100 leaves a row out.
        chunk: rows a block, which bounds the logits in memory to ``chunk * V`` float32.

    Returns:
        ``(loss, correct)``: the float32 sum over the supervised rows, and how many of them the argmax gets right.
    """
    loss, correct = _ChunkedLinearCrossEntropy.apply(hidden_NE, weight_VE.detach(), label_N, chunk)
    return loss, correct
