"""Soft cross-entropy through a trainable draft head against a frozen head's distribution, in row chunks.

Training-time test draws several draft rows against one row of the target (EAGLE-3, section 3.1), so rows come with the index
of their teacher row and are handled in teacher order: a teacher's distribution is computed once, and no tensor is ever
[rows, vocabulary].

Legend: M draft rows, J teacher rows, U different teachers asked for, R rows of a chunk, E hidden size, N draft vocabulary.
"""

from typing import Any

import torch
from torch.nn.functional import log_softmax

CHUNK = 1024


class _ChunkedSoftCrossEntropy(torch.autograd.Function):
    """The loss is the end of the graph up to a factor, so the forward pass makes both gradients."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_ME: torch.Tensor,
        head_NE: torch.Tensor,
        teacher_JE: torch.Tensor,
        teacher_head_NE: torch.Tensor,
        teacher_M: torch.Tensor,
        weight_M: torch.Tensor,
        chunk: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        wants_hidden, wants_head = ctx.needs_input_grad[:2]
        grad_ME = torch.zeros_like(hidden_ME) if wants_hidden else None
        wide = torch.float64 if head_NE.dtype == torch.float64 else torch.float32
        grad_NE = torch.zeros(head_NE.shape, dtype=wide, device=head_NE.device) if wants_head else None
        loss = hidden_ME.new_zeros((), dtype=wide)
        choice_M = torch.empty(len(hidden_ME), dtype=torch.int64, device=hidden_ME.device)
        order_M = torch.argsort(teacher_M, stable=True)
        teacher_U, which_M = torch.unique_consecutive(teacher_M[order_M], return_inverse=True)
        # Which teachers a chunk asks for, read from the device before the loop: each chunk would wait for all work before it.
        firsts = which_M[::chunk].tolist()
        lasts = torch.cat(
            [which_M[chunk - 1 :: chunk], which_M[-1:]]
        ).tolist()  # one too many where the chunks are full
        for rows, which_R, a, b in zip(order_M.split(chunk), which_M.split(chunk), firsts, lasts, strict=False):
            teacher_RE = teacher_JE[teacher_U[a : b + 1]]
            p = torch.softmax((teacher_RE @ teacher_head_NE.t()).to(wide), -1)[which_R - a]
            hidden_RE, weight_R1 = hidden_ME[rows], weight_M[rows, None].to(wide)
            log_q = log_softmax((hidden_RE @ head_NE.t()).to(wide), -1)
            choice_M[rows] = log_q.argmax(-1)
            loss -= (weight_R1 * p * log_q).sum()
            error = ((log_q.exp_().sub_(p)) * weight_R1).to(head_NE.dtype)
            if grad_ME is not None:
                grad_ME[rows] = error @ head_NE
            if grad_NE is not None:
                grad_NE += error.t() @ hidden_RE
        ctx.save_for_backward(grad_ME, None if grad_NE is None else grad_NE.to(head_NE.dtype))
        ctx.mark_non_differentiable(choice_M)
        return loss, choice_M

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        # One over a step's tokens, as a row: a scalar would be rounded to 16 bit and tilt all of the gradient alike.
        scaled = [None if g is None else (g * grads[0].reshape(1)).to(g.dtype) for g in ctx.saved_tensors]
        return *scaled, None, None, None, None, None


def linear_soft_cross_entropy(
    hidden_ME: torch.Tensor,
    head_NE: torch.Tensor,
    teacher_JE: torch.Tensor,
    teacher_head_NE: torch.Tensor,
    teacher_M: torch.Tensor,
    weight_M: torch.Tensor,
    chunk: int = CHUNK,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Weighted sum of ``-sum_v p(v) log q(v)``, both over the draft vocabulary.

    Args:
        hidden_ME: draft rows before the draft's head; differentiable.
        head_NE: the draft's head, in the rows' dtype; differentiable.
        teacher_JE: the target's rows before its head; no gradient.
        teacher_head_NE: rows of the target's head for the draft's tokens, in the draft's order, so that p is the target's
            distribution renormalised to them; in the teacher rows' dtype, no gradient.
        teacher_M: int64, which teacher row each draft row is to match.
        weight_M: factor of each row's loss; 0 leaves a row out.
        chunk: draft rows whose logits exist at once.

    Returns:
        ``(loss, choice_M)``: the float32 sum (float64 for float64 rows), and the draft id that each row scores highest.
    """
    loss, choice_M = _ChunkedSoftCrossEntropy.apply(
        hidden_ME, head_NE, teacher_JE.detach(), teacher_head_NE.detach(), teacher_M, weight_M, chunk
    )
    return loss, choice_M
