"""SpecForge's draft JSON: the same architecture in our settings, printed as a recipe's section, and refusals by field."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from tiny import tiny_model, tiny_target

from longdraft import cli
from longdraft.draft_models.eagle3 import Eagle3Draft
from longdraft.draft_models.eagle3_config import Eagle3Config
from longdraft.draft_models.eagle3_json import settings_of_json
from longdraft.errors import UserError
from longdraft.schema import validate
from longdraft.train.config import TrainSettings
from longdraft.train.specforge_seam.draft_json import specforge_json

SPEC = tiny_target("llama", num_hidden_layers=5).spec
# The shape of the files that SpecForge ships for its EAGLE-3 recipes.
JSON: dict[str, Any] = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 64,
    "initializer_range": 0.02,
    "intermediate_size": 80,
    "max_position_embeddings": 4096,
    "model_type": "llama",
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "num_hidden_layers": 1,
    "pad_token_id": 0,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "torch_dtype": "float16",
    "use_cache": True,
    "vocab_size": 288,
    "draft_vocab_size": 100,
}


def write(folder: Path, **changes: Any) -> Path:
    path = folder / "draft.json"
    path.write_text(json.dumps({k: v for k, v in {**JSON, **changes}.items() if v != "absent"}))
    return path


def test_sizes_vocabulary_and_epsilon_are_read(tmp_path: Path) -> None:
    config = Eagle3Config(SPEC, settings_of_json(write(tmp_path), SPEC))
    assert (config.vocab_size, config.intermediate_size, config.rms_norm_eps) == (100, 80, 1e-6)
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (8, 2, 8)
    assert config.max_position == 4096
    draft = Eagle3Draft(config)
    assert draft.lm_head.weight.shape == (100, 64)


def test_a_json_without_a_draft_vocabulary_has_the_whole_one(tmp_path: Path) -> None:
    assert settings_of_json(write(tmp_path, draft_vocab_size="absent"), SPEC).draft_vocab_size is None


@pytest.mark.parametrize("style", ["rope_scaling", "rope_parameters"])
def test_a_rotation_under_either_name_is_read(style: str, tmp_path: Path) -> None:
    rope = {
        "rope_type": "yarn",
        "factor": 8.0,
        "original_max_position_embeddings": 2048,
        "mscale": 1.0,
        "mscale_all_dim": 0,
    }
    settings = settings_of_json(write(tmp_path, **{style: rope}, rope_theta=500000.0), SPEC)
    assert settings.rope is not None
    assert (settings.rope.rope_type, settings.rope.factor, settings.rope.rope_theta) == ("yarn", 8.0, 500000.0)
    assert Eagle3Config(SPEC, settings).max_position == 16384


def test_what_is_written_for_specforge_reads_back(tmp_path: Path) -> None:
    rope = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}
    settings = settings_of_json(write(tmp_path, rope_scaling=rope, fc_norm=True), SPEC)
    before = Eagle3Config(SPEC, settings)
    path = tmp_path / "again.json"
    path.write_text(json.dumps(specforge_json(before)))
    after = Eagle3Config(SPEC, settings_of_json(path, SPEC))
    for field in (
        "vocab_size",
        "aux_layers",
        "num_heads",
        "num_kv_heads",
        "head_dim",
        "intermediate_size",
        "max_position",
    ):
        assert getattr(before, field) == getattr(after, field), field
    assert after.settings.fc_norm
    assert torch.equal(Eagle3Draft(before).rotary.inverse, Eagle3Draft(after).rotary.inverse)


def test_its_head_norm_is_not_sglangs_normed_chain(tmp_path: Path) -> None:
    assert settings_of_json(write(tmp_path, norm_output=True), SPEC).norm_output is False
    with pytest.raises(UserError, match="norm_output=False"):
        settings_of_json(write(tmp_path, norm_output=False), SPEC)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"architectures": ["DFlashDraftModel"]}, "DFlashDraftModel"),
        ({"num_hidden_layers": 2}, "num_hidden_layers=2"),
        ({"hidden_size": 128}, "hidden_size=128"),
        ({"vocab_size": 99}, "vocab_size=99"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "rope_type"),
    ],
)
def test_another_architecture_is_refused_by_its_field(changes: dict[str, Any], named: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=named) as error:
        settings_of_json(write(tmp_path, **changes), SPEC)
    assert "draft.json" in str(error.value)


def test_the_printed_section_is_a_recipes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = str(tiny_model("llama", tmp_path / "target", num_hidden_layers=5))
    assert cli.main(["drafts", "recipe", str(write(tmp_path)), "--target", target]) == 0
    section = yaml.safe_load(capsys.readouterr().out)
    settings = validate(TrainSettings, {"target": {"path": target}, "data": {"train": "x"}, **section})
    assert settings.eagle3 == settings_of_json(write(tmp_path), SPEC)
    assert cli.main(["drafts", "recipe", str(tmp_path / "no.json"), "--target", target]) == 2
    assert "no.json" in capsys.readouterr().err
