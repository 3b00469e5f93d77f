"""The reference decoder: greedy tokens for every draft, however good or bad, and honest counts (V1, V2, V5)."""

import copy
from collections.abc import Callable

import pytest
import torch
from tiny import tiny_draft, tiny_target

from longdraft.draft_models import drafting
from longdraft.draft_models.longspec import LongSpecDraft
from longdraft.draft_models.reference_decode import greedy_decode, prefill, speculative_decode
from longdraft.train.target import FrozenTarget

PROMPT, NEW = [70, 81, 92, 13, 54, 65, 76, 87, 98, 9, 20, 31], 24


def greedy(target: FrozenTarget, new_tokens: int = NEW) -> list[int]:
    return greedy_decode(target.model, PROMPT, new_tokens)


def script(monkeypatch: pytest.MonkeyPatch, draft_at: Callable[[int, int], int]) -> None:
    """Replace proposing by a rule: the token drafted for a position, given the depth."""

    def propose(
        state: object, row: object, root: object, at: torch.Tensor, steps: int, *_: object, **__: object
    ) -> torch.Tensor:
        return torch.tensor([[draft_at(int(at) + 1 + d, d) for d in range(steps)]])

    monkeypatch.setattr(drafting, "propose_chain", propose)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("steps", [1, 2, 3, 4, 5])
def test_a_random_draft_gives_the_targets_own_tokens(family: str, steps: int) -> None:
    """V1, and by V2 next to nothing of it is kept."""
    target = tiny_target(family)
    done = speculative_decode(target.model, tiny_draft(target, window=8), PROMPT, NEW, steps)
    assert done.tokens == greedy(target)
    assert 1.0 <= done.stats.tau < 2.0


@pytest.mark.parametrize("steps", [1, 2, 3, 4, 5])
def test_an_oracle_is_kept_whole(steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """V2: tau is the depth plus one, and every verification keeps every depth."""
    target = tiny_target("llama")
    text = [*PROMPT, *greedy(target, NEW + 10)]
    script(monkeypatch, lambda position, depth: text[position])
    done = speculative_decode(target.model, tiny_draft(target), PROMPT, NEW, steps)
    assert done.tokens == text[len(PROMPT) :][:NEW]
    assert done.stats.tau == steps + 1
    assert done.accepted_at == [done.stats.verifications] * steps


@pytest.mark.parametrize("steps", [1, 3, 5])
def test_an_adversary_costs_speed_and_no_token(steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Always the wrong first token, the right ones behind it: nothing may be kept."""
    target = tiny_target("llama")
    text = [*PROMPT, *greedy(target, NEW + 10)]
    script(monkeypatch, lambda position, depth: text[position] if depth else (text[position] + 1) % 288)
    done = speculative_decode(target.model, tiny_draft(target), PROMPT, NEW, steps)
    assert done.tokens == text[len(PROMPT) :][:NEW]
    assert done.stats.accepted == 0
    assert done.stats.tau == 1.0
    assert done.accepted_at == [0] * steps


@pytest.mark.parametrize("right", [1, 2, 3])
def test_a_draft_that_fails_at_one_depth_is_kept_up_to_it(right: int, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tiny_target("qwen2")
    text = [*PROMPT, *greedy(target, NEW + 10)]
    script(monkeypatch, lambda position, depth: text[position] if depth < right else (text[position] + 1) % 288)
    done = speculative_decode(target.model, tiny_draft(target), PROMPT, NEW, 4)
    assert done.tokens == text[len(PROMPT) :][:NEW]
    assert done.accepted_at == [done.stats.verifications] * right + [0] * (4 - right)


def test_the_accounts_add_up() -> None:
    """V5: tokens emitted are one of the prefill, and drafts kept plus one a verification, before the cut at the length."""
    target = tiny_target("llama")
    for steps in (1, 4):
        done = speculative_decode(target.model, tiny_draft(target, window=8), PROMPT, NEW, steps)
        produced = 1 + done.stats.accepted + done.stats.verifications
        assert NEW <= produced <= NEW + steps
        assert done.stats.drafted == steps * done.stats.verifications
        assert sum(done.accepted_at) == done.stats.accepted
        assert done.accepted_at == sorted(done.accepted_at, reverse=True)


@pytest.mark.parametrize("new_tokens", [1, 2, 3])
def test_short_answers_stop_where_asked(new_tokens: int) -> None:
    target = tiny_target("llama")
    done = speculative_decode(target.model, tiny_draft(target), PROMPT, new_tokens, 5)
    assert done.tokens == greedy(target)[:new_tokens]


def test_a_one_token_prompt_drafts_from_an_empty_window() -> None:
    target = tiny_target("llama")
    done = speculative_decode(target.model, tiny_draft(target, window=1), [77], 12, 3)
    assert done.tokens == greedy_decode(target.model, [77], 12)


def test_a_broken_draft_changes_nothing() -> None:
    """NaN weights: whatever argmax makes of them is refused like any wrong draft."""
    target = tiny_target("llama")
    draft: LongSpecDraft = tiny_draft(target)
    with torch.no_grad():
        draft.mlp.up_proj.weight.fill_(float("nan"))
    assert speculative_decode(target.model, draft, PROMPT, NEW, 3).tokens == greedy(target)


def test_prefill_in_chunks_is_prefill_at_once() -> None:
    target = tiny_target("llama")
    whole_cache, whole = prefill(target.model, PROMPT)
    cache, logits = prefill(target.model, PROMPT, chunk=5)
    torch.testing.assert_close(logits, whole, rtol=1e-4, atol=1e-4)
    assert cache.get_seq_length() == whole_cache.get_seq_length() == len(PROMPT)


def test_a_half_precision_target_is_read_by_a_float32_draft() -> None:
    """Training on a GPU evaluates like this: the target's cache and head are bfloat16, the draft's weights float32."""
    target = tiny_target("llama")
    half = copy.deepcopy(target.model).to(torch.bfloat16)
    draft = tiny_draft(target, window=8).bind(half.get_input_embeddings().weight, half.get_output_embeddings().weight)
    done = speculative_decode(half, draft, PROMPT, NEW, 3)
    assert len(done.tokens) == NEW and done.stats.verifications > 0
