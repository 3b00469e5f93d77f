"""The k largest in one order: against sorting by value and place, with ties, zeros of both signs and infinities."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from longdraft.kernels.stable_topk import stable_topk

FLOATS = st.one_of(
    st.sampled_from(
        [0.0, -0.0, float("inf"), float("-inf"), 1.0, -1.0, 2.0**-149, -(2.0**-149), 2.0**127, -(2.0**127)]
    ),
    st.floats(width=32, allow_nan=False),
)


@settings(max_examples=80, deadline=None)
@given(row=st.lists(FLOATS, min_size=1, max_size=30), k=st.integers(1, 30))
def test_the_order_is_by_value_then_place(row: list[float], k: int) -> None:
    k = min(k, len(row))
    want = sorted(range(len(row)), key=lambda i: (-row[i], i))[:k]
    score, index = stable_topk(torch.tensor([row, row[::-1]]), k)
    assert index[0].tolist() == want
    assert score[0].tolist() == [row[i] for i in want]
    assert score[1].tolist() == score[0].tolist()


def test_many_ties_among_many_rows() -> None:
    """Half-precision scores: three values over 5000 entries."""
    scores = torch.randint(-2, 1, (2, 3, 5000), generator=torch.Generator().manual_seed(0)).float()
    score, index = stable_topk(scores, 64)
    order = scores.sort(dim=-1, descending=True, stable=True)
    assert torch.equal(index, order.indices[..., :64])
    assert torch.equal(score, order.values[..., :64])


def test_more_than_there_are_is_refused() -> None:
    with pytest.raises(ValueError, match="the 4 largest of 3 entries"):
        stable_topk(torch.zeros(1, 3), 4)
