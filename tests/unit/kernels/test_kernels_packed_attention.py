"""Causal, windowed and lagged attention of packed documents against dense masks, gradients included (D1)."""

import itertools
from typing import Any

import pytest
import torch
from attention_case import dense_reference

from longdraft.kernels import packed_attention
from longdraft.kernels.packed_attention import CHUNK, lagged_attention, packed_causal_attention


def packed(length: int, heads: int = 4, kv_heads: int = 2, size: int = 8, seed: int = 0) -> list[torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    return [torch.randn(length, n, size, dtype=torch.float64, generator=g) for n in (heads, kv_heads, kv_heads)]


def by_mask(tensors: list[torch.Tensor], cu: list[int], lag: int, window: int | None) -> torch.Tensor:
    """Key s is visible to query t of the same document iff s <= t - lag and s > t - window."""
    q, k, v = tensors
    t = torch.arange(len(q))
    document = torch.bucketize(t, torch.tensor(cu[1:]), right=True)
    distance = t[:, None] - t
    visible = (document[:, None] == document) & (distance >= lag)
    if window is not None:
        visible &= distance < window
    return dense_reference(q, k, v, q.shape[-1] ** -0.5, visible)[0]


@pytest.mark.parametrize("cu", [[0, 17], [0, 1, 2, 9, 17], [0, 0, 5, 5, 17, 17]], ids=str)
@pytest.mark.parametrize("window", [None, 1, 3, 17, 99])
def test_documents_attend_causally_within_their_window(cu: list[int], window: int | None) -> None:
    """Window 1 is self alone; a window wider than a document is no window; empty documents are nothing."""
    case = packed(17)
    torch.testing.assert_close(packed_causal_attention(*case, cu, window), by_mask(case, cu, 0, window))


def test_window_one_returns_the_values() -> None:
    q, k, v = packed(6)
    assert torch.allclose(packed_causal_attention(q, k, v, [0, 6], 1), v.repeat_interleave(2, 1))


@pytest.mark.parametrize("length", [CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK + 3])
@pytest.mark.parametrize("window", [1, 7, CHUNK, CHUNK + 1])
def test_rows_at_chunk_boundaries_see_their_whole_window(length: int, window: int) -> None:
    """The CPU path cuts queries into chunks; each row at an edge is held to its own window alone."""
    q, k, v = packed(length, 2, 1)
    out = packed_causal_attention(q, k, v, [0, length], window)
    for t in {0, window - 1, window, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK, length - 1}:
        if 0 <= t < length:
            keys = slice(max(0, t - window + 1), t + 1)
            want, _ = dense_reference(q[t : t + 1], k[keys], v[keys], 8**-0.5)
            torch.testing.assert_close(out[t : t + 1], want)


@pytest.mark.parametrize("lag", [1, 2, 5, 40])
@pytest.mark.parametrize("cu", [[0, 16], [0, 1, 3, 4, 10, 16], [0, 0, 2, 2, 16]], ids=str)
def test_a_lag_is_the_dense_mask_s_at_most_t_minus_lag(cu: list[int], lag: int) -> None:
    """D1, with documents shorter than the lag, empty ones, and a lag longer than everything."""
    case = packed(16)
    out = lagged_attention(*case, cu, lag)
    torch.testing.assert_close(out, by_mask(case, cu, lag, None))
    for a, b in itertools.pairwise(cu):
        assert (out[a : min(a + lag, b)] == 0).all(), "the first rows of a document see nothing"


def test_a_lag_below_one_is_refused() -> None:
    with pytest.raises(ValueError, match="lag = 0"):
        lagged_attention(*packed(4), [0, 4], 0)


@pytest.mark.parametrize("lag", [1, 3])
def test_gradients_of_lagged_attention(lag: int) -> None:
    case = [x.requires_grad_() for x in packed(7, 2, 1, 3)]
    assert torch.autograd.gradcheck(lambda *x: lagged_attention(*x, [0, 2, 7], lag), case)


@pytest.mark.parametrize("window", [None, 2])
def test_gradients_of_windowed_attention(window: int | None) -> None:
    case = [x.requires_grad_() for x in packed(7, 2, 1, 3)]
    assert torch.autograd.gradcheck(lambda *x: packed_causal_attention(*x, [0, 2, 7], window), case)


def test_gradients_across_a_chunk_boundary_reach_exactly_the_window() -> None:
    """The first row of the second chunk sends gradient to its window's keys and to no other."""
    q, k, v = (x.requires_grad_() for x in packed(CHUNK + 2, 2, 1))
    packed_causal_attention(q, k, v, [0, CHUNK + 2], 3)[CHUNK].sum().backward()
    assert v.grad is not None
    assert v.grad.abs().sum((1, 2)).nonzero().flatten().tolist() == [CHUNK - 2, CHUNK - 1, CHUNK]


def test_no_gradient_and_no_value_crosses_documents() -> None:
    q, k, v = (x.requires_grad_() for x in packed(10))
    lagged_attention(q, k, v, [0, 6, 10], 1)[6:].sum().backward()
    assert k.grad is not None
    assert v.grad is not None
    assert (k.grad[:6] == 0).all()
    assert (v.grad[:6] == 0).all()
    assert (v.grad[6:9] != 0).all()


@pytest.mark.parametrize("window", [None, 4])
def test_cudnn_never_attends(window: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's first choice on Hopper, whose backward pass may not be finite; what the caller allowed comes back afterwards."""
    honest, allowed = packed_attention.scaled_dot_product_attention, []

    def watched(*args: Any, **kwargs: Any) -> torch.Tensor:
        allowed.append(torch.backends.cuda.cudnn_sdp_enabled())
        # Only FlashAttention groups heads without writing all scores, and it takes no mask.
        assert kwargs.get("attn_mask") is None or args[0].shape[1] == args[1].shape[1]
        return honest(*args, **kwargs)

    monkeypatch.setattr(packed_attention, "scaled_dot_product_attention", watched)
    before = torch.backends.cuda.cudnn_sdp_enabled()
    packed_causal_attention(*packed(9), [0, 9], window)
    assert allowed == [False]
    assert torch.backends.cuda.cudnn_sdp_enabled() == before


@pytest.mark.parametrize(("length", "window"), [(1024, 512), (996, 512), (667, None)])
def test_16_bit_gradients_are_near_the_exact_ones(length: int, window: int | None) -> None:
    exact = [x.requires_grad_() for x in packed(length, 9, 3, 64)]
    half = [x.detach().bfloat16().requires_grad_() for x in exact]
    out = torch.randn(length, 9, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).bfloat16()
    packed_causal_attention(*exact, [0, length], window).backward(out.double())
    packed_causal_attention(*half, [0, length], window).backward(out)
    for want, got in zip(exact, half, strict=True):
        assert want.grad is not None and got.grad is not None
        assert float((got.grad - want.grad).norm() / want.grad.norm()) < 0.02
