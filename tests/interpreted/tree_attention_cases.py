"""The Triton tree and merge kernels in Triton's interpreter, against float64 (run by test_kernels_tree_attention.py)."""

import itertools
import random

import pytest
import torch
from attention_case import make_case
from tree_case import check, make_tree_case, merged_reference, other_part

from longdraft.kernels.hybrid_attention import hybrid_tree_attention
from longdraft.kernels.triton_merge import triton_merge_attention
from longdraft.kernels.triton_tree import tile_for, triton_tree_attention

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
NAN = float("nan")


@pytest.mark.parametrize("tile", [(16, 16), (32, 64), None], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_ragged_trees_equal_float64(dtype: torch.dtype, tile: tuple[int, int] | None) -> None:
    """A1, A3: empty requests, one node, block edges; groups that divide no tile."""
    case = make_tree_case([3, 0, 1, 17, 33], heads=6, dtype=dtype)
    got = triton_tree_attention(case.q, case.k, case.v, case.plan, case.scale, case.bits, tile=tile)
    check(got, case.expected(), dtype)


@pytest.mark.parametrize("seed", range(4))
def test_any_mask_over_any_keys(seed: int) -> None:
    """Masks that are no trees, rows that read nothing, as many keys as there are bits, odd sizes, another part or none."""
    rng = random.Random(seed)
    requests, kv_heads, group = rng.randint(1, 4), rng.randint(1, 3), rng.choice([1, 2, 3, 5])
    rows = [rng.randint(0, 20) for _ in range(requests)]
    case = make_tree_case(
        rows,
        keys=[rng.choice([0, 1, 64, 128, rng.randint(1, 128)]) for _ in rows],
        heads=kv_heads * group,
        kv_heads=kv_heads,
        size=rng.choice([5, 16, 24]),
        seed=seed,
        masks="any",
    )
    for tile, onto in itertools.product([(16, 16), (64, 32)], [None, other_part(case)]):
        got = triton_tree_attention(
            case.q, case.k, case.v, case.plan, case.scale, case.bits, case.cu_keys_B1, onto, tile
        )
        check(got, case.expected() if onto is None else merged_reference(case.expected(), onto), torch.float32)


def test_the_largest_tree_uses_the_sign_bits_of_both_words() -> None:
    case = make_tree_case([128], heads=2, kv_heads=1, masks="chains")
    assert (case.bits < 0).any(0).all()
    want = case.expected()
    for bits, keys in ((case.bits, 64), (None, 64), (None, 16)):
        got = triton_tree_attention(case.q, case.k, case.v, case.plan, case.scale, bits, tile=(64, keys))
        check(got, want, torch.float32)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_chain_is_the_causal_mask(dtype: torch.dtype) -> None:
    """A6, bit for bit, a poisoned last token included: no other row reads it."""
    case = make_tree_case([6, 1, 20], dtype=dtype, masks="chains")
    case.k[5], case.v[-1] = NAN, NAN
    args = case.q, case.k, case.v, case.plan, case.scale
    masked = triton_tree_attention(*args, case.bits, tile=(16, 16))
    causal = triton_tree_attention(*args, tile=(16, 16))
    check(causal, case.expected(), dtype)
    for a, b in zip(masked, causal, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("poison", [NAN, float("inf"), float("-inf"), 1e30], ids=str)
def test_poison_shows_to_its_readers_alone(poison: float) -> None:
    """A7: keys and values of some nodes are broken; rows that may not read them keep every bit."""
    case = make_tree_case([9, 30], masks="any", seed=3)
    args = case.q, case.k, case.v, case.plan, case.scale, case.bits
    clean = triton_tree_attention(*args, onto=other_part(case))
    for x, broken in itertools.product((case.k, case.v), (4, 20)):
        kept = x[broken].clone()
        x[broken] = poison
        b, first = (0, 0) if broken < 9 else (1, 9)
        reads = torch.zeros(39, dtype=torch.bool)
        reads[case.plan.rows_of(b)] = case.masks[b][:, broken - first]
        dirty = triton_tree_attention(*args, onto=other_part(case))
        for a, c in zip(dirty, clean, strict=True):
            assert torch.equal(a[~reads], c[~reads])
        if poison != 1e30:
            assert dirty[0][reads].isnan().all()
        x[broken] = kept


def test_rows_without_bits_are_zero_and_minus_infinity() -> None:
    """A3: rows that fill a fixed stride read nothing, and merge to nothing where the other part is empty too."""
    case = make_tree_case([4, 4])
    bits = case.bits
    bits[[2, 3, 7]] = 0
    args = case.q, case.k, case.v, case.plan, case.scale, bits
    out, lse = triton_tree_attention(*args)
    assert (out[[2, 3, 7]] == 0).all() and torch.isneginf(lse[[2, 3, 7]]).all()
    other = other_part(case)
    both = triton_tree_attention(*args, onto=other)
    assert (both[0][3] == 0).all() and torch.isneginf(both[1][3]).all()  # row 3 of the other part is empty too
    assert torch.equal(both[0][[2, 7]], other[0][[2, 7]]), "an empty tree leaves the other part as it is"
    torch.testing.assert_close(both[1][[2, 7]], other[1][[2, 7]], rtol=0, atol=0)
    assert torch.equal(both[0][[0, 6]], out[[0, 6]]), "an empty prefix leaves the tree as it is"


def test_bits_behind_a_requests_keys_name_nothing() -> None:
    """What stands there are the next request's keys, or nothing at all."""
    case = make_tree_case([5, 7, 3], masks="any")
    args = case.q, case.k, case.v, case.plan, case.scale
    bits = case.bits
    for b, n in enumerate((5, 7, 3)):
        bits[case.plan.rows_of(b), 0] |= -1 << n
    for a, b in zip(triton_tree_attention(*args, bits), triton_tree_attention(*args, case.bits), strict=True):
        assert torch.equal(a, b)


def test_huge_scores_stay_finite() -> None:
    """A4: scores of +-1e4 in the tree, log-sum-exps of +-1e4 in the other part."""
    case = make_tree_case([20], masks="any")
    case.k *= 5e3
    other = torch.randn_like(case.q), torch.tensor([1e4, -1e4]).repeat(20, 2)
    for onto in (None, other):
        got = triton_tree_attention(case.q, case.k, case.v, case.plan, case.scale, case.bits, onto=onto)
        want = case.expected() if onto is None else merged_reference(case.expected(), onto)
        check(got, want, torch.float32)
        assert not got[0].isnan().any()


def test_nodes_in_another_order_give_the_same_rows() -> None:
    """A5."""
    case = make_tree_case([40])
    order = torch.randperm(40, generator=torch.Generator().manual_seed(0))
    before = triton_tree_attention(case.q, case.k, case.v, case.plan, case.scale, case.bits)
    case.masks[0] = case.masks[0][order][:, order]
    after = triton_tree_attention(case.q[order], case.k[order], case.v[order], case.plan, case.scale, case.bits)
    torch.testing.assert_close(after[0], before[0][order])
    torch.testing.assert_close(after[1], before[1][order])


def test_strided_inputs_and_a_transposed_log_sum_exp() -> None:
    """Queries and values as slices of a projection, keys rotated anew, the log-sum-exp as FlashAttention-3 hands it over."""
    case = make_tree_case([5, 9], masks="any")
    q, _, v = torch.cat([case.q, case.k, case.v], 1).split([4, 2, 2], 1)
    k = case.k
    out, lse = other_part(case)
    onto = out.mT.contiguous().mT, lse.t().contiguous().t()
    got = triton_tree_attention(q, k, v, case.plan, case.scale, case.bits, onto=onto)
    check(got, merged_reference(case.expected(), onto), torch.float32)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("parts", "size"), [(1, 16), (2, 5), (3, 128), (5, 96)])
def test_any_number_of_parts_merges(parts: int, size: int, dtype: torch.dtype) -> None:
    """A2, A3, A4: empty parts hold NaN, a row is empty in all of them, a part's log-sum-exps are huge."""
    case = make_tree_case([13, 8], heads=3, kv_heads=1, size=size, dtype=dtype)
    made = [other_part(case, seed) for seed in range(parts)]
    for i, (out, lse) in enumerate(made):
        lse[i + 1 :: 4], out[i + 1 :: 4] = float("-inf"), NAN
    made[0][1][5] = 1e4
    outs, lses = (torch.stack(column) for column in zip(*made, strict=True))
    got = triton_merge_attention(outs, lses)
    check(got, merged_reference(*made), dtype)
    assert torch.isneginf(got[1][0]).all() and (got[0][0] == 0).all()
    for order in itertools.islice(itertools.permutations(range(parts)), 3):
        again = triton_merge_attention(outs[list(order)], lses[list(order)])
        torch.testing.assert_close(again[1], got[1])
    assert torch.equal(triton_merge_attention(outs[:1], lses[:1])[1], lses[0])
    assert triton_merge_attention(outs[:, :0], lses[:, :0])[0].shape == (0, 3, size)


def test_a_broken_part_shows() -> None:
    out, lse = torch.ones(2, 1, 1, 4), torch.zeros(2, 1, 1)
    lse[1] = NAN
    assert all(x.isnan().all() for x in triton_merge_attention(out, lse))
    case = make_tree_case([3])
    onto = torch.ones_like(case.q), torch.full(case.q.shape[:2], NAN)
    assert triton_tree_attention(case.q, case.k, case.v, case.plan, case.scale, case.bits, onto=onto)[0].isnan().all()


def test_the_hybrid_takes_the_kernels_by_name() -> None:
    case = make_case([20, 0, 7], [2, 3, 1])
    args = case.q, case.k, case.v, case.k_cache, case.v_cache, case.plan, case.scale
    out = hybrid_tree_attention(*args, case.bits, "triton")
    torch.testing.assert_close(out.double(), case.expected(), rtol=1e-4, atol=1e-5)
    out = hybrid_tree_attention(*args, backend="triton")
    torch.testing.assert_close(out.double(), case.expected(causal=True), rtol=1e-4, atol=1e-5)


def test_tiles_leave_every_multiprocessor_a_program_where_there_is_work_for_it() -> None:
    assert tile_for(8, 69 * 4, 128, 2, 132) == (16, 32)  # one request: 144 programs
    assert tile_for(16 * 8, 69 * 4, 128, 2, 132) == (64, 32)
    assert tile_for(16 * 8, 6 * 4, 128, 2, 132) == (16, 32)  # 24 packed rows: 256 programs of 16, 128 of 32
    assert tile_for(32 * 8, 6 * 4, 64, 2, 132) == (32, 64)
    assert tile_for(64 * 8, 4, 128, 2, 132) == (16, 32)
    assert tile_for(64 * 8, 69 * 4, 256, 2, 132) == (32, 16)
    assert tile_for(64 * 8, 69 * 4, 128, 4, 132) == (16, 16)
