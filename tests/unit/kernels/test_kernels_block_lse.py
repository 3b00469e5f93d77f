"""Log-sum-exp of blocks: the twin against float64, the shares, and the kernel as a card would get it."""

from pathlib import Path

import pytest
import torch
from block_case import close, expected_lse
from built_kernel import build_for_h100, spilled_bytes
from interpreter import run_interpreted
from prefix_case import make_prefix_case

from longdraft.errors import UserError
from longdraft.kernels import triton_block_lse
from longdraft.kernels.block_lse import block_lse, block_mass
from longdraft.kernels.plan import AttentionPlan
from longdraft.kernels.prefix_attention import prefix_attention

FP8 = torch.float8_e4m3fn
LENS, ROWS = [0, 17, 16, 1, 0, 70], [3, 1, 6, 0, 1, 2]


def test_the_triton_kernels_in_the_interpreter() -> None:
    run_interpreted("block_score_cases.py")


@pytest.mark.parametrize("block", [1, 3, 16, 64])
@pytest.mark.parametrize("page_size", [1, 5, 16])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_the_twin_equals_float64(dtype: torch.dtype, page_size: int, block: int) -> None:
    """A3, A7: odd lengths, empty prefixes and requests, poison in every slot that is not listed."""
    case = make_prefix_case(LENS, ROWS, dtype=dtype, page_size=page_size, heads=6)
    found = block_lse(case.q, case.k, case.plan, case.scale, block)
    assert found.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert found.shape == (13, 6, -(-case.plan.pages_BW.shape[1] * page_size // block))
    close(found, expected_lse(case, block, found.shape[2]), dtype)


@pytest.mark.parametrize("blocks", [1, 3, 40])
def test_fewer_blocks_and_more_than_the_lists_hold(blocks: int) -> None:
    case = make_prefix_case(LENS, ROWS)
    found = block_lse(case.q, case.k, case.plan, case.scale, 16, blocks)
    close(found, expected_lse(case, 16, blocks))


def test_a_float8_cache_is_read_with_its_scale() -> None:
    case = make_prefix_case(LENS, ROWS, dtype=torch.bfloat16, cache=FP8, kv_scales=(0.5, 1.0))
    found = block_lse(case.q, case.k, case.plan, case.scale, 4, 20, kv_scale=0.5)
    close(found, expected_lse(case, 4, 20))


def test_queries_and_keys_may_be_slices_of_wider_tensors() -> None:
    """As the server hands them in: parts of a fused projection and of a cache that holds values too."""
    case = make_prefix_case([40, 7], [2, 3])
    want = block_lse(case.q, case.k, case.plan, case.scale)
    case.q, case.k = torch.cat([case.q, case.q], 1)[:, :4], torch.stack([case.k, case.v], 1)[:, 0]
    assert not case.q.is_contiguous() and not case.k.is_contiguous()
    torch.testing.assert_close(block_lse(case.q, case.k, case.plan, case.scale), want)


def test_a_plan_on_the_device_reads_its_lengths_late() -> None:
    case = make_prefix_case([33, 4], [1, 2])
    plan = AttentionPlan.on_device(
        case.plan.pages_BW, torch.zeros(2, dtype=torch.int32), case.plan.cu_rows_B1, case.plan.cu_rows
    )
    assert block_lse(case.q, case.k, plan, case.scale).isneginf().all()
    plan.lens_B.copy_(case.plan.lens_B)
    assert torch.equal(block_lse(case.q, case.k, plan, case.scale), block_lse(case.q, case.k, case.plan, case.scale))


@pytest.mark.parametrize("block", [1, 16])
def test_shares_are_the_softmax_of_the_whole_row_summed_by_block(block: int) -> None:
    case = make_prefix_case([0, 17, 70], [2, 1, 3], dtype=torch.float64)
    mass = block_mass(block_lse(case.q, case.k, case.plan, case.scale, block))
    assert (mass[:2] == 0).all(), "a row that reads nothing has no share and no NaN"
    torch.testing.assert_close(mass[2:].sum(-1), torch.ones(4, 4, dtype=torch.float64))
    for b in (1, 2):
        k_NHD = case.k[case.slots[b]].repeat_interleave(2, 1)
        prob_RHN = (torch.einsum("rhd,nhd->rhn", case.q[case.plan.rows_of(b)], k_NHD) * case.scale).softmax(-1)
        for n in range(mass.shape[2]):
            want = prob_RHN[..., n * block : (n + 1) * block].sum(-1)
            torch.testing.assert_close(mass[case.plan.rows_of(b), :, n], want)


def test_over_the_blocks_it_is_the_log_sum_exp_of_attention() -> None:
    case = make_prefix_case([50, 0], [2, 1])
    _, want = prefix_attention(case.q, case.k, case.v, case.plan, case.scale)
    torch.testing.assert_close(block_lse(case.q, case.k, case.plan, case.scale, 7).logsumexp(-1), want)


def test_huge_scores_stay_finite() -> None:
    """A4: the shares of scores of +-1e4 and more."""
    case = make_prefix_case([50], [2])
    case.k[case.slots[0]] *= 3e3
    found = block_lse(case.q, case.k, case.plan, case.scale)
    assert found.abs().isfinite()[..., :4].all() and found[..., :4].abs().max() > 1e3
    torch.testing.assert_close(block_mass(found).sum(-1), torch.ones(2, 4))


def test_what_cannot_be_served_is_refused_with_the_reason() -> None:
    case = make_prefix_case([9], [2], dtype=torch.bfloat16)
    with pytest.raises(
        UserError, match=r"backend='triton' cannot score these blocks, it needs Triton and a GPU.*'torch'"
    ):
        block_lse(case.q, case.k, case.plan, 1.0, backend="triton")
    with pytest.raises(UserError, match="backend='fa3' is unknown: write one of triton, torch"):
        block_lse(case.q, case.k, case.plan, 1.0, backend="fa3")
    with pytest.raises(ValueError, match="block=0: a block has at least one column"):
        block_lse(case.q, case.k, case.plan, 1.0, block=0)


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize(
    ("rows", "cache", "block"), [(5, "bf16", 16), (1, "bf16", 16), (5, "fp8e4nv", 16), (5, "bf16", 1), (16, "bf16", 16)]
)
def test_built_for_an_h100_the_loop_reads_ahead_and_nothing_spills(
    rows: int, cache: str, block: int, page_size: int, tmp_path: Path
) -> None:
    tile = triton_block_lse.block_tile_for(rows * 4, 128, 1 if cache == "fp8e4nv" else 2, block)
    fixed = {
        "KV_HEADS": 8, "GROUP": 4, "SIZE": 128, "PAGE": page_size, "BLOCK": block, "TILES": 1, "TURNS": tile.turns,
        "M": tile.rows, "N": tile.blocks, "D": 128, "EIGHT": cache == "fp8e4nv",
    }  # fmt: skip
    kinds = {"q_ptr": "*bf16", "k_ptr": f"*{cache}", "lse_ptr": "*fp32", "scale": "fp32"}
    kinds |= dict.fromkeys(("pages_ptr", "lens_ptr", "cu_ptr"), "*i32")
    made = {"num_warps": tile.warps, "num_stages": tile.stages}
    built = build_for_h100(triton_block_lse._lse_kernel, fixed, kinds, {"blocks", "pages_row"}, **made)
    assert "async_copy_global_to_local" in built.asm["ttgir"]
    ahead = tile.stages - (tile.rows < 64)  # tiles of keys that have room; where a warp group multiplies, one more
    assert f"memdesc<{ahead}x{tile.blocks}x128x" in built.asm["ttgir"]
    assert 2 * built.metadata.shared <= 227 << 10
    assert spilled_bytes(built, tmp_path) == 0
