"""Attention over views: the dense mask it equals, the budget it keeps, and what a draw depends on."""

from itertools import pairwise

import pytest
import torch
from attention_case import dense_reference
from hypothesis import given
from hypothesis import strategies as st

from longdraft.kernels.packed_attention import lagged_attention
from longdraft.kernels.view_attention import View, view_attention


def packed(length: int, heads: int = 4, kv_heads: int = 2, size: int = 8, seed: int = 0) -> list[torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    return [torch.randn(length, n, size, dtype=torch.float64, generator=g) for n in (heads, kv_heads, kv_heads)]


def visible(cu: list[int], lag: int, views: list[View | None], rows: int) -> torch.Tensor:
    """Bool ``[T, T]`` by the definition, a row at a time: who reads what."""
    mask = torch.zeros(cu[-1], cu[-1], dtype=torch.bool)
    for (a, b), view in zip(pairwise(cu), views, strict=True):
        generator = torch.Generator().manual_seed(view.seed if view else 0)
        for t in range(b - a):
            count = t - lag + 1
            if count <= 0:
                continue
            if view is None or count <= view.budget:
                mask[a + t, a : a + count] = True
                continue
            since = t - view.budget - lag
            if since % rows == 0:  # a chunk begins
                last = min(t + rows, b - a) - lag  # keys of its last row
                first, beyond = view.sinks // view.block, -(-(last - view.window) // view.block)
                blocks = {
                    first + i for i in torch.randperm(beyond - first, generator=generator)[: view.blocks].tolist()
                }
            for s in range(count):
                if s < view.sinks or s >= count - view.window or s // view.block in blocks:
                    mask[a + t, a + s] = True
    return mask


CASES = [
    ([0, 61], 1, [View(12, 2, 4, 3, 7)], 8),
    ([0, 61], 3, [View(20, 0, 5, 4, 1)], 8),
    ([0, 5, 5, 40, 61], 2, [View(9, 2, 3, 2, 1), None, View(16, 4, 4, 4, 2), View(8, 1, 1, 1, 3)], 7),
    ([0, 30, 61], 4, [None, View(10, 3, 7, 5, 4)], 64),  # no room for blocks: sinks and the most recent
    ([0, 61], 1, [View(12, 5, 2, 3, 9)], 16),  # sinks end inside a block, blocks reach into windows
    ([0, 61], 2, [View(1, 0, 1, 1, 0)], 5),
]


@pytest.mark.parametrize(("cu", "lag", "views", "rows"), CASES, ids=str)
@pytest.mark.parametrize("heads", [(4, 2), (3, 1), (2, 2)], ids=str)
def test_values_and_gradients_are_the_dense_masks(
    cu: list[int], lag: int, views: list[View | None], rows: int, heads: tuple[int, int]
) -> None:
    case = [x.requires_grad_() for x in packed(cu[-1], *heads)]
    out = view_attention(*case, cu, lag, views, rows)
    want = dense_reference(*case, 8**-0.5, visible(cu, lag, views, rows))[0]
    torch.testing.assert_close(out, want)
    weight = torch.randn(out.shape, dtype=out.dtype, generator=torch.Generator().manual_seed(5))
    for got, wanted in zip(*(torch.autograd.grad((x * weight).sum(), case) for x in (out, want)), strict=True):
        torch.testing.assert_close(got, wanted)


def rows_read(cu: list[int], lag: int, views: list[View | None], rows: int) -> torch.Tensor:
    """Bool ``[T, T]``: which keys each row of the implementation reads, seen from one-hot values."""
    total = cu[-1]
    q, k = torch.zeros(total, 1, total), torch.zeros(total, 1, total)
    return view_attention(q, k, torch.eye(total)[:, None], cu, lag, views, rows)[:, 0] > 0


@given(
    st.integers(1, 120),
    st.integers(1, 5),
    st.integers(0, 6),
    st.integers(1, 9),
    st.integers(1, 6),
    st.integers(0, 40),
    st.integers(1, 40),
    st.integers(0, 99),
)
def test_no_row_reads_more_than_the_budget(
    length: int, lag: int, sinks: int, window: int, block: int, spare: int, rows: int, seed: int
) -> None:
    """Sinks and the window's newest keys are always there; a row with no more keys than the budget reads them all."""
    view = View(sinks + window + spare, sinks, window, block, seed)
    read = rows_read([0, length], lag, [view], rows)
    for t in range(length):
        count = max(t - lag + 1, 0)
        got = set(read[t].nonzero().flatten().tolist())
        assert len(got) == count if count <= view.budget else len(got) <= view.budget
        assert got <= set(range(count))
        assert {s for s in range(count) if s < sinks or s >= count - window} <= got


def test_late_rows_use_nearly_all_of_the_budget() -> None:
    view = View(64, 8, 16, 4, seed=3)
    counts = rows_read([0, 600], 2, [view], 32)[200:].sum(1)
    assert counts.max() == 64
    assert counts.float().mean() > 56  # the rest lies in the future of a chunk's first rows or inside sinks and windows


@pytest.mark.parametrize("views", [[None, None], [View(60, 2, 4, 4), None], [View(58, 2, 4, 4), View(1, 0, 1, 1)]])
def test_views_that_cut_nothing_are_lagged_attention_bit_for_bit(views: list[View | None]) -> None:
    case, cu = packed(61), [0, 60, 61]
    assert torch.equal(view_attention(*case, cu, 2, views), lagged_attention(*case, cu, 2))


def test_a_documents_draw_is_its_own_seeds_whatever_it_is_packed_with() -> None:
    q, k, v = packed(90)
    views = [View(12, 2, 4, 2, seed) for seed in (1, 2)]
    both = view_attention(q, k, v, [0, 50, 90], 1, views, 8)
    alone = [
        view_attention(q[a:b], k[a:b], v[a:b], [0, b - a], 1, [view], 8)
        for (a, b), view in zip(((0, 50), (50, 90)), views, strict=True)
    ]
    torch.testing.assert_close(both, torch.cat(alone))
    other = view_attention(q, k, v, [0, 50, 90], 1, [views[0], View(12, 2, 4, 2, seed=3)], 8)
    assert torch.equal(other[:50], both[:50])
    assert not torch.equal(other[50:], both[50:])


def test_chunks_draw_their_own_blocks_and_reach_the_whole_past() -> None:
    read = rows_read([0, 800], 1, [View(32, 0, 8, 4)], 16)
    far = read[780:, :760].any(0)
    assert not torch.equal(read[799], read[780])
    assert 16 <= int(far.sum()) < 100
    assert read[40:].any(0)[:700].all(), "over a document every key is read by someone"


def test_no_gathered_keys_wait_for_the_backward_pass() -> None:
    """What is kept for it does not grow with rows times budget."""
    kept: dict[int, torch.UntypedStorage] = {}

    def pack(x: torch.Tensor) -> torch.Tensor:
        kept[x.untyped_storage().data_ptr()] = x.untyped_storage()
        return x

    q, k, v = (x.requires_grad_() for x in packed(2048))
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        view_attention(q, k, v, [0, 2048], 1, [View(512, 4, 16, 4)], 16)
    chunks = (2048 - 513) // 16
    gathered = chunks * 2 * 4 * 512 * 8 * 8  # bytes of all chunks' keys and values, heads repeated
    assert 0 < sum(storage.nbytes() for storage in kept.values()) < gathered / 4
