"""The path of a GPU in 16 bit over torch's twin in the place of FlashAttention's: its indices against the loop over documents."""

import itertools
from collections.abc import Callable

import pytest
import torch
from flash_stand_in import flash_in_torch

from longdraft.kernels.packed_attention import lagged_attention, packed_causal_attention, ranges
from longdraft.kernels.varlen_flash import flash_documents, takes_flash
from longdraft.kernels.view_attention import View, view_attention

CUTS = [[0, 17], [0, 1, 2, 9, 17], [0, 0, 5, 5, 17, 17], list(range(18)), [0, 16, 17], [0, 1, 17]]
Attend = Callable[..., torch.Tensor]


def case_of(length: int, heads: int = 6, kv_heads: int = 2, size: int = 4) -> list[torch.Tensor]:
    g = torch.Generator().manual_seed(length)
    return [
        torch.randn(length, n, size, dtype=torch.float64, generator=g).requires_grad_()
        for n in (heads, kv_heads, kv_heads)
    ]


def results(attend: Attend, case: list[torch.Tensor]) -> list[torch.Tensor]:
    """Output and all gradients; where nothing attends they are zero."""
    case = [x.detach().requires_grad_() for x in case]
    out = attend(*case)
    weight = torch.randn(out.shape, dtype=out.dtype, generator=torch.Generator().manual_seed(1))
    if out.requires_grad:
        (out * weight).sum().backward()
    return [out.detach(), *(torch.zeros_like(x) if x.grad is None else x.grad for x in case)]


def check(attend: Attend, length: int, patch: pytest.MonkeyPatch, launches: int) -> None:
    case = case_of(length)
    want = results(attend, case)
    twin = flash_in_torch(patch)
    for ours, theirs in zip(results(attend, case), want, strict=True):
        torch.testing.assert_close(ours, theirs)
    assert (len(twin.given), twin.launches) == (launches, launches)


@pytest.mark.parametrize("window", [None, 1, 2, 3, 8, 15, 16, 17, 99])
@pytest.mark.parametrize("cu", CUTS, ids=str)
def test_one_launch_is_the_loop_over_documents(
    cu: list[int], window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    longest = max(b - a for a, b in itertools.pairwise(cu))
    kernels = 0 if window == 1 or longest == 1 else 1
    check(lambda *x: packed_causal_attention(*x, cu, window), 17, monkeypatch, kernels)


@pytest.mark.parametrize("lag", [1, 2, 4, 7, 15, 16, 17, 40])
@pytest.mark.parametrize("cu", CUTS, ids=str)
def test_one_launch_is_the_loop_over_lagged_documents(cu: list[int], lag: int, monkeypatch: pytest.MonkeyPatch) -> None:
    longest = max(b - a for a, b in itertools.pairwise(cu)) - lag
    check(lambda *x: lagged_attention(*x, cu, lag), 17, monkeypatch, int(longest > 1))


def test_views_of_some_documents_leave_one_launch_for_all_whole_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    view = View(budget=6, sinks=1, window=2, block=2, seed=3)
    cu, views = [0, 4, 4, 20, 27, 40], [None, view, view, None, view]
    check(lambda *x: view_attention(*x, cu, 2, views, rows=4), 40, monkeypatch, 1)


def test_the_kernel_gets_offsets_without_empty_documents_and_the_window_before_a_row(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    twin = flash_in_torch(monkeypatch)
    case = case_of(17)
    packed_causal_attention(*case, [0, 0, 5, 5, 17, 17], 3)
    packed_causal_attention(*case, [0, 0, 5, 5, 17, 17])
    packed_causal_attention(*case, [0, 5, 17], 12)
    lagged_attention(*case, [0, 2, 5, 5, 17], 2)
    assert twin.given == [([0, 5, 17], 12, 2), ([0, 5, 17], 12, None), ([0, 5, 17], 12, None), ([0, 1, 11], 10, None)]


def test_rows_that_do_not_lie_side_by_side_are_laid_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stand-in refuses them, as the kernel does."""
    flash_in_torch(monkeypatch)
    plain = case_of(9)
    folded = [x.detach().permute(2, 0, 1).contiguous().permute(1, 2, 0) for x in plain]
    assert folded[0].stride(-1) != 1
    torch.testing.assert_close(packed_causal_attention(*folded, [0, 9]), packed_causal_attention(*plain, [0, 9]))


def test_a_window_of_one_gives_queries_and_keys_a_gradient_of_zero() -> None:
    """None at all would leave an engine waiting, or a weight without its moments."""
    q, k, v = case_of(8)
    packed_causal_attention(q, k, v, [0, 3, 8], 1).sum().backward()
    assert q.grad is not None and k.grad is not None and v.grad is not None
    assert (q.grad == 0).all() and (k.grad == 0).all()
    assert (v.grad == 3).all()


def test_gradients_through_the_ops(monkeypatch: pytest.MonkeyPatch) -> None:
    flash_in_torch(monkeypatch)
    case = case_of(7, 4, 2, 3)
    assert torch.autograd.gradcheck(lambda *x: packed_causal_attention(*x, [0, 2, 7], 2), case)
    assert torch.autograd.gradcheck(lambda *x: lagged_attention(*x, [0, 2, 7], 1), case)
    assert torch.autograd.gradcheck(lambda *x: packed_causal_attention(*x, [0, 2, 7], 1), case)


@pytest.mark.parametrize(("longest", "left"), [(1, None), (5, 0), (5, 5)])
def test_shapes_that_would_take_another_way_in_the_kernel_are_a_mistake(longest: int, left: int | None) -> None:
    with pytest.raises(AssertionError):
        flash_documents(*case_of(5), torch.tensor([0, 5], dtype=torch.int32), longest, left)


def test_a_cpu_never_takes_flash() -> None:
    assert not takes_flash(torch.zeros(2, 1, 64, dtype=torch.bfloat16))


@pytest.mark.parametrize(
    ("starts", "counts"), [([], []), ([4], [0]), ([0, 9, 3], [2, 3, 1]), ([7, 7, 0], [0, 2, 0])], ids=str
)
def test_ranges_are_the_ranges_side_by_side(starts: list[int], counts: list[int]) -> None:
    want = [i for start, count in zip(starts, counts, strict=True) for i in range(start, start + count)]
    got = ranges(starts, counts, torch.device("cpu"))
    assert got.dtype == torch.int64
    assert got.tolist() == want


def test_the_ops_take_what_the_path_gives_them() -> None:
    """Torch's own schemas and shape functions, since a CPU cannot run the kernels."""
    q, k, v = (torch.empty(17, n, 64, dtype=torch.bfloat16, device="meta", requires_grad=True) for n in (6, 2, 2))
    offsets = torch.empty(4, dtype=torch.int32, device="meta")
    for left in (None, 3):
        out = flash_documents(q, k, v, offsets, 9, left)
        assert out.shape == q.shape and out.dtype == torch.bfloat16
        out.backward(torch.empty_like(out))
        assert all(x.grad is not None and x.grad.shape == x.shape for x in (q, k, v))
