"""What drafts of every kind are taken to look at is what their chains look at while they draft (U3, D2).

Legend: W chains, C steps, N tokens, H heads.
"""

import pytest
import torch
from tiny import tiny_draft, tiny_eagle3, tiny_target

from longdraft.draft_models.chain import Choose, propose_chain
from longdraft.draft_models.eagle3 import Eagle3Draft
from longdraft.draft_models.eagle3_chain import propose_eagle3_chain
from longdraft.draft_models.feature_state import FeatureState
from longdraft.draft_models.longspec import LongSpecDraft
from longdraft.draft_models.window_state import WindowState
from longdraft.train.calibration.lookahead import (
    Eagle3Lookahead,
    LongSpecLookahead,
    Lookahead,
    StandaloneLookahead,
)
from longdraft.train.calibration.reading import CHUNK, Reading
from longdraft.train.calibration.traces import Tracer, Windows
from longdraft.train.target import FrozenTarget

STEPS, STARTS = 3, [7, 20, 23, 41]  # chains with gaps, side by side, and shorter than a draft's window
IDS = torch.randint(0, 256, (STARTS[-1] + STEPS,), generator=torch.Generator().manual_seed(5)).tolist()


def looked(draft: Lookahead, target: FrozenTarget) -> torch.Tensor:
    """Attention of all chains, ``[S, H, W, C, N]``."""
    reading, seen = Reading(target.model, draft.aux_layers), dict[int, torch.Tensor]()
    reading.read(IDS)
    draft.look(reading, STARTS, STEPS, lambda layer, score: seen.update({layer: score.softmax(-1)}))
    assert sorted(seen) == list(range(len(draft.layers)))
    assert {tuple(x.shape) for x in seen.values()} == {(draft.heads, len(STARTS), STEPS, STARTS[-1])}
    return torch.stack([seen[layer] for layer in sorted(seen)])


