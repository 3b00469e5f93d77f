"""Linear layers over a few rows equal torch's, whatever the shape and the path."""

import pytest
import torch
from torch.nn.functional import linear

from longdraft.kernels.few_rows_linear import MOST_ROWS, few_rows_linear


@pytest.mark.parametrize("rows", [0, 1, 2, 3, 5, MOST_ROWS, MOST_ROWS + 1])
@pytest.mark.parametrize(("inner", "outer"), [(1, 1), (7, 13), (64, 96)])
@pytest.mark.parametrize("bias", [False, True])
def test_it_is_torchs_linear(rows: int, inner: int, outer: int, bias: bool) -> None:
    torch.manual_seed(rows)
    x, weight = torch.randn(rows, inner), torch.randn(outer, inner)
    b = torch.randn(outer) if bias else None
    out = few_rows_linear(x, weight, b)
    torch.testing.assert_close(out, linear(x, weight, b), rtol=1e-5, atol=1e-5)
    assert out.is_contiguous()


def test_leading_dimensions_strides_and_other_dtypes() -> None:
    x, weight = torch.randn(2, 6, 10)[:, ::2], torch.randn(5, 10)
    torch.testing.assert_close(few_rows_linear(x, weight), linear(x, weight), rtol=1e-5, atol=1e-5)
    half = few_rows_linear(x.bfloat16(), weight.bfloat16())
    assert half.dtype == torch.bfloat16 and torch.equal(half, linear(x.bfloat16(), weight.bfloat16()))
    double = few_rows_linear(x.double(), weight.double())
    assert torch.equal(double, linear(x.double(), weight.double()))
