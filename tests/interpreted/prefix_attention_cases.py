"""The Triton prefix kernel in Triton's interpreter, against float64 (run by test_kernels_prefix_attention.py, TRITON_INTERPRET=1)."""

import itertools
import random

import pytest
import torch
from prefix_case import PrefixCase, make_prefix_case

from longdraft.kernels import triton_prefix
from longdraft.kernels.plan import AttentionPlan
from longdraft.kernels.prefix_attention import prefix_attention
from longdraft.kernels.triton_prefix import Tile, tile_for, triton_prefix_attention

SMALL = Tile(
    16, 16, 4, 2, 1, 3
)  # many blocks, several tiles of rows and shares that end inside of units, at small sizes


def check(case: PrefixCase, tile: Tile | None = SMALL) -> None:
    out, lse = triton_prefix_attention(case.q, case.k, case.v, case.plan, case.scale, case.kv_scales, tile)
    case.check(out, lse)


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_ragged_batches_equal_float64(dtype: torch.dtype, page_size: int) -> None:
    """A1, A3, A7, A8: empty prefixes and requests, block edges, partly filled last pages, poison all around."""
    lens, rows = [0, 17, 16, 1, 0, 70], [3, 1, 6, 0, 1, 2]
    check(make_prefix_case(lens, rows, heads=4, kv_heads=2, size=16, dtype=dtype, page_size=page_size))


