"""The tree and merge kernels on a card against float64, in and out of CUDA graphs. Needs torch and Triton."""

import random

import pytest
import torch
from attention_case import ancestor_mask, bits_of, random_parents
from tree_case import TreeCase, check, make_tree_case, merged_reference, other_part

from longdraft.kernels.hybrid_attention import hybrid_tree_attention
from longdraft.kernels.merge import merge_attention
from longdraft.kernels.plan import AttentionPlan
from longdraft.kernels.prefix_attention import BACKENDS
from longdraft.kernels.tree_attention import tree_attention
from longdraft.kernels.tree_bits import ancestor_bits, unpack_bits
from longdraft.kernels.triton_tree import triton_tree_attention

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
HEADS = [(32, 8, 128), (28, 4, 128), (8, 1, 64), (6, 6, 96), (16, 2, 256), (5, 1, 40)]
BATCHES = [[1], [3, 0, 17, 64], [128, 65], [6] * 40]


def attend(case: TreeCase, **more: object) -> tuple[torch.Tensor, torch.Tensor]:
    return tree_attention(case.q, case.k, case.v, case.plan, case.scale, case.bits, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", HEADS, ids=str)
@pytest.mark.parametrize("rows", BATCHES, ids=[f"b{len(rows)}max{max(rows)}" for rows in BATCHES])
def test_trees_alone_and_onto_another_part_equal_float64(
    rows: list[int], shape: tuple[int, int, int], dtype: torch.dtype
) -> None:
    """A1, A3: any masks, rows without bits, parts that are empty and hold NaN."""
    heads, kv_heads, size = shape
    case = make_tree_case(rows, heads=heads, kv_heads=kv_heads, size=size, dtype=dtype, masks="any", device="cuda")
    want, onto = case.expected(), other_part(case)
    check(attend(case), want, dtype)
    check(attend(case, onto=onto), merged_reference(want, onto), dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_chain_is_the_causal_mask(dtype: torch.dtype) -> None:
    """A6."""
    case = make_tree_case([6, 1, 128], heads=32, kv_heads=8, size=128, dtype=dtype, masks="chains", device="cuda")
    masked = attend(case)
    causal = tree_attention(case.q, case.k, case.v, case.plan, case.scale)
    check(causal, case.expected(), dtype)
    for a, b in zip(masked, causal, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
@pytest.mark.parametrize("tile", [(16, 16), (16, 32), (32, 64), (64, 32), (128, 16)], ids=str)
def test_other_tiles_give_the_same(tile: tuple[int, int], dtype: torch.dtype) -> None:
    case = make_tree_case([69, 3, 128], heads=32, kv_heads=8, size=128, dtype=dtype, device="cuda")
    check(triton_tree_attention(case.q, case.k, case.v, case.plan, case.scale, case.bits, tile=tile), case.expected(), dtype)  # fmt: skip


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), 1e30], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_poison_shows_to_its_readers_alone(dtype: torch.dtype, poison: float) -> None:
    """A7."""
    case = make_tree_case([69], heads=8, kv_heads=2, size=128, dtype=dtype, device="cuda")
    clean = attend(case)
    for x in (case.k, case.v):
        kept = x[4].clone()
        x[4] = poison
        reads = case.masks[0][:, 4]
        dirty = attend(case)
        for a, b in zip(dirty, clean, strict=True):
            assert torch.equal(a[~reads], b[~reads])
        if poison != 1e30:
            assert dirty[0][reads].isnan().all()
        x[4] = kept


def test_huge_scores_stay_finite() -> None:
    """A4."""
    case = make_tree_case([60], heads=8, kv_heads=2, size=64, masks="any", device="cuda")
    case.k *= 5e3
    onto = torch.randn_like(case.q), torch.tensor([1e4, -1e4], device="cuda").repeat(60, 4)
    got = attend(case, onto=onto)
    assert got[0].isfinite().all()
    check(got, merged_reference(case.expected(), onto), torch.float32)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("parts", "size"), [(1, 128), (2, 128), (3, 40), (7, 256)])
