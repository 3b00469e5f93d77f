"""Budgets of KV views and the choice of columns, against a plain reference (P3).

Legend: B requests, N blocks.
"""

import math
import random

import pytest
import torch

from longdraft.errors import UserError
from longdraft.serve.views.budget import Budget
from longdraft.serve.views.choose import Chosen, choose_columns


def columns_of(chosen: Chosen, b: int) -> list[int]:
    return chosen.column_BV[b, : int(chosen.count_B[b])].tolist()


def reference(score_N: list[float], length: int, budget: Budget) -> tuple[list[int], int]:
    """Chosen columns and the window's start, one request, in plain words."""
    if length <= budget.tokens:
        return [], 0
    block = budget.block
    start = (length - budget.recent) // block * block
    room = (budget.tokens - (length - start)) // block
    free = range(min(start // block, len(score_N)))
    rank = {n: -math.inf if math.isnan(score_N[n]) else score_N[n] for n in free}
    order = sorted(free, key=lambda n: (n >= budget.sinks // block, 0.0 if n < budget.sinks // block else -rank[n], n))
    picked = order[:room]
    if budget.mass is not None:
        mass = [max(s, 0.0) if n * block < length else 0.0 for n, s in enumerate(score_N)]
        held, picked = sum(mass) - sum(mass[n] for n in free), list[int]()
        for n in order[:room]:
            if n >= budget.sinks // block and held >= budget.mass * sum(mass) and sum(mass) > 0:
                break
            picked.append(n)
            held += mass[n]
    return [n * block + i for n in sorted(picked) for i in range(block)], start


def check(score_BN: torch.Tensor, lengths: list[int], budget: Budget) -> Chosen:
    """Against the reference, and what must hold whatever the scores are."""
    chosen = choose_columns(score_BN, torch.tensor(lengths), budget)
    assert [x.dtype for x in chosen] == [torch.int32, torch.int32, torch.int64]
    assert chosen.column_BV.shape == (len(lengths), budget.columns)
    for b, length in enumerate(lengths):
        columns, start = columns_of(chosen, b), int(chosen.start_B[b])
        assert (columns, start) == reference(score_BN[b].tolist(), length, budget)
        assert columns == sorted(set(columns)) and all(c < start for c in columns)
        assert len(columns) + length - start <= budget.tokens
        if length > budget.tokens:
            assert length - start >= budget.recent and start % budget.block == 0
            assert columns[: budget.sinks] == list(range(min(budget.sinks, len(score_BN[b]) * budget.block)))
        assert not chosen.column_BV[b, len(columns) :].any()
    return chosen


@pytest.mark.parametrize("seed", range(40))
def test_random_scores_ties_and_lengths(seed: int) -> None:
    """Scores of few values tie often; of the blocks some are -inf or NaN, all of some rows are; N is small, fitting or large."""
    rng = random.Random(seed)
    block = rng.choice([1, 3, 16])
    sinks, recent = rng.choice([0, 1, 20, 32]), rng.choice([0, 5, 40])
    least = sum(-(-x // block) * block for x in (sinks, recent)) + block
    budget = Budget(least + rng.choice([0, 1, 50]), sinks, recent, block)
    lengths = [rng.choice([0, 1, budget.tokens, budget.tokens + 1, rng.randint(0, 400)]) for _ in range(5)]
    blocks = rng.choice([1, -(-max(lengths) // block), 500 // block + 9]) or 1
    values = torch.tensor([0.0, -0.0, 1.0, -2.5, 7.0, -math.inf, math.nan, math.inf])
    score_BN = values[torch.randint(len(values), (5, blocks), generator=torch.Generator().manual_seed(seed))]
    score_BN[0] = -math.inf
    score_BN[1] = torch.randn(blocks, generator=torch.Generator().manual_seed(seed))
    check(score_BN, lengths, budget)


@pytest.mark.parametrize("seed", range(30))
def test_a_mass_takes_the_fewest_blocks_that_reach_it(seed: int) -> None:
    """Scores are multiples of 1/64 and masses of 1/8, so that sums are exact and limits are met to the last bit."""
    rng = random.Random(seed)
    budget = Budget(rng.choice([64, 120, 300]), 16, rng.choice([16, 30]), 8, mass=rng.randint(1, 8) / 8)
    lengths = [rng.randint(0, 700) for _ in range(4)]
    g = torch.Generator().manual_seed(seed)
    score_BN = torch.randint(0, 64, (4, 100), generator=g).double().pow(3).round().float() / 64
    score_BN[0] = 0
    check(score_BN, lengths, budget)


def test_one_block_that_holds_it_all_is_enough() -> None:
    score_BN = torch.full((1, 20), 1e-6)
    score_BN[0, 7] = 5.0
    chosen = check(score_BN, [313], Budget(128, 16, 32, mass=0.99))
    assert columns_of(chosen, 0) == [*range(16), *range(112, 128)]
    assert columns_of(check(score_BN, [313], Budget(128, 16, 32, mass=1.0)), 0) != columns_of(chosen, 0)


def test_a_mass_that_is_reached_exactly_takes_no_block_more() -> None:
    score_BN = torch.zeros(1, 20)
    score_BN[0, [5, 7, 9, 11]] = 2.0
    for mass, held in ((0.25, [5]), (0.5, [5, 7]), (0.75, [5, 7, 9]), (1.0, [5, 7, 9, 11])):
        chosen = check(score_BN, [320], Budget(160, 0, 32, mass=mass))
        assert columns_of(chosen, 0)[::16] == [16 * n for n in held]


def test_what_the_window_holds_counts_toward_the_mass_and_garbage_behind_the_end_does_not() -> None:
    score_BN = torch.full((1, 30), 1.0)
    score_BN[0, 18:20] = 1000.0  # the window
    score_BN[0, 20:] = 1e9  # behind the end
    assert columns_of(check(score_BN, [320], Budget(128, 16, 32, mass=0.95)), 0) == list(range(16))


def test_a_budget_that_holds_the_context_reads_all_of_it() -> None:
    """P1's condition, up to the last token."""
    budget = Budget(256)
    chosen = check(torch.rand(3, 40), [255, 256, 257], budget)
    assert chosen.count_B.tolist()[:2] == [0, 0] and chosen.start_B.tolist()[:2] == [0, 0]
    assert chosen.count_B[2] > 0 and chosen.start_B[2] == 128


def test_sinks_and_window_are_rounded_up_to_whole_blocks() -> None:
    budget = Budget(200, sinks=4, recent=33, block=16)
    assert (budget.sinks, budget.recent, budget.columns) == (16, 48, 192)
    assert Budget(1000, 30, 100, 1).columns == 1000


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"tokens": 175}, "tokens=175 has no room for sinks=32, recent=128 and one block of 16: write 176 or more"),
        ({"tokens": 500, "sinks": -1}, "sinks=-1: write 0 or more"),
        ({"tokens": 500, "recent": -3}, "recent=-3: write 0 or more"),
        ({"tokens": 500, "block": 0}, "block=0: a block has at least one token"),
        ({"tokens": 500, "mass": 0.0}, "mass=0.0: write a share"),
        ({"tokens": 500, "mass": 1.5}, "mass=1.5: write a share"),
        ({"tokens": 500, "mass": math.nan}, "mass=nan: write a share"),
    ],
)
def test_a_bad_budget_is_refused_with_its_field_value_and_remedy(given: dict[str, float], words: str) -> None:
    with pytest.raises(UserError, match=words):
        Budget(**given)  # type: ignore[arg-type]
    Budget(176)
