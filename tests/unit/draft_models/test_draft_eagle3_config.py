"""EAGLE-3 settings: what is left out comes from the target, and what cannot be served is refused in one line."""

import dataclasses
from typing import Any

import pytest
from tiny import tiny_target

from longdraft.draft_models.config import TrainingFacts
from longdraft.draft_models.eagle3_config import (
    Eagle3Config,
    Eagle3Settings,
    RopeSettings,
    check_reach,
    default_aux_layers,
)
from longdraft.errors import UserError
from longdraft.schema import validate

SPEC = tiny_target("llama", num_hidden_layers=5).spec
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048}


def config(**settings: Any) -> Eagle3Config:
    return Eagle3Config(SPEC, validate(Eagle3Settings, settings))


def test_an_empty_setting_is_the_targets() -> None:
    c = config()
    assert (c.vocab_size, c.intermediate_size, c.num_heads, c.num_kv_heads, c.head_dim) == (288, 96, 4, 2, 16)
    assert (c.rope, c.max_position, c.rms_norm_eps) == (SPEC.rope, SPEC.max_position, SPEC.rms_norm_eps)
    assert c.aux_layers == (0, 1, 3)


@pytest.mark.parametrize(
    ("layers", "chosen"), [(4, (0, 1, 2)), (5, (0, 1, 3)), (6, (0, 2, 4)), (7, (1, 2, 3)), (30, (1, 14, 26))]
)
def test_default_layers_ascend_and_leave_out_the_last(layers: int, chosen: tuple[int, int, int]) -> None:
    assert default_aux_layers(layers) == chosen


def test_a_target_of_three_layers_is_too_small() -> None:
    with pytest.raises(UserError, match=r"num_hidden_layers=3.*at least 4 layers"):
        default_aux_layers(3)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"draft_vocab_size": 289}, "draft_vocab_size=289, the target's vocabulary has 288"),
        ({"aux_layers": [0, 0, 2]}, r"aux_layers=\[0, 0, 2\].*from 0 to 3"),
        ({"aux_layers": [0, 1, 4]}, "the last layer's output cannot be read"),
        ({"aux_layers": [2, 1, 3]}, "ascending"),
        ({"aux_layers": [0, 1]}, "aux_layers"),
        ({"num_heads": 3, "num_kv_heads": 2}, "num_heads=3 is no multiple of num_kv_heads=2"),
        ({"num_heads": 6}, "num_heads=6 does not divide hidden_size=64"),
        ({"sinks": 4}, "sinks=4 needs a window"),
        ({"rope": {"rope_type": "yarn", "factor": 4.0}}, "needs original_max_position_embeddings"),
        ({"rope": {"rope_type": "linear"}}, "needs factor"),
        ({"rope": YARN, "max_position": 8193}, "covers 8192 positions, 8193 are needed.*rope.factor=5"),
        ({"windw": 3}, "windw"),
        ({"head_dim": 15}, "head_dim=15 is odd"),
        ({"rope": {"rope_type": "linear", "factor": float("inf")}}, "factor=inf"),
        ({"rope": {**YARN, "beta_slow": 64.0}}, "beta_slow=64 must not be above beta_fast=32"),
        ({"rope": {**YARN, "rope_type": "llama3", "low_freq_factor": 0.0}}, "low_freq_factor=0"),
        ({"rope": {**YARN, "rope_type": "llama3", "low_freq_factor": 4.0}}, "low_freq_factor=4 must be below"),
    ],
)
def test_settings_that_cannot_be(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message) as error:
        config(**settings)
    assert "\n" not in str(error.value)


def test_a_stretched_rotation_covers_what_it_stretches_to() -> None:
    c = config(rope=YARN)
    assert c.max_position == 8192
    assert c.rope["rope_theta"] == SPEC.rope["rope_theta"]
    check_reach(c, 8192 - 5, 5)
    with pytest.raises(UserError, match=r"factor=4 over .*=2048 covers 8192 positions, 8193 are needed .*at most 8187"):
        check_reach(c, 8188, 5)


def test_a_plain_rotation_covers_max_position() -> None:
    check_reach(config(), 16384 - 6, 6)
    with pytest.raises(UserError, match="max_position=16384 of the draft is below the 16385"):
        check_reach(config(), 16384 - 5, 6)


def test_a_targets_own_yarn_bounds_the_draft() -> None:
    """A target whose config claims more positions than its rotation covers."""
    spec = dataclasses.replace(SPEC, rope={**YARN, "rope_theta": 1e4})
    assert Eagle3Config(spec).max_position == 8192


def test_a_rotation_stores_what_its_kind_reads() -> None:
    llama3 = RopeSettings(rope_type="llama3", factor=8.0, original_max_position_embeddings=64).parameters(5e5)
    assert llama3 == {
        "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "original_max_position_embeddings": 64,
        "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    }  # fmt: skip
    assert RopeSettings(rope_theta=7.0).parameters(5e5) == {"rope_type": "default", "rope_theta": 7.0}


def test_the_written_config_says_everything_in_the_names_of_published_drafts() -> None:
    written = config(draft_vocab_size=64, rope=YARN, fc_norm=True).to_json("t", TrainingFacts(), {})
    assert written["architectures"] == ["LlamaForCausalLMEagle3"]
    assert (written["model_type"], written["num_hidden_layers"], written["draft_vocab_size"]) == ("llama", 1, 64)
    assert written["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [0, 1, 3]
    assert written["rope_parameters"] == {**written["rope_scaling"], "rope_theta": written["rope_theta"]}
    assert written["rope_scaling"]["rope_type"] == "yarn"
    assert written["max_position_embeddings"] == 8192
    assert written["tie_word_embeddings"] is False
    assert config().to_json("t", TrainingFacts(), {})["rope_scaling"] is None
