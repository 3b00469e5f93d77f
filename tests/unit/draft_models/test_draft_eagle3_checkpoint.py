"""EAGLE-3 draft folders: the round trip, what transformers makes of them, and refusals in one line."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import tiny_eagle3, tiny_target
from transformers import AutoConfig

from longdraft.draft_models.checkpoint import CheckpointError, check_draft, load_draft, read_config, save_draft
from longdraft.draft_models.config import TrainingFacts
from longdraft.draft_models.eagle3 import Eagle3Draft

TARGET = tiny_target("llama", num_hidden_layers=5)
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048}
DRAFT = tiny_eagle3(TARGET, draft_vocab_size=100, fc_norm=True, window=9, sinks=2, rope=YARN)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_draft(DRAFT, tmp_path / "draft", "a-target", TrainingFacts(steps=3, max_lag=7))
    return tmp_path / "draft"


def edit(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    config = json.loads((folder / "config.json").read_text())
    change(config)
    (folder / "config.json").write_text(json.dumps(config))


def refusal(folder: Path) -> str:
    with pytest.raises(CheckpointError) as error:
        load_draft(folder, TARGET.spec)
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_a_saved_draft_loads_bit_for_bit(family: str, tmp_path: Path) -> None:
    target = tiny_target(family, num_hidden_layers=4)
    draft = tiny_eagle3(target, draft_vocab_size=50, norm_output=True)
    save_draft(draft, tmp_path / "d", "t")
    again = load_draft(tmp_path / "d", target.spec)
    assert isinstance(again, Eagle3Draft) and not again.training
    assert again.config.settings == draft.config.settings
    assert again.state_dict().keys() == draft.state_dict().keys()
    for name, weight in draft.state_dict().items():
        assert torch.equal(again.state_dict()[name], weight), name


def test_options_and_scaled_rotation_round_trip(folder: Path) -> None:
    again = load_draft(folder, TARGET.spec)
    assert again.config.settings == DRAFT.config.settings
    assert torch.equal(again.rotary.inverse, DRAFT.rotary.inverse)
    assert again.rotary.factor == DRAFT.rotary.factor != 1.0


def test_half_precision_leaves_the_vocabulary_and_the_rotation_alone(tmp_path: Path) -> None:
    state = {n: w.bfloat16() if w.is_floating_point() else w for n, w in DRAFT.state_dict().items()}
    save_draft(DRAFT, tmp_path / "d", "t", state=state)
    assert read_config(tmp_path / "d")["dtype"] == "bfloat16"
    again = load_draft(tmp_path / "d", TARGET.spec, dtype=torch.float16)
    assert isinstance(again, Eagle3Draft)
    assert {p.dtype for p in again.parameters()} == {torch.float16}
    assert (again.d2t.dtype, again.t2d.dtype, again.rotary.inverse.dtype) == (torch.int64, torch.bool, torch.float32)
    assert torch.equal(again.target_ids, DRAFT.target_ids)


def test_gathered_weights_need_not_hold_the_vocabulary(tmp_path: Path) -> None:
    """Training gathers what it trains; the map comes from the module."""
    save_draft(DRAFT, tmp_path / "d", "t", state={n: p + 1 for n, p in DRAFT.named_parameters()})
    again = load_draft(tmp_path / "d", TARGET.spec)
    assert isinstance(again, Eagle3Draft)
    assert torch.equal(again.target_ids, DRAFT.target_ids)
    assert torch.equal(again.fc.weight, DRAFT.fc.weight + 1)


def test_the_names_are_those_of_published_drafts(folder: Path) -> None:
    names = set(load_file(folder / "model.safetensors"))
    attention = {f"midlayer.self_attn.{p}_proj.weight" for p in "qkvo"}
    mlp = {f"midlayer.mlp.{p}_proj.weight" for p in ("gate", "up", "down")}
    norms = {f"midlayer.{n}.weight" for n in ("input_layernorm", "hidden_norm", "post_attention_layernorm")}
    rest = {"fc.weight", "norm.weight", "lm_head.weight", "d2t", "t2d", *(f"fc_norm.{i}.weight" for i in range(3))}
    assert names == attention | mlp | norms | rest


def test_transformers_reads_the_config_and_the_rotation(folder: Path) -> None:
    config = AutoConfig.from_pretrained(folder)
    assert (config.model_type, config.num_hidden_layers, config.draft_vocab_size) == ("llama", 1, 100)
    assert config.rope_parameters["rope_type"] == "yarn" and config.rope_parameters["factor"] == 4.0
    assert config.max_position_embeddings == 8192
    assert getattr(config, "num_nextn_predict_layers", None) is None, "SGLang would size its draft cache by it"


def test_checking_a_folder_reads_no_weights(folder: Path) -> None:
    assert all(p.is_meta for p in check_draft(folder, read_config(folder), TARGET.spec).parameters())


def test_the_width_of_the_mlp_is_the_drafts_own(tmp_path: Path) -> None:
    """A mixture of experts has no dense width that a draft could share."""
    save_draft(tiny_eagle3(TARGET, intermediate_size=40), tmp_path / "d", "t")
    again = load_draft(tmp_path / "d", TARGET.spec)
    assert isinstance(again, Eagle3Draft) and again.midlayer.mlp.up_proj.weight.shape == (40, 64)


@pytest.mark.parametrize(
    ("field", "value"),
    [("draft_vocab_size", 99), ("rope_parameters", {}), ("norm_output", True), ("eagle_config", None), ("head_dim", 8)],
)
def test_what_sglang_reads_must_be_what_we_read(field: str, value: Any, folder: Path) -> None:
    edit(folder, lambda c: c.update({field: value}))
    assert f"{field}={value}, longdraft.settings makes it " in refusal(folder)


def test_another_targets_shape(folder: Path) -> None:
    edit(folder, lambda c: c.update(vocab_size=4097))
    assert "vocab_size=4097, the target has 288: use the draft that was trained for this target" in refusal(folder)


def test_settings_that_do_not_fit_the_target(folder: Path) -> None:
    edit(folder, lambda c: c["longdraft"]["settings"].update(aux_layers=[0, 1, 4]))
    assert "longdraft.settings: aux_layers=[0, 1, 4]" in refusal(folder)


@pytest.mark.parametrize("spoil", ["order", "range", "mask"])
def test_a_vocabulary_map_that_contradicts_itself(spoil: str, folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    if spoil == "order":
        weights["d2t"][5] -= 200
    elif spoil == "range":
        weights["d2t"][-1] += 288
    else:
        weights["t2d"] = ~weights["t2d"]
    save_file(weights, folder / "model.safetensors")
    assert "d2t and t2d do not name the same ascending tokens" in refusal(folder)


def test_unused_weights_are_refused(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    save_file({**weights, "embed_tokens.weight": torch.zeros(288, 64)}, folder / "model.safetensors")
    assert "has unused weights embed_tokens.weight" in refusal(folder)
