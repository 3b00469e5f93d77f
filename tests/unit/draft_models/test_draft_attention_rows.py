"""Scores that a pass shows are those of transformers' eager attention, and showing them changes no output (U3)."""

from typing import Any

import pytest
import torch
from tiny import tiny_target
from transformers import DynamicCache, MistralConfig, MistralForCausalLM

from longdraft.draft_models.attention_rows import Look, can_look, grouped_scores, run_looking
from longdraft.train.tiny_random import tiny_config

LENGTH, CUT = 40, 23


def model_of(family: str) -> Any:
    if family != "mistral":
        return tiny_target(family).model
    fields = tiny_config("llama").to_dict()
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return MistralForCausalLM(MistralConfig(**{**fields, "model_type": "mistral", "sliding_window": 9})).eval()


def eager(model: Any, id_L: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Logits and attention ``[H, L, L]`` of each layer, as transformers computes them one matrix at a time."""
    before = model.config._attn_implementation
    model.set_attn_implementation("eager")
    with torch.no_grad():
        out = model(id_L[None], output_attentions=True)
    model.set_attn_implementation(before)
    return out.logits[0], [attention[0] for attention in out.attentions]


@pytest.fixture
def id_L() -> torch.Tensor:
    return torch.randint(0, 256, (LENGTH,), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral"])
def test_scores_are_those_of_eager_attention(family: str, id_L: torch.Tensor) -> None:
    model, seen, cache = model_of(family), dict[int, torch.Tensor](), DynamicCache()
    assert can_look(model)
    logits_LV, attention = eager(model, id_L)
    run_looking(model, id_L[:CUT], cache, None)
    row_R = torch.tensor([0, 5, LENGTH - CUT - 1])
    look = Look(row_R, lambda layer, score_HRN: seen.update({layer: score_HRN.softmax(-1)}))
    got_LV = run_looking(model, id_L[CUT:], cache, look)
    torch.testing.assert_close(got_LV, logits_LV[CUT:], rtol=1e-4, atol=1e-4)
    assert sorted(seen) == list(range(len(attention)))
    for layer, want_HLL in enumerate(attention):
        torch.testing.assert_close(seen[layer], want_HLL[:, CUT + row_R], rtol=1e-4, atol=1e-6)


def test_only_the_wanted_layers_and_heads_are_shown(id_L: torch.Tensor) -> None:
    model, seen = model_of("llama"), dict[int, torch.Tensor]()
    look = Look(torch.arange(LENGTH), lambda layer, s_HRN: seen.update({layer: s_HRN.softmax(-1)}), {1: [3, 0]})
    run_looking(model, id_L, DynamicCache(), look)
    assert list(seen) == [1]
    torch.testing.assert_close(seen[1], eager(model, id_L)[1][1][[3, 0]], rtol=1e-4, atol=1e-6)


def test_afterwards_the_model_attends_as_before(id_L: torch.Tensor) -> None:
    model = model_of("llama")
    before = model.config._attn_implementation
    with pytest.raises(RuntimeError, match="in the middle"):
        run_looking(
            model,
            id_L,
            DynamicCache(),
            Look(torch.arange(2), lambda *_: (_ for _ in ()).throw(RuntimeError("in the middle"))),
        )
    assert model.config._attn_implementation == before


def test_a_model_with_code_of_its_own_is_not_known() -> None:
    model = model_of("llama")
    assert not can_look(type("Other", (), {"config": model.config, "__module__": "their_code"})())
    model.config.model_type = "their_own"
    assert not can_look(model)


def test_heads_read_their_groups_keys_in_any_order() -> None:
    g = torch.Generator().manual_seed(0)
    q_HRD, k_KND = torch.randn(6, 3, 8, generator=g), torch.randn(2, 5, 8, generator=g)
    want_HRN = (q_HRD @ k_KND.repeat_interleave(3, 0).mT) * 0.25
    for heads in ([0, 1, 2, 3, 4, 5], [4], [5, 0, 3]):
        torch.testing.assert_close(grouped_scores(q_HRD, k_KND, heads, 0.25), want_HRN[heads])
