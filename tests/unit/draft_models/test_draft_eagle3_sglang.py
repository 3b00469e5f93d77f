"""What is written is what SGLang's stock EAGLE3 serves: the same weights, rows, logits, rotation and target layers."""

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from sglang.srt.models.llama import LlamaForCausalLM, LlamaModel
from tiny import tiny_eagle3, tiny_target

from longdraft.draft_models.aux_features import aux_features
from longdraft.draft_models.checkpoint import save_draft
from longdraft.draft_models.eagle3 import Eagle3Draft
from longdraft.draft_models.eagle3_config import default_aux_layers
from longdraft.kernels.dense_attention import dense_attention

TARGET = tiny_target("llama", num_hidden_layers=5)
SCRIPT = Path(__file__).parents[2] / "sglang_eagle3.py"
ROWS, FAR = 9, 70
YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 32}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 64, "rope_theta": 5e5}
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "small_vocabulary": {"draft_vocab_size": 100, "fc_norm": True, "aux_layers": (0, 1, 3)},
    "normed_and_own_sizes": {
        "norm_output": True, "num_heads": 8, "num_kv_heads": 4, "head_dim": 12, "intermediate_size": 48, "rms_norm_eps": 1e-3,
    },
    "yarn": {"rope": YARN, "draft_vocab_size": 128},
    "llama3": {"rope": LLAMA3},
    "linear": {"rope": {"rope_type": "linear", "factor": 4.0}},
}  # fmt: skip


def inputs() -> dict[str, torch.Tensor]:
    torch.manual_seed(3)
    spec = TARGET.spec
    return {
        "embedding": TARGET.embedding_VE.clone(),
        "aux": torch.randn(ROWS, 3 * spec.hidden_size),
        "ids": torch.randint(spec.vocab_size, (ROWS,)),
        "positions": torch.arange(FAR, FAR + ROWS),
    }


@pytest.fixture(scope="module")
def served(
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[str, tuple[Eagle3Draft, list[str], dict[str, torch.Tensor]]]:
    """Every case through SGLang's loader and model, in one process."""
    root, drafts = tmp_path_factory.mktemp("drafts"), {}
    for seed, (name, settings) in enumerate(CASES.items()):
        drafts[name] = tiny_eagle3(TARGET, seed, **settings)
        save_draft(drafts[name], root / name, "t")
        save_file(inputs(), root / name / "inputs.safetensors")
    done = subprocess.run([sys.executable, SCRIPT, *(root / name for name in CASES)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    filled = {line["folder"]: line["filled"] for line in map(json.loads, done.stdout.splitlines()[-len(CASES) :])}
    return {n: (d, filled[n], load_file(root / n / "outputs.safetensors")) for n, d in drafts.items()}


@pytest.mark.parametrize("name", CASES)
def test_sglang_computes_what_we_compute(name: str, served: dict[str, Any]) -> None:
    draft, _, theirs = served[name]
    given, scale = inputs(), draft.config.head_dim**-0.5
    mask = torch.ones(ROWS, ROWS, dtype=torch.bool).tril()
    with torch.no_grad():
        normed, following = draft(
            given["ids"],
            draft.fuse(given["aux"]),
            given["positions"],
            lambda q, k, v: dense_attention(q, k, v, scale, mask)[0],
        )
        logits = draft.draft_logits(normed)
    for ours, key in ((normed, "normed"), (following, "next"), (logits, "logits")):
        torch.testing.assert_close(ours, theirs[key], rtol=2e-4, atol=2e-4)
    assert torch.equal(draft.target_ids, theirs["ids"])


@pytest.mark.parametrize("name", CASES)
def test_sglang_finds_a_weight_for_each_of_its_parameters(name: str, served: dict[str, Any]) -> None:
    """It skips what it does not know without a word; the embedding comes from the target."""
    draft, filled, _ = served[name]
    expected = {
        "model.fc.weight", "model.norm.weight", "lm_head.weight", "model.layers.0.self_attn.qkv_proj.weight",
        "model.layers.0.self_attn.o_proj.weight", "model.layers.0.mlp.gate_up_proj.weight", "model.layers.0.mlp.down_proj.weight",
        "model.layers.0.input_layernorm.weight", "model.layers.0.post_attention_layernorm.weight",
        "model.layers.0.hidden_norm.weight",
    }  # fmt: skip
    if draft.config.settings.fc_norm:
        expected |= {f"model.fc_norm.{i}.weight" for i in range(3)}
    assert set(filled) == expected


def captured_by_sglang(layer_ids: list[int] | None, num_layers: int) -> list[int]:
    model = SimpleNamespace(
        pp_group=SimpleNamespace(is_last_rank=True),
        config=SimpleNamespace(num_hidden_layers=num_layers),
        model=SimpleNamespace(layers_to_capture=[]),
        capture_aux_hidden_states=False,
    )
    LlamaForCausalLM.set_eagle3_layers_to_capture(model, layer_ids)
    return model.model.layers_to_capture


@pytest.mark.parametrize("num_layers", [8, 16, 28, 32, 80])
def test_our_default_layers_are_sglangs(num_layers: int) -> None:
    ours = list(default_aux_layers(num_layers))
    assert captured_by_sglang(ours, num_layers) == captured_by_sglang(None, num_layers)


@pytest.mark.parametrize("layers", [(0, 1, 3), (1, 2, 3), (0, 1, 2)])
def test_the_features_are_those_that_sglang_captures(layers: tuple[int, int, int]) -> None:
    """SGLang's own loop over the layers of a transformers model, with its habit of keeping the residual apart."""
    ids, model = torch.arange(40, 52), TARGET.model
    base = model.get_decoder()

    def layer(block: Any) -> Any:
        def run(positions: Any, hidden: torch.Tensor, batch: Any, residual: Any) -> tuple[torch.Tensor, torch.Tensor]:
            x = hidden if residual is None else hidden + residual
            rotation = base.rotary_emb(x[None], positions[None])
            mask = torch.full((len(ids), len(ids)), float("-inf")).triu(1)[None, None]
            y = block(x[None], attention_mask=mask, position_embeddings=rotation, position_ids=positions[None])
            y = (y[0] if isinstance(y, tuple) else y)[0]
            return 0.25 * y, 0.75 * y

        return run

    stub = SimpleNamespace(
        pp_group=SimpleNamespace(is_first_rank=True, is_last_rank=True),
        embed_tokens=base.embed_tokens,
        start_layer=0,
        end_layer=5,
        layers=[layer(block) for block in base.layers],
        layers_to_capture=captured_by_sglang(list(layers), 5),
        norm=lambda hidden, residual: (base.norm(hidden + residual), None),
    )
    with torch.no_grad():
        _, theirs = LlamaModel.forward(stub, ids, torch.arange(len(ids)), None)
        with aux_features(model, layers) as seen:
            out = model(ids[None], output_hidden_states=True)
            ours = seen.take()[0]
    torch.testing.assert_close(ours, torch.cat(theirs, -1), rtol=1e-4, atol=1e-4)
    assert torch.equal(ours, torch.cat([out.hidden_states[i + 1][0] for i in layers], -1))
