"""Anchor-Offset Indices and seeded draws: invariants D4, D5 and D6."""

from collections import Counter

import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny import tiny_draft, tiny_target

from longdraft.train.positions import anchor_offset_positions, draw, lag_of_step


@given(st.integers(1, 300), st.integers(0, 8), st.integers(1, 2000), st.integers(0, 50))
def test_positions_are_anchored_increasing_and_within_the_limit(
    length: int, anchors: int, limit: int, seed: int
) -> None:
    """D6: anchors fixed, strictly increasing, one jump at most, below the limit."""
    position = anchor_offset_positions(length, anchors, limit, seed)
    assert position[:anchors].tolist() == list(range(min(anchors, length)))
    steps = (position[1:] - position[:-1]).tolist()
    assert all(step >= 1 for step in steps)
    assert sum(step != 1 for step in steps) <= 1
    assert int(position[-1]) < max(limit, length)
    assert torch.equal(position, anchor_offset_positions(length, anchors, limit, seed))


def test_the_offset_is_uniform_over_its_range() -> None:
    """D6, by chi-square over 10 offsets: 27.9 is the 0.999 quantile at 9 degrees of freedom."""
    draws = 4000
    seen = Counter(int(anchor_offset_positions(11, 4, 20, "uniform", i)[-1]) - 10 for i in range(draws))
    assert sorted(seen) == list(range(10))
    assert sum((n - draws / 10) ** 2 / (draws / 10) for n in seen.values()) < 27.9


def test_a_document_as_long_as_the_limit_has_plain_positions() -> None:
    """D4, the positions themselves."""
    assert torch.equal(anchor_offset_positions(64, 4, 64, 0), torch.arange(64))
    assert torch.equal(anchor_offset_positions(64, 4, 0, 0), torch.arange(64))


def outputs(position: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    target = tiny_target("llama")
    draft = tiny_draft(target, window=16)
    ids = torch.randint(0, 256, (len(position),), generator=torch.Generator().manual_seed(3))
    seen = target.capture(ids, position, [0, len(ids)], hidden=True)
    assert seen.hidden_TE is not None
    with torch.no_grad():
        return seen.hidden_TE, draft.forward_packed(ids, position, seen.k_TKD, seen.v_TKD, [0, len(ids)], 2)


def test_shifting_every_position_changes_nothing_and_anchors_change_something() -> None:
    """D5: rotary scores depend on distances, so only the anchors' distance to the rest can matter."""
    plain, shifted = outputs(torch.arange(48)), outputs(torch.arange(48) + 100)
    anchored = outputs(torch.cat([torch.arange(4), torch.arange(4, 48) + 100]))
    for a, b, c in zip(plain, shifted, anchored, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3)
        torch.testing.assert_close(a[:4], c[:4], rtol=1e-4, atol=1e-4)
        assert (a[4:] - c[4:]).abs().max() > 0.05


def test_lags_cover_their_range_and_depend_on_the_step_alone() -> None:
    lags = [lag_of_step(step, 1, 4, seed=5) for step in range(200)]
    assert set(lags) == {1, 2, 3, 4}
    torch.manual_seed(99)  # the global generator plays no part
    assert lags == [lag_of_step(step, 1, 4, seed=5) for step in range(200)]
    assert lags != [lag_of_step(step, 1, 4, seed=6) for step in range(200)]
    assert draw(7, 7, "x") == 7