def test_any_number_of_parts_merges(parts: int, size: int, dtype: torch.dtype) -> None:
    """A2, A3: row 0 is empty in all parts."""
    case = make_tree_case([30, 9], heads=6, kv_heads=1, size=size, dtype=dtype, device="cuda")
    made = [other_part(case, seed) for seed in range(parts)]
    got = merge_attention(*(torch.stack(column) for column in zip(*made, strict=True)))
    check(got, merged_reference(*made), dtype)
    assert (got[0][0] == 0).all()


def test_rows_of_a_depth_read_the_tree_so_far() -> None:
    case = make_tree_case([16] * 5, keys=[69, 5, 128, 0, 37], heads=32, kv_heads=8, size=128, dtype=torch.bfloat16, masks="any", device="cuda")  # fmt: skip
    check(attend(case, cu_keys_B1=case.cu_keys_B1), case.expected(), torch.bfloat16)


def test_bits_are_made_on_the_card() -> None:
    parents = [random_parents(n, random.Random(n)) for n in (128, 128, 128)]
    bits = ancestor_bits(torch.tensor(parents, dtype=torch.int32, device="cuda"))
    for tree, p in zip(bits, parents, strict=True):
        assert torch.equal(unpack_bits(tree, 128).cpu(), ancestor_mask(p))


def test_a_graph_serves_any_trees() -> None:
    """Bits from parents and attention, captured once with a fixed stride: nothing waits for the device. Trees change in place."""
    stride, requests = 40, 3
    plan = AttentionPlan.build(
        torch.zeros(requests, 1, dtype=torch.int32, device="cuda"), [0] * requests, [stride] * requests
    )
    parents = torch.full((requests, stride), -2, dtype=torch.int32, device="cuda")
    case = make_tree_case([stride] * requests, heads=32, kv_heads=8, size=128, dtype=torch.bfloat16, device="cuda")
    onto = other_part(case)

    def round_() -> tuple[torch.Tensor, torch.Tensor]:
        bits = ancestor_bits(parents).flatten(0, 1)
        return tree_attention(case.q, case.k, case.v, plan, case.scale, bits, onto=onto)

    round_()  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = round_()
    for seed in range(4):
        rng = random.Random(seed)
        parents.fill_(-2)
        for b in range(requests):
            count = rng.choice([0, 1, 7, stride])
            parents[b, :count] = torch.tensor(random_parents(count, rng)[:count], dtype=torch.int32)
            case.masks[b] = torch.zeros(stride, stride, dtype=torch.bool, device="cuda")
            case.masks[b][:count, :count] = ancestor_mask(parents[b, :count].tolist(), "cuda")
        graph.replay()
        check(found, merged_reference(case.expected(), onto), torch.bfloat16)


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
def test_the_hybrid_of_every_backend_is_the_twins(dtype: torch.dtype) -> None:
    g = torch.Generator("cuda").manual_seed(0)
    lens, rows = [0, 3000, 17], [69, 5, 1]

    def normal(count: int, heads: int) -> torch.Tensor:
        return torch.randn(count, heads, 128, generator=g, device="cuda").to(dtype)

    pages = torch.randperm(4000, generator=g, device="cuda")[:3100].repeat(3, 1)
    plan = AttentionPlan.build(pages, lens, rows)
    q, k, v, k_cache, v_cache = normal(75, 32), normal(75, 8), normal(75, 8), normal(4000, 8), normal(4000, 8)
    bits = bits_of([ancestor_mask(random_parents(n, random.Random(n)), "cuda") for n in rows])
    q64, k64, v64, kc64, vc64 = (x.double() for x in (q, k, v, k_cache, v_cache))
    want = hybrid_tree_attention(q64, k64, v64, kc64, vc64, plan, 0.1, bits, "torch")
    fit = [name for name, backend in BACKENDS.items() if backend.unfit(q, k_cache, plan) is None]
    assert {"triton", "torch"} <= set(fit)
    for name in fit:
        out = hybrid_tree_attention(q, k, v, k_cache, v_cache, plan, 0.1, bits, name)
        torch.testing.assert_close(
            out.double(), want, rtol=2e-2, atol=2e-2, msg=lambda text, name=name: f"{name}: {text}"
        )  # type: ignore[misc]
