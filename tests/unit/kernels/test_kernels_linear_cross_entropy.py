"""The chunked loss through a frozen head against the plain one: value, gradient, ignored rows, chunks (D10)."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import cross_entropy

from longdraft.kernels.linear_cross_entropy import IGNORED, linear_cross_entropy


def case(rows: int, ignored: list[int], seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    hidden = torch.randn(rows, 12, generator=g)
    label = torch.randint(0, 23, (rows,), generator=g)
    label[ignored] = IGNORED
    return hidden.requires_grad_(), torch.randn(23, 12, generator=g), label


@settings(max_examples=30, deadline=None)
@given(rows=st.integers(0, 17), chunk=st.integers(1, 20), seed=st.integers(0, 99), data=st.data())
def test_value_gradient_and_hits_equal_the_plain_loss(rows: int, chunk: int, seed: int, data: st.DataObject) -> None:
    """Any chunk, any set of ignored rows; a scaled loss scales the gradient."""
    ignored = sorted(data.draw(st.sets(st.integers(0, rows - 1))) if rows else ())
    hidden, weight, label = case(rows, ignored, seed)
    loss, correct = linear_cross_entropy(hidden, weight, label, chunk)
    (loss * 0.37).backward()
    plain = hidden.detach().requires_grad_()
    logits = plain @ weight.t()
    want = cross_entropy(logits, label, reduction="sum", ignore_index=IGNORED)
    (want * 0.37).backward()
    assert hidden.grad is not None
    assert plain.grad is not None
    torch.testing.assert_close(loss, want.detach())
    torch.testing.assert_close(hidden.grad, plain.grad, rtol=1e-4, atol=1e-5)
    assert (hidden.grad[ignored] == 0).all()
    assert int(correct) == int((logits.argmax(-1) == label).sum())


def test_nothing_supervised_is_no_loss_and_no_gradient() -> None:
    hidden, weight, label = case(4, [0, 1, 2, 3])
    loss, correct = linear_cross_entropy(hidden, weight, label)
    loss.backward()
    assert loss.item() == 0
    assert int(correct) == 0
    assert hidden.grad is not None
    assert (hidden.grad == 0).all()


def test_the_head_gets_no_gradient_and_stays_as_it_is() -> None:
    """D9: also where the head is a parameter that asks for one."""
    hidden, weight, label = case(5, [])
    head, before = weight.requires_grad_(), weight.detach().clone()
    linear_cross_entropy(hidden, head, label)[0].backward()
    assert head.grad is None
    assert torch.equal(head, before)


def test_poison_in_ignored_rows_never_shows() -> None:
    hidden, weight, label = case(6, [2, 5])
    clean, _ = linear_cross_entropy(hidden, weight, label)
    with torch.no_grad():
        hidden[[2, 5]] = float("nan")
    loss, _ = linear_cross_entropy(hidden, weight, label)
    loss.backward()
    assert torch.equal(loss, clean)
    assert hidden.grad is not None
    assert hidden.grad.isfinite().all()


@pytest.mark.parametrize("factor", [1.0, 1e4])
def test_huge_logits_give_a_finite_loss_and_gradient(factor: float) -> None:
    hidden, weight, label = case(6, [])
    loss, _ = linear_cross_entropy(hidden * factor, weight, label)
    loss.backward()
    assert loss.isfinite()
    assert hidden.grad is not None
    assert hidden.grad.isfinite().all()


def test_bfloat16_rows_sum_their_loss_in_float32() -> None:
    """A sum of 300 losses in bfloat16 would stall at steps of two."""
    g = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(300, 12, generator=g).bfloat16(), torch.randn(23, 12, generator=g).bfloat16()
    label = torch.randint(0, 23, (300,), generator=g)
    loss, _ = linear_cross_entropy(hidden, weight, label, 64)
    want = cross_entropy((hidden @ weight.t()).float(), label, reduction="sum")
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, want, rtol=1e-5, atol=1e-3)
