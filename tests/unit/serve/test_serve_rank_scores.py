"""Ranks that have some heads each choose what one with all of them chooses: views, sets, and what those miss; and the head's rows.

Legend: B requests, H query heads, K key/value heads, D head size, S cache slots, V vocabulary, E hidden size, N rows of a head.
"""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_serve_set_chooser import COLUMNS, HEADS, KEYS, ROW, RUNNING, SIZE, TABLE, Chosen, said
from thread_ranks import ThreadRanks, run_ranks
from tiny import tiny_draft, tiny_target

from longdraft.serve.drafters.base import Lookahead
from longdraft.serve.drafters.cross_attention import Cache, newest_rows
from longdraft.serve.drafters.looked import own_heads
from longdraft.serve.ranks import ALONE, Ranks
from longdraft.serve.target_weights import TargetWeights
from longdraft.serve.views.budget import Budget
from longdraft.serve.views.chooser import ViewChooser
from longdraft.serve.views.missed_mass import MissedMass
from longdraft.serve.views.query_tap import QueryTap
from longdraft.serve.views.selectors import SELECTORS, make_selector
from longdraft.serve.views.set_chooser import Group, History, SetChooser
from longdraft.serve.views.token_set import SparseBudget
from longdraft.serve.views.view_state import ViewState

DRAW = torch.Generator().manual_seed(7)
SLOTS = TABLE.numel()
LENGTH = RUNNING.length_B


def own(ranks: Ranks, x: torch.Tensor, dim: int = 1) -> torch.Tensor:
    """This rank's heads."""
    return x.chunk(ranks.size, dim)[ranks.rank].contiguous()


def view_chooser(ranks: Ranks, name: str, by_layer: bool, given: dict[str, Any]) -> ViewChooser:
    selector = make_selector(name)
    layers = (0, 1) if selector.rows else ()
    tap = QueryTap(layers, selector.rows)
    pool = SimpleNamespace(get_key_buffer=lambda layer: own(ranks, given["keys"][layer]))
    budget = Budget(32, 8, 8, 4, mass=0.9 if name == "mass" else None)
    selector.block = 4
    return ViewChooser(selector, budget, pool, tap, 0.4, {}, by_layer, ranks)


@pytest.mark.parametrize(
    ("name", "by_layer"), [(name, by) for name in SELECTORS for by in (False, True) if name != "streaming" or not by]
)
def test_views_of_all_heads(name: str, by_layer: bool) -> None:
    given = {
        "keys": torch.randn(2, SLOTS, KEYS, SIZE, generator=DRAW),
        "queries": torch.randn(2, 3 * make_selector(name).rows, HEADS, SIZE, generator=DRAW),
    }

    def choose(ranks: Ranks) -> Chosen:
        chooser = view_chooser(ranks, name, by_layer, given)
        queries = [own(ranks, q) for q in given["queries"]] if chooser.selector.rows else []
        return chooser.choose(queries, ROW, TABLE, LENGTH, COLUMNS)

    want, shared = choose(ALONE), run_ranks(2, choose)
    for got in shared:
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    if make_selector(name).rows:  # and one rank's heads alone would choose otherwise
        unlike = [Ranks(), Ranks()]
        for rank, ranks in enumerate(unlike):
            ranks.rank, ranks.size = rank, 2
        assert any(not torch.equal(choose(ranks).column_BV, want.column_BV) for ranks in unlike)


def test_what_views_miss_is_the_mean_over_all_heads() -> None:
    given = {"keys": torch.randn(2, SLOTS, KEYS, SIZE, generator=DRAW)}
    queries = torch.randn(2, 3, HEADS, SIZE, generator=DRAW)

    def missed(ranks: Ranks) -> torch.Tensor:
        chooser = view_chooser(ranks, "mass", False, given)
        chooser.tap.buffers = {layer: own(ranks, queries[layer]) for layer in (0, 1)}
        views = ViewState(len(TABLE), COLUMNS, 32, 8, torch.device("cpu"))
        views.start_R[ROW] = (LENGTH - 8).clamp_min(0)
        view = views.pages(RUNNING, None, 40, 1)
        last_B = torch.zeros(3, dtype=torch.int64)
        return MissedMass(chooser, views, (0, 1), 0.5).missed(view, RUNNING, 1, last_B, LENGTH, COLUMNS)

    want = missed(ALONE)
    assert 0.1 < float(want[0]) < 1.0
    for got in run_ranks(2, missed):
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("heads", [(0, 3), (0, 1)], ids=["of-both", "of-rank-0-alone"])
def test_sets_of_all_heads(heads: tuple[int, ...]) -> None:
    """History and lookahead; a rank that has none of the heads goes along."""
    keys, others = torch.randn(2, SLOTS, KEYS, SIZE, generator=DRAW)
    query_RHD, look_NHD = (
        torch.randn(len(TABLE), HEADS, SIZE, generator=DRAW),
        torch.randn(9, HEADS, SIZE, generator=DRAW),
    )
    budget = SparseBudget(32, 4, 16, 6)

    def choose(ranks: Ranks) -> tuple[list[Any], torch.Tensor]:
        each = HEADS // ranks.size
        mine = own_heads(heads, range(ranks.rank * each, (ranks.rank + 1) * each))
        tap = QueryTap((2,), 1)
        tap.allocate(20, each, SIZE, torch.float32, torch.device("cpu"))
        views = ViewState(len(TABLE), COLUMNS, 40, 8, torch.device("cpu"))
        views.prefilled(ROW, LENGTH)
        look = Lookahead(own(ranks, look_NHD), own(ranks, others), 0.3, mine)
        history = History(own(ranks, keys), mine, 0.4, 1.0, len(heads))
        sets = SetChooser(history, tap, views, TABLE, lambda running: [look], True, ranks)
        sets.query_RHD[:] = own(ranks, query_RHD)
        views.start_R[ROW] = LENGTH // 2
        lacked_B = sets.choose(RUNNING, [Group(budget, None)], True, COLUMNS)
        assert lacked_B is not None
        chosen = Chosen(views.column_LRV[0, ROW], views.count_LR[0, ROW], views.start_R[ROW])
        return [said(chosen, b) for b in range(3)], lacked_B

    want, lacked_B = choose(ALONE)
    for got, missed_B in run_ranks(2, choose):
        assert got == want
        torch.testing.assert_close(missed_B, lacked_B)


