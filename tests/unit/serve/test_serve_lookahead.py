"""What drafters say of their chains' queries: those of an independent run of the draft, whatever batch and padding they were kept in."""

from typing import Any

import pytest
import test_serve_eagle3_drafter as eagle3
import test_serve_longspec_drafter as longspec
import torch
from tiny import tiny_draft, tiny_eagle3

from longdraft.draft_models.chain import propose_chain
from longdraft.draft_models.fused_step import FusedStep
from longdraft.draft_models.sparse_recipe import LayerHeads
from longdraft.draft_models.window_state import WindowState
from longdraft.errors import UserError
from longdraft.kernels.dense_attention import dense_attention
from longdraft.serve.drafters.cross_attention import Cache
from longdraft.serve.drafters.longspec import LongSpecDrafter
from longdraft.serve.drafters.lookup import LookupDrafter

HEADS = longspec.DRAFT.config.cross_heads


@pytest.fixture(params=["module", "fused"])
def step(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "fused":
        monkeypatch.setattr(FusedStep, "of", staticmethod(FusedStep))


def longspec_queries(rid: str, at: int, columns: list[int] | slice) -> torch.Tensor:
    state, seen = WindowState(longspec.DRAFT, 1, longspec.STEPS), longspec.SEEN[rid]
    state.rebuild(0, longspec.TEXTS[rid][:at].tolist(), at)
    found, position = [], torch.tensor([at])

    def attend(q_BHD: torch.Tensor) -> torch.Tensor:
        found.append(q_BHD[0])
        return dense_attention(q_BHD, seen.k_TKD[columns], seen.v_TKD[columns], longspec.SCALE)[0]

    given = state, torch.tensor([0]), longspec.TEXTS[rid][position], position, longspec.STEPS
    propose_chain(*given, attend)
    return torch.stack(found)


@pytest.mark.usefixtures("step")
@pytest.mark.parametrize("sizes", [[], [2, 4]])
def test_a_longspec_draft_looks_over_the_targets_cache(sizes: list[int]) -> None:
    drafter = longspec.make(rows=4, context=8, sinks=2)
    assert drafter.lookahead(longspec.running({"a": 12})) == []
    assert drafter.look_ahead(None) == 1
    drafter.use_graphs(sizes)
    for places in ({"c": 4, "a": 30, "b": 17}, {"a": 21}):
        for rid, place in places.items():
            drafter.follow(rid, longspec.request(rid, place).tokens, place)
        batch = longspec.running(places)
        drafter.propose_running(batch, longspec.greedy)
        [look] = drafter.lookahead(batch)
        got = look.q_NHD.unflatten(0, (len(places), longspec.STEPS))
        for (rid, at), q_SHD in zip(places.items(), got, strict=True):
            read: Any = slice(0, at) if at <= 8 else [0, 1, *range(at - 6, at)]
            torch.testing.assert_close(q_SHD, longspec_queries(rid, at, read), rtol=1e-4, atol=1e-4)
    assert look.k_SKD is drafter.layers[0].k_SKD and look.heads == tuple(range(HEADS)) and look.first == 0
    assert look.scale == longspec.SCALE and look.table_RW is None and look.kv_scale == 1.0


def test_a_longspec_draft_of_several_layers_looks_with_each_ones_heads() -> None:
    draft = tiny_draft(longspec.TARGET, window=6, cross_layers=[0, 1])
    drafter = LongSpecDrafter(draft, 3, 2, 64, 4, "torch")
    caches = [
        Cache(*torch.randn(2, 400, 2, 16, generator=torch.Generator().manual_seed(i)), (1.0 + i, 1.0)) for i in (0, 1)
    ]
    drafter.bind_cache(*caches)
    each = draft.config.cross_heads // 2
    assert drafter.look_ahead([LayerHeads(layer=1, heads=[0, each - 1])]) == 1
    batch = longspec.running({"a": 9, "b": 5})
    drafter.propose_running(batch, longspec.greedy)
    [second] = drafter.lookahead(batch)
    assert second.k_SKD is caches[1].k_SKD and second.heads == (0, each - 1) and second.kv_scale == 2.0
    assert drafter.looked is not None
    assert torch.equal(second.q_NHD, drafter.looked.q_BSHD[:2, :, each:].flatten(0, 1)) and bool(second.q_NHD.any())


@torch.no_grad()
def eagle3_queries(rid: str, at: int) -> torch.Tensor:
    """The last row's queries of every step, all rows of it computed again."""
    draft, text = eagle3.DRAFT, eagle3.TEXTS[rid]
    hidden, ids, found = draft.fuse(eagle3.features(text)[:at]), text[1 : at + 1].tolist(), []
    for _ in range(eagle3.STEPS):
        rows = torch.arange(len(ids))
        x, seen = draft.attention_input(torch.tensor(ids), hidden), rows[:, None] >= rows[None]
        query = draft.query(x, rows)
        found.append(query[-1])
        attended = dense_attention(query, *draft.key_value(x, rows), draft.config.head_dim**-0.5, seen)[0]
        normed, following = draft.finish(hidden, attended)
        ids.append(int(draft.logits(normed)[-1].argmax()))
        hidden = torch.cat([hidden, following[-1:]])
    return torch.stack(found)


@pytest.mark.parametrize("sizes", [[], [2, 4]])
def test_an_eagle3_draft_looks_over_its_own_rows(sizes: list[int]) -> None:
    drafter = eagle3.make(rows=4)
    assert drafter.look_ahead([LayerHeads(layer=0, heads=[1])]) == 1
    drafter.use_graphs(sizes)
    places = {"a": 30, "b": 3, "c": 17}
    for rid, at in places.items():
        eagle3.show(drafter, eagle3.TEXTS[rid], eagle3.PAGES[rid], 0, at)
    batch = eagle3.running(places)
    drafter.propose_running(batch, eagle3.greedy)
    [look] = drafter.lookahead(batch)
    got = look.q_NHD.unflatten(0, (3, eagle3.STEPS))
    for (rid, at), q_SHD in zip(places.items(), got, strict=True):
        torch.testing.assert_close(q_SHD, eagle3_queries(rid, at), rtol=1e-4, atol=1e-4)
    assert look.first == 1 and look.heads == (1,) and look.k_SKD is drafter.k_SKD


def test_an_eagle3_draft_with_a_window_looks_at_nothing_outside(caplog: pytest.LogCaptureFixture) -> None:
    draft = tiny_eagle3(eagle3.TARGET, draft_vocab_size=100, window=8)
    drafter = eagle3.make(draft)
    assert drafter.look_ahead(None) == 0 and drafter.lookahead(eagle3.running({"a": 9})) == []
    assert "window of 8 tokens" in caplog.text and "history alone" in caplog.text
    with pytest.raises(UserError, match=r"draft layer 0 is none of the EAGLE-3 draft's \(it has none\)"):
        drafter.look_ahead([LayerHeads(layer=0, heads=[0])])


def test_layers_and_heads_that_are_not_there_are_named() -> None:
    drafter = longspec.make()
    last = longspec.DRAFT.config.cross_layers[0]
    with pytest.raises(UserError, match=r"draft layer 77 is none of the LongSpec draft.*calibrate with this draft"):
        drafter.look_ahead([LayerHeads(layer=77, heads=[0])])
    with pytest.raises(UserError, match=rf"draft layer {last} has {HEADS} query heads in .*, not head {HEADS}"):
        drafter.look_ahead([LayerHeads(layer=last, heads=[0, HEADS])])


def test_a_drafter_without_attention_looks_at_nothing() -> None:
    drafter = LookupDrafter(2)
    assert drafter.look_ahead(None) == 0 and drafter.lookahead(longspec.running({"a": 9})) == []
