"""Probabilities of chosen rows and heads, summed: the twin against float64, and the kernels as a card would get them."""

from pathlib import Path

import pytest
import torch
from block_case import close
from built_kernel import build_for_h100, spilled_bytes
from interpreter import run_interpreted
from mass_case import expected_mass, some_rows
from prefix_case import make_prefix_case

from longdraft.errors import UserError
from longdraft.kernels import triton_head_mass
from longdraft.kernels.head_mass import head_mass
from longdraft.kernels.plan import AttentionPlan

FP8 = torch.float8_e4m3fn
LENS, ROWS = [0, 17, 16, 1, 0, 70], [3, 1, 6, 0, 1, 2]


def test_the_triton_kernels_in_the_interpreter() -> None:
    run_interpreted("head_mass_cases.py")


@pytest.mark.parametrize("heads", [[5], [0, 1], [4, 0, 3], [0, 1, 2, 3, 4, 5]], ids=str)
@pytest.mark.parametrize("page_size", [1, 5, 16])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_u3_the_twin_equals_float64(dtype: torch.dtype, page_size: int, heads: list[int]) -> None:
    """A3, A7: odd lengths, empty prefixes and requests, poison in every slot that is not listed."""
    case = make_prefix_case(LENS, ROWS, dtype=dtype, page_size=page_size, heads=6)
    found = head_mass(case.q, case.k, case.plan, case.scale, heads)
    assert found.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert found.shape == (6, case.plan.pages_BW.shape[1] * page_size)
    close(found, expected_mass(case, heads), dtype)
    counted = torch.tensor([0, 1, 6, 0, 0, 2], dtype=found.dtype)  # rows that read something
    torch.testing.assert_close(found.sum(1), counted * len(heads))


def test_u3_it_is_what_an_eager_forward_attends_with() -> None:
    """Whole softmax attention of a layer, its probabilities captured, against the scores of two heads of four."""
    case = make_prefix_case([50, 21], [2, 2], dtype=torch.float64)
    captured = []
    for b, slots in enumerate(case.slots):
        k_NHD = case.k[slots].repeat_interleave(2, 1)
        prob_RHN = (torch.einsum("rhd,nhd->rhn", case.q[case.plan.rows_of(b)], k_NHD) * case.scale).softmax(-1)
        captured.append(prob_RHN[:, [1, 2]].sum((0, 1)))
    found = head_mass(case.q, case.k, case.plan, case.scale, [1, 2])
    for b, want in enumerate(captured):
        torch.testing.assert_close(found[b, : len(want)], want)


def test_layers_add_up_in_one_score() -> None:
    """Eq. 5: the sum over (head, layer) pairs."""
    case, other = make_prefix_case(LENS, ROWS), make_prefix_case(LENS, ROWS, seed=1)
    other.plan, other.k = case.plan, case.k * 0.5
    score = head_mass(case.q, case.k, case.plan, case.scale, [0, 3])
    want = score + head_mass(other.q, other.k, case.plan, case.scale, [1])
    assert head_mass(other.q, other.k, case.plan, case.scale, [1], out=score) is score
    torch.testing.assert_close(score, want)


def test_rows_that_do_not_count_have_no_influence() -> None:
    """A7: their queries are NaN; the mask may be wider than the most rows."""
    case = make_prefix_case(LENS, ROWS)
    valid = some_rows(case)
    assert valid.any() and case.q.isnan().any()
    found = head_mass(case.q, case.k, case.plan, case.scale, [0, 3], valid)
    close(found, expected_mass(case, [0, 3], valid=valid))


def test_requests_have_no_influence_on_each_other() -> None:
    """U7: scored alone, each request has the scores that it has in a batch."""
    case = make_prefix_case([40, 7, 23], [2, 3, 1])
    whole = head_mass(case.q, case.k, case.plan, case.scale, [1, 2])
    for b, length in enumerate([40, 7, 23]):
        rows = case.plan.rows_of(b)
        alone = AttentionPlan.build(case.plan.pages_BW[b : b + 1], [length], [rows.stop - rows.start])
        torch.testing.assert_close(head_mass(case.q[rows], case.k, alone, case.scale, [1, 2])[0], whole[b])


def test_a_float8_cache_is_read_with_its_scale() -> None:
    case = make_prefix_case(LENS, ROWS, dtype=torch.bfloat16, cache=FP8, kv_scales=(0.5, 1.0))
    found = head_mass(case.q, case.k, case.plan, case.scale, [0, 2], kv_scale=0.5, columns=90)
    close(found, expected_mass(case, [0, 2], 90))


