"""An EAGLE-3 draft in decoding: what it computes is what training computed, and the tokens are the target's own."""

import copy
from typing import Any

import pytest
import torch
from tiny import tiny_eagle3, tiny_target

from longdraft.draft_models.aux_features import aux_features
from longdraft.draft_models.drafting import drafting
from longdraft.draft_models.eagle3 import Eagle3Draft
from longdraft.draft_models.eagle3_ttt import forward_ttt
from longdraft.draft_models.feature_state import FeatureState, propose_from_features
from longdraft.draft_models.reference_decode import greedy_decode, prefill, speculative_decode
from longdraft.errors import UserError
from longdraft.kernels.view_attention import View

TARGET = tiny_target("llama", num_hidden_layers=5)
PROMPT, NEW, STEPS = [70, 81, 92, 13, 54, 65, 76, 87, 98, 9, 20, 31], 20, 3
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {"draft_vocab_size": 120},
    "window": {"window": 4, "fc_norm": True},
    "window of one": {"window": 1},
    "window and sinks": {"window": 3, "sinks": 2, "norm_output": True},
    "sinks beyond the text": {"window": 2, "sinks": 99},
}


def features(draft: Eagle3Draft, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad(), aux_features(TARGET.model, draft.config.aux_layers) as seen:
        TARGET.model(ids[None])
        return seen.take()[0]


def trained_logits(draft: Eagle3Draft, text: torch.Tensor, aux: torch.Tensor) -> list[torch.Tensor]:
    """``[T, V]`` logits of each step from the training forward."""
    everything = torch.arange(len(text))
    with torch.no_grad():
        steps = forward_ttt(draft, aux, text, everything, [0, len(text)], everything, STEPS)
        return [draft.logits(step.normed_NE) for step in steps]


class Follow:
    """Notes the draft's logits and drafts the text, each request at its place."""

    def __init__(self, text: torch.Tensor) -> None:
        self.text, self.logits = text, list[torch.Tensor]()

    def __call__(self, logits_BV: torch.Tensor, position_B: torch.Tensor, step: int) -> torch.Tensor:
        self.logits.append(logits_BV)
        return self.text[position_B + 1]


def wrong(logits_BV: torch.Tensor, position_B: torch.Tensor, step: int) -> torch.Tensor:
    """Whatever is refused must leave no trace."""
    return torch.full_like(position_B, 7)


@pytest.mark.parametrize("cuts", [[2, 3, 7, 8, 14], [14], [1, 14]], ids=["pieces", "at once", "after one token"])
@pytest.mark.parametrize("name", SETTINGS)
def test_a_served_chain_is_the_trained_chain(name: str, cuts: list[int]) -> None:
    draft, text = tiny_eagle3(TARGET, **SETTINGS[name]), torch.arange(30, 50)
    aux = features(draft, text)
    trained, state, done = trained_logits(draft, text, aux), FeatureState(draft, 2, 30, STEPS), 0
    for length in cuts:
        state.extend(1, text[done:length], aux[done:length])
        done = length
        row, root = torch.tensor([1]), text[length : length + 1]
        propose_from_features(state, row, root, STEPS, wrong)
        follow = Follow(text)
        drafted = propose_from_features(state, row, root, STEPS, follow)
        assert torch.equal(drafted[0], text[length + 1 : length + 1 + STEPS])
        for step, logits in enumerate(follow.logits):
            torch.testing.assert_close(logits[0], trained[step][length - 1], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", SETTINGS)
def test_requests_in_a_batch_do_not_see_each_other(name: str) -> None:
    draft, text = tiny_eagle3(TARGET, **SETTINGS[name]), torch.arange(30, 50)
    aux = features(draft, text)
    state = FeatureState(draft, 3, 30, STEPS)
    lengths = torch.tensor([11, 1, 5])
    for row, length in enumerate(lengths.tolist()):
        state.extend(row, text[:length], aux[:length])
    trained, follow = trained_logits(draft, text, aux), Follow(text)
    rows = torch.tensor([2, 0, 1])
    propose_from_features(state, rows, text[lengths[rows]], STEPS, follow)
    for step, logits in enumerate(follow.logits):
        torch.testing.assert_close(logits, trained[step][lengths[rows] - 1], rtol=1e-4, atol=1e-4)


def test_a_forgotten_row_serves_the_next_request() -> None:
    draft, text = tiny_eagle3(TARGET, window=3, sinks=1), torch.arange(30, 50)
    aux = features(draft, text)
    used, fresh = (FeatureState(draft, 1, 30, STEPS) for _ in range(2))
    used.extend(0, text.flip(0), aux.flip(0))
    used.forget(0)
    row = torch.tensor([0])
    for state in (used, fresh):
        state.extend(0, text[:6], aux[:6])
    found = [propose_from_features(state, row, text[6:7], STEPS) for state in (used, fresh)]
    assert torch.equal(*found)


def test_a_window_bounds_the_state() -> None:
    draft = tiny_eagle3(TARGET, window=8, sinks=2)
    assert FeatureState(draft, 1, 10**6, 4).k.shape[1] == 2 + 8 + 4
    assert FeatureState(tiny_eagle3(TARGET), 1, 100, 4).k.shape[1] == 100


@pytest.mark.parametrize(
    ("family", "name", "steps"),
    [
        ("llama", "plain", 1),
        ("llama", "window and sinks", 5),
        ("qwen2", "window", 4),
        ("qwen2", "window of one", 2),
        ("qwen3", "plain", 4),
        ("qwen3", "sinks beyond the text", 3),
    ],
)
def test_a_random_draft_gives_the_targets_own_tokens(family: str, steps: int, name: str) -> None:
    """V1, whatever the draft is."""
    target = tiny_target(family, num_hidden_layers=4)
    done = speculative_decode(target.model, tiny_eagle3(target, **SETTINGS[name]), PROMPT, NEW, steps)
    assert done.tokens == greedy_decode(target.model, PROMPT, NEW)
    assert done.stats.verifications > 0
    assert all(not block._forward_hooks for block in target.model.get_decoder().layers), "hooks are gone"


@pytest.mark.parametrize("chunk", [1, 5, 2048])
def test_a_prefill_in_chunks_drafts_alike(chunk: int) -> None:
    draft = tiny_eagle3(TARGET, window=5)
    with drafting(TARGET.model, draft, 40, STEPS) as request, torch.no_grad():
        cache, logits = prefill(TARGET.model, PROMPT, chunk, request.commit)
        root = logits.argmax()[None]
        drafted = request.propose(root, cache, STEPS)
    text = torch.cat([torch.tensor(PROMPT), root, drafted])
    trained = trained_logits(draft, text, features(draft, text))
    assert drafted.tolist() == [int(trained[step][len(PROMPT) - 1].argmax()) for step in range(STEPS)]


def test_a_draft_of_the_targets_habits_is_kept() -> None:
    """A target that repeats one token, and a draft whose head knows nothing else."""
    target = tiny_target("llama", num_hidden_layers=4)
    model = copy.deepcopy(target.model)
    with torch.no_grad():
        model.get_output_embeddings().weight.zero_()  # every logit is equal: the argmax is token 0
    draft = tiny_eagle3(target, draft_vocab_size=1)
    draft.choose_vocabulary(torch.tensor([0]))
    done = speculative_decode(model, draft, PROMPT, NEW, 4)
    assert done.tokens == [0] * NEW
    assert done.stats.tau == 5.0


def test_a_half_precision_target_is_read_by_a_float32_draft() -> None:
    half = copy.deepcopy(TARGET.model).to(torch.bfloat16)
    draft = tiny_eagle3(TARGET).bind(half.get_input_embeddings().weight)
    assert len(speculative_decode(half, draft, PROMPT, 8, 3).tokens) == 8


def test_a_one_token_prompt() -> None:
    done = speculative_decode(TARGET.model, tiny_eagle3(TARGET, window=2, sinks=1), [77], 9, 3)
    assert done.tokens == greedy_decode(TARGET.model, [77], 9)


def test_a_view_is_for_drafts_that_read_the_cache() -> None:
    with pytest.raises(UserError, match="leave the view out"):
        speculative_decode(TARGET.model, tiny_eagle3(TARGET), PROMPT, 4, 2, View(64, 4, 16, 8))
