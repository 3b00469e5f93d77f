"""Both drafts grow trees: a beam of one is the chain, and every node's logits are those of a chain along its path."""

import pytest
import torch
from tiny import tiny_draft, tiny_eagle3, tiny_target

from longdraft.draft_models.aux_features import aux_features
from longdraft.draft_models.chain import propose_chain
from longdraft.draft_models.draft_tree import Frontier, TreeDraft, beam_tree, ranked_tree
from longdraft.draft_models.eagle3 import Eagle3Draft
from longdraft.draft_models.feature_state import FeatureState, propose_from_features
from longdraft.draft_models.longspec import LongSpecDraft
from longdraft.draft_models.tree_steps import Eagle3TreeStep, LongSpecTreeStep
from longdraft.draft_models.window_state import WindowState
from longdraft.kernels.dense_attention import dense_attention

TARGET = tiny_target("llama", num_hidden_layers=5)
LENGTHS, WIDTHS = [30, 3, 1], [2, 3, 3, 1]
TEXTS = [torch.randint(0, 256, (n + 1,), generator=torch.Generator().manual_seed(n)) for n in LENGTHS]
ROOTS, POSITIONS = torch.stack([text[-1] for text in TEXTS]), torch.tensor(LENGTHS)
RUNS, STEPS, SCALE = 1 + sum(WIDTHS[:-1]), len(WIDTHS), 16**-0.5


