"""Objectives: chunked distillation against the dense one, and both losses on a whole micro-batch (invariant D10)."""

import pytest
import torch
from tiny import tiny_draft, tiny_target
from torch.nn.functional import cross_entropy, kl_div, log_softmax

from longdraft.train.config import ObjectiveSettings, OptimSettings
from longdraft.train.objective import linear_distillation, longspec_loss
from longdraft.train.samples import Packed


@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_chunked_distillation_equals_the_dense_one(chunk: int) -> None:
    generator = torch.Generator().manual_seed(0)
    hidden, teacher, head = (torch.randn(n, 16, generator=generator) for n in (20, 20, 50))
    one, two = hidden.clone().requires_grad_(), hidden.clone().requires_grad_()
    loss, agree = linear_distillation(one, teacher, head, chunk)
    log_p, log_q = log_softmax(teacher @ head.t(), -1), log_softmax(two @ head.t(), -1)
    want = kl_div(log_q, log_p, reduction="sum", log_target=True)
    torch.testing.assert_close(loss, want)
    assert int(agree) == int((log_p.argmax(-1) == log_q.argmax(-1)).sum())
    (loss * 0.3).backward()
    (want * 0.3).backward()
    torch.testing.assert_close(one.grad, two.grad)


def batch() -> Packed:
    ids = torch.randint(0, 256, (30,), generator=torch.Generator().manual_seed(2))
    label = torch.cat([ids[1:], torch.tensor([-100])])
    label[[3, 11, 12]] = -100  # two masked rows and the end of the first document
    return Packed(ids, torch.cat([torch.arange(13), torch.arange(17)]), label, [0, 13, 30], ["a", "b"])


@pytest.mark.parametrize("objective", ["ce", "kl"])
def test_a_micro_batchs_loss_is_the_dense_sum_over_supervised_rows(objective: str) -> None:
    target, packed = tiny_target("qwen3"), batch()
    draft = tiny_draft(target, window=8)
    out = longspec_loss(draft, target, packed, 2, ObjectiveSettings(name=objective, chunk=5))
    seen = target.capture(packed.id_T, packed.position_T, packed.cu, hidden=True)
    assert seen.hidden_TE is not None
    args = packed.id_T, packed.position_T, seen.k_TKD, seen.v_TKD, packed.cu, 2
    logits = draft.logits(draft.forward_packed(*args))
    kept = packed.label_T != -100
    if objective == "ce":
        want = cross_entropy(logits, packed.label_T, reduction="sum", ignore_index=-100)
        picks = packed.label_T
    else:
        teacher = seen.hidden_TE @ target.head_VE.t()
        want = kl_div(log_softmax(logits, -1)[kept], log_softmax(teacher, -1)[kept], reduction="sum", log_target=True)
        picks = teacher.argmax(-1)
    torch.testing.assert_close(out.loss, want, rtol=1e-4, atol=1e-3)
    assert int(out.correct) == int((logits.argmax(-1) == picks)[kept].sum())


def test_a_micro_batch_without_supervision_costs_nothing() -> None:
    target, packed = tiny_target("llama"), batch()
    packed.label_T.fill_(-100)
    draft = tiny_draft(target, window=8)
    for name in ("ce", "kl"):
        out = longspec_loss(draft, target, packed, 1, ObjectiveSettings(name=name))
        out.loss.backward()
        assert float(out.loss.detach()) == 0


def test_learning_rates_warm_up_then_follow_the_schedule() -> None:
    cosine = OptimSettings(lr=2.0, warmup_ratio=0.1, schedule="cosine")
    assert [cosine.rate(step, 100) for step in (1, 5, 10)] == pytest.approx([0.2, 1.0, 2.0])
    assert cosine.rate(11, 100) == pytest.approx(2.0)
    assert cosine.rate(56, 100) == pytest.approx(1.0)
    assert 0 < cosine.rate(100, 100) < 0.01
    assert OptimSettings(lr=2.0, schedule="constant", warmup_ratio=0).rate(1, 10) == 2.0
    assert OptimSettings(lr=2.0, schedule="linear", warmup_ratio=0, min_ratio=0.5).rate(11, 10) == pytest.approx(1.0)
