"""Merging attention parts by log-sum-exp: any split, any order, any grouping, empty parts (A1, A2, A3, A4)."""

import itertools

import torch
from attention_case import dense_reference
from hypothesis import given, settings
from hypothesis import strategies as st

from longdraft.kernels.dense_attention import dense_attention
from longdraft.kernels.merge import merge_attention

Part = tuple[torch.Tensor, torch.Tensor]


def merged(parts: list[Part]) -> Part:
    return merge_attention(torch.stack([out for out, _ in parts]), torch.stack([lse for _, lse in parts]))


def parts_of(cuts: list[int], keys: int, scale: float = 0.3) -> tuple[list[Part], Part]:
    """Attention over each piece of the keys, and over all of them by the reference."""
    g = torch.Generator().manual_seed(keys)
    q, k, v = (torch.randn(n, h, 8, dtype=torch.float64, generator=g) for n, h in ((3, 4), (keys, 2), (keys, 2)))
    edges = [0, *sorted(cuts), keys]
    pieces = [dense_attention(q, k[a:b], v[a:b], scale) for a, b in itertools.pairwise(edges)]
    return pieces, dense_reference(q, k, v, scale)


@settings(max_examples=40, deadline=None)
@given(keys=st.integers(1, 12), data=st.data())
def test_any_split_merges_to_the_whole(keys: int, data: st.DataObject) -> None:
    """Cuts may coincide, so that some parts are empty (A1, A3)."""
    cuts = data.draw(st.lists(st.integers(0, keys), min_size=1, max_size=4))
    pieces, (want_out, want_lse) = parts_of(cuts, keys)
    out, lse = merged(pieces)
    torch.testing.assert_close(out, want_out)
    torch.testing.assert_close(lse, want_lse)


def test_order_and_grouping_do_not_matter() -> None:
    """A2, over four parts of which one is empty."""
    pieces, _ = parts_of([3, 3, 7], 11)
    first_out, first_lse = merged(pieces)
    for order in itertools.permutations(pieces):
        out, lse = merged([merged(list(order[:2])), merged([order[2], merged([order[3]])])])
        torch.testing.assert_close(out, first_out)
        torch.testing.assert_close(lse, first_lse)


def test_all_parts_empty_gives_zero_and_minus_infinity() -> None:
    out, lse = merge_attention(torch.zeros(3, 2, 2, 4), torch.full((3, 2, 2), float("-inf")))
    assert (out == 0).all()
    assert torch.isneginf(lse).all()


def test_an_empty_part_leaves_the_other_bitwise_unchanged_whatever_it_holds() -> None:
    """A3; kernels leave rows of an empty part uninitialised."""
    kept = torch.randn(2, 3, 4), torch.randn(2, 3)
    for junk in (0.0, 1e30, float("nan")):
        empty = torch.full((2, 3, 4), junk), torch.full((2, 3), float("-inf"))
        for parts in ([kept, empty], [empty, kept]):
            out, lse = merged(parts)
            assert torch.equal(out, kept[0])
            assert torch.equal(lse, kept[1])


def test_huge_log_sum_exps_stay_finite_and_the_larger_part_wins() -> None:
    """A4: exp(1e4) overflows, exp(-1e4) underflows; neither may show."""
    outs = torch.stack([torch.full((1, 1, 2), 1.0), torch.full((1, 1, 2), 3.0)])
    for lses, want in (([1e4, -1e4], 1.0), ([-1e4, 1e4], 3.0), ([1e4, 1e4], 2.0), ([-1e4, -1e4], 2.0)):
        out, lse = merge_attention(outs, torch.tensor(lses).view(2, 1, 1))
        assert torch.allclose(out, torch.full_like(out, want))
        assert lse.isfinite().all()


def test_half_precision_parts_merge_in_the_log_sum_exps_precision() -> None:
    """Weights of 1 / 3 and 2 / 3 in bfloat16 would miss the mean by half a percent."""
    outs = torch.tensor([1.0, 4.0], dtype=torch.bfloat16).view(2, 1, 1, 1)
    out, lse = merge_attention(outs, torch.tensor([1.0, 2.0]).log().view(2, 1, 1))
    assert out.dtype == torch.bfloat16
    assert lse.dtype == torch.float32
    assert out.item() == 3.0


def test_a_broken_part_shows_instead_of_turning_into_zeros() -> None:
    whole = torch.ones(1, 1, 2), torch.zeros(1, 1)
    out, lse = merged([whole, (torch.full((1, 1, 2), float("nan")), torch.full((1, 1), float("nan")))])
    assert out.isnan().all()
    assert lse.isnan().all()
