"""Scoring a known continuation counts what the reference decoder counts."""

import pytest
import torch
from tiny import tiny_draft, tiny_eagle3, tiny_target

from longdraft.draft_models.reference_decode import greedy_decode, speculative_decode
from longdraft.kernels.view_attention import View
from longdraft.train.scoring import score

PROMPT, NEW, STEPS = 37, 40, 4


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize(
    "kind", ["longspec", "longspec view", "longspec layers", "longspec newest", "eagle3", "eagle3 window"]
)
def test_the_walk_is_the_reference_decoders(family: str, kind: str) -> None:
    target = tiny_target(family, num_hidden_layers=4)
    view = View(24, 4, 20, 1) if kind.endswith("view") else None
    if kind.startswith("eagle3"):
        own = {"window": 9, "sinks": 2} if kind.endswith("window") else {}
        draft = tiny_eagle3(target, **own)
        with torch.no_grad():  # random drafts keep nothing: this one often repeats the target's own head
            draft.lm_head.weight.copy_(target.head_VE)
            draft.fc.weight.zero_()
            draft.fc.weight[:, -target.spec.hidden_size :].copy_(torch.eye(target.spec.hidden_size))
    else:
        own = {"cross_layers": [0, 2, 3], "cross_group": 1} if kind.endswith("layers") else {}
        own |= {"newest_lags": 2, "cross_layers": [1, 3]} if kind.endswith("newest") else {}
        draft = tiny_draft(target, window=16, **own)  # type: ignore[assignment]
    ids = torch.randint(0, 256, (PROMPT,), generator=torch.Generator().manual_seed(3)).tolist()
    answer = greedy_decode(target.model, ids, NEW + STEPS + 1)
    want = speculative_decode(target.model, draft, ids, NEW, STEPS, view)
    got = score(target, draft, ids + answer, PROMPT, NEW, STEPS, view)
    assert got.tokens == want.tokens == answer[:NEW]
    assert got.stats == want.stats and got.accepted_at == want.accepted_at


def test_a_perfect_draft_keeps_everything() -> None:
    """The walk itself: a text of one token, which a draft that always says that token guesses right."""
    target = tiny_target("llama", num_hidden_layers=4)
    draft = tiny_draft(target, window=16)
    with torch.no_grad():
        for projection in (draft.mlp.down_proj, draft.self_attn.o_proj, draft.cross_attn.o_proj):
            projection.weight.zero_()
        target.head_VE[7] = 50 * target.embedding_VE[7]
    draft.bind(target.embedding_VE, target.head_VE)
    got = score(target, draft, [7] * 60, 20, 21, 4)
    assert got.stats.verifications == 4 and got.stats.accepted == 16
