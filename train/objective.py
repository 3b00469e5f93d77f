"""What a LongSpec draft is trained on: the data's next tokens, the target's own choice of them, or its distribution.

Legend: T packed tokens, N supervised rows, E hidden size, V vocabulary.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import log_softmax

from longdraft.draft_models.longspec import LongSpecDraft
from longdraft.kernels.linear_cross_entropy import IGNORED, linear_cross_entropy
from longdraft.train.config import ObjectiveSettings
from longdraft.train.samples import Packed
from longdraft.train.target import FrozenTarget


@dataclass
class SummedLoss:
    """Sums over supervised rows: the loss (float32, differentiable) and how often the draft's argmax is the wanted token."""

    loss: torch.Tensor
    correct: torch.Tensor


class _ChunkedDistillation(torch.autograd.Function):
    """Like the chunked cross-entropy: the head is frozen, so the forward pass makes the one gradient there is."""

    @staticmethod
    def forward(
        ctx: Any, hidden_NE: torch.Tensor, teacher_NE: torch.Tensor, weight_VE: torch.Tensor, chunk: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        grad_NE = torch.zeros_like(hidden_NE)
        loss = hidden_NE.new_zeros((), dtype=torch.float32)
        correct = torch.zeros((), dtype=torch.int64, device=hidden_NE.device)
        for begin in range(0, len(hidden_NE), chunk):
            rows = slice(begin, begin + chunk)
            log_p = log_softmax((teacher_NE[rows] @ weight_VE.t()).float(), -1)
            log_q = log_softmax((hidden_NE[rows] @ weight_VE.t()).float(), -1)
            p = log_p.exp()
            loss += (p * (log_p - log_q)).sum()
            correct += (log_q.argmax(-1) == log_p.argmax(-1)).sum()
            grad_NE[rows] = (log_q.exp() - p).to(weight_VE.dtype) @ weight_VE
        ctx.save_for_backward(grad_NE)
        ctx.mark_non_differentiable(correct)
        return loss, correct

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        (grad_NE,) = ctx.saved_tensors
        # One over a step's tokens, as a row: a scalar would be rounded to 16 bit and tilt all of the gradient alike.
        return (grad_NE * grads[0].reshape(1)).to(grad_NE.dtype), None, None, None


def linear_distillation(
    hidden_NE: torch.Tensor, teacher_NE: torch.Tensor, weight_VE: torch.Tensor, chunk: int = 1024
) -> tuple[torch.Tensor, torch.Tensor]:
    """Summed KL(target || draft) over rows that share one frozen head, in row chunks.

    Args:
        hidden_NE: the draft's rows before the head.
        teacher_NE: the target's rows before the head; no gradient.
        weight_VE: the head; no gradient.
        chunk: rows whose logits exist at once.

    Returns:
        ``(loss, agree)``: float32 sum in nats, and on how many rows both pick the same token.
    """
    loss, agree = _ChunkedDistillation.apply(hidden_NE, teacher_NE.detach(), weight_VE.detach(), chunk)
    return loss, agree


def longspec_loss(
    draft: LongSpecDraft, target: FrozenTarget, batch: Packed, lag: int, settings: ObjectiveSettings
) -> SummedLoss:
    """The summed loss of one micro-batch under one Flash Noisy lag (LongSpec, section 3.2).

    Args:
        draft: bound to the target's embedding and head.
        target: runs under the same positions as the draft.
        batch: on the target's device.
        lag: row t sees the target's keys 0 .. t - lag of its document.
        settings: which objective.
    """
    teaches = settings.name != "ce"
    seen = batch.capture or target.capture(
        batch.id_T, batch.position_T, batch.cu, hidden=teaches, kv_layers=draft.config.cross_layers
    )
    cache = seen.k_TKD, seen.v_TKD
    hidden_TE = draft.forward_packed(batch.id_T, batch.position_T, *cache, batch.cu, lag, batch.views)
    return summed_loss(draft, hidden_TE, batch.label_T, seen.hidden_TE, settings)


def summed_loss(
    draft: LongSpecDraft,
    hidden_TE: torch.Tensor,
    label_T: torch.Tensor,
    teacher_TE: torch.Tensor | None,
    settings: ObjectiveSettings,
) -> SummedLoss:
    """The loss of rows before the head.

    Args:
        draft: bound.
        hidden_TE: the draft's rows.
        label_T: what the data has behind each; -100 where nobody asks.
        teacher_TE: the target's rows; None for plain cross-entropy.
        settings: which objective.
    """
    head_NE = draft.drafting_head_NE.to(hidden_TE.dtype)
    if settings.name == "ce":
        return SummedLoss(*linear_cross_entropy(hidden_TE, head_NE, draft.ranked_label(label_T), settings.chunk))
    assert teacher_TE is not None
    row_N = (label_T != IGNORED).nonzero().flatten()
    # No row comes twice, so the backward pass need not sort them, as it would behind an index in brackets.
    hidden_NE, teacher_NE = (x.index_select(0, row_N) for x in (hidden_TE, teacher_TE))
    teacher_NE = teacher_NE.to(hidden_NE.dtype)
    if settings.name == "kl":
        return SummedLoss(*linear_distillation(hidden_NE, teacher_NE, head_NE, settings.chunk))
    choice_N = greedy_choice(teacher_NE, head_NE, settings.chunk)
    return SummedLoss(*linear_cross_entropy(hidden_NE, head_NE, choice_N, settings.chunk))


@torch.no_grad()
def greedy_choice(teacher_NE: torch.Tensor, head_VE: torch.Tensor, chunk: int) -> torch.Tensor:
    """The row of the head that each of the target's hidden rows scores highest, int64 ``[N]``, in row chunks."""
    picks = [(rows @ head_VE.t()).argmax(-1) for rows in teacher_NE.split(chunk)]
    return torch.cat(picks) if picks else torch.zeros(0, dtype=torch.int64, device=teacher_NE.device)
