"""Hybrid tree attention over page lists against the dense reference (A1, A3, A5 to A8)."""

import dataclasses

import pytest
import torch
from attention_case import Case, ancestor_mask, bits_of, make_case
from hypothesis import given, settings
from hypothesis import strategies as st

from longdraft.kernels.dense_attention import dense_attention
from longdraft.kernels.hybrid_attention import hybrid_tree_attention
from longdraft.kernels.plan import AttentionPlan, consecutive_runs
from longdraft.kernels.prefix_attention import checked_backend, gather_slots, prefix_attention
from longdraft.kernels.tree_attention import MAX_TREE, tree_attention


def hybrid(case: Case, masks: list[torch.Tensor] | None) -> torch.Tensor:
    bits = None if masks is None else bits_of(masks)
    return hybrid_tree_attention(
        case.q, case.k, case.v, case.k_cache, case.v_cache, case.plan, case.scale, bits, "torch"
    )


requests = st.lists(st.tuples(st.integers(0, 20), st.integers(0, 6)), min_size=1, max_size=4)


@settings(max_examples=30, deadline=None)
@given(
    shapes=requests,
    kv_heads=st.integers(1, 3),
    group=st.integers(1, 3),
    size=st.integers(2, 21),
    seed=st.integers(0, 99),
)
def test_trees_and_chains_of_any_batch_equal_dense_attention(
    shapes: list[tuple[int, int]], kv_heads: int, group: int, size: int, seed: int
) -> None:
    """A1, A3, A6, A7: prefixes and trees may be empty, heads grouped, and slots outside the page lists hold NaN."""
    lens, rows = [n for n, _ in shapes], [m for _, m in shapes]
    case = make_case(lens, rows, heads=kv_heads * group, kv_heads=kv_heads, size=size, seed=seed)
    torch.testing.assert_close(hybrid(case, case.masks).double(), case.expected(), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(hybrid(case, None).double(), case.expected(causal=True), rtol=1e-4, atol=1e-5)


def test_a_tree_in_another_order_gives_the_same_rows() -> None:
    """A5: permuting nodes with their mask permutes the output."""
    case = make_case([13], [7], seed=3)
    order = torch.randperm(7, generator=torch.Generator().manual_seed(1))
    before = hybrid(case, case.masks)
    case.q, case.k, case.v = case.q[order], case.k[order], case.v[order]
    after = hybrid(case, [case.masks[0][order][:, order]])
    torch.testing.assert_close(after, before[order])


def test_the_tree_part_is_the_request_alone() -> None:
    """Rows of one request never read another's new tokens, under masks as under the causal default."""
    case = make_case([4, 0, 9], [3, 5, 2], seed=5)
    together = tree_attention(case.q, case.k, case.v, case.plan, case.scale, bits_of(case.masks))
    for b in range(3):
        rows = case.plan.rows_of(b)
        alone = dense_attention(case.q[rows], case.k[rows], case.v[rows], case.scale, case.masks[b])
        assert torch.equal(together[0][rows], alone[0])
        assert torch.equal(together[1][rows], alone[1])


def test_a_poisoned_sibling_changes_no_other_branch() -> None:
    """A7 inside the tree: two branches of one root, one of them NaN."""
    case = make_case([6], [3], seed=2)
    mask = ancestor_mask([-1, 0, 0])
    before = hybrid(case, [mask])
    case.k[2], case.v[2] = float("nan"), float("nan")
    after = hybrid(case, [mask])
    assert torch.equal(before[:2], after[:2])
    assert after[2].isnan().all()


def test_scattered_reversed_and_consecutive_pages_read_the_same() -> None:
    """A8: the order of slots changes only the rounding; consecutive ones come as a view, which changes nothing at all."""
    k, v, q = (torch.randn(n, h, 16, generator=torch.Generator().manual_seed(n)) for n, h in ((30, 2), (31, 2), (2, 4)))
    v = v[:30]
    order = torch.randperm(30, generator=torch.Generator().manual_seed(9))
    where = torch.argsort(order)  # slot of each key once the cache is shuffled

    def attend(keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return prefix_attention(q, keys, values, AttentionPlan.build(slots[None], [12], [2]), 0.25, "torch")

    straight = attend(k, v, torch.arange(5, 17))
    shuffled = attend(k[order], v[order], where[5:17])
    backwards = attend(k, v, torch.arange(16, 4, -1))
    assert torch.equal(straight[0], shuffled[0])
    assert torch.equal(straight[1], shuffled[1])
    torch.testing.assert_close(straight[0], backwards[0])
    torch.testing.assert_close(straight[1], backwards[1])


def test_gather_slots_views_a_run_and_copies_anything_else() -> None:
    """A run that only looks consecutive by its ends (a duplicate and a gap) must not be taken for one."""
    cache = torch.arange(20.0).view(10, 1, 2)
    run = gather_slots(cache, torch.tensor([3, 4, 5], dtype=torch.int32))
    assert run.data_ptr() == cache[3].data_ptr()
    for slots in ([3, 5, 5, 6], [3, 5, 4, 6], [6, 5, 4], [7], []):
        picked = gather_slots(cache, torch.tensor(slots, dtype=torch.int32))
        assert torch.equal(picked, cache[torch.tensor(slots, dtype=torch.long)])


def test_the_prefix_part_of_an_empty_prefix_is_zero_and_minus_infinity() -> None:
    case = make_case([0, 5], [2, 1], seed=1)
    out, lse = prefix_attention(case.q, case.k_cache, case.v_cache, case.plan, case.scale, "torch")
    assert (out[:2] == 0).all()
    assert torch.isneginf(lse[:2]).all()
    assert out[2].isfinite().all()
    assert lse[2].isfinite().all()


def test_bad_trees_and_plans_are_refused() -> None:
    pages = torch.zeros(2, 3, dtype=torch.int32)
    with pytest.raises(ValueError, match="2 page lists got 1 lengths"):
        AttentionPlan.build(pages, [1], [1, 1])
    with pytest.raises(ValueError, match="reads 4 slots, its page list holds 3"):
        AttentionPlan.build(pages, [4, 1], [1, 1])
    case = make_case([1], [MAX_TREE + 1])
    with pytest.raises(ValueError, match="129 new tokens, tree attention takes at most 128"):
        tree_attention(case.q, case.k, case.v, case.plan, case.scale)
    case = make_case([1], [65])
    with pytest.raises(ValueError, match="65 new tokens, its bits name 64"):
        tree_attention(case.q, case.k, case.v, case.plan, case.scale, bits_of(case.masks)[:, :1])


def test_a_plan_knows_its_rows() -> None:
    plan = AttentionPlan.build(torch.zeros(3, 9, dtype=torch.int64), [2, 0, 9], [1, 4, 0])
    assert [plan.rows_of(b) for b in range(3)] == [slice(0, 1), slice(1, 5), slice(5, 5)]
    assert plan.max_rows == 4
    assert len(plan) == 3
    assert plan.pages_BW.dtype == torch.int32
    assert plan.lens_B.tolist() == [2, 0, 9]
    assert plan.cu_rows_B1.tolist() == [0, 1, 5, 5]


def test_a_cpu_reads_with_torch() -> None:
    case = make_case([3], [1], dtype=torch.bfloat16)
    assert checked_backend(None, case.q, case.k_cache, case.plan) == "torch"


def test_the_hybrid_reads_pages_of_16_and_float8_with_its_scales() -> None:
    """The new tokens' own keys and values are not in the cache's units."""
    case = make_case([37, 0], [3, 2], dtype=torch.bfloat16)
    want = case.expected()
    pages = torch.tensor([[2, 0, 4], [1, 1, 1]])
    k, v = (torch.full((96, *x.shape[1:]), float("nan"), dtype=torch.float8_e4m3fn) for x in (case.k, case.v))
    where = AttentionPlan.build(pages, [37, 0], [3, 2], 16)
    slots = where.slots(0, 37)
    k[slots] = (case.k_cache[case.slots[0]].float() / 0.25).to(k.dtype)
    v[slots] = (case.v_cache[case.slots[0]].float() / 4.0).to(k.dtype)
    out = hybrid_tree_attention(case.q, case.k, case.v, k, v, where, case.scale, case.bits, kv_scales=(0.25, 4.0))
    torch.testing.assert_close(out.double(), want, rtol=0.1, atol=0.08)


@pytest.mark.parametrize(
    ("slots", "runs"),
    [
        ([], None),
        ([7], (slice(7, 8),)),
        ([3, 4, 5], (slice(3, 6),)),
        ([3, 4, 9, 10, 2], (slice(3, 5), slice(9, 11), slice(2, 3))),
        ([5, 4, 3], (slice(5, 6), slice(4, 5), slice(3, 4))),
        (list(range(0, 40, 2)), None),
    ],
)
def test_runs_of_consecutive_slots(slots: list[int], runs: tuple[slice, ...] | None) -> None:
    assert consecutive_runs(torch.tensor(slots, dtype=torch.int32)) == runs


def test_a_prefix_in_a_few_runs_attends_like_one_that_is_gathered() -> None:
    torch.manual_seed(0)
    k, v = torch.randn(2, 200, 2, 8)
    q = torch.randn(3, 4, 8)
    slots = torch.tensor([[*range(100, 160), *range(20, 60), 5, *range(190, 199)]], dtype=torch.int32)
    plan = AttentionPlan.build(slots, [110], [3])
    assert plan.runs[0] is not None
    assert len(plan.runs[0]) == 4
    gathered = dataclasses.replace(plan, runs=(None,))
    for got, want in zip(prefix_attention(q, k, v, plan, 0.4), prefix_attention(q, k, v, gathered, 0.4), strict=True):
        torch.testing.assert_close(got, want)