def test_queries_and_keys_may_be_slices_of_wider_tensors() -> None:
    """As the server hands them in: parts of a fused projection and of a cache that holds values too."""
    case = make_prefix_case([40, 7], [2, 3])
    want = head_mass(case.q, case.k, case.plan, case.scale, [0, 3])
    case.q, case.k = torch.cat([case.q, case.q], 1)[:, :4], torch.stack([case.k, case.v], 1)[:, 0]
    assert not case.q.is_contiguous() and not case.k.is_contiguous()
    torch.testing.assert_close(head_mass(case.q, case.k, case.plan, case.scale, [0, 3]), want)


def test_a_plan_on_the_device_reads_its_lengths_late() -> None:
    case = make_prefix_case([33, 4], [1, 2])
    lens = torch.zeros(2, dtype=torch.int32)
    plan = AttentionPlan.on_device(case.plan.pages_BW, lens, case.plan.cu_rows_B1, case.plan.cu_rows)
    assert not head_mass(case.q, case.k, plan, case.scale, [1]).any()
    lens.copy_(case.plan.lens_B)
    want = head_mass(case.q, case.k, case.plan, case.scale, [1])
    assert torch.equal(head_mass(case.q, case.k, plan, case.scale, [1]), want)


def test_a_mask_that_says_nothing_of_some_row_is_refused() -> None:
    case = make_prefix_case([9, 9], [2, 1])
    for shape in ((2, 1), (1, 2)):
        with pytest.raises(ValueError, match=r"rows_valid of .* for 2 requests of up to 2 rows"):
            head_mass(case.q, case.k, case.plan, 1.0, [0], torch.ones(shape, dtype=torch.bool))


@pytest.mark.parametrize("heads", [[], [4], [-1], [1, 1]], ids=str)
def test_heads_that_there_are_not_are_refused(heads: list[int]) -> None:
    case = make_prefix_case([9], [2])
    with pytest.raises(UserError, match=r"heads=.*name one or more of the layer's 4 query heads, 0 to 3, each once"):
        head_mass(case.q, case.k, case.plan, 1.0, heads)


def test_what_cannot_be_served_is_refused_with_the_reason() -> None:
    case = make_prefix_case([9], [2], dtype=torch.bfloat16)
    with pytest.raises(UserError, match=r"backend='triton' cannot score these heads, it needs Triton.*'torch'"):
        head_mass(case.q, case.k, case.plan, 1.0, [0], backend="triton")
    with pytest.raises(UserError, match="backend='fa3' is unknown: write one of triton, torch"):
        head_mass(case.q, case.k, case.plan, 1.0, [0], backend="fa3")


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize(("rows", "own", "cache"), [(1, 4, "bf16"), (5, 1, "bf16"), (5, 4, "bf16"), (5, 4, "fp8e4nv")])
def test_built_for_an_h100_the_loop_reads_ahead_and_nothing_spills(
    rows: int, own: int, cache: str, page_size: int, tmp_path: Path
) -> None:
    tile = triton_head_mass.mass_tile_for(rows * own, 128, 1 if cache == "fp8e4nv" else 2, 4 * 16 << 15)
    fixed = {
        "CHOSEN": 4, "OWN": own, "GROUP": 4, "SIZE": 128, "PAGE": page_size, "TILES": 1, "TURNS": tile.turns,
        "M": tile.rows, "N": tile.columns, "D": 128, "EIGHT": cache == "fp8e4nv", "MASKED": True,
    }  # fmt: skip
    kinds = {"q_ptr": "*bf16", "k_ptr": f"*{cache}", "score_ptr": "*fp32", "part_ptr": "*fp32", "scale": "fp32"}
    kinds |= dict.fromkeys(("pages_ptr", "lens_ptr", "cu_ptr", "heads_ptr"), "*i32") | {"valid_ptr": "*i1"}
    made = {"num_warps": tile.warps, "num_stages": tile.stages}
    odd = {"columns", "splits", "pages_row", "valid_row"}
    built = build_for_h100(triton_head_mass._score_kernel, fixed, kinds, odd, **made)
    assert "async_copy_global_to_local" in built.asm["ttgir"]
    assert f"memdesc<{tile.stages - 1}x{tile.columns}x128x" in built.asm["ttgir"], "tiles of keys that have room"
    assert 3 * built.metadata.shared <= 227 << 10
    assert spilled_bytes(built, tmp_path) == 0


@pytest.mark.parametrize("masked", [False, True])
def test_built_for_an_h100_the_sums_do_not_spill(masked: bool, tmp_path: Path) -> None:
    fixed = {"CHOSEN": 4, "P": 32, "C": 256, "S": 64, "ADD": True, "MASKED": masked}
    kinds = dict.fromkeys(("score_ptr", "part_ptr", "out_ptr"), "*fp32") | {"valid_ptr": "*i1"}
    kinds |= dict.fromkeys(("lens_ptr", "cu_ptr"), "*i32")
    odd = {"columns", "splits", "valid_row"}
    built = build_for_h100(triton_head_mass._sum_kernel, fixed, kinds, odd, num_warps=4)
    assert spilled_bytes(built, tmp_path) == 0