def shard(ranks: Ranks, weight_VE: torch.Tensor) -> Any:
    """SGLang's rows of an embedding or a head on a rank: as many as on the others, zeros behind the vocabulary."""
    each = 4 * -(-len(weight_VE) // (4 * ranks.size))
    padded = torch.nn.functional.pad(weight_VE, (0, 0, 0, ranks.size * each - len(weight_VE)))
    return SimpleNamespace(weight=padded.split(each)[ranks.rank].clone(), tp_size=ranks.size)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("least", [0, 1 << 60], ids=["divided", "whole"])
def test_a_draft_on_ranks_has_the_whole_head_and_embedding(least: int, size: int) -> None:
    vocab = 50
    embedding_VE, head_VE = torch.randn(2, vocab, 8, generator=DRAW)
    hidden_TE = torch.randn(4, 8, generator=DRAW)
    ids = torch.tensor([0, 3, 11, 16, 17, 30, 33, 49])

    def lent(ranks: ThreadRanks) -> list[Any]:
        embedding, head = shard(ranks, embedding_VE), shard(ranks, head_VE)
        model = SimpleNamespace(model=SimpleNamespace(embed_tokens=embedding), lm_head=head)
        weights = TargetWeights(model, torch.float32, ranks)
        found: list[Any] = [weights.embedding_VE[:vocab].clone()]
        for chosen in (None, ids):
            row_NE, joined = weights.head_rows(chosen, vocab, ranks.share(least))
            found += [joined(hidden_TE @ row_NE.t()), len(row_NE)]
        embedding.weight += 1
        before = weights.embedding_VE.data_ptr()
        weights.renew()
        assert weights.embedding_VE.data_ptr() == before, "a graph goes on reading the same memory"
        return [*found, weights.embedding_VE[:vocab]]

    for embedding, every, rows, some, few, renewed in run_ranks(size, lent):
        assert torch.equal(embedding, embedding_VE) and torch.equal(renewed, embedding_VE + 1)
        torch.testing.assert_close(every, hidden_TE @ head_VE.t())
        torch.testing.assert_close(some, hidden_TE @ head_VE[ids].t())
        assert (rows, few) == ((rows, -(-len(ids) // size)) if least == 0 else (vocab, len(ids)))
        assert least or rows < vocab


@pytest.mark.parametrize("size", [2, 4], ids=["heads-each", "two-a-head"])
def test_the_newest_row_has_the_key_heads_of_all_ranks(size: int) -> None:
    target = tiny_target("llama", num_attention_heads=4, num_key_value_heads=2)
    draft = tiny_draft(target, newest_lags=2, cross_layers=[0, 1])
    keys, values = torch.randn(2, 2, 30, 2, 16, generator=DRAW)
    pages = torch.tensor([[4, 9, 2], [7, 0, 0]], dtype=torch.int32)
    lens, position = torch.tensor([3, 1], dtype=torch.int32), torch.tensor([3, 1])

    def newest(ranks: Ranks) -> torch.Tensor:
        kv = range(2) if ranks.size == 1 else ranks.share().heads(4, 2)[1]  # type: ignore[attr-defined]
        layers = [Cache(k[:, kv.start : kv.stop], v[:, kv.start : kv.stop]) for k, v in zip(keys, values, strict=True)]
        found = newest_rows(draft, layers, pages, lens, position, ranks)
        assert found is not None
        return found

    want = newest(ALONE)
    for got in run_ranks(size, newest):
        torch.testing.assert_close(got, want)
