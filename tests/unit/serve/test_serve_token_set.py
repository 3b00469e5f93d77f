"""The token set of a sparse verification against Equation 6 in plain words (U1, U2, U7).

Legend: B requests, N columns.
"""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from longdraft.errors import UserError
from longdraft.serve.drafters.running import Running
from longdraft.serve.views.choose import Chosen
from longdraft.serve.views.token_set import SparseBudget, choose_tokens
from longdraft.serve.views.view_state import ViewState

Scores = list[float]
FEW = [0.0, -0.0, 1.0, 2.0, -3.0, math.inf, -math.inf, math.nan]  # so that ties are the rule


def best(score_N: Scores, candidates: set[int], count: int) -> set[int]:
    """The candidates of highest score, the first of equal ones; NaN last."""
    rank = {n: -math.inf if math.isnan(score_N[n]) else score_N[n] for n in candidates}
    return set(sorted(candidates, key=lambda n: (-rank[n], n))[:count])


def parts(draft_N: Scores | None, target_N: Scores | None, length: int, budget: SparseBudget) -> list[set[int]]:
    """Protected, draft's and target's columns of one request as Equation 6 has them."""
    everything = set(range(length))
    if length <= budget.tokens:
        return [everything, set(), set()]
    protected = set(range(budget.sinks)) | set(range(length - budget.window, length))
    draft_N = target_N if draft_N is None else draft_N
    target_N = draft_N if target_N is None else target_N
    assert draft_N is not None and target_N is not None
    scored = [any(x[n] > 0 for n in everything - protected) for x in (draft_N, target_N)]
    draft_N, target_N = draft_N if scored[0] else target_N, target_N if scored[1] else draft_N
    ahead = best(draft_N, everything - protected, budget.lookahead)
    rest = budget.tokens - budget.lookahead - len(protected)
    return [protected, ahead, best(target_N, everything - protected - ahead, rest)]


def columns_of(chosen: Chosen, b: int, length: int) -> set[int]:
    """All columns that a view of request b reads."""
    return {*chosen.column_BV[b, : int(chosen.count_B[b])].tolist(), *range(int(chosen.start_B[b]), length)}


def check(
    draft_BN: torch.Tensor | None, target_BN: torch.Tensor | None, lengths: list[int], budget: SparseBudget
) -> Chosen:
    """Against the reference, and what must hold whatever the scores are."""
    chosen = choose_tokens(draft_BN, target_BN, torch.tensor(lengths), budget)
    assert [x.dtype for x in chosen] == [torch.int32, torch.int32, torch.int64]
    assert chosen.column_BV.shape == (len(lengths), budget.columns)
    for b, length in enumerate(lengths):
        draft_N, target_N = (None if x is None else x[b].tolist() for x in (draft_BN, target_BN))
        protected, ahead, rest = parts(draft_N, target_N, length, budget)
        listed = chosen.column_BV[b, : int(chosen.count_B[b])].tolist()
        assert columns_of(chosen, b, length) == protected | ahead | rest
        assert listed == sorted(set(listed)) and all(c < chosen.start_B[b] for c in listed)
        assert len(listed) + length - int(chosen.start_B[b]) == min(length, budget.tokens)
        assert not chosen.column_BV[b, len(listed) :].any()
    return chosen


@st.composite
def cases(draw: st.DrawFn) -> tuple[torch.Tensor | None, torch.Tensor | None, list[int], SparseBudget]:
    sinks, window = draw(st.integers(0, 5)), draw(st.integers(0, 6))
    tokens = sinks + window + draw(st.integers(1, 12))
    budget = SparseBudget(tokens, sinks, window, draw(st.integers(0, tokens - sinks - window)))
    lengths = draw(st.lists(st.integers(0, 60), min_size=1, max_size=4))
    columns = max(1, *lengths) + draw(st.integers(0, 3))
    values = st.one_of(st.sampled_from(FEW), st.floats(0, 4, width=32))

    def scores() -> torch.Tensor:
        rows = [draw(st.one_of(st.just([0.0] * columns), st.lists(values, min_size=columns, max_size=columns)))
                for _ in lengths]  # fmt: skip
        return torch.tensor(rows)

    missing = draw(st.sampled_from(["none", "draft", "target"]))
    return None if missing == "draft" else scores(), None if missing == "target" else scores(), lengths, budget