def check_chain(attention_SHCN: torch.Tensor, queries: list[torch.Tensor], k_KND: torch.Tensor) -> None:
    """One chain against the queries that drafting asked with, and keys of committed tokens only."""
    heads, tokens = queries[0].shape[0], k_KND.shape[1]
    keys = k_KND.repeat_interleave(heads // len(k_KND), 0)
    for step, q_HD in enumerate(queries):
        score_HN = torch.einsum("hd,hnd->hn", q_HD, keys) * q_HD.shape[-1] ** -0.5
        got_HN = attention_SHCN[:, :, step].flatten(0, 1)
        torch.testing.assert_close(got_HN[:, -tokens:], score_HN.softmax(-1), rtol=1e-4, atol=1e-6)
        assert not got_HN[:, :-tokens].any()


def teacher(start: int) -> Choose:
    """What makes a chain follow the text."""
    return lambda logits, position, step: torch.tensor([IDS[min(start + step + 1, len(IDS) - 1)]])


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize(
    "own", [{}, {"cross_layers": [0, 2, 3], "cross_group": 1}, {"cross_layers": [1, 3], "newest_lags": 2}]
)
def test_a_longspec_draft_looks_as_its_chains_do(family: str, own: dict[str, object]) -> None:
    target = tiny_target(family, num_hidden_layers=4)
    draft: LongSpecDraft = tiny_draft(target, window=16, **own)
    attention_SHWCN = looked(lookahead := LongSpecLookahead(draft), target)
    assert lookahead.layers == own.get("cross_layers", [3])
    reading = Reading(target.model)
    reading.read(IDS)
    layers = [reading.cache.layers[layer] for layer in lookahead.layers]
    for chain, start in enumerate(STARTS):
        state, queries = WindowState(draft, 1, STEPS), list[torch.Tensor]()
        state.rebuild(0, IDS[:start], start)
        keys, values = (torch.cat([getattr(x, n)[0, :, :start] for x in layers]) for n in ("keys", "values"))
        at = torch.tensor([start])
        newest = draft.read_newest(keys[:, -1][None], values[:, -1][None], at - 1)

        def attend(q_BHD: torch.Tensor, queries: list[torch.Tensor] = queries) -> torch.Tensor:
            queries.append(q_BHD[0])
            return torch.randn_like(q_BHD)  # what is found there changes no query

        row = torch.zeros(1, dtype=torch.int64)
        root = torch.tensor([IDS[start]])
        propose_chain(state, row, root, at, STEPS, attend, teacher(start), newest_BF=newest)
        check_chain(attention_SHWCN[:, :, chain, :, :start], queries, keys)
        assert not attention_SHWCN[:, :, chain, :, start:].any()


def eagle3_chain(draft: Eagle3Draft, reading: Reading, start: int) -> tuple[list[torch.Tensor], torch.Tensor]:
    """A drafted chain's queries, and the keys of the rows before it that its state holds."""
    state, queries = FeatureState(draft, 1, len(IDS), STEPS), list[torch.Tensor]()
    state.extend(0, torch.tensor(IDS[:start]), reading.aux_LA[:start])
    row, root = torch.zeros(1, dtype=torch.int64), torch.tensor([IDS[start]])

    def attend(step: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        queries.append(q[0])
        return state.attend(row, state.length - 1 + step, q, k, v)

    propose_eagle3_chain(draft, state.feature, root, state.length, STEPS, attend, teacher(start))
    return queries, state.k[0, : start - 1].transpose(0, 1)


@pytest.mark.parametrize("own", [{}, {"window": 9, "sinks": 2}])
def test_an_eagle3_draft_looks_as_its_chains_do(own: dict[str, int]) -> None:
    """Row t stands for token t + 1; without a window the rows that the chain's own state holds are all keys."""
    target = tiny_target("llama", num_hidden_layers=4)
    draft = tiny_eagle3(target, **own)
    attention_SHWCN = looked(lookahead := Eagle3Lookahead(draft), target)
    reading = Reading(target.model, lookahead.aux_layers)
    reading.read(IDS)
    for chain, start in enumerate(STARTS):
        got = attention_SHWCN[:, :, chain, :, :start]
        if own:
            assert got[..., 1:].min() > 0, "a row out of the window is scored too, as in serving"
        else:
            check_chain(got, *eagle3_chain(draft, reading, start))
        assert not attention_SHWCN[:, :, chain, :, start:].any() and not got[..., 0].any()


def test_a_model_of_its_own_looks_as_eager_attention_does() -> None:
    target, other = tiny_target("llama"), tiny_target("llama", seed=1, num_hidden_layers=3)
    attention_SHWCN = looked(StandaloneLookahead(other.model), target)
    other.model.set_attn_implementation("eager")
    with torch.no_grad():
        full = other.model(torch.tensor([IDS]), output_attentions=True).attentions
    for layer, attention in enumerate(full):
        for chain, start in enumerate(STARTS):
            want_HCN = attention[0][:, start : start + STEPS, :start]
            got_HCN = attention_SHWCN[layer, :, chain, :, :start]
            torch.testing.assert_close(got_HCN, want_HCN / want_HCN.sum(-1, keepdim=True), rtol=1e-4, atol=1e-6)
            assert not attention_SHWCN[layer, :, chain, :, start:].any()


def test_a_text_is_read_in_pieces_and_again_from_any_place(monkeypatch: pytest.MonkeyPatch) -> None:
    target = tiny_target("llama", num_hidden_layers=4)
    with torch.no_grad():
        want_LV = target.model(torch.tensor([IDS])).logits[0]
    monkeypatch.setattr("longdraft.train.calibration.reading.CHUNK", 5)
    assert len(IDS) < CHUNK, "in one piece otherwise"
    reading, rows = Reading(target.model, (0, 1, 3)), list[int]()
    torch.testing.assert_close(reading.read(IDS), want_LV[-1], rtol=1e-4, atol=1e-4)
    aux_LA = reading.aux_LA
    reading.back_to(9)
    assert len(reading) == 9 == reading.cache.get_seq_length() and torch.equal(reading.aux_LA, aux_LA[:9])
    got_LV = reading.look(IDS[9:], lambda layer, score: rows.append(score.shape[1]))
    torch.testing.assert_close(got_LV, want_LV[9:], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(reading.aux_LA, aux_LA, rtol=1e-4, atol=1e-4)
    assert rows == [len(IDS) - 9] * 4 and reading.ids == IDS


def test_a_model_that_drafts_for_itself_looks_at_what_its_verification_looks_at() -> None:
    """History, window and lookahead of a trace are on the same columns: here the lookahead is the window, times heads and steps."""
    model, heads = tiny_target("llama").model, [[0, 3], [1, 2]]
    trace = Tracer(model, StandaloneLookahead(model), heads, heads).trace(IDS, Windows(20, 5, 4))
    torch.testing.assert_close(trace.lookahead_SWN, trace.attention_SWN * 2 * 4, rtol=1e-4, atol=1e-6)


def test_a_window_is_the_next_ones_history_but_for_what_the_row_sees_of_itself() -> None:
    """Of verifications of one row: the row at T is the last committed one of the next verification."""
    trace = Tracer(tiny_target("llama").model, None, [[0], [3]], []).trace(IDS, Windows(20, 6, 1))
    for w in range(5):
        length = int(trace.length_W[w])
        history_SN = trace.history_GSWN[0, :, w + 1]
        assert (history_SN[:, length] > 0).all() and not history_SN[:, length + 1 :].any()
        want_SN = history_SN.index_fill(1, torch.tensor([length]), 0)
        want_SN = want_SN / want_SN.sum(1, keepdim=True)
        torch.testing.assert_close(trace.attention_SWN[:, w], want_SN, rtol=1e-4, atol=1e-6)
