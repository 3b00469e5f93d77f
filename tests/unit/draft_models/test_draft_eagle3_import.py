"""Published EAGLE-3 drafts: every spelling of names and keys reads the same, the way back, and refusals by name."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import tiny_eagle3, tiny_model, tiny_target

from longdraft import cli
from longdraft.draft_models.checkpoint import CheckpointError, load_draft, read_config
from longdraft.draft_models.config import TrainingFacts
from longdraft.draft_models.eagle3 import Eagle3Draft
from longdraft.draft_models.eagle3_import import export_eagle3, import_eagle3

TARGET = tiny_target("llama", num_hidden_layers=8)
DRAFT = tiny_eagle3(TARGET, draft_vocab_size=60, fc_norm=True, rope={"rope_theta": 10000.0}, max_position=2048)


def published(folder: Path, draft: Eagle3Draft = DRAFT, **config: Any) -> Path:
    """As EAGLE publishes: a short config with old names, no head size, no layers, and an embedding in the weights."""
    folder.mkdir()
    c = draft.config
    given = {
        "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "hidden_size": 64, "hidden_act": "silu",
        "intermediate_size": c.intermediate_size, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2,
        "max_position_embeddings": 2048, "rms_norm_eps": c.rms_norm_eps, "vocab_size": 288, "draft_vocab_size": c.vocab_size,
        "tie_word_embeddings": False, "torch_dtype": "float32", "fc_norm": True,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps({**given, **config}))
    save_file({**draft.state_dict(), "embed_tokens.weight": torch.zeros(288, 64)}, folder / "model.safetensors")
    return folder


def rename(folder: Path, change: Callable[[str], str | None]) -> None:
    weights = load_file(folder / "model.safetensors")
    save_file({new: w for n, w in weights.items() if (new := change(n))}, folder / "model.safetensors")


def same(one: Eagle3Draft, other: Eagle3Draft) -> None:
    assert one.state_dict().keys() == other.state_dict().keys()
    for name, weight in one.state_dict().items():
        assert torch.equal(other.state_dict()[name], weight), name


def test_a_short_config_is_read_as_sglang_reads_it(tmp_path: Path) -> None:
    draft = import_eagle3(published(tmp_path / "p"), TARGET.spec)
    same(draft, DRAFT)
    assert draft.config.aux_layers == (1, 3, 4)
    assert draft.config.rope == {"rope_type": "default", "rope_theta": 10000.0}
    assert draft.config.max_position == 2048
    assert not draft.config.settings.norm_output


LEGACY = {"fc_norm.0": "aux_norm_low", "fc_norm.1": "aux_norm_mid", "fc_norm.2": "aux_norm_high"}


def legacy(name: str) -> str:
    for ours, theirs in LEGACY.items():
        name = name.replace(ours, theirs)
    return name


@pytest.mark.parametrize(
    "change",
    [
        lambda n: n.replace("midlayer.", "layers.0."),
        lambda n: f"model.{n.replace('midlayer.', 'layers.0.')}" if "d2t" not in n and "t2d" not in n else n,
        legacy,
        lambda n: None if n == "embed_tokens.weight" else n,
        lambda n: None if n == "t2d" else n,
        lambda n: f"draft_model.{n}",
    ],
    ids=["layers.0", "model.layers.0", "aux_norm", "no embedding", "no t2d", "training state"],
)
def test_every_spelling_is_the_same_draft(change: Callable[[str], str | None], tmp_path: Path) -> None:
    rename(published(tmp_path / "p"), change)
    same(import_eagle3(tmp_path / "p", TARGET.spec), DRAFT)


def test_a_legacy_flag_for_the_norms(tmp_path: Path) -> None:
    same(import_eagle3(published(tmp_path / "p", fc_norm=None, use_aux_norm=True), TARGET.spec), DRAFT)


@pytest.mark.parametrize(
    ("given", "rope", "reach"),
    [
        ({"rope_theta": 5e5}, {"rope_type": "default", "rope_theta": 5e5}, 2048),
        (
            {"rope_scaling": {"type": "yarn", "factor": 16, "original_max_position_embeddings": 2048, "finetuned": True}},
            {
                "rope_type": "yarn", "rope_theta": 1e4, "factor": 16.0, "original_max_position_embeddings": 2048,
                "beta_fast": 32.0, "beta_slow": 1.0,
            },
            32768,
        ),
        (
            {"rope_parameters": {"rope_type": "linear", "factor": 4, "rope_theta": 7e3}},
            {"rope_type": "linear", "rope_theta": 7e3, "factor": 4.0, "original_max_position_embeddings": 2048},
            8192,
        ),
        (
            {"rope_scaling": {"rope_type": "llama3", "factor": 8, "low_freq_factor": 1, "high_freq_factor": 4,
                              "original_max_position_embeddings": 512}},
            {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
             "original_max_position_embeddings": 512},
            2048,
        ),
    ],
    ids=["base", "yarn by its old name", "linear", "llama3"],
)  # fmt: skip
def test_rotations_by_either_name(given: dict[str, Any], rope: dict[str, Any], reach: int, tmp_path: Path) -> None:
    config = import_eagle3(published(tmp_path / "p", **given), TARGET.spec).config
    assert config.rope == rope
    assert config.max_position == reach


def test_layers_norms_and_sizes_of_the_config(tmp_path: Path) -> None:
    wide = tiny_eagle3(
        TARGET, draft_vocab_size=60, fc_norm=True, num_heads=8, num_kv_heads=8, head_dim=8, norm_output=True, aux_layers=(0, 2, 6),
        intermediate_size=32,
    )  # fmt: skip
    folder = published(
        tmp_path / "p", wide, num_attention_heads=8, num_key_value_heads=None, norm_output=True, intermediate_size=32,
        eagle_config={"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": [0, 2, 6]},
    )  # fmt: skip
    config = json.loads((folder / "config.json").read_text())
    del config["num_key_value_heads"]
    (folder / "config.json").write_text(json.dumps(config))
    draft = import_eagle3(folder, TARGET.spec)
    same(draft, wide)
    assert draft.config.aux_layers == (0, 2, 6)
    assert draft.config.settings.norm_output


def test_a_vocabulary_out_of_order_keeps_each_tokens_logit(tmp_path: Path) -> None:
    folder = published(tmp_path / "p")
    weights, order = load_file(folder / "model.safetensors"), torch.randperm(60)
    weights["lm_head.weight"] = weights["lm_head.weight"][order]
    weights["d2t"] = DRAFT.target_ids[order] - torch.arange(60)
    save_file(weights, folder / "model.safetensors")
    rows = torch.randn(2, 64)
    assert torch.equal(import_eagle3(folder, TARGET.spec).logits(rows), DRAFT.logits(rows))


def test_the_whole_vocabulary_needs_no_map(tmp_path: Path) -> None:
    whole = tiny_eagle3(TARGET, fc_norm=True)
    folder = published(tmp_path / "p", whole)
    rename(folder, lambda n: None if n in ("d2t", "t2d") else n)
    draft = import_eagle3(folder, TARGET.spec)
    same(draft, whole)
    assert draft.config.settings.draft_vocab_size is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_out_and_in_again(dtype: torch.dtype, tmp_path: Path) -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048}
    draft = tiny_eagle3(TARGET, draft_vocab_size=60, norm_output=True, rope=yarn, aux_layers=(0, 2, 6), head_dim=24)
    draft = draft.to(dtype)
    export_eagle3(draft, tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert "longdraft" not in config and config["torch_dtype"] == str(dtype).removeprefix("torch.")
    again = import_eagle3(tmp_path / "out", TARGET.spec)
    same(again, draft)
    first, second = (d.config.to_json("", TrainingFacts(), {}) for d in (draft, again))
    assert {**first, "longdraft": None} == {**second, "longdraft": None}
    export_eagle3(again, tmp_path / "twice")
    for name in ("config.json", "model.safetensors"):
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "twice" / name).read_bytes()


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"num_hidden_layers": 2}, "num_hidden_layers=2"),
        ({"attention_bias": True}, "attention_bias=True"),
        ({"vocab_size": 32000}, "vocab_size=32000, a draft for this target has 288"),
        ({"target_hidden_size": 128}, "target_hidden_size=128"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, "use_aux_hidden_state=False"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2]}}, "aux_layers"),
        ({"fc_norm": False}, "set fc_norm to true"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2}}, "rope_type='dynamic'"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2}}, "needs original_max_position_embeddings"),
        ({"rope_scaling": {"rope_type": "default", "mrope_section": [1, 2]}}, "rope mrope_section="),
        ({"intermediate_size": 95}, r"is \(96, 64\), config.json and the target make it \(95, 64\)"),
    ],
)
def test_what_sglang_would_serve_differently_is_refused(config: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=message) as error:
        import_eagle3(published(tmp_path / "p", **config), TARGET.spec)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda n: None if n == "fc.weight" else n, "misses weights fc.weight"),
        (lambda n: None if n == "d2t" else n, "misses weights d2t, its head has 60 of the target's 288"),
        (lambda n: None if n == "lm_head.weight" else n, "no lm_head.weight"),
        (lambda n: n.replace("norm.weight", "nrm.weight") if n == "norm.weight" else n, "misses weights norm.weight"),
        (
            lambda n: n.replace("embed_tokens.weight", "midlayer.self_attn.q_proj.bias"),
            "has unknown weights midlayer.self",
        ),
    ],
)
def test_weights_that_do_not_fit(change: Callable[[str], str | None], message: str, tmp_path: Path) -> None:
    rename(published(tmp_path / "p"), change)
    with pytest.raises(CheckpointError, match=message):
        import_eagle3(tmp_path / "p", TARGET.spec)


def test_pickled_weights_are_not_read(tmp_path: Path) -> None:
    folder = published(tmp_path / "p")
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(
        CheckpointError, match=r"only pytorch_model.bin, which is not read .*convert it to safetensors first"
    ):
        import_eagle3(folder, TARGET.spec)


def test_a_window_is_not_exported_away(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"window=512 has no key.*--speculative-draft-window-size 511"):
        export_eagle3(tiny_eagle3(TARGET, window=512), tmp_path / "out")


def test_the_command_imports_and_exports(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = str(tiny_model("llama", tmp_path / "target", num_hidden_layers=8))
    folder, ours, back = str(published(tmp_path / "p")), str(tmp_path / "ours"), str(tmp_path / "back")
    told = ["--format", "eagle3", "--target", target, "--output"]
    assert cli.main(["drafts", "import", folder, *told, ours]) == 0
    assert read_config(ours)["longdraft"]["draft"] == "eagle3"
    loaded = load_draft(ours, TARGET.spec)
    assert isinstance(loaded, Eagle3Draft)
    same(loaded, DRAFT)
    assert cli.main(["drafts", "export", ours, *told, back]) == 0
    same(import_eagle3(back, TARGET.spec), DRAFT)
    assert "parameters, window none" in capsys.readouterr().out
    assert cli.main(["drafts", "export", ours, "--target", target, "--output", str(tmp_path / "no")]) == 2
    assert "use --format eagle3" in capsys.readouterr().err
