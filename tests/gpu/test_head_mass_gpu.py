"""Dustin's scores and sets on a card against float64 and the CPU, in and out of CUDA graphs. Needs torch and Triton."""

import pytest
import torch
from block_case import close
from mass_case import some_rows
from prefix_case import PrefixCase, make_prefix_case

from longdraft.kernels.head_mass import head_mass
from longdraft.kernels.plan import AttentionPlan
from longdraft.kernels.top_set import top_set
from longdraft.kernels.triton_head_mass import MassTile, triton_head_mass
from longdraft.serve.views.token_set import SparseBudget, choose_tokens

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

FP8 = torch.float8_e4m3fn
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
HEADS = [(32, 8, 128), (28, 4, 128), (8, 1, 64), (9, 3, 64), (24, 8, 96), (16, 2, 256), (5, 1, 40)]
BATCHES = [
    ([0], [1]),
    ([0, 7, 0], [3, 1, 6]),
    ([127, 128, 129, 64], [1, 2, 0, 5]),
    ([4097, 1, 0, 1500], [6, 6, 1, 6]),
    ([300, 2000], [40, 17]),
]


def check(
    case: PrefixCase,
    heads: list[int],
    valid: torch.Tensor | None = None,
    columns: int | None = None,
    tile: MassTile | None = None,
) -> None:
    """Against the twin in float64, which other tests hold to a plain loop."""
    kv_scale = case.kv_scales[0]
    want = head_mass(case.q.double(), case.k.double(), case.plan, case.scale, heads, valid, None, kv_scale, columns)
    scale, width = case.scale * kv_scale, want.shape[1]
    found = triton_head_mass(case.q, case.k, case.plan, scale, tuple(heads), valid, None, width, tile)
    assert found.dtype == torch.float32
    # Tensor cores add 16-bit products in float32, not in one order; queries of a float8 cache are rounded to float16.
    looser = 300.0 if case.k.dtype == FP8 else 10.0
    close(found, want.cpu(), case.q.dtype, looser)
    after = torch.ones_like(found)
    triton_head_mass(case.q, case.k, case.plan, scale, tuple(heads), valid, after, width, tile)
    torch.testing.assert_close(after, found + 1)


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", HEADS, ids=str)
@pytest.mark.parametrize("batch", BATCHES, ids=[f"b{len(lens)}max{max(lens)}" for lens, _ in BATCHES])
def test_u3_equals_float64(
    batch: tuple[list[int], list[int]], shape: tuple[int, int, int], dtype: torch.dtype, page_size: int
) -> None:
    """A3, A7, A8: empty prefixes and requests, partly filled pages, poison in what is not listed, rows that do not count."""
    heads, kv_heads, size = shape
    case = make_prefix_case(
        *batch, heads=heads, kv_heads=kv_heads, size=size, dtype=dtype, page_size=page_size, device="cuda"
    )
    check(case, [heads - 1])
    check(case, [0, 1, 2, heads - 1])
    check(case, [h * heads // 4 for h in range(4)], some_rows(case))


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
def test_float8_caches_are_read_with_their_scale(dtype: torch.dtype, page_size: int) -> None:
    case = make_prefix_case(
        [0, 700, 33], [2, 6, 1], heads=32, kv_heads=8, size=128, dtype=dtype, page_size=page_size, cache=FP8,
        kv_scales=(0.5, 2.0), device="cuda",
    )  # fmt: skip
    check(case, [1, 2, 17, 30])


@pytest.mark.parametrize("tile", [MassTile(16, 16, 3, 4, 2), MassTile(64, 32, 1, 8, 4), MassTile(128, 64, 2, 8, 2)])
def test_other_tiles_give_the_same(tile: MassTile) -> None:
    more = {"heads": 32, "kv_heads": 8, "size": 128, "dtype": torch.bfloat16, "device": "cuda"}
    check(make_prefix_case([3000, 0, 77], [6, 2, 20], **more), [0, 1, 2, 9], tile=tile, columns=5000)  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_chosen_tiles_fit_this_card(dtype: torch.dtype) -> None:
    """Shared memory and registers for every number of rows and head size."""
    for rows in (1, 6, 12, 33):
        for size in (64, 128, 256):
            case = make_prefix_case([100], [rows], heads=8, kv_heads=2, size=size, dtype=dtype, device="cuda")
            check(case, [0, 1, 2, 3])


def test_the_same_score_every_time() -> None:
    case = make_prefix_case([9000, 50], [5, 5], heads=32, kv_heads=8, size=128, dtype=torch.bfloat16, device="cuda")
    first, second = (head_mass(case.q, case.k, case.plan, case.scale, [3, 9, 10, 31]) for _ in range(2))
    assert torch.equal(first, second)


@pytest.mark.parametrize(("rows", "entries", "room"), [(1, 125_000, 512), (16, 32_768, 512), (16, 2048, 256), (3, 7813, 256),
                                                       (2, 1_000_000, 2048), (4, 100, 100), (2, 8192, 4096), (1, 9000, 4096)])  # fmt: skip
def test_sets_are_those_of_the_cpu(rows: int, entries: int, room: int) -> None:
    """Half-precision scores tie often; some rows are of one value, of zeros of both signs, or hold NaN."""
    g = torch.Generator().manual_seed(0)
    score_BN = torch.randn(rows, entries, generator=g).bfloat16().float().exp() * 1e-6
    score_BN[-1, ::3] = float("nan")
    count_B = torch.randint(0, room + 1, (rows,), generator=g)
    end_B = torch.randint(entries // 2, entries + 5, (rows,), generator=g)
    for scores in (score_BN, torch.zeros(rows, entries).copysign(score_BN - 1e-6)):
        found = top_set(scores.cuda(), count_B.cuda(), end_B.cuda(), room, 4)
        assert torch.equal(found.cpu(), top_set(scores, count_B, end_B, room, 4))


@pytest.mark.parametrize(
    "budget", [SparseBudget(), SparseBudget(128, lookahead=0), SparseBudget(256, lookahead=236)], ids=str
)
@pytest.mark.parametrize(("batch", "columns"), [(16, 32_768), (1, 125_000), (3, 700), (2, 300_000), (5, 4096)])
def test_u1_tokens_are_those_of_the_cpu(batch: int, columns: int, budget: SparseBudget) -> None:
    """Ties, NaN, lengths of all kinds, and rows of which one source or both say nothing."""
    g = torch.Generator().manual_seed(0)
    draft_BN, target_BN = torch.randn(2, batch, columns, generator=g).bfloat16().float().exp().mul(1e-6).unbind()
    draft_BN[batch // 2], target_BN[-1, ::7] = 0.0, float("nan")
    target_BN[batch // 3] = 0.0
    length_B = torch.randint(0, columns + 1, (batch,), generator=g)
    length_B[0] = columns
    for pair in ((draft_BN, target_BN), (None, target_BN), (draft_BN, None)):
        found = choose_tokens(*(None if x is None else x.cuda() for x in pair), length_B.cuda(), budget)
        want = choose_tokens(*pair, length_B, budget)
        assert all(torch.equal(got.cpu(), wanted) for got, wanted in zip(found, want, strict=True))


def test_captured_once_a_set_is_chosen_for_any_lengths_and_rows() -> None:
    """Two layers' scores, two sources and Equation 6 in one CUDA graph: nothing waits for the device, or capture would fail."""
    cases = [
        make_prefix_case(lens, [5] * 3, heads=32, kv_heads=8, size=128, dtype=torch.bfloat16, slots=21_000, device="cuda")
        for lens in ([3, 0, 1], [12_500, 400, 1], [0, 0, 0], [9800, 1801, 700])
    ]  # fmt: skip
    width, slots = max(c.plan.pages_BW.shape[1] for c in cases), max(len(c.k) for c in cases)
    pages, lens, cu = (torch.zeros(n, dtype=torch.int32, device="cuda") for n in ((3, width), 3, 4))
    cu += torch.arange(0, 20, 5, device="cuda")
    plan = AttentionPlan.on_device(pages, lens, cu, [0, 5, 10, 15])
    q, k = torch.zeros_like(cases[0].q), torch.zeros(slots, 8, 128, dtype=torch.bfloat16, device="cuda")
    valid, budget, scale = torch.zeros(3, 6, dtype=torch.bool, device="cuda"), SparseBudget(), cases[0].scale

    def choose() -> tuple[torch.Tensor, ...]:
        draft_BN = head_mass(q, k, plan, scale, [0, 5, 6, 31])
        draft_BN = head_mass(q, k, plan, scale, [1, 2, 3], out=draft_BN)
        target_BN = head_mass(q, k, plan, scale, [8, 9, 10, 11], valid)
        return draft_BN, target_BN, *choose_tokens(draft_BN, target_BN, lens.long(), budget)

    choose()  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        draft_BN, target_BN, *found = choose()
    for seed, case in enumerate(cases):
        pages.zero_()
        pages[:, : case.plan.pages_BW.shape[1]] = case.plan.pages_BW
        lens.copy_(case.plan.lens_B)
        q.copy_(case.q)
        k[: len(case.k)] = case.k
        valid.zero_()
        if seed:  # of the first no row counts
            valid[:, seed] = True
        graph.replay()
        want = choose_tokens(draft_BN.cpu(), target_BN.cpu(), lens.long().cpu(), budget)
        assert all(torch.equal(got.cpu(), wanted) for got, wanted in zip(found, want, strict=True))
        wide = case.q.double(), case.k.double(), case.plan, scale
        target = head_mass(*wide, [8, 9, 10, 11], valid, columns=width)
        draft = head_mass(*wide, [0, 5, 6, 31], columns=width) + head_mass(*wide, [1, 2, 3], columns=width)
        torch.testing.assert_close(target_BN.double(), target, rtol=1e-3, atol=1e-5)
        torch.testing.assert_close(draft_BN.double(), draft, rtol=1e-3, atol=1e-5)


def test_offsets_beyond_32_bits() -> None:
    """Slots in a cache of more than 2^31 elements, and more than 2^31 scores in between."""
    slots = (1 << 31) // (8 * 128) + 1000
    if torch.cuda.mem_get_info()[0] < 24 << 30:
        pytest.skip("needs 24 GB of free memory")
    k = torch.zeros(slots, 8, 128, dtype=torch.bfloat16, device="cuda")
    g = torch.Generator("cuda").manual_seed(0)
    k[-512:] = torch.randn(512, 8, 128, device="cuda", generator=g).bfloat16()
    listed = torch.arange(slots - 512, slots, dtype=torch.int32, device="cuda")
    q = torch.randn(5, 32, 128, device="cuda", generator=g).bfloat16()
    small, heads = AttentionPlan.build(listed[None], [512], [5]), list(range(32))
    want = head_mass(q, k, small, 0.1, heads, backend="torch")
    torch.testing.assert_close(head_mass(q, k, small, 0.1, heads), want, rtol=1e-4, atol=1e-4)
    times = (1 << 31) // (5 * 32 * 512) + 2
    lens, cu = (torch.tensor(x, dtype=torch.int32, device="cuda") for x in ([512 * times], [0, 5]))
    plan = AttentionPlan.on_device(listed.repeat(times)[None], lens, cu, [0, 5])
    found = head_mass(q, k, plan, 0.1, heads)
    torch.testing.assert_close(found[0, -512:] * times, want[0], rtol=1e-3, atol=1e-4)
