"""The Triton kernels of summed probabilities in Triton's interpreter, against float64 (run by test_kernels_head_mass.py)."""

import random

import pytest
import torch
from block_case import close
from mass_case import expected_mass, some_rows
from prefix_case import PrefixCase, make_prefix_case

from longdraft.kernels.head_mass import head_mass
from longdraft.kernels.plan import AttentionPlan
from longdraft.kernels.triton_head_mass import MassTile, head_places, mass_tile_for, triton_head_mass

FP8 = torch.float8_e4m3fn
LENS, ROWS = [0, 17, 16, 1, 0, 70], [3, 1, 6, 0, 1, 2]
SMALL = MassTile(16, 16, 2, 4, 2)  # several programs, tiles of rows and turns at small sizes


def check(
    case: PrefixCase,
    heads: list[int],
    columns: int | None = None,
    valid: torch.Tensor | None = None,
    tile: MassTile | None = SMALL,
) -> None:
    """A score, and the same added to another one."""
    want = expected_mass(case, heads, columns, valid)
    scale, width = case.scale * case.kv_scales[0], want.shape[1]
    mine = case.q, case.k, case.plan, scale, tuple(heads), valid
    found = triton_head_mass(*mine, None, width, tile)
    assert found.dtype == torch.float32 and found.is_contiguous()
    # Queries of a float8 cache are rounded to float16 with the scale in them.
    looser = 100.0 if case.k.dtype == FP8 else 1.0
    close(found, want, case.q.dtype, looser)
    before = torch.rand(len(case.plan), width + 3)[:, :width]
    after = before.clone()
    assert triton_head_mass(*mine, after, width, tile) is after
    torch.testing.assert_close(after, before + found)


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_u3_ragged_batches_equal_float64(dtype: torch.dtype, page_size: int) -> None:
    """Empty prefixes and requests, partly filled pages, poison all around; one head, and more of one key head than of the other."""
    case = make_prefix_case(LENS, ROWS, dtype=dtype, page_size=page_size)
    for heads in ([3], [0, 1, 3]):
        check(case, heads)


def test_rows_that_do_not_count_have_no_influence() -> None:
    """A7: their queries are NaN; of some requests no row counts."""
    for seed in range(2):
        case = make_prefix_case(LENS, ROWS, seed=seed)
        valid = some_rows(case, seed)
        check(case, [0, 3], valid=valid.T.contiguous().T if seed else valid)


def test_without_a_row_that_counts_no_key_is_read() -> None:
    case = make_prefix_case([40], [2])
    case.plan.pages_BW.fill_(1 << 30)
    found = head_mass(case.q, case.k, case.plan, case.scale, [0], torch.zeros(1, 2, dtype=torch.bool), backend="triton")
    assert not found.any()


@pytest.mark.parametrize("columns", [1, 40, 77, 200])
def test_more_columns_than_the_lists_hold(columns: int) -> None:
    lens = [min(columns, n) for n in (0, 40, 33)]
    check(make_prefix_case(lens, [1, 2, 1], page_size=5), [0, 2], columns)


@pytest.mark.parametrize("seed", range(4))
def test_any_batch(seed: int) -> None:
    """Random lengths, rows, groups, head sizes, pages, heads and tiles."""
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
    heads = rng.sample(range(kv_heads * group), rng.randint(1, min(4, kv_heads * group)))
    for turns in (1, 3):
        check(case, heads, tile=SMALL._replace(turns=turns))


def test_rows_beyond_a_tile_take_several() -> None:
    check(make_prefix_case([20, 33], [23, 1], heads=8, kv_heads=2), [0, 1, 2, 3, 7])


def test_a_float8_cache_is_read_with_its_scale() -> None:
    check(make_prefix_case([40, 0, 3], [2, 1, 5], dtype=torch.bfloat16, cache=FP8, kv_scales=(0.5, 3.0)), [1, 2])


def test_the_chosen_tiles_are_right_too() -> None:
    for rows, dtype in ((1, torch.float32), (6, torch.bfloat16), (17, torch.float16)):
        check(make_prefix_case([300], [rows], heads=4, kv_heads=1, size=8, dtype=dtype), [0, 2], tile=None)


def test_strided_queries_and_keys() -> None:
    case = make_prefix_case([30, 30], [2, 2])
    case.q, case.k = torch.cat([case.q, case.q], 1)[:, :4], torch.stack([case.k, case.v], 1)[:, 0]
    check(case, [1, 3])


def test_huge_scores_stay_finite() -> None:
    """A4: scores of +-1e4 and more; all mass is on few columns."""
    case = make_prefix_case([50], [2])
    case.k[case.slots[0]] *= 3e3
    found = head_mass(case.q, case.k, case.plan, case.scale, [0, 2], backend="triton")
    torch.testing.assert_close(found.sum(), torch.tensor(4.0))


def test_a_plan_on_the_device_serves_whatever_lengths_and_rows_are_filled_in() -> None:
    """As a CUDA graph does: shapes and grid are fixed, page lists, lengths and the rows that count change in place."""
    cases = [make_prefix_case(lens, [3, 3], slots=80) for lens in ([60, 0], [1, 2], [0, 0], [17, 60])]
    width = max(c.plan.pages_BW.shape[1] for c in cases)
    pages, lens, cu = torch.zeros(2, width, dtype=torch.int32), torch.zeros(2, dtype=torch.int32), [0, 3, 6]
    plan = AttentionPlan.on_device(pages, lens, torch.tensor(cu, dtype=torch.int32), cu)
    valid = torch.zeros(2, 3, dtype=torch.bool)
    for seed, case in enumerate(cases):
        pages[:, : case.plan.pages_BW.shape[1]] = case.plan.pages_BW
        lens.copy_(case.plan.lens_B)
        valid.copy_(some_rows(case, seed)[:, :3])
        found = head_mass(case.q, case.k, plan, case.scale, [0, 3], valid, backend="triton")
        close(found, expected_mass(case, [0, 3], width, valid))


def test_places_name_every_chosen_head_once_beside_those_of_its_key_head() -> None:
    assert head_places((9, 0, 2, 8, 11), 4, torch.device("cpu")).tolist() == [
        [[0, 0], [2, 1], [-1, -1]],
        [[8, 2], [9, 3], [11, 4]],
    ]


@pytest.mark.parametrize("rows", [1, 16, 17, 64, 65, 1024])
def test_tiles_hold_their_rows_or_are_the_largest_and_fit(rows: int) -> None:
    for size in (64, 128, 256):
        for element in (1, 2, 4):
            for columns in (1, 125_000, 16 << 15, 1 << 30):
                tile = mass_tile_for(rows, size, element, columns)
                assert tile.rows >= min(rows, 32 if element == 4 else 128)
                assert tile.stages * tile.columns * size * element <= 76 << 10, "three programs of a multiprocessor"
                assert 256 <= tile.turns * tile.columns <= 1024