@settings(max_examples=150, deadline=None)
@given(case=cases())
def test_u1_equation_6_with_ties_missing_rows_and_odd_numbers(
    case: tuple[torch.Tensor | None, torch.Tensor | None, list[int], SparseBudget],
) -> None:
    check(*case)


def random_scores(batch: int, columns: int, seed: int) -> torch.Tensor:
    """Distinct ones, as softmax probabilities are."""
    return torch.rand(batch, columns, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("tokens", [128, 256, 512])
def test_u1_sizes_of_the_papers_budgets(tokens: int) -> None:
    """k counts what is protected; the parts are disjoint, or there would be fewer."""
    budget = SparseBudget(tokens, lookahead=tokens // 3)
    draft_BN, target_BN = random_scores(3, 2000, 0), random_scores(3, 2000, 1)
    chosen = check(draft_BN, target_BN, [2000, tokens + 1, tokens], budget)
    assert chosen.count_B.tolist() == [tokens - 16, tokens - 16, 0]
    assert chosen.start_B.tolist() == [1984, tokens - 15, 0]
    ahead = set(draft_BN[0, 4:1984].topk(tokens // 3).indices.add(4).tolist())
    assert ahead <= columns_of(chosen, 0, 2000)


def test_u1_a_budget_of_the_context_or_more_takes_all_of_it() -> None:
    for length in (0, 1, 20, 63, 64):
        chosen = check(random_scores(1, 70, 0), random_scores(1, 70, 1), [length], SparseBudget(64, lookahead=9))
        assert columns_of(chosen, 0, length) == set(range(length)) and not chosen.count_B.any()


def test_u1_of_equal_scores_the_first_columns_are_taken() -> None:
    budget = SparseBudget(16, 2, 4, 5)
    chosen = check(torch.ones(1, 100), torch.ones(1, 100), [100], budget)
    assert chosen.column_BV[0].tolist() == list(range(12))
    target_BN = torch.ones(1, 100)
    target_BN[0, :50] = float("nan")
    chosen = check(torch.ones(1, 100), target_BN, [100], budget)
    assert chosen.column_BV[0].tolist() == [*range(7), *range(50, 55)]


def test_u2_no_lookahead_is_history_only_and_all_of_it_is_lookahead_only() -> None:
    draft_BN, target_BN = random_scores(2, 300, 0), random_scores(2, 300, 1)
    lengths = [300, 211]
    for m, matters, other in ((0, target_BN, draft_BN), (44, draft_BN, target_BN)):
        budget = SparseBudget(64, lookahead=m)
        assert budget.most_lookahead == 44
        pair = (matters, other) if m else (other, matters)
        both = check(*pair, lengths, budget)
        alone = check(*((matters, None) if m else (None, matters)), lengths, budget)
        assert all(torch.equal(x, y) for x, y in zip(both, alone, strict=True))
        for b, length in enumerate(lengths):
            best_44 = matters[b, 4 : length - 16].topk(44).indices + 4
            assert set(best_44.tolist()) == columns_of(both, b, length) - {*range(4), *range(length - 16, length)}


def test_u7_requests_have_no_influence_on_each_other() -> None:
    draft_BN, target_BN = random_scores(4, 400, 0), random_scores(4, 400, 1)
    draft_BN[1], target_BN[2] = 0.0, 0.0
    lengths, budget = torch.tensor([400, 350, 399, 30]), SparseBudget(100, lookahead=30)
    whole = choose_tokens(draft_BN, target_BN, lengths, budget)
    for b in range(4):
        alone = choose_tokens(draft_BN[b : b + 1], target_BN[b : b + 1], lengths[b : b + 1], budget)
        assert all(torch.equal(x[0], y[b]) for x, y in zip(alone, whole, strict=True))


def test_what_lies_beyond_a_length_or_in_the_window_has_no_influence() -> None:
    draft_BN, target_BN = random_scores(1, 200, 0), random_scores(1, 200, 1)
    budget, length = SparseBudget(50, 4, 10, 12), torch.tensor([150])
    want = choose_tokens(draft_BN, target_BN, length, budget)
    draft_BN[0, 140:], target_BN[0, 140:] = float("inf"), float("nan")
    found = choose_tokens(draft_BN, target_BN, length, budget)
    assert all(torch.equal(x, y) for x, y in zip(found, want, strict=True))


def test_scores_of_16_bits_and_fewer_scores_than_columns_are_taken() -> None:
    """The newest tokens may have no score yet: those before them are chosen from."""
    budget = SparseBudget(30, 2, 3, 10)
    chosen = choose_tokens(random_scores(1, 40, 0).bfloat16(), random_scores(1, 40, 1), torch.tensor([90]), budget)
    assert chosen.count_B.tolist() == [27] and (chosen.column_BV[0] < 40).all()
    chosen = choose_tokens(random_scores(1, 20, 0), random_scores(1, 20, 1), torch.tensor([90]), budget)
    assert chosen.column_BV[0].tolist() == [*range(20), *[0] * 7] and chosen.count_B.tolist() == [20]


def test_a_view_reads_the_set_and_what_comes_behind_it() -> None:
    """Through the page table, two tokens after the choice."""
    budget, length = SparseBudget(24, 2, 5, 7), torch.tensor([80, 20])
    target_BN = random_scores(2, 80, 1)
    chosen = choose_tokens(random_scores(2, 80, 0), target_BN, length, budget)
    views = ViewState(4, 100, budget.columns, 8, torch.device("cpu"), sinks=budget.sinks)
    row_B = torch.tensor([3, 1])
    views.choose(row_B, chosen)
    table_RW = torch.arange(400, dtype=torch.int32).view(4, 100)
    running = Running(("a", "b"), row_B, table_RW, length + 2, torch.zeros(2, dtype=torch.int64))
    pages_BW, lens_B = views.pages(running, None, budget.tokens + 8, 1)
    assert lens_B.tolist() == [26, 22]
    for b, row in enumerate(row_B.tolist()):
        read = {slot - 100 * row for slot in pages_BW[b, : int(lens_B[b])].tolist()}
        assert read == columns_of(chosen, b, int(length[b]) + 2)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"sinks": -1}, "sinks=-1: write 0 or more tokens"),
        ({"window": -2}, "window=-2: write 0 or more tokens"),
        ({"lookahead": -3}, "lookahead=-3: write 0 or more tokens"),
        ({"tokens": 20, "lookahead": 0}, "tokens=20 has no room for sinks=4, window=16.*write 21 or more"),
        ({"lookahead": 493}, "lookahead=493: tokens=512 leaves 492 beside sinks=4 and window=16: write 0 to 492"),
    ],
)
def test_a_budget_that_cannot_be_kept_is_refused(fields: dict[str, int], message: str) -> None:
    with pytest.raises(UserError, match=message):
        SparseBudget(**fields)


def test_scores_must_be_there_and_fit_each_other() -> None:
    with pytest.raises(ValueError, match="one of them must score the columns"):
        choose_tokens(None, None, torch.tensor([9]), SparseBudget())
    with pytest.raises(ValueError, match=r"draft_BN scores \[1, 9\], target_BN \[1, 8\]: score the same columns"):
        choose_tokens(torch.ones(1, 9), torch.ones(1, 8), torch.tensor([9]), SparseBudget())
