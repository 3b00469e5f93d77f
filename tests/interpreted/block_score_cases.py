"""The Triton kernels that score blocks, in Triton's interpreter, against float64 (run by test_kernels_block_lse.py)."""

import random

import pytest
import torch
from block_case import close, expected_bound, expected_lse
from prefix_case import PrefixCase, make_prefix_case

from longdraft.kernels.block_bound import Rule, block_bound
from longdraft.kernels.block_lse import block_lse, count_blocks
from longdraft.kernels.plan import AttentionPlan
from longdraft.kernels.triton_block_bound import bound_tile_for, triton_block_bound
from longdraft.kernels.triton_block_lse import BlockTile, block_tile_for, triton_block_lse

FP8 = torch.float8_e4m3fn
LENS, ROWS = [0, 17, 16, 1, 0, 70], [3, 1, 6, 0, 1, 2]
SMALL = BlockTile(16, 16, 2, 4, 2)  # several programs, tiles of rows and turns at small sizes
RULES: list[Rule] = ["quest", "specpv"]


def check(case: PrefixCase, block: int, blocks: int | None = None, tile: BlockTile | None = SMALL) -> None:
    blocks = count_blocks(case.plan, block, blocks)
    scale = case.scale * case.kv_scales[0]
    # Queries of a float8 cache are rounded to float16 with the scale in them.
    looser = 100.0 if case.k.dtype == FP8 else 1.0
    found = triton_block_lse(case.q, case.k, case.plan, scale, block, blocks, tile)
    close(found, expected_lse(case, block, blocks), case.q.dtype, looser)
    for rule in RULES:
        found = triton_block_bound(case.q, case.k, case.plan, block, blocks, 0.5, rule, tile)
        close(found, expected_bound(case, block, blocks, rule) * 0.5, case.q.dtype)


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_ragged_batches_equal_float64(dtype: torch.dtype, page_size: int) -> None:
    """A3, A7: empty prefixes and requests, partly filled blocks and pages, poison all around."""
    check(make_prefix_case(LENS, ROWS, dtype=dtype, page_size=page_size), 16)


@pytest.mark.parametrize("block", [1, 2, 5, 64])
def test_any_size_of_block(block: int) -> None:
    check(make_prefix_case([0, 70, 129], [1, 2, 1], heads=2, kv_heads=1), block)


@pytest.mark.parametrize("blocks", [1, 3, 40])
def test_fewer_blocks_and_more_than_the_lists_hold(blocks: int) -> None:
    check(make_prefix_case([0, 70, 33], [1, 2, 1], page_size=5), 16, blocks)


@pytest.mark.parametrize("seed", range(4))
def test_any_batch(seed: int) -> None:
    """Random lengths, rows, groups, head sizes, pages, blocks and tiles."""
    rng = random.Random(seed)
    requests, kv_heads, group = rng.randint(1, 4), rng.randint(1, 3), rng.choice([1, 2, 3, 5])
    case = make_prefix_case(
        [rng.choice([0, rng.randint(1, 90)]) for _ in range(requests)],
        [rng.randint(0, 7) for _ in range(requests)],
        heads=kv_heads * group,
        kv_heads=kv_heads,
        size=rng.choice([5, 16, 24]),
        page_size=rng.choice([1, 4, 16]),
        seed=seed,
    )
    for turns in (1, 3):
        check(case, rng.choice([1, 3, 4]), None, SMALL._replace(turns=turns))


def test_rows_beyond_a_tile_take_several() -> None:
    check(make_prefix_case([20, 33], [23, 1], heads=4, kv_heads=2), 8)


def test_a_float8_cache_is_read_with_its_scale() -> None:
    check(make_prefix_case([40, 0, 3], [2, 1, 5], dtype=torch.bfloat16, cache=FP8, kv_scales=(0.5, 3.0)), 16)


def test_the_chosen_tiles_are_right_too() -> None:
    for rows, dtype, block in ((1, torch.float32, 16), (6, torch.bfloat16, 1), (17, torch.float16, 16)):
        check(make_prefix_case([70], [rows], heads=4, kv_heads=1, size=8, dtype=dtype), block, None, None)


def test_strided_queries_and_keys() -> None:
    case = make_prefix_case([30, 30], [2, 2])
    case.q, case.k = torch.cat([case.q, case.q], 1)[:, :4], torch.stack([case.k, case.v], 1)[:, 0]
    check(case, 16)


def test_a_plan_on_the_device_serves_whatever_lengths_are_filled_in() -> None:
    """As a CUDA graph does: shapes and grid are fixed, page lists and lengths change in place."""
    cases = [make_prefix_case(lens, [3, 3], slots=80) for lens in ([60, 0], [1, 2], [0, 0], [17, 60])]
    width = max(c.plan.pages_BW.shape[1] for c in cases)
    pages, lens, cu = torch.zeros(2, width, dtype=torch.int32), torch.zeros(2, dtype=torch.int32), [0, 3, 6]
    plan = AttentionPlan.on_device(pages, lens, torch.tensor(cu, dtype=torch.int32), cu)
    for case in cases:
        pages[:, : case.plan.pages_BW.shape[1]] = case.plan.pages_BW
        lens.copy_(case.plan.lens_B)
        blocks = count_blocks(plan, 16, None)
        close(block_lse(case.q, case.k, plan, case.scale, backend="triton"), expected_lse(case, 16, blocks))
        close(block_bound(case.q, case.k, plan, backend="triton"), expected_bound(case, 16, blocks))


def test_a_nan_that_is_read_shows_in_its_block_alone() -> None:
    case = make_prefix_case([600, 20], [1, 1])
    case.k[case.slots[0][37]] = float("nan")
    found = triton_block_lse(case.q, case.k, case.plan, case.scale, 16, 38, SMALL)
    assert found[0, :, 2].isnan().all()
    assert found[0, :, [n for n in range(38) if n != 2]].isfinite().all() and not found[1].isnan().any()


@pytest.mark.parametrize("rows", [1, 16, 17, 64, 65, 1024])
def test_tiles_hold_their_rows_or_are_the_largest_and_fit(rows: int) -> None:
    for size in (64, 128, 256):
        for element in (1, 2, 4):
            for block in (1, 16, 128, 4096):
                tile = block_tile_for(rows, size, element, block)
                assert tile.rows >= min(rows, 32 if element == 4 else 128)
                assert tile.stages * tile.blocks * size * element <= 76 << 10, "three programs of a multiprocessor"
                assert tile.turns * tile.blocks * block <= max(1024, 16 * block)
                assert bound_tile_for(rows, size, element, block).blocks >= 16
