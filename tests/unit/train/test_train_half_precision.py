"""The 16-bit path: gradients at real shapes, and a short training, both beside float32 from the same weights."""

import pytest
import torch
from half_precision import check_gradients, documents, loss_and_gradients, pair, short_run, wide_target
from tiny import tiny_target

from longdraft.kernels.linear_cross_entropy import linear_cross_entropy
from longdraft.train.objective import linear_distillation
from longdraft.train.target import FrozenTarget


@pytest.fixture(scope="module")
def target() -> FrozenTarget:
    return wide_target()


@pytest.mark.parametrize(
    ("lengths", "lag", "objective"), [([1024], 1, "kl"), ([996], 2, "ce"), ([577, 64, 3], 2, "kl")]
)
def test_gradients_in_16_bit_are_float32s(target: FrozenTarget, lengths: list[int], lag: int, objective: str) -> None:
    """Grouped heads, a window that cuts, documents whose length is no multiple of anything."""
    batch = documents(lengths, target.spec.vocab_size, every=8)
    half, full = (loss_and_gradients(draft, target, batch, lag, objective) for draft in pair(target))
    check_gradients(half, full)


def test_a_short_16_bit_run_learns_what_float32_learns() -> None:
    """Far below one rounding step of a 16-bit weight, most updates show in the float32 masters alone."""
    target = tiny_target("llama")
    batches = [documents(lengths, 256, seed=i) for i, lengths in enumerate(([48], [37], [20, 9]))]
    half, full = (short_run(draft, target, batches, 60, 2e-3) for draft in pair(target, window=16))
    assert sum(full[-6:]) < 0.8 * sum(full[:6])
    assert sum(half[-6:]) == pytest.approx(sum(full[-6:]), rel=0.03)


@pytest.mark.parametrize("objective", ["ce", "kl"])
def test_a_steps_share_scales_16_bit_gradients_without_a_bias(objective: str) -> None:
    """1 / 1005 lies far from every bfloat16 number: rounding it would tilt all gradients by 0.3 percent the same way."""
    g = torch.Generator().manual_seed(0)
    hidden, teacher, head = (torch.randn(n, 32, generator=g).bfloat16() for n in (64, 64, 100))
    label = torch.randint(0, 100, (64,), generator=g)
    sums = []
    for scale in (1.0, 1 / 1005):
        row = hidden.clone().requires_grad_()
        loss = linear_cross_entropy(row, head, label) if objective == "ce" else linear_distillation(row, teacher, head)
        (loss[0] * scale).backward()
        assert row.grad is not None
        sums.append(float((row.grad.double().abs() / scale).sum()))
    assert sums[1] == pytest.approx(sums[0], rel=3e-4)
