"""Quest's bound and SpecPV's rule: the twin against float64, that the one bounds and the other does not, and after a rollback."""

from pathlib import Path

import pytest
import torch
from block_case import close, expected_bound, largest_scores
from built_kernel import build_for_h100, spilled_bytes
from prefix_case import make_prefix_case

from longdraft.kernels import triton_block_bound
from longdraft.kernels.block_bound import Rule, block_bound
from longdraft.kernels.plan import AttentionPlan

LENS, ROWS = [0, 17, 16, 1, 0, 70], [3, 1, 6, 0, 1, 2]


@pytest.mark.parametrize("rule", ["quest", "specpv"])
@pytest.mark.parametrize("block", [1, 5, 16])
@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_the_twin_equals_float64(dtype: torch.dtype, page_size: int, block: int, rule: Rule) -> None:
    """Odd lengths, empty prefixes and requests, poison in every slot that is not listed (A7)."""
    case = make_prefix_case(LENS, ROWS, dtype=dtype, page_size=page_size, heads=6)
    found = block_bound(case.q, case.k, case.plan, block, rule=rule)
    assert found.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    close(found, expected_bound(case, block, found.shape[2], rule), dtype)


def test_no_score_is_above_quests_bound() -> None:
    """P4, on scores of any sign."""
    for seed in range(5):
        case = make_prefix_case([70, 33], [4, 4], seed=seed, dtype=torch.float64)
        bound = block_bound(case.q, case.k, case.plan, 16, 5)
        assert (bound >= largest_scores(case, 16, 5) - 1e-12).all()


def test_a_score_may_be_above_specpvs() -> None:
    """P4: a query of two signs, whose products with the largest numbers and with the smallest ones cancel."""
    q = torch.tensor([[[1.0, -1.0]]])
    k = torch.tensor([[[2.0, 0.0]], [[0.0, 2.0]]])  # scores 2 and -2; high (2, 2), low (0, 0)
    plan = AttentionPlan.build(torch.tensor([[0, 1]]), [2], [1])
    assert block_bound(q, k, plan, 2).item() == 2.0
    assert block_bound(q, k, plan, 2, rule="specpv").item() == 0.0


def test_a_block_of_one_column_is_its_score() -> None:
    case = make_prefix_case([9], [2], dtype=torch.float64)
    for rule in ("quest", "specpv"):
        torch.testing.assert_close(block_bound(case.q, case.k, case.plan, 1, 9, rule=rule), largest_scores(case, 1, 9))


def test_rewritten_and_rolled_back_slots_count_as_they_are_now() -> None:
    """P5: nothing is remembered from the call before."""
    case = make_prefix_case([40], [2])
    block_bound(case.q, case.k, case.plan)
    kept, case.slots[0] = case.slots[0][:35], case.slots[0][:35]
    case.k[kept[-1]] = 9.0
    case.plan = AttentionPlan.build(case.plan.pages_BW, [35], [2])
    close(block_bound(case.q, case.k, case.plan, 16, 3), expected_bound(case, 16, 3))


def test_a_float8_cache_and_a_scale() -> None:
    case = make_prefix_case(LENS, ROWS, dtype=torch.bfloat16, cache=torch.float8_e4m3fn)
    found = block_bound(case.q, case.k, case.plan, 16, 6, scale=0.25)
    close(found, expected_bound(case, 16, 6) * 0.25)


@pytest.mark.parametrize(("rows", "cache"), [(5, "bf16"), (5, "fp8e4nv"), (16, "bf16")])
def test_built_for_an_h100_the_loop_reads_ahead_and_nothing_spills(rows: int, cache: str, tmp_path: Path) -> None:
    """Nothing in the loop multiplies, so the compiler reads ahead only because it is told how far."""
    tile = triton_block_bound.bound_tile_for(rows * 4, 128, 1 if cache == "fp8e4nv" else 2, 16)
    fixed = {
        "KV_HEADS": 8, "GROUP": 4, "SIZE": 128, "PAGE": 1, "BLOCK": 16, "TILES": 1, "TURNS": tile.turns, "M": tile.rows,
        "N": tile.blocks, "D": 128, "EIGHT": cache == "fp8e4nv", "PRODUCTS": False, "STAGES": tile.stages,
    }  # fmt: skip
    kinds = {"q_ptr": "*bf16", "k_ptr": f"*{cache}", "bound_ptr": "*fp32", "scale": "fp32"}
    kinds |= dict.fromkeys(("pages_ptr", "lens_ptr", "cu_ptr"), "*i32")
    made = {"num_warps": tile.warps, "num_stages": tile.stages}
    built = build_for_h100(triton_block_bound._bound_kernel, fixed, kinds, {"blocks", "pages_row"}, **made)
    assert f"memdesc<{tile.stages - 1}x{tile.blocks}x128x" in built.asm["ttgir"]
    assert 2 * built.metadata.shared <= 227 << 10
    assert spilled_bytes(built, tmp_path) == 0
