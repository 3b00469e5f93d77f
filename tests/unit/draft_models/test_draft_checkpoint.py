"""Draft folders: the round trip, atomic replacement, and one line with field and remedy for everything that is wrong."""

import dataclasses
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import tiny_draft, tiny_target
from transformers import AutoConfig

from longdraft.draft_models import checkpoint
from longdraft.draft_models.checkpoint import CheckpointError, load_draft, read_config, save_draft
from longdraft.draft_models.config import LongSpecConfig, LongSpecSettings, TrainingFacts
from longdraft.draft_models.longspec import LongSpecDraft
from longdraft.draft_models.target import TargetSpec

TARGET = tiny_target("llama")
DRAFT = tiny_draft(TARGET, window=32, final_norm=True)
FACTS = TrainingFacts(steps=3, tokens=99, max_length=64, max_position=80, anchors=4, max_lag=5)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_draft(DRAFT, tmp_path / "draft", "a-target", FACTS)
    return tmp_path / "draft"


def edit(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text())
    change(config)
    path.write_text(json.dumps(config))


def edit_weights(folder: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors")


def refusal(folder: Path, spec: TargetSpec = TARGET.spec) -> str:
    with pytest.raises(CheckpointError) as error:
        load_draft(folder, spec)
    assert "\n" not in str(error.value), "one line"
    return str(error.value)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize(
    "settings", [{}, {"qkv_bias": True, "final_norm": True, "window": 7}], ids=["plain", "options"]
)
def test_a_saved_draft_loads_bit_for_bit(family: str, settings: dict[str, Any], tmp_path: Path) -> None:
    target = tiny_target(family)
    draft = tiny_draft(target, **settings)
    save_draft(draft, tmp_path / "d", "t")
    again = load_draft(tmp_path / "d", target.spec)
    assert again.config.settings == draft.config.settings
    assert again.state_dict().keys() == draft.state_dict().keys()
    for name, weight in draft.state_dict().items():
        assert torch.equal(again.state_dict()[name], weight), name
    assert torch.equal(again.rotary.inverse, draft.rotary.inverse)
    assert not again.training


ROPES: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0},
    "llama3": {
        "rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 256,
    },
    "yarn": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 1024},
}  # fmt: skip


@pytest.mark.parametrize("rope", ROPES.values(), ids=ROPES.keys())
def test_targets_with_scaled_rotation_round_trip(rope: dict[str, Any], tmp_path: Path) -> None:
    """The check builds the draft without storage, and scaled frequencies are computed on the way."""
    spec = dataclasses.replace(TARGET.spec, rope=rope)
    draft = LongSpecDraft(LongSpecConfig(spec))
    save_draft(draft, tmp_path / "d", "t")
    again = load_draft(tmp_path / "d", spec)
    assert torch.equal(again.rotary.inverse, draft.rotary.inverse)
    assert again.rotary.factor == draft.rotary.factor


def test_half_precision_keeps_its_dtype_and_float32_rotation(tmp_path: Path) -> None:
    state = {name: weight.bfloat16() for name, weight in DRAFT.state_dict().items()}
    save_draft(DRAFT, tmp_path / "d", "t", state=state)
    assert read_config(tmp_path / "d")["dtype"] == "bfloat16"
    draft = load_draft(tmp_path / "d", TARGET.spec)
    assert {p.dtype for p in draft.parameters()} == {torch.bfloat16}
    assert draft.rotary.inverse.dtype == torch.float32
    assert {p.dtype for p in load_draft(tmp_path / "d", TARGET.spec, dtype=torch.float16).parameters()} == {
        torch.float16
    }


def test_the_config_is_readable_for_transformers_and_keeps_the_facts(folder: Path) -> None:
    """SGLang parses the folder with transformers before anything of ours runs."""
    config = AutoConfig.from_pretrained(folder)
    assert (config.model_type, config.num_hidden_layers, config.vocab_size) == ("llama", 1, 288)
    ours = read_config(folder)["longdraft"]
    assert ours["training"] == FACTS.model_dump()
    assert ours["target"]["name"] == "a-target"
    assert ours["versions"]["torch"].startswith(torch.__version__.split("+")[0])


def test_saving_replaces_the_old_folder_whole(folder: Path) -> None:
    """A file that only the old draft had is gone, no working folder is left, and others may read it."""
    (folder / "stale.txt").write_text("old")
    other = tiny_draft(TARGET, seed=1, window=16)
    save_draft(other, folder, "b-target")
    assert sorted(p.name for p in folder.iterdir()) == ["config.json", "model.safetensors"]
    assert [p.name for p in folder.parent.iterdir()] == ["draft"]
    assert folder.stat().st_mode & 0o777 == 0o755
    assert load_draft(folder, TARGET.spec).config.settings.window == 16


