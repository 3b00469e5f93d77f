"""Sets of largest entries: the twin against sorting in plain words, and the kernel as a card would get it."""

import math
from pathlib import Path

import pytest
import torch
from built_kernel import build_for_h100, spilled_bytes
from hypothesis import given, settings
from hypothesis import strategies as st
from interpreter import run_interpreted

from longdraft.kernels import triton_top_set
from longdraft.kernels.top_set import top_set

FLOATS = st.one_of(
    st.sampled_from([0.0, -0.0, math.inf, -math.inf, math.nan, 1.0, -1.0, 2.0**-149]), st.floats(width=32)
)


def test_the_triton_kernel_in_the_interpreter() -> None:
    run_interpreted("top_set_cases.py")


@settings(max_examples=100, deadline=None)
@given(
    row=st.lists(FLOATS, min_size=1, max_size=30),
    count=st.integers(0, 35),
    end=st.integers(0, 40),
    forced=st.integers(0, 4),
    spare=st.integers(0, 5),
)
def test_the_set_is_that_of_sorting_by_value_then_place(
    row: list[float], count: int, end: int, forced: int, spare: int
) -> None:
    rank = [-math.inf if math.isnan(x) or x == -math.inf else x for x in row]
    rank = [max(x, -3.4028234663852886e38) for x in rank]
    candidates = sorted(range(min(end, len(row))), key=lambda n: (n >= forced, -rank[n] if n >= forced else 0, n))
    want = sorted(candidates[:count])
    found = top_set(torch.tensor([row, row]), torch.tensor([count, 0]), torch.tensor([end, end]), count + spare, forced)
    assert found.shape == (2, count + spare) and found.dtype == torch.int32
    assert found[0].tolist() == want + [len(row)] * (count + spare - len(want))
    assert (found[1] == len(row)).all()


@pytest.mark.parametrize(("size", "first", "final"), [(4096, True, False), (8192, True, True), (8192, False, True)])
def test_built_for_an_h100_a_piece_stays_in_registers(size: int, first: bool, final: bool, tmp_path: Path) -> None:
    fixed = {"N": size, "ROOM": 512, "FORCED": 4, "FIRST": first, "FINAL": final}
    kinds = {"score_ptr": "*fp32" if first else "*i32"} | dict.fromkeys(("index_ptr", "key_ptr", "out_ptr"), "*i32")
    kinds |= dict.fromkeys(("count_ptr", "end_ptr"), "*i64")
    warps = size // 512
    built = build_for_h100(triton_top_set._cut_kernel, fixed, kinds, {"entries", "none", "pieces"}, num_warps=warps)
    assert spilled_bytes(built, tmp_path) == 0
