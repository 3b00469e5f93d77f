"""The draft step's Triton kernels in Triton's interpreter (run by test_kernels_row_ops.py)."""

import pytest
import torch
from row_case import DTYPES, HEADS, ROWS, check_rotation, check_rows


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", HEADS, ids=str)
def test_heads_are_rotated_and_put_away_as_by_the_twin(shape: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    check_rotation(shape, dtype, "cpu")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", ROWS, ids=str)
def test_row_operations_are_the_twins(shape: tuple[int, int], dtype: torch.dtype) -> None:
    check_rows(shape, dtype, "cpu")
