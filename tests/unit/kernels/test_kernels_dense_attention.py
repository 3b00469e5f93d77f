"""Dense attention against a float64 reference: shapes, empty rows, huge logits, poison, half precision (A1, A3, A4, A7)."""

import pytest
import torch
from attention_case import dense_reference
from hypothesis import given, settings
from hypothesis import strategies as st

from longdraft.kernels.dense_attention import dense_attention


def inputs(
    rows: int, keys: int, heads: int, kv_heads: int, size: int, seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    return (
        torch.randn(rows, heads, size, generator=g),
        torch.randn(keys, kv_heads, size, generator=g),
        torch.randn(keys, kv_heads, size, generator=g),
    )


@settings(max_examples=30, deadline=None)
@given(
    rows=st.integers(0, 5),
    keys=st.integers(0, 9),
    kv_heads=st.integers(1, 3),
    group=st.integers(1, 4),
    size=st.integers(1, 19),
    masked=st.booleans(),
    seed=st.integers(0, 999),
)
def test_any_shape_equals_the_float64_reference(
    rows: int, keys: int, kv_heads: int, group: int, size: int, masked: bool, seed: int
) -> None:
    """Random visibility includes rows that see nothing and keys that nobody reads."""
    q, k, v = inputs(rows, keys, kv_heads * group, kv_heads, size, seed)
    mask = torch.rand(rows, keys, generator=torch.Generator().manual_seed(seed)) < 0.4 if masked else None
    out, lse = dense_attention(q, k, v, 0.3, mask)
    want_out, want_lse = dense_reference(q, k, v, 0.3, mask)
    torch.testing.assert_close(out.double(), want_out, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(lse.double(), want_lse, rtol=1e-4, atol=1e-5)


def test_a_row_that_sees_nothing_is_zero_with_log_sum_exp_minus_infinity() -> None:
    q, k, v = inputs(3, 4, 2, 1, 8)
    mask = torch.ones(3, 4, dtype=torch.bool)
    mask[1] = False
    out, lse = dense_attention(q, k, v, 1.0, mask)
    assert (out[1] == 0).all()
    assert torch.isneginf(lse[1]).all()
    alone, _ = dense_attention(q[[0, 2]], k, v, 1.0)
    torch.testing.assert_close(out[[0, 2]], alone)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("sign", [1, -1])
def test_huge_logits_stay_finite(dtype: torch.dtype, sign: int) -> None:
    """Scores of 1e4 after the scale are 1.1e5 before it, past float16's largest number (A4)."""
    q, k, v = (x.to(dtype) for x in inputs(2, 3, 2, 1, 128))
    q[:], k[:] = sign * 30.0, 29.5
    out, lse = dense_attention(q, k, v, 128**-0.5)
    assert out.isfinite().all()
    assert lse.isfinite().all()
    assert abs(lse).min() > 9e3
    torch.testing.assert_close(out.double(), v.double().mean(0).expand(2, 2, 128), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 2e-2), (torch.float16, 2.5e-3)])
def test_half_precision_loses_no_more_than_its_inputs_and_output_round(dtype: torch.dtype, tolerance: float) -> None:
    """Scores rounded to bfloat16 before the softmax are off by tenths where attention is sharp: 0.12 in this case."""
    q, k, v = (x.to(dtype) for x in inputs(5, 1500, 8, 2, 128))
    q *= 8
    out, _ = dense_attention(q, k, v, 128**-0.5)
    want, _ = dense_reference(q, k, v, 128**-0.5)
    assert (out.double() - want).abs().max() < tolerance


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), 1e9])
def test_a_masked_key_changes_nothing_even_where_another_row_reads_it(poison: float) -> None:
    """In a chain the last key is read by the last row alone; the rows before must not notice what it holds (A7)."""
    q, k, v = inputs(4, 4, 4, 2, 16)
    mask = torch.ones(4, 4, dtype=torch.bool).tril()
    before, before_lse = dense_attention(q, k, v, 0.25, mask)
    k[3], v[3] = poison, poison
    after, after_lse = dense_attention(q, k, v, 0.25, mask)
    assert torch.equal(before[:3], after[:3])
    assert torch.equal(before_lse[:3], after_lse[:3])
    if poison != 1e9:
        assert not after[3].isfinite().all(), "the row that reads the poison shows it instead of hiding it"


def test_strided_keys_and_values_read_like_contiguous_ones() -> None:
    """The server hands in slices of a cache and of a fused projection."""
    q, k, v = inputs(3, 6, 4, 2, 8)
    fused = torch.cat([q.flatten(1), k[:3].flatten(1), v[:3].flatten(1)], 1)
    parts = fused[:, :32].view(3, 4, 8), fused[:, 32:48].view(3, 2, 8), fused[:, 48:].view(3, 2, 8)
    got, _ = dense_attention(*parts, 0.3)
    want, _ = dense_attention(q, k[:3].contiguous(), v[:3].contiguous(), 0.3)
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize(("rows", "heads", "kv_heads", "keys"), [(1, 9, 3, 700), (3, 4, 4, 1), (5, 8, 2, 1500)])
def test_the_fused_cpu_kernel_gives_the_same(
    rows: int, heads: int, kv_heads: int, keys: int, dtype: torch.dtype
) -> None:
    """Without gradients and a mask it takes over, on strided views of a cache too."""
    torch.manual_seed(keys)
    q = torch.randn(rows, heads, 16).to(dtype)
    cache = torch.randn(2, keys + 9, kv_heads, 16).to(dtype)[:, 5 : 5 + keys]
    want_out, want_lse = dense_attention(q, cache[0], cache[1], 0.3)
    with torch.no_grad():
        out, lse = dense_attention(q, cache[0], cache[1], 0.3)
    assert (out.shape, out.dtype, lse.shape, lse.dtype) == (
        want_out.shape,
        want_out.dtype,
        want_lse.shape,
        want_lse.dtype,
    )
    close = {"rtol": 2e-2, "atol": 2e-2} if dtype == torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-5}
    torch.testing.assert_close(out, want_out, **close)
    torch.testing.assert_close(lse, want_lse, **close)
