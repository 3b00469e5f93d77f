"""The chunked soft cross-entropy against torch's own on whole tensors."""

import pytest
import torch

from longdraft.kernels.linear_soft_cross_entropy import linear_soft_cross_entropy


def case(rows: int, teachers: int, size: int, vocabulary: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    g = torch.Generator().manual_seed(rows * 31 + vocabulary)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=g, dtype=torch.float64).to(dtype)

    return (
        normal(rows, size).requires_grad_(),
        (normal(vocabulary, size) * 0.5).requires_grad_(),
        normal(teachers, size),
        normal(vocabulary, size) * 0.5,
        torch.randint(0, teachers, (rows,), generator=g),
        torch.rand(rows, generator=g, dtype=torch.float64) * (torch.arange(rows) % 3 > 0),
    )


def whole(*args: torch.Tensor) -> torch.Tensor:
    hidden, head, teacher, teacher_head, which, weight = (x.double() if x.is_floating_point() else x for x in args)
    p = torch.softmax(teacher @ teacher_head.t(), -1)[which]
    return -(weight[:, None] * p * torch.log_softmax(hidden @ head.t(), -1)).sum()


@pytest.mark.parametrize("shape", [(1, 1, 8, 3), (13, 5, 8, 17), (40, 40, 16, 31), (7, 50, 4, 9)])
@pytest.mark.parametrize("chunk", [1, 5, 1024])
def test_values_and_gradients_equal_the_whole_loss(shape: tuple[int, int, int, int], chunk: int) -> None:
    args = case(*shape, torch.float64)
    want = whole(*args)
    want_gradients = torch.autograd.grad(want / 7, args[:2])
    loss, choice = linear_soft_cross_entropy(*args, chunk=chunk)
    torch.testing.assert_close(loss, want)
    for got, expected in zip(torch.autograd.grad(loss / 7, args[:2]), want_gradients, strict=True):
        torch.testing.assert_close(got, expected)
    assert torch.equal(choice, (args[0] @ args[1].t()).argmax(-1))


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 3e-2)])
def test_lower_precision_stays_near(dtype: torch.dtype, tolerance: float) -> None:
    args = case(33, 20, 32, 50, dtype)
    loss, _ = linear_soft_cross_entropy(*args, chunk=8)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss.double(), whole(*args), rtol=tolerance, atol=0)
    gradients = torch.autograd.grad(loss / 33, args[:2])
    wide = [x.detach().double().requires_grad_() for x in args[:2]]
    for got, want in zip(gradients, torch.autograd.grad(whole(*wide, *args[2:]) / 33, wide), strict=True):
        assert got.dtype == dtype
        torch.testing.assert_close(got.double(), want, rtol=tolerance * 10, atol=tolerance * float(want.abs().max()))


def test_no_rows_cost_nothing() -> None:
    args = case(0, 3, 8, 5, torch.float32)
    loss, choice = linear_soft_cross_entropy(*args)
    assert float(loss) == 0.0 and choice.shape == (0,)


def test_a_frozen_head_gets_no_gradient() -> None:
    hidden, head, *rest = case(6, 3, 8, 5, torch.float32)
    loss, _ = linear_soft_cross_entropy(hidden, head.detach(), *rest)
    loss.backward()
    assert hidden.grad is not None and head.grad is None
