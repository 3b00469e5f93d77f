"""The draft step's Triton kernels in Triton's interpreter (run by test_kernels_row_ops.py)."""

import pytest
import torch
from row_case import DTYPES, HEADS, ROWS, check_choices, check_rotation, check_rows, check_windows


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", HEADS, ids=str)
def test_heads_are_rotated_and_put_away_as_by_the_twin(shape: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    check_rotation(shape, dtype, "cpu")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", ROWS, ids=str)
def test_row_operations_are_the_twins(shape: tuple[int, int], dtype: torch.dtype) -> None:
    check_rows(shape, dtype, "cpu")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "count"), [(1, 3), (3, 40), (2, 8192), (2, 20000)])
def test_choices_are_the_twins(rows: int, count: int, dtype: torch.dtype) -> None:
    check_choices(rows, count, dtype, "cpu")


@pytest.mark.parametrize(("window", "size", "steps"), [(1, 1, 1), (6, 10, 5), (512, 517, 3), (9, 9, 2)])
def test_windows_are_the_twins(window: int, size: int, steps: int) -> None:
    check_windows(window, size, steps, "cpu")
