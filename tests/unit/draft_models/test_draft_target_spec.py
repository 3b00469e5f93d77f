"""What a draft reads of its target's config, and every target it refuses with its reason."""

import re
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import (
    DeepseekV3Config,
    Gemma2Config,
    LlamaConfig,
    MistralConfig,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

from longdraft.draft_models.target import FAMILIES, TargetSpec
from longdraft.errors import UserError

SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 300,
    "max_position_embeddings": 4096,
}


SERVED = [
    (LlamaConfig(**SIZES), False),
    (MistralConfig(**SIZES, sliding_window=None), False),
    (Qwen2Config(**SIZES), False),
    (Qwen2MoeConfig(**SIZES), False),
    (Qwen3Config(**SIZES, head_dim=32), True),
    (Qwen3MoeConfig(**SIZES, head_dim=32), True),
]


@pytest.mark.parametrize(("config", "qk_norm"), SERVED, ids=[config.model_type for config, _ in SERVED])
def test_every_served_family_is_read(config: Any, qk_norm: bool) -> None:
    spec = TargetSpec.from_config(config)
    assert spec.model_type == config.model_type
    assert (spec.hidden_size, spec.intermediate_size, spec.num_layers) == (64, 96, 3)
    assert (spec.num_heads, spec.num_kv_heads, spec.vocab_size, spec.max_position) == (4, 2, 300, 4096)
    assert spec.head_dim == (32 if qk_norm else 16)
    assert spec.qk_norm is qk_norm
    assert spec.rope["rope_type"] == "default"
    assert spec.rope["rope_theta"] == config.rope_parameters["rope_theta"]


def test_no_family_is_served_untested() -> None:
    assert {config.model_type for config, _ in SERVED} == set(FAMILIES)


def test_old_configs_without_group_or_head_sizes_get_the_usual_ones() -> None:
    config = SimpleNamespace(
        model_type="llama", hidden_size=64, intermediate_size=96, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=None, head_dim=None, vocab_size=10, max_position_embeddings=99, rms_norm_eps=1e-6,
        hidden_act="silu", tie_word_embeddings=False, rope_theta=5e5,
    )  # fmt: skip
    spec = TargetSpec.from_config(config)
    assert (spec.num_kv_heads, spec.head_dim) == (4, 16)
    assert spec.rope == {"rope_theta": 5e5, "rope_type": "default"}


def test_the_hash_is_the_shapes_and_the_rotation_not_their_spelling() -> None:
    """SGLang adds legacy aliases to the rotary parameters of the same model; a draft must still know it."""
    plain, aliased = LlamaConfig(**SIZES), LlamaConfig(**SIZES)
    aliased.rope_parameters = {**aliased.rope_parameters, "type": "default", "rope_dim": 16, "factor": None}
    assert TargetSpec.from_config(plain).hash == TargetSpec.from_config(aliased).hash
    for change in ({"hidden_size": 128}, {"rope_theta": 1e6}, {"rms_norm_eps": 1e-3}, {"tie_word_embeddings": True}):
        assert TargetSpec.from_config(LlamaConfig(**{**SIZES, **change})).hash != TargetSpec.from_config(plain).hash


def test_cache_bytes_count_keys_and_values_in_16_bit() -> None:
    assert TargetSpec.from_config(LlamaConfig(**SIZES)).kv_bytes_per_token == 2 * 2 * 16 * 2


def refusal(config: Any) -> str:
    with pytest.raises(UserError) as error:
        TargetSpec.from_config(config)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_compressed_keys_are_refused() -> None:
    message = refusal(DeepseekV3Config())
    assert re.search(r"model_type='deepseek_v3'.*kv_lora_rank=512.*use a target with grouped-query attention", message)


def test_an_unknown_family_is_refused_with_the_known_ones() -> None:
    assert re.search(r"model_type='gemma2'.*use one of llama, mistral", refusal(Gemma2Config()))


@pytest.mark.parametrize(
    "config",
    [
        Qwen2Config(**SIZES, use_sliding_window=True, sliding_window=128, max_window_layers=1),
        MistralConfig(**SIZES, sliding_window=128),
    ],
    ids=["listed layer types", "one window for all"],
)
def test_a_sliding_last_layer_is_refused(config: Any) -> None:
    assert re.search(r"last layer is sliding-window.*sliding_window=128.*whole context", refusal(config))


def test_sliding_layers_below_a_full_last_layer_are_served() -> None:
    config = Qwen3Config(**SIZES, layer_types=["sliding_attention", "sliding_attention", "full_attention"])
    assert TargetSpec.from_config(config).num_layers == 3


@pytest.mark.parametrize("kind", ["dynamic", "longrope", "proportional"])
@pytest.mark.parametrize("name", ["rope_type", "type"])
def test_an_unknown_rotation_is_refused_under_either_name(kind: str, name: str) -> None:
    """Older configs say ``type``; read as the default rotation it would draft nonsense."""
    config = LlamaConfig(**SIZES)
    config.rope_parameters = {name: kind, "rope_theta": 1e4, "factor": 2.0}
    assert re.search(rf"rope_type='{kind}' is not supported: use one of default, linear", refusal(config))


def test_a_partly_rotated_head_is_refused() -> None:
    config = LlamaConfig(**SIZES)
    config.rope_parameters = {**config.rope_parameters, "partial_rotary_factor": 0.5}
    assert "partial_rotary_factor=0.5 is not supported" in refusal(config)
