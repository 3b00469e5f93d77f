"""Page lists of views against a plain loop, masses against softmax, and their Triton kernels in the interpreter."""

from pathlib import Path
from typing import Any

import pytest
import torch
from built_kernel import build_for_h100, spilled_bytes
from interpreter import run_interpreted
from view_kernel_case import any_scores, any_views

from longdraft.kernels.mass_sum import mass_sum
from longdraft.kernels.triton_chain_inputs import _inputs_kernel, _remember_kernel
from longdraft.kernels.triton_mass_sum import _mass_kernel, _total_kernel
from longdraft.kernels.triton_view_pages import _pages_kernel
from longdraft.kernels.view_pages import view_pages


def test_the_triton_kernels_in_the_interpreter() -> None:
    run_interpreted("view_kernel_cases.py")


def listed(given: tuple[Any, ...], at: int, b: int) -> tuple[list[int], int]:
    """The columns of one page list by the definition, and how many of them are cached."""
    lists, table, row_B, length_B, everything_B, width, count = given
    row, length = int(row_B[b]), int(length_B[b])
    chosen, start = lists.column_LRV[at, row, : int(lists.count_LR[at, row])].tolist(), int(lists.start_R[row])
    if not chosen and not start and length > width:
        chosen = list(range(min(lists.sinks, width)))
    if everything_B is not None and everything_B[b]:
        chosen, start = [], 0
    else:
        start = max(start, length + len(chosen) - width)
    read = len(chosen) + length - start
    columns = (chosen + list(range(start, start + width + count)))[: width + count]
    return [int(table[row, c]) if c < table.shape[1] else 0 for c in columns], read


@pytest.mark.parametrize("seed", range(40))
def test_a_list_is_what_was_chosen_and_then_the_window(seed: int) -> None:
    """P3: every gathered slot is that of the column it stands for."""
    given = any_views(seed)
    slot_LBW, read_LB = view_pages(*given)
    for at in range(len(slot_LBW)):
        for b in range(slot_LBW.shape[1]):
            assert (slot_LBW[at, b].tolist(), int(read_LB[at, b])) == listed(given, at, b)


@pytest.mark.parametrize("seed", range(5))
def test_masses_are_shares_of_softmax_and_rows_that_read_nothing_count_nothing(seed: int) -> None:
    lse_THN, batch = any_scores(seed)
    share_THN = torch.softmax(lse_THN.double(), -1).nan_to_num(0.0)
    wanted = share_THN.unflatten(0, (batch, -1)).sum((1, 2))
    torch.testing.assert_close(mass_sum(lse_THN, batch), wanted.float())


POINTERS = {
    "column_ptr": "*i32", "table_ptr": "*i32", "slot_ptr": "*i32", "read_ptr": "*i32", "everything_ptr": "*i1",
    "count_ptr": "*i64", "start_ptr": "*i64", "row_ptr": "*i64", "length_ptr": "*i64",
}  # fmt: skip
FLOATS = dict.fromkeys(("lse_ptr", "total_ptr", "score_ptr"), "*fp32")
INTEGERS = {
    f"{name}_ptr": "*i64" for name in ["newest", "draft", "limit", "length", "row", "id", "position", "slot", "ring"]
}
BUILT: list[tuple[Any, dict[str, int], dict[str, str], int]] = [
    (_pages_kernel, {"EVERYTHING": 1, "TILE": 1024}, POINTERS, 4),
    (_total_kernel, {"WIDE": 2048}, FLOATS, 8),
    (_mass_kernel, {"ROWS": 32, "NARROW": 64}, FLOATS, 4),
    (_inputs_kernel, {"T": 16}, INTEGERS | {"table_ptr": "*i32"}, 1),
    (_remember_kernel, {"N": 16}, INTEGERS, 1),
]


@pytest.mark.parametrize(("kernel", "fixed", "kinds", "warps"), BUILT)
def test_the_kernels_fit_an_h100(
    kernel: Any, fixed: dict[str, int], kinds: dict[str, str], warps: int, tmp_path: Path
) -> None:
    built = build_for_h100(kernel, fixed, kinds, odd=set(), num_warps=warps)
    assert spilled_bytes(built, tmp_path) == 0
