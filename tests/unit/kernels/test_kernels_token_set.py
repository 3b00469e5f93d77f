"""The kernels of Equation 6: their cases, what they take, and how a card would get them (the set itself: test_serve_token_set.py)."""

from pathlib import Path

import pytest
import torch
from built_kernel import build_for_h100, spilled_bytes
from interpreter import run_interpreted

from longdraft.kernels import triton_token_set
from longdraft.kernels.token_set import piece_for, token_set
from longdraft.kernels.top_set import LAST, PIECE

BUDGET = {"TOKENS": 512, "SINKS": 4, "WINDOW": 16}
KINDS = {"draft_ptr": "*fp32", "target_ptr": "*fp32", "length_ptr": "*i64", "start_ptr": "*i64"} | dict.fromkeys(
    ("key_ptr", "index_ptr", "list_ptr", "count_ptr"), "*i32"
)


def test_the_triton_kernels_in_the_interpreter() -> None:
    run_interpreted("token_set_cases.py")


def test_pieces_give_no_more_candidates_than_one_program_holds() -> None:
    assert [piece_for(n, 492) for n in (1, 32_768, 65_536, 125_000, 131_072)] == [4096, 4096, 4096, 8192, 8192]
    assert piece_for(125_000, 108) == 4096 and piece_for(0, 492) == 0
    assert piece_for(1_000_000, 492) == piece_for(20_000, LAST + 1) == 0
    for columns in range(1, 200_000, 777):
        for room in (1, 108, 492, 4000):
            size = piece_for(columns, room)
            assert size in (0, PIECE, LAST)
            if size:
                assert -(-columns // size) * room <= LAST


@pytest.mark.parametrize("size", [4096, 8192])
def test_built_for_an_h100_a_piece_stays_in_registers(size: int, tmp_path: Path) -> None:
    fixed = BUDGET | {"N": size, "ROOM": 512}
    built = build_for_h100(
        triton_token_set._candidate_kernel, fixed, KINDS, {"columns", "pieces", "room"}, num_warps=size // 512
    )
    assert spilled_bytes(built, tmp_path) == 0


@pytest.mark.parametrize(("size", "ones"), [(4096, {}), (8192, {}), (4096, {"room": 1, "candidates": 1, "AHEAD": 0})])
def test_built_for_an_h100_the_choice_stays_in_registers(size: int, ones: dict[str, int], tmp_path: Path) -> None:
    """Arguments of 1 become constants when it is called."""
    fixed = BUDGET | {"AHEAD": 192, "N": size, "V": 512} | ones
    odd = {"columns", "candidates", "room"} - set(ones)
    built = build_for_h100(triton_token_set._choice_kernel, fixed, KINDS, odd, num_warps=size // 512)
    assert spilled_bytes(built, tmp_path) == 0


def test_a_set_of_thousands_from_a_long_row_is_left_to_the_twin() -> None:
    score_BN, length_B = torch.rand(1, 20_000), torch.tensor([20_000])
    with pytest.raises(AssertionError):
        triton_token_set.triton_token_set(score_BN, score_BN, length_B, LAST + 30, 4, 16, 9)
    column_BV, _, _ = token_set(score_BN, score_BN, length_B, LAST + 30, 4, 16, 9)
    want = (score_BN[0, 4:19_984].topk(LAST + 10).indices + 4).sort().values
    assert torch.equal(column_BV[0, 4:].long(), want)
