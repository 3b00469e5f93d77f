"""The kernels that score blocks on a card against float64, in and out of CUDA graphs, and the choice of a view. Needs torch and Triton."""

import pytest
import torch
from block_case import close
from prefix_case import PrefixCase, make_prefix_case

from longdraft.kernels.block_bound import Rule, block_bound
from longdraft.kernels.block_lse import block_lse
from longdraft.kernels.plan import AttentionPlan
from longdraft.kernels.triton_block_bound import bound_tile_for, triton_block_bound
from longdraft.kernels.triton_block_lse import BlockTile, block_tile_for, triton_block_lse
from longdraft.serve.views.budget import Budget
from longdraft.serve.views.choose import choose_columns
from longdraft.serve.views.selectors import make_selector

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

FP8 = torch.float8_e4m3fn
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
HEADS = [(32, 8, 128), (28, 4, 128), (8, 1, 64), (6, 6, 128), (9, 3, 64), (24, 8, 96), (16, 2, 256), (5, 1, 40)]
BATCHES = [
    ([0], [1]),
    ([1], [5]),
    ([0, 7, 0], [3, 1, 6]),
    ([127, 128, 129, 64], [1, 2, 0, 5]),
    ([4097, 1, 0, 1500], [6, 6, 1, 6]),
    ([300, 2000], [40, 17]),
]
RULES: list[Rule] = ["quest", "specpv"]


def check(case: PrefixCase, block: int = 16, blocks: int | None = None, plan: AttentionPlan | None = None) -> None:
    """Against the twins in float64, which other tests hold to a plain loop over blocks."""
    wide, scale, kv_scale = (case.q.double(), case.k.double(), case.plan), case.scale, case.kv_scales[0]
    mine = case.q, case.k, plan or case.plan
    # Tensor cores add 16-bit products in float32, not in one order; queries of a float8 cache are rounded to float16.
    looser = 300.0 if case.k.dtype == FP8 else 10.0
    found = block_lse(*mine, scale, block, blocks, "triton", kv_scale)
    assert found.dtype == torch.float32
    close(found, block_lse(*wide, scale, block, found.shape[2], "torch", kv_scale).cpu(), case.q.dtype, looser)
    for rule in RULES:
        found = block_bound(*mine, block, blocks, "triton", scale, rule)
        want = block_bound(*wide, block, found.shape[2], "torch", scale, rule)
        close(found, want.cpu(), case.q.dtype, 10.0)


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", HEADS, ids=str)
@pytest.mark.parametrize("batch", BATCHES, ids=[f"b{len(lens)}max{max(lens)}" for lens, _ in BATCHES])
def test_equals_float64(
    batch: tuple[list[int], list[int]], shape: tuple[int, int, int], dtype: torch.dtype, page_size: int
) -> None:
    """A3, A7, A8: empty prefixes and requests, partly filled blocks and pages, poison in what is not listed."""
    heads, kv_heads, size = shape
    check(
        make_prefix_case(
            *batch, heads=heads, kv_heads=kv_heads, size=size, dtype=dtype, page_size=page_size, device="cuda"
        )
    )


@pytest.mark.parametrize("block", [1, 2, 5, 32, 128, 1000])
@pytest.mark.parametrize("dtype", DTYPES[::2], ids=str)
def test_any_size_of_block_and_number_of_blocks(dtype: torch.dtype, block: int) -> None:
    more = {"heads": 32, "kv_heads": 8, "size": 128}
    for lens, rows in (([3000, 0, 77], [5, 5, 5]), ([129], [16])):
        case = make_prefix_case(lens, rows, dtype=dtype, device="cuda", **more)  # type: ignore[arg-type]
        for blocks in (None, 1, 70, 5000):
            check(case, block, blocks)


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
@pytest.mark.parametrize("shape", HEADS[:4], ids=str)
def test_float8_caches_are_read_with_their_scale(
    shape: tuple[int, int, int], dtype: torch.dtype, page_size: int
) -> None:
    heads, kv_heads, size = shape
    more = {"heads": heads, "kv_heads": kv_heads, "size": size, "dtype": dtype, "page_size": page_size}
    check(make_prefix_case([0, 700, 33], [2, 6, 1], cache=FP8, kv_scales=(0.5, 2.0), device="cuda", **more))  # type: ignore[arg-type]