@pytest.mark.parametrize("seed", range(4))
def test_any_batch_however_the_line_is_cut(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Random lengths, rows, groups and head sizes; one wave of programs and several, more than there are blocks and fewer."""
    rng = random.Random(seed)
    requests, kv_heads, group = rng.randint(1, 5), rng.randint(1, 3), rng.choice([1, 2, 3, 5])
    case = make_prefix_case(
        [rng.choice([0, rng.randint(1, 90)]) for _ in range(requests)],
        [rng.randint(0, 9) for _ in range(requests)],
        heads=kv_heads * group,
        kv_heads=kv_heads,
        size=rng.choice([5, 16, 24]),
        page_size=rng.choice([1, 4, 16]),
        seed=seed,
    )
    for resident, waves, full in ((1, 1, 2048), (5, 2, 2048), (1, 9, 48)):
        monkeypatch.setattr(triton_prefix, "FULL", full)
        monkeypatch.setattr(triton_prefix, "PIECES", 2)  # the pieces of a row in several goes
        check(case, SMALL._replace(resident=resident, waves=waves))


def test_rows_beyond_a_tile_take_several() -> None:
    """37 rows of two heads in tiles of 16, beside a request of one row."""
    check(make_prefix_case([20, 33], [37, 1], heads=2, kv_heads=1, size=16))


@pytest.mark.parametrize("queries", [torch.bfloat16, torch.float16], ids=str)
def test_a_float8_cache_is_read_with_its_scales(queries: torch.dtype) -> None:
    check(make_prefix_case([40, 0, 3], [2, 1, 5], dtype=queries, cache=torch.float8_e4m3fn, kv_scales=(0.5, 3.0)))


def test_the_chosen_tiles_are_right_too() -> None:
    for rows, dtype in ((1, torch.float32), (6, torch.bfloat16), (9, torch.float16), (17, torch.bfloat16)):
        check(make_prefix_case([70, 5], [rows, 1], heads=8, kv_heads=2, size=8, dtype=dtype), None)


def test_huge_scores_stay_finite() -> None:
    """A4: scores of +-1e4, the largest in the last block."""
    case = make_prefix_case([50], [2], size=16)
    case.k[case.slots[0]] *= 3e3
    assert float((case.q[:, :1] @ case.k[case.slots[0], 0].T).abs().max()) > 1e4
    check(case)


def test_sharing_a_page_list_and_reading_strided_caches() -> None:
    """A cache that holds keys and values side by side is two strided views; requests may read the same slots."""
    case = make_prefix_case([30, 30], [2, 2], size=16)
    both = torch.stack([case.k, case.v], 1)
    case.k, case.v = both[:, 0], both[:, 1]
    case.plan.pages_BW[1] = case.plan.pages_BW[0]
    case.slots[1] = case.slots[0]
    check(case)


def test_a_plan_on_the_device_serves_whatever_lengths_are_filled_in() -> None:
    """As a CUDA graph does: shapes, grid and pieces are fixed, page lists and lengths change in place."""
    cases = [make_prefix_case(lens, [3, 3], size=16, slots=80) for lens in ([60, 0], [1, 2], [0, 0], [17, 60])]
    width = max(c.plan.pages_BW.shape[1] for c in cases)
    pages, lens, cu = torch.zeros(2, width, dtype=torch.int32), torch.zeros(2, dtype=torch.int32), [0, 3, 6]
    plan = AttentionPlan.on_device(pages, lens, torch.tensor(cu, dtype=torch.int32), cu)
    for case in cases:
        pages[:, : case.plan.pages_BW.shape[1]] = case.plan.pages_BW
        lens.copy_(case.plan.lens_B)
        case.check(*triton_prefix_attention(case.q, case.k, case.v, plan, case.scale, tile=SMALL))


def test_a_nan_that_is_read_shows() -> None:
    case = make_prefix_case([20, 20], [1, 1], size=16)
    case.v[case.slots[1][7]] = float("nan")
    out, _ = triton_prefix_attention(case.q, case.k, case.v, case.plan, case.scale, tile=SMALL)
    assert out[1].isnan().all()
    assert out[0].isfinite().all()


def test_every_program_has_an_equal_share_and_every_block_one_program(monkeypatch: pytest.MonkeyPatch) -> None:
    """The shares that the kernel takes, told apart by what each program writes: the pieces that are not left as they were."""
    lens, rows = [64, 0, 16, 160], [1, 2, 1, 3]
    case = make_prefix_case(lens, rows, heads=4, kv_heads=2, size=16)
    made: list[torch.Tensor] = []
    empty = torch.empty

    def marked(*size: int, **more: object) -> torch.Tensor:
        made.append(empty(*size, **more).fill_(-1.0))  # type: ignore[call-overload]
        return made[-1]

    monkeypatch.setattr(triton_prefix.torch, "empty", marked)
    monkeypatch.setattr(triton_prefix, "multiprocessors", lambda device: 5)
    check(case, SMALL)
    states = next(x for x in made if x.shape[0] == 2)[1]  # the weights of each piece's rows
    written = (states != -1).any(1).nonzero().flatten().tolist()
    blocks = [-(-n // 16) * 2 for n in lens]  # of both heads; no request has more than one tile of rows
    share = -(-sum(blocks) // 5)
    units = [(b, h) for b in range(4) for h in range(2)]
    starts = dict(zip(units, itertools.accumulate([blocks[b] // 2 for b, _ in units], initial=0), strict=False))
    want = [
        p + b * 2 + h for b, h in units for p in range(5)
        if max(p * share, starts[b, h]) < min((p + 1) * share, starts[b, h] + blocks[b] // 2)
    ]  # fmt: skip
    assert written == sorted(want)
    assert len(set(want)) == len(want), "a piece has one writer"


def test_prefix_attention_takes_the_kernel_by_name() -> None:
    case = make_prefix_case([20, 0], [2, 1], size=16)
    case.check(*prefix_attention(case.q, case.k, case.v, case.plan, case.scale, "triton"))


@pytest.mark.parametrize("rows", [1, 16, 17, 32, 33, 64, 65, 1024])
def test_tiles_hold_their_rows_or_are_the_largest(rows: int) -> None:
    for size, element in itertools.product((64, 128, 256), (1, 2, 4)):
        tile = tile_for(rows, size, element)
        assert tile.rows >= min(rows, 32 if element == 4 else 128)
        block = 2 * tile.keys * size * element
        assert block * tile.stages <= 160 << 10, "shared memory of the pipeline"
