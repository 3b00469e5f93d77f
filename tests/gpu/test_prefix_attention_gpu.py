"""The prefix part's backends on a card against float64, in and out of CUDA graphs. Needs torch, Triton and SGLang's packages."""

import pytest
import torch
from prefix_case import PrefixCase, make_prefix_case

from longdraft.errors import UserError
from longdraft.kernels.flashinfer_prefix import flashinfer_available
from longdraft.kernels.plan import AttentionPlan
from longdraft.kernels.prefix_attention import BACKENDS, checked_backend, prefix_attention
from longdraft.kernels.triton_prefix import Tile, tile_for, triton_prefix_attention

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
    ([300, 20], [128, 17]),
]


def served(case: PrefixCase) -> list[str]:
    """Backends that can serve a case, but FlashInfer, which compiles for a minute, in one shape; refusals need no card."""
    usual = case.q.shape[-1] == 128 and case.q.dtype == torch.bfloat16
    fit = [n for n, b in BACKENDS.items() if b.unfit(case.q, case.k, case.plan) is None]
    return [n for n in fit if n != "flashinfer" or usual]


def check_all(case: PrefixCase, looser: float = 1.0) -> None:
    for backend in served(case):
        found = prefix_attention(case.q, case.k, case.v, case.plan, case.scale, backend, case.kv_scales)
        # FA3 multiplies float8 by float8: queries and weights have four bits.
        rough = 5.0 if backend == "fa3" and case.k.dtype == FP8 else 1.0
        case.check(*found, looser=looser * rough)


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", HEADS, ids=str)
@pytest.mark.parametrize("batch", BATCHES, ids=[f"b{len(lens)}max{max(lens)}" for lens, _ in BATCHES])
def test_every_backend_equals_float64(
    batch: tuple[list[int], list[int]], shape: tuple[int, int, int], dtype: torch.dtype, page_size: int
) -> None:
    """A1, A3, A7, A8: scattered pages, partly filled last ones, empty prefixes, poison around all that is listed."""
    heads, kv_heads, size = shape
    case = make_prefix_case(
        *batch, heads=heads, kv_heads=kv_heads, size=size, dtype=dtype, page_size=page_size, device="cuda"
    )
    assert {"triton", "torch"} <= set(served(case))
    check_all(case)


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
@pytest.mark.parametrize("shape", HEADS[:4], ids=str)
def test_float8_caches_are_read_with_their_scales(
    shape: tuple[int, int, int], dtype: torch.dtype, page_size: int
) -> None:
    heads, kv_heads, size = shape
    more = {"heads": heads, "kv_heads": kv_heads, "size": size, "dtype": dtype, "page_size": page_size}
    for lens, rows in (([0, 700, 33], [2, 6, 1]), ([129], [70])):
        check_all(make_prefix_case(lens, rows, cache=FP8, kv_scales=(0.5, 2.0), device="cuda", **more))  # type: ignore[arg-type]


def test_the_triton_kernel_captured_once_serves_any_lengths() -> None:
    """And nothing in it waits for the device: capture would fail."""
    cases = [
        make_prefix_case(
            lens, [6, 6, 6], heads=32, kv_heads=8, size=128, dtype=torch.bfloat16, slots=6000, device="cuda"
        )
        for lens in ([3, 0, 1], [2500, 100, 1], [0, 0, 0], [1800, 1800, 1800])
    ]
    width, slots = max(c.plan.pages_BW.shape[1] for c in cases), max(len(c.k) for c in cases)
    pages, lens, cu = (torch.zeros(n, dtype=torch.int32, device="cuda") for n in ((3, width), 3, 4))
    cu += torch.arange(0, 24, 6, device="cuda")
    plan = AttentionPlan.on_device(pages, lens, cu, [0, 6, 12, 18])
    q = torch.zeros_like(cases[0].q)
    k, v = (torch.zeros(slots, 8, 128, dtype=torch.bfloat16, device="cuda") for _ in "kv")
    prefix_attention(q, k, v, plan, cases[0].scale, "triton")  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = prefix_attention(q, k, v, plan, cases[0].scale, "triton")
    for case in cases:
        pages.zero_()
        pages[:, : case.plan.pages_BW.shape[1]] = case.plan.pages_BW
        lens.copy_(case.plan.lens_B)
        q.copy_(case.q)
        k[: len(case.k)], v[: len(case.v)] = case.k, case.v
        graph.replay()
        case.check(*found)


@pytest.mark.skipif(not flashinfer_available(), reason="needs FlashInfer")
def test_flashinfer_is_not_taken_for_a_plan_on_the_device() -> None:
    case = make_prefix_case([5], [1], size=128, dtype=torch.bfloat16, device="cuda")
    assert "flashinfer" in served(case)
    plan = case.plan
    on_device = AttentionPlan.on_device(plan.pages_BW, plan.lens_B, plan.cu_rows_B1, plan.cu_rows)
    assert checked_backend(None, case.q, case.k, on_device) in ("fa3", "triton")
    with pytest.raises(UserError, match="CUDA graph"):
        checked_backend("flashinfer", case.q, case.k, on_device)


@pytest.mark.parametrize(
    "tile", [Tile(16, 32, 4, 3, 1, 2), Tile(64, 32, 4, 3, 2, 8), Tile(128, 128, 8, 1, 1, 1)], ids=str
)
def test_other_tiles_give_the_same(tile: Tile) -> None:
    case = make_prefix_case(
        [3000, 0, 77], [6, 2, 40], heads=32, kv_heads=8, size=128, dtype=torch.bfloat16, device="cuda"
    )
    case.check(*triton_prefix_attention(case.q, case.k, case.v, case.plan, case.scale, tile=tile))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_chosen_tiles_fit_this_card(dtype: torch.dtype) -> None:
    """Shared memory and registers for every number of rows and head size."""
    for rows in (1, 6, 12, 33):
        for size in (64, 128, 256):
            case = make_prefix_case([100], [rows], heads=8, kv_heads=2, size=size, dtype=dtype, device="cuda")
            assert tile_for(rows * 4, size, case.k.element_size()).rows >= 16
            case.check(*triton_prefix_attention(case.q, case.k, case.v, case.plan, case.scale))


def test_offsets_beyond_32_bits() -> None:
    """Slots in a cache of more than 2^31 elements."""
    slots = (1 << 31) // (8 * 128) + 1000
    if torch.cuda.mem_get_info()[0] < 12 << 30:
        pytest.skip("needs 12 GB of free memory")
    k, v = (torch.zeros(slots, 8, 128, dtype=torch.bfloat16, device="cuda") for _ in "kv")
    g = torch.Generator("cuda").manual_seed(0)
    k[-500:], v[-500:] = (torch.randn(500, 8, 128, device="cuda", generator=g).bfloat16() for _ in "kv")
    listed = torch.arange(slots - 500, slots, device="cuda")
    q = torch.randn(6, 32, 128, device="cuda", generator=g).bfloat16()
    plan = AttentionPlan.build(listed[None].int(), [500], [6])
    case = PrefixCase(q, k, v, plan, [listed.tolist()], 0.1, (1.0, 1.0))
    case.check(*triton_prefix_attention(q, k, v, plan, 0.1))
