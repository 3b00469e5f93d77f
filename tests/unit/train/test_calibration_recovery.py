"""Recovery and sets against their formulas in plain words (U1, U2, U4).

Legend: W windows, N tokens.
"""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from longdraft.train.calibration.recovery import RECENT, SINKS, Split, choose_sets, oracle_sets, recovery


def scores(seed: int, windows: int, tokens: int, ties: bool) -> torch.Tensor:
    """Attention of some rows, each summing to 1 over its window's tokens; few different values where ties are wanted."""
    g = torch.Generator().manual_seed(seed)
    drawn = (
        torch.randint(1, 4, (windows, tokens), generator=g).float()
        if ties
        else torch.rand(windows, tokens, generator=g)
    )
    return drawn / drawn.sum(-1, keepdim=True)


def best(score_N: list[float], candidates: set[int], count: int) -> set[int]:
    return set(sorted(candidates, key=lambda n: (-score_N[n], n))[: max(0, count)])


def plain_set(history_N: list[float], lookahead_N: list[float], length: int, split: Split) -> set[int]:
    """Equation 6."""
    everything = set(range(length))
    if length <= split.budget:
        return everything
    protected = {n for n in everything if n < SINKS or n >= length - RECENT}
    ahead = best(lookahead_N, everything - protected, split.lookahead)
    rest = split.budget - split.lookahead - len(protected)
    return protected | ahead | best(history_N, everything - protected - ahead, rest)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_sets_are_equation_six(data: st.DataObject) -> None:
    budget = data.draw(st.integers(21, 60))
    split = Split(budget, data.draw(st.integers(0, Split(budget).most)))
    lengths = data.draw(st.lists(st.integers(1, 80), min_size=1, max_size=4))
    seed, ties = data.draw(st.integers(0, 99)), data.draw(st.booleans())
    history_WN, lookahead_WN = (scores(seed + i, len(lengths), 80, ties) for i in (0, 100))
    got_WN = choose_sets(history_WN, lookahead_WN, torch.tensor(lengths), split)
    for w, length in enumerate(lengths):
        want = plain_set(history_WN[w].tolist(), lookahead_WN[w].tolist(), length, split)
        assert set(got_WN[w].nonzero().flatten().tolist()) == want
        assert len(want) == min(length, budget)


def test_no_lookahead_is_the_history_alone_and_all_of_it_the_lookahead_alone() -> None:
    length, split = torch.tensor([70, 55]), Split(40)
    one, other, third = (scores(seed, 2, 70, False) for seed in range(3))
    assert torch.equal(choose_sets(one, other, length, split), choose_sets(one, None, length, split))
    full = Split(40, split.most)
    assert torch.equal(choose_sets(one, other, length, full), choose_sets(third, other, length, full))
    assert not torch.equal(choose_sets(one, other, length, split), choose_sets(one, other, length, full))


def naive_recovery(attention: list[list[list[float]]], kept: list[set[int]]) -> list[float]:
    """Equations 1 and 2 over ``attention[w][row][token]``."""
    return [
        sum(sum(row[n] for n in chosen) for row in rows) / len(rows)
        for rows, chosen in zip(attention, kept, strict=True)
    ]


def test_recovery_is_the_mean_over_rows_of_what_each_keeps() -> None:
    rows_WCN = torch.stack([scores(seed, 4, 30, False) for seed in range(3)])
    kept_WN = torch.rand(3, 30, generator=torch.Generator().manual_seed(9)) < 0.3
    kept = [set(row.nonzero().flatten().tolist()) for row in kept_WN]
    got_W = recovery(rows_WCN.mean(1), kept_WN)
    torch.testing.assert_close(got_W, torch.tensor(naive_recovery(rows_WCN.tolist(), kept)))


@settings(max_examples=80, deadline=None)
@given(st.integers(0, 99), st.booleans())
def test_the_oracle_beats_all_and_grows_to_one(seed: int, ties: bool) -> None:
    lengths = [60, 33]
    attention_WN, history_WN, ahead_WN = (scores(seed + 100 * i, 2, 60, ties) for i in range(3))
    attention_WN[1, 33:] = 0
    attention_WN /= attention_WN.sum(-1, keepdim=True)
    length_W, before = torch.tensor(lengths), torch.zeros(2)
    for budget in (21, 30, 33, 45, 60, 90):
        sets_WN = oracle_sets(attention_WN, length_W, budget)
        for w, length in enumerate(lengths):
            want = best(attention_WN[w].tolist(), set(range(length)), budget)
            assert set(sets_WN[w].nonzero().flatten().tolist()) == want
        oracle_W = recovery(attention_WN, sets_WN)
        hybrid_WN = choose_sets(history_WN, ahead_WN, length_W, Split(budget, (budget - 20) // 2))
        assert (recovery(attention_WN, hybrid_WN) <= oracle_W + 1e-6).all()
        assert (oracle_W >= before - 1e-6).all() and (oracle_W <= 1 + 1e-6).all()
        before = oracle_W
    torch.testing.assert_close(before, torch.ones(2))


def test_layers_share_a_set_or_have_their_own() -> None:
    attention_SWN, length_W = scores(3, 6, 40, False).view(3, 2, 40), torch.tensor([40, 40])
    own = recovery(attention_SWN, oracle_sets(attention_SWN, length_W, 25))
    shared = recovery(attention_SWN, oracle_sets(attention_SWN.mean(0), length_W, 25))
    assert own.shape == shared.shape == (3, 2) and (own >= shared).all() and (own > shared).any()


def test_a_share_without_scores_is_a_mistake() -> None:
    with pytest.raises(AssertionError, match="without a draft's scores"):
        choose_sets(scores(0, 1, 50, False), None, torch.tensor([50]), Split(30, 5))