@pytest.mark.parametrize("broken", ["save_file", "os.chmod"])
def test_a_failed_save_leaves_the_old_draft(broken: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(checkpoint, broken, fail) if "." not in broken else monkeypatch.setattr(os, "chmod", fail)
    with pytest.raises(OSError, match="disk full"):
        save_draft(tiny_draft(TARGET, seed=1, window=16), folder, "b-target")
    monkeypatch.undo()
    assert load_draft(folder, TARGET.spec).config.settings.window == 32
    assert [p.name for p in folder.parent.iterdir()] == ["draft"]


def test_a_save_that_fails_at_the_last_step_puts_the_old_draft_back(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rename = Path.rename

    def fail(self: Path, to: Path) -> Path:
        if Path(to) == folder and not self.name.endswith("-old"):
            raise OSError("disk full")
        return rename(self, to)

    monkeypatch.setattr(Path, "rename", fail)
    with pytest.raises(OSError, match="disk full"):
        save_draft(tiny_draft(TARGET, seed=1, window=16), folder, "b-target")
    assert load_draft(folder, TARGET.spec).config.settings.window == 32
    assert [p.name for p in folder.parent.iterdir()] == ["draft"]


def test_a_missing_folder_or_config(tmp_path: Path) -> None:
    assert "has no config.json: give a folder that longdraft train wrote" in refusal(tmp_path / "nowhere")


@pytest.mark.parametrize("text", ["{", "", "[1, 2", "\n\n{'a': 1}\n"])
def test_a_config_that_is_no_json(text: str, folder: Path) -> None:
    (folder / "config.json").write_text(text)
    assert "config.json: not valid JSON" in refusal(folder)


@pytest.mark.parametrize("text", ["[]", "3", "null", '{"architectures": ["LlamaForCausalLM"]}', '{"longdraft": 1}'])
def test_a_config_of_something_else(text: str, folder: Path) -> None:
    (folder / "config.json").write_text(text)
    assert "is not a LongSpec or EAGLE-3 draft: give a folder that longdraft train wrote" in refusal(folder)


def test_another_algorithms_draft(folder: Path) -> None:
    edit(folder, lambda c: c["longdraft"].update(draft="medusa"))
    assert "is not a LongSpec or EAGLE-3 draft" in refusal(folder)


def test_another_format_version(folder: Path) -> None:
    edit(folder, lambda c: c["longdraft"].update(format_version=99))
    assert "format_version=99, this longdraft reads 1: export the draft again" in refusal(folder)


@pytest.mark.parametrize("field", ["hidden_size", "intermediate_size", "num_attention_heads", "head_dim", "vocab_size"])
def test_another_targets_shape(field: str, folder: Path) -> None:
    edit(folder, lambda c: c.update({field: 4097}))
    message = refusal(folder)
    assert f"{field}=4097, the target has " in message
    assert "use the draft that was trained for this target" in message


def test_another_targets_rotation_names_the_draft_it_is_for(folder: Path) -> None:
    other = dataclasses.replace(TARGET.spec, rope={"rope_type": "default", "rope_theta": 123.0})
    message = refusal(folder, other)
    assert "longdraft.target.spec.rope={'rope_theta': 10000.0, 'rope_type': 'default'}" in message
    assert "(this one is for 'a-target')" in message


def test_a_hash_that_fits_no_field(folder: Path) -> None:
    edit(folder, lambda c: c["longdraft"]["target"].update(hash="0000"))
    assert "longdraft.target.hash=0000, the target's is " in refusal(folder)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda c: c["longdraft"].pop("settings"), "longdraft.settings"),
        (lambda c: c["longdraft"]["settings"].update(window=0), "longdraft.settings: window=0"),
        (lambda c: c["longdraft"]["settings"].update(windw=3), "'windw'"),
        (lambda c: c["longdraft"].pop("training"), "longdraft.training"),
        (lambda c: c["longdraft"]["training"].update(max_lag="deep"), "longdraft.training: max_lag='deep'"),
        (lambda c: c["longdraft"].pop("target"), "longdraft.target"),
        (lambda c: c["longdraft"]["target"].pop("hash"), "longdraft.target"),
        (lambda c: c["longdraft"]["target"].update(hash="0000", spec=None), "longdraft.target"),
    ],
    ids=["no settings", "bad setting", "unknown setting", "no training", "bad lag", "no target", "no hash", "no spec"],
)
def test_incomplete_or_unfit_own_fields(change: Callable[[dict[str, Any]], Any], named: str, folder: Path) -> None:
    edit(folder, change)
    message = refusal(folder)
    assert named in message
    assert "export the draft again" in message


def test_missing_weights(folder: Path) -> None:
    edit_weights(folder, lambda w: (w.pop("mlp.up_proj.weight"), w.pop("final_norm.weight")))
    assert "misses weights final_norm.weight, mlp.up_proj.weight: export the draft again" in refusal(folder)


def test_unused_weights(folder: Path) -> None:
    edit_weights(folder, lambda w: w.update({"lm_head.weight": torch.zeros(2)}))
    assert "has unused weights lm_head.weight" in refusal(folder)


def test_misshaped_weights(folder: Path) -> None:
    edit_weights(folder, lambda w: w.update({"mlp.up_proj.weight": torch.zeros(95, 64)}))
    assert "mlp.up_proj.weight is (95, 64), config.json makes it (96, 64): export the draft again" in refusal(folder)


def test_a_missing_weights_file(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    assert "model.safetensors is missing: export the draft again" in refusal(folder)


@pytest.mark.parametrize("keep", [0, 7, 200, -100])
def test_a_truncated_weights_file(keep: int, folder: Path) -> None:
    """An interrupted copy: nothing, part of the header, all but some data."""
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    assert "model.safetensors is damaged" in refusal(folder)
    assert "copy or export the draft again" in refusal(folder)


def test_checking_a_folder_reads_no_weight_data(folder: Path) -> None:
    """The launcher checks a draft of any size before the server loads it; zeroed data must not matter to it."""
    draft = checkpoint.check_draft(folder, read_config(folder), TARGET.spec)
    assert all(p.is_meta for p in draft.parameters())
    shutil.rmtree(folder)
    with pytest.raises(CheckpointError):
        checkpoint.check_draft(folder, DRAFT.config.to_json("t", FACTS, {}), TARGET.spec)


def test_settings_default_to_the_papers_draft() -> None:
    assert LongSpecSettings().model_dump() == {
        "window": 512,
        "qkv_bias": False,
        "cross_q_norm": None,
        "head_tokens": None,
        "final_norm": False,
        "cross_layers": [],
        "cross_group": None,
        "newest_lags": 0,
    }
