"""The set of a round: scores over whole contexts by history and lookahead, and what the set before it lacked (U1, U2, U4, U7)."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from longdraft.serve.drafters.base import Lookahead
from longdraft.serve.drafters.running import Running
from longdraft.serve.sparse_rounds import SparseRounds
from longdraft.serve.views.choose import Chosen
from longdraft.serve.views.query_tap import QueryTap
from longdraft.serve.views.set_chooser import Group, History, SetChooser
from longdraft.serve.views.token_set import SparseBudget, choose_tokens
from longdraft.serve.views.view_state import ViewState

ROWS, COLUMNS, HEADS, KEYS, SIZE = 5, 64, 4, 2, 8
LENGTHS, STEPS, SCALE = (60, 37, 9), 3, 0.4
DRAW = torch.Generator().manual_seed(0)
SLOTS = torch.randperm(ROWS * COLUMNS, generator=DRAW)
TABLE, OWN = SLOTS.view(ROWS, COLUMNS).int(), SLOTS.flip(0).view(ROWS, COLUMNS).int()
ROW = torch.tensor([3, 1, 4])
RUNNING = Running(("a", "b", "c"), ROW, TABLE, torch.tensor(LENGTHS), torch.tensor([0, 0, 0]))


def random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=DRAW)


def chooser(
    lists: int = 1, given: Sequence[Lookahead] = (), measures: bool = False, heads: tuple[int, ...] = (0, 3)
) -> SetChooser:
    tap = QueryTap((2,), 1)
    tap.allocate(20, HEADS, SIZE, torch.float32, torch.device("cpu"))
    views = ViewState(ROWS, COLUMNS, 40, 8, torch.device("cpu"), lists)
    views.prefilled(ROW, torch.tensor(LENGTHS))
    history = History(random(len(SLOTS), KEYS, SIZE), heads, SCALE, 2.0)
    sets = SetChooser(history, tap, views, TABLE, lambda running: first_of(given, len(running.row_B)), measures)
    sets.query_RHD[:] = random(ROWS, HEADS, SIZE)
    return sets


def first_of(given: Sequence[Lookahead], count: int) -> list[Lookahead]:
    """Of a batch with its padding, whose queries are anything."""
    each = [len(look.q_NHD) // 3 for look in given]
    more = [torch.full((rows * (count - 3), HEADS, SIZE), 9.0) for rows in each]
    return [replace(look, q_NHD=torch.cat([look.q_NHD, x])) for look, x in zip(given, more, strict=True)]


def mass(
    q_NHD: torch.Tensor,
    k_SKD: torch.Tensor,
    table: torch.Tensor,
    b: int,
    heads: Sequence[int],
    scale: float,
    first: int = 0,
) -> torch.Tensor:
    """Probabilities of one request's rows over its context, summed over rows and heads, as a dense attention has them."""
    total_N = torch.zeros(COLUMNS)
    k_NKD = k_SKD[table[ROW[b], first : LENGTHS[b]].long()]
    for q_HD in q_NHD:
        for h in heads:
            score_N = k_NKD[:, h // (HEADS // KEYS)] @ q_HD[h] * scale
            total_N[first : LENGTHS[b]] += score_N.softmax(0)
    return total_N


def looks() -> list[Lookahead]:
    return [
        Lookahead(random(9, HEADS, SIZE), random(len(SLOTS), KEYS, SIZE), 0.3, (1,)),
        Lookahead(random(6, HEADS, SIZE), random(len(SLOTS), KEYS, SIZE), 0.5, None, 1.5, 1, OWN),
    ]


def wanted(sets: SetChooser, given: list[Lookahead], budget: SparseBudget) -> Chosen:
    past = sets.history
    target = [
        mass(sets.query_RHD[ROW[b]][None], past.k_SKD, TABLE, b, past.heads, past.scale * past.kv_scale)
        for b in range(3)
    ]
    draft = []
    for b in range(3):
        total_N = torch.zeros(COLUMNS)
        for look in given:
            rows = len(look.q_NHD) // 3
            q_NHD, table = look.q_NHD[b * rows : (b + 1) * rows], TABLE if look.table_RW is None else look.table_RW
            heads = range(HEADS) if look.heads is None else look.heads
            total_N += mass(q_NHD, look.k_SKD, table, b, heads, look.scale * look.kv_scale, look.first)
        draft.append(total_N)
    return choose_tokens(torch.stack(draft) if given else None, torch.stack(target), torch.tensor(LENGTHS), budget)


def view_of(sets: SetChooser, b: int, at: int = -1) -> tuple[int, list[int]]:
    views, row = sets.views, ROW[b]
    return int(views.start_R[row]), views.column_LRV[at, row, : int(views.count_LR[at, row])].tolist()


def said(chosen: Chosen, b: int) -> tuple[int, list[int]]:
    return int(chosen.start_B[b]), chosen.column_BV[b, : int(chosen.count_B[b])].tolist()


@pytest.mark.parametrize("sizes", [[], [1, 4]])
@pytest.mark.parametrize("lookahead", [0, 5, 12])
def test_a_set_is_chosen_by_dense_attention(lookahead: int, sizes: list[int]) -> None:
    """And by the work that a graph replays, over a padded batch."""
    sets = chooser(lists=2, given=(given := looks()))
    budget = SparseBudget(32, 4, 16, lookahead)
    sets.use_graphs(sizes, [budget])
    run = sets.runner._run  # type: ignore[attr-defined]
    replayed: list[Any] = []
    sets.runner._run = lambda size, choice: (replayed.append((size, choice.columns)), run(size, choice))  # type: ignore[attr-defined]
    assert sets.choose(RUNNING, [Group(budget, None)], True, 61) is None
    assert replayed == ([(4, COLUMNS)] if sizes else [])
    want = wanted(sets, given, budget)
    for b in range(3):
        assert view_of(sets, b, 0) == view_of(sets, b, 1) == said(want, b)
    assert not sets.views.count_LR[:, [0, 2]].any() and not sets.views.start_R[[0, 2]].any()
    assert view_of(sets, 2) == (0, []), "a context that fits is read whole"
    alone = [said(wanted(sets, given, SparseBudget(32, 4, 16, m)), 0) for m in (0, 12)]
    assert (said(want, 0) == alone[0]) == (lookahead == 0) and (said(want, 0) == alone[1]) == (lookahead == 12)


def test_without_a_lookahead_the_history_chooses_all() -> None:
    sets = chooser(given=looks())
    sets.choose(RUNNING, [Group(SparseBudget(32, 4, 16, 12), None)], False, COLUMNS)
    want = wanted(sets, [], SparseBudget(32, 4, 16, 0))
    assert [view_of(sets, b) for b in range(3)] == [said(want, b) for b in range(3)]


def test_requests_have_their_own_budgets_or_keep_what_they_have() -> None:
    sets = chooser(given=(given := looks()))
    sets.use_graphs([8], [SparseBudget(32, 4, 16, 12)])
    sets.runner._run = lambda size, choice: pytest.fail("other budgets have no graphs")  # type: ignore[attr-defined]
    sets.views.start_R[ROW[2]] = 5
    small, large = SparseBudget(25, 4, 16, 2), SparseBudget(36, 4, 16, 8)
    groups = [
        Group(small, torch.tensor([True, False, False])),
        Group(large, torch.tensor([False, True, False])),
    ]
    sets.choose(RUNNING, groups, True, 61)
    assert view_of(sets, 0) == said(wanted(sets, given, small), 0)
    assert view_of(sets, 1) == said(wanted(sets, given, large), 1)
    assert view_of(sets, 2) == (5, [])


def test_what_the_former_set_lacked_is_the_rest_of_the_attention() -> None:
    """1 - ARR (equation 1) by the newest history, of a set with a list, one that reads everything, and one of no list but recent tokens."""
    sets = chooser(measures=True)
    columns = torch.zeros(1, 40, dtype=torch.int32)
    columns[0, :3] = torch.tensor([0, 7, 20])
    sets.views.choose(ROW[:1], Chosen(columns, torch.tensor([3]), torch.tensor([50])))
    sets.views.start_R[ROW[1]] = 30
    missed_B = sets.choose(RUNNING, [Group(SparseBudget(32, 4, 16, 0), None)], False, COLUMNS)
    assert missed_B is not None and len(missed_B) == 3
    past = sets.history
    kept = ([0, 7, 20, *range(50, 60)], list(range(30, 37)), list(range(9)))
    for b, columns_held in enumerate(kept):
        score_N = mass(sets.query_RHD[ROW[b]][None], past.k_SKD, TABLE, b, past.heads, past.scale * past.kv_scale)
        assert float(missed_B[b]) == pytest.approx(1 - float(score_N[columns_held].sum()) / 2, abs=1e-5)


def test_queries_are_kept_by_row() -> None:
    sets = chooser()
    q_THD = random(6, HEADS, SIZE)
    sets.tap.verification(2, q_THD)
    sets.verified(torch.tensor([1, 4]), 3, torch.tensor([2, 0]))
    assert torch.equal(sets.query_RHD[[1, 4]], q_THD[[2, 3]])
    sets.tap.prefill[2] = prompt = random(2, HEADS, SIZE)
    sets.prefilled(torch.tensor([0, 4]))
    assert torch.equal(sets.query_RHD[[0, 4, 1]], torch.cat([prompt, q_THD[2:3]]))


@pytest.mark.parametrize("length", [7, 30, 33, 60])
def test_what_a_draft_reads_beside_a_set_is_filled_up_with_recent_tokens(length: int) -> None:
    views = ViewState(ROWS, COLUMNS, 40, 8, torch.device("cpu"))
    columns = torch.zeros(1, 40, dtype=torch.int32)
    chosen, start = [0, 1, 12, 25, 40], 44
    if length == 60:
        columns[0, :5] = torch.tensor(chosen)
        views.choose(torch.tensor([2]), Chosen(columns, torch.tensor([5]), torch.tensor([start])))
    running = Running(("a",), torch.tensor([2]), TABLE, torch.tensor([length]), torch.tensor([0]))
    pages, count = views.pages(running, None, 33, 0, fill=True)
    got = pages[0, : int(count)].tolist()
    assert int(count) <= 33
    if length == 60:  # 28 beside the five, and what is chosen among those is not read twice
        want = [0, 1, 12, 25, *range(32, 60)]
    else:
        want = list(range(length))
    assert got == TABLE[2, want].tolist()


def test_graphs_are_of_few_widths() -> None:
    """Whatever a context's length is, and never wider than the page table."""
    sets = chooser()
    sets.table_RW = torch.zeros(1, 40_000, dtype=torch.int32)
    assert sets._widths() == [4096, 8192, 16384, 32768, 40_000]


def test_the_first_graphs_are_those_of_the_servers_own_mode() -> None:
    sparse, viewed = SparseBudget(64, 4, 16, 2), SparseBudget(512, 16, 16, 2)
    asked: list[Any] = []
    for mode in ("sparse", "exact"):
        for own in (viewed, None):
            rounds = SparseRounds(chooser(), sparse, own)
            rounds.sets.use_graphs = lambda sizes, budgets: asked.append(budgets)  # type: ignore[method-assign]
            rounds.use_graphs([1], mode)
    assert asked == [[sparse, viewed], [sparse], [viewed, sparse], [sparse]]