@pytest.mark.parametrize("tile", [BlockTile(16, 16, 3, 4, 2), BlockTile(64, 32, 1, 8, 4), BlockTile(128, 64, 2, 8, 2)])
def test_other_tiles_give_the_same(tile: BlockTile) -> None:
    case = make_prefix_case(
        [3000, 0, 77], [6, 2, 20], heads=32, kv_heads=8, size=128, dtype=torch.bfloat16, device="cuda"
    )
    chosen = block_lse(case.q, case.k, case.plan, case.scale, blocks=190)
    other = triton_block_lse(case.q, case.k, case.plan, case.scale, 16, 190, tile)
    torch.testing.assert_close(other, chosen, rtol=1e-4, atol=1e-4)
    tile = tile._replace(blocks=min(tile.blocks, 32))
    bound = block_bound(case.q, case.k, case.plan, blocks=190)
    torch.testing.assert_close(
        triton_block_bound(case.q, case.k, case.plan, 16, 190, 1.0, "quest", tile), bound, rtol=1e-4, atol=1e-3
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_chosen_tiles_fit_this_card(dtype: torch.dtype) -> None:
    """Shared memory and registers for every number of rows and head size."""
    for rows in (1, 6, 12, 33):
        for size in (64, 128, 256):
            case = make_prefix_case([100], [rows], heads=8, kv_heads=2, size=size, dtype=dtype, device="cuda")
            element = case.k.element_size()
            assert (
                block_tile_for(rows * 4, size, element, 16).rows
                >= 16
                <= bound_tile_for(rows * 4, size, element, 16).rows
            )
            check(case)


def test_captured_once_a_view_is_chosen_for_any_lengths() -> None:
    """Scores, reduction and choice in one CUDA graph: nothing waits for the device, or capture would fail."""
    cases = [
        make_prefix_case(lens, [5] * 3, heads=32, kv_heads=8, size=128, dtype=torch.bfloat16, slots=6000, device="cuda")
        for lens in ([3, 0, 1], [2500, 400, 1], [0, 0, 0], [1800, 1801, 700])
    ]
    width, slots = max(c.plan.pages_BW.shape[1] for c in cases), max(len(c.k) for c in cases)
    pages, lens, cu = (torch.zeros(n, dtype=torch.int32, device="cuda") for n in ((3, width), 3, 4))
    cu += torch.arange(0, 20, 5, device="cuda")
    plan = AttentionPlan.on_device(pages, lens, cu, [0, 5, 10, 15])
    q, k = torch.zeros_like(cases[0].q), torch.zeros(slots, 8, 128, dtype=torch.bfloat16, device="cuda")
    blocks, budgets = -(-width // 16), [Budget(256, 16, 64), Budget(256, 16, 64, mass=0.5)]

    def choose() -> list[torch.Tensor]:
        found = []
        for name, budget in (("mass", budgets[0]), ("mass", budgets[1]), ("quest", budgets[0]), ("snapkv", budgets[0])):
            score_BN = make_selector(name).score([q, q], [k, k], plan, cases[0].scale, blocks)
            found += [score_BN, *choose_columns(score_BN, lens.long(), budget)]
        return found

    choose()  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = choose()
    for case in cases:
        pages.zero_()
        pages[:, : case.plan.pages_BW.shape[1]] = case.plan.pages_BW
        lens.copy_(case.plan.lens_B)
        q.copy_(case.q)
        k[: len(case.k)] = case.k
        graph.replay()
        for score_BN, column_BV, count_B, start_B, budget in zip(
            found[::4], found[1::4], found[2::4], found[3::4], [*budgets, budgets[0], budgets[0]], strict=True
        ):
            want = choose_columns(score_BN.cpu(), lens.long().cpu(), budget)
            for got, wanted in zip((column_BV, count_B, start_B), want, strict=True):
                assert torch.equal(got.cpu(), wanted)
        mass = make_selector("mass").score([case.q.double()] * 2, [case.k.double()] * 2, case.plan, case.scale, blocks)
        torch.testing.assert_close(found[0], mass, rtol=1e-4, atol=1e-4)


def test_offsets_beyond_32_bits() -> None:
    """Slots in a cache of more than 2^31 elements, and more than 2^31 results."""
    slots = (1 << 31) // (8 * 128) + 1000
    if torch.cuda.mem_get_info()[0] < 24 << 30:
        pytest.skip("needs 24 GB of free memory")
    k = torch.zeros(slots, 8, 128, dtype=torch.bfloat16, device="cuda")
    g = torch.Generator("cuda").manual_seed(0)
    k[-500:] = torch.randn(500, 8, 128, device="cuda", generator=g).bfloat16()
    listed = torch.arange(slots - 500, slots, dtype=torch.int32, device="cuda")
    q = torch.randn(5, 32, 128, device="cuda", generator=g).bfloat16()
    small = AttentionPlan.build(listed[None], [500], [5])
    want = block_lse(q, k, small, 0.1, 1, 500, "torch")
    torch.testing.assert_close(block_lse(q, k, small, 0.1, 1, 500, "triton"), want, rtol=1e-4, atol=1e-4)
    times = (1 << 31) // (5 * 32 * 500) + 2
    lens, cu = (torch.tensor(x, dtype=torch.int32, device="cuda") for x in ([500 * times], [0, 5]))
    found = block_lse(q, k, AttentionPlan.on_device(listed.repeat(times)[None], lens, cu, [0, 5]), 0.1, 1)
    assert found.numel() > 1 << 31
    torch.testing.assert_close(found[..., -500:], want, rtol=1e-4, atol=1e-4)