def captured(text: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    seen = TARGET.capture(text[:-1], torch.arange(len(text) - 1), [0, len(text) - 1])
    return seen.k_TKD, seen.v_TKD


CACHES = [captured(text) for text in TEXTS]


class Noted:
    """A step that keeps what was asked and answered, with each node's tokens behind the root."""

    def __init__(self, step: LongSpecTreeStep | Eagle3TreeStep) -> None:
        self.step = step
        self.seen: list[tuple[int, tuple[int, ...], torch.Tensor]] = []
        self.paths: list[list[tuple[int, ...]]] = [[()] for _ in LENGTHS]

    def __call__(self, nodes: Frontier) -> torch.Tensor:
        logits_BMN = self.step(nodes)
        if nodes.depth:
            pairs = [
                zip(t, p, strict=True) for t, p in zip(nodes.token_BM.tolist(), nodes.parent_BM.tolist(), strict=True)
            ]
            self.paths = [[(*old[p], t) for t, p in pair] for old, pair in zip(self.paths, pairs, strict=True)]
        for b, paths in enumerate(self.paths):
            self.seen += [(b, path, logits) for path, logits in zip(paths, logits_BMN[b], strict=True)]
        return logits_BMN


class Along:
    """Drafts a given path and notes the last logits."""

    def __init__(self, path: tuple[int, ...]) -> None:
        self.path = path

    def __call__(self, logits_BV: torch.Tensor, position_B: torch.Tensor, step: int) -> torch.Tensor:
        self.logits_V = logits_BV[0]
        return torch.tensor([self.path[step] if step < len(self.path) else 0])


def longspec_step(draft: LongSpecDraft) -> LongSpecTreeStep:
    state = WindowState(draft, 5, STEPS)
    rows = torch.tensor([4, 0, 2])
    for row, text in zip(rows.tolist(), TEXTS, strict=True):
        state.store(torch.full((9,), row), torch.arange(9), torch.arange(900, 909))  # another request's, long ago
        state.rebuild(row, text[:-1].tolist(), len(text) - 1)

    def cross_attend(q_BMHD: torch.Tensor) -> torch.Tensor:
        return torch.stack([dense_attention(q, k, v, SCALE)[0] for q, (k, v) in zip(q_BMHD, CACHES, strict=True)])

    return LongSpecTreeStep(state, rows, POSITIONS, cross_attend, RUNS)


def longspec_chain(draft: LongSpecDraft, b: int, choose: Along, steps: int) -> torch.Tensor:
    state = WindowState(draft, 1, steps)
    state.rebuild(0, TEXTS[b][:-1].tolist(), LENGTHS[b])
    k, v = CACHES[b]
    zero = torch.tensor([0])
    return propose_chain(
        state, zero, ROOTS[b : b + 1], POSITIONS[b : b + 1], steps, lambda q: dense_attention(q, k, v, SCALE)[0], choose
    )


def feature_state(draft: Eagle3Draft, b: int) -> FeatureState:
    state = FeatureState(draft, 1, 64, STEPS)
    with torch.no_grad(), aux_features(TARGET.model, draft.config.aux_layers) as seen:
        TARGET.model(TEXTS[b][None, :-1])
        state.extend(0, TEXTS[b][:-1], seen.take()[0])
    return state


def eagle3_step(draft: Eagle3Draft) -> Eagle3TreeStep:
    states = [feature_state(draft, b) for b in range(len(TEXTS))]

    def prefix(depth: int, q_BMHD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        parts = [
            dense_attention(q, state.k[0, : n - 1], state.v[0, : n - 1], q.shape[-1] ** -0.5)
            for q, state, n in zip(q_BMHD, states, LENGTHS, strict=True)
        ]
        return torch.cat([out for out, _ in parts]), torch.cat([lse for _, lse in parts])

    return Eagle3TreeStep(draft, torch.cat([state.feature for state in states]), POSITIONS, prefix, RUNS)


def eagle3_chain(draft: Eagle3Draft, b: int, choose: Along, steps: int) -> torch.Tensor:
    return propose_from_features(feature_state(draft, b), torch.tensor([0]), ROOTS[b : b + 1], steps, choose)


LONGSPEC = {
    "longspec": tiny_draft(TARGET, window=8),
    "longspec, ranked head": tiny_draft(TARGET, window=4, head_tokens=40),
    "longspec, window as deep as the tree": tiny_draft(TARGET, window=STEPS),
}
EAGLE3 = {
    "eagle3": tiny_eagle3(TARGET, draft_vocab_size=120),
    "eagle3, normed": tiny_eagle3(TARGET, fc_norm=True, norm_output=True),
}
LONGSPEC["longspec, ranked head"].rank_head(torch.randperm(256, generator=torch.Generator().manual_seed(0))[:40])
DRAFTS = {**LONGSPEC, **EAGLE3}


def step_of(name: str) -> LongSpecTreeStep | Eagle3TreeStep:
    return longspec_step(LONGSPEC[name]) if name in LONGSPEC else eagle3_step(EAGLE3[name])


def chain(name: str, b: int, choose: Along, steps: int) -> torch.Tensor:
    if name in LONGSPEC:
        return longspec_chain(LONGSPEC[name], b, choose, steps)
    return eagle3_chain(EAGLE3[name], b, choose, steps)


@pytest.mark.parametrize("kind", ["beam", "ranked"])
@pytest.mark.parametrize("name", DRAFTS)
def test_every_nodes_logits_are_those_of_a_chain_along_its_path(name: str, kind: str) -> None:
    noted, ids = Noted(step_of(name)), DRAFTS[name].target_ids
    draft = TreeDraft(noted, id_N=ids)
    tree = beam_tree(draft, ROOTS, WIDTHS) if kind == "beam" else ranked_tree(draft, ROOTS, 4, 2, 12)
    assert bool(tree.valid_BT.all())
    assert len({path for _, path, _ in noted.seen}) > 12
    for b, path, logits_N in noted.seen:
        along = Along(path)
        with torch.no_grad():
            chain(name, b, along, len(path) + 1)
        want = along.logits_V if ids is None else along.logits_V[ids]
        torch.testing.assert_close(logits_N, want, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("name", DRAFTS)
def test_a_beam_of_one_is_the_chain(name: str) -> None:
    tree = beam_tree(TreeDraft(step_of(name), id_N=DRAFTS[name].target_ids), ROOTS, [1] * STEPS)

    def best(logits_BV: torch.Tensor, position_B: torch.Tensor, step: int) -> torch.Tensor:
        return logits_BV.argmax(-1)

    for b in range(len(TEXTS)):
        assert tree.token_BT[b, 1:].tolist() == chain(name, b, best, STEPS)[0].tolist()  # type: ignore[arg-type]


def test_what_cannot_be_drafted_is_refused() -> None:
    with pytest.raises(ValueError, match="deeper than the draft's window of 2: draft less deep"):
        beam_tree(TreeDraft(longspec_step(tiny_draft(TARGET, window=2))), ROOTS, WIDTHS)
    with pytest.raises(ValueError, match="runs on 129 nodes of a tree, at most 128"):
        Eagle3TreeStep(EAGLE3["eagle3"], torch.zeros(1, 64), torch.tensor([3]), lambda depth, q: (q, q), 129)
