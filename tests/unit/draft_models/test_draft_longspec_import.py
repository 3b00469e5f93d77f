"""LongSpec's published layout: round trip both ways, and the same numbers as a layer written out here from the paper.

Legend: T tokens, E hidden size, H query heads, K key/value heads, D head size.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import tiny_draft, tiny_model, tiny_target

from longdraft import cli
from longdraft.draft_models.checkpoint import CheckpointError, load_draft, read_config, save_draft
from longdraft.draft_models.longspec_import import WINDOW, export_longspec, import_longspec

TARGET = tiny_target("llama")
SPEC = TARGET.spec
E, H, K, D = SPEC.hidden_size, SPEC.num_heads, SPEC.num_kv_heads, SPEC.head_dim


def published(seed: int = 0, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """A random checkpoint in the schema of the released decoder layer."""
    g = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return (0.2 * torch.randn(*shape, generator=g)).to(dtype)

    out = {}
    for attention in ("self_attn", "cross_attn"):
        for which, heads in (("q", H), ("k", K), ("v", K)):
            out[f"{attention}.{which}_proj.weight"] = normal(heads * D, E)
            out[f"{attention}.{which}_proj.bias"] = normal(heads * D)
        out[f"{attention}.o_proj.weight"] = normal(E, H * D)
    for name in ("gate", "up"):
        out[f"mlp.{name}_proj.weight"] = normal(SPEC.intermediate_size, E)
    out["mlp.down_proj.weight"] = normal(E, SPEC.intermediate_size)
    for name in ("input_layernorm", "post_self_attention_layernorm", "post_cross_attention_layernorm"):
        out[f"{name}.weight"] = 1 + normal(E)
    return out


def write(folder: Path, weights: dict[str, torch.Tensor]) -> Path:
    folder.mkdir()
    save_file(weights, folder / "model.safetensors")
    return folder


def released_layer(
    w: dict[str, torch.Tensor], id_T: torch.Tensor, k_TKD: torch.Tensor, v_TKD: torch.Tensor, lag: int
) -> torch.Tensor:
    """The published layer with dense masks: windowed self-attention, lagged cross-attention, gated MLP."""
    count = len(id_T)
    row, column = torch.arange(count)[:, None], torch.arange(count)[None]
    angle = torch.arange(count)[:, None] / 10000.0 ** (torch.arange(0, D, 2) / D)
    cos, sin = torch.cat([angle.cos()] * 2, -1)[:, None], torch.cat([angle.sin()] * 2, -1)[:, None]

    def rotate(x: torch.Tensor) -> torch.Tensor:
        return x * cos + torch.cat([-x[..., D // 2 :], x[..., : D // 2]], -1) * sin

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        return x * (x.pow(2).mean(-1, keepdim=True) + SPEC.rms_norm_eps).rsqrt() * w[f"{name}.weight"]

    def project(x: torch.Tensor, name: str) -> torch.Tensor:
        return (x @ w[f"{name}.weight"].t() + w[f"{name}.bias"]).view(count, -1, D)

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, visible: torch.Tensor) -> torch.Tensor:
        k, v = (x.repeat_interleave(H // K, 1) for x in (k, v))
        score = torch.einsum("thd,shd->hts", q, k) / D**0.5
        weight = score.masked_fill(~visible, float("-inf")).softmax(-1).nan_to_num(0.0)
        return torch.einsum("hts,shd->thd", weight, v).reshape(count, -1)

    h = TARGET.embedding_VE[id_T]
    x = norm(h, "input_layernorm")
    q, k, v = (project(x, f"self_attn.{n}_proj") for n in "qkv")
    window = (row - column >= 0) & (row - column <= 512)  # flash's (512, -1) under a causal mask
    h = h + attend(rotate(q), rotate(k), v, window) @ w["self_attn.o_proj.weight"].t()
    q = rotate(project(norm(h, "post_self_attention_layernorm"), "cross_attn.q_proj"))
    h = h + attend(q, k_TKD, v_TKD, row - column >= lag) @ w["cross_attn.o_proj.weight"].t()
    x = norm(h, "post_cross_attention_layernorm")
    gated = torch.nn.functional.silu(x @ w["mlp.gate_proj.weight"].t()) * (x @ w["mlp.up_proj.weight"].t())
    return h + gated @ w["mlp.down_proj.weight"].t()


@pytest.mark.parametrize("lag", [1, 4])
def test_an_imported_draft_computes_what_the_released_layer_does(lag: int, tmp_path: Path) -> None:
    weights = published()
    draft = import_longspec(write(tmp_path / "p", weights), SPEC).bind(TARGET.embedding_VE, TARGET.head_VE)
    count = 530  # so that the window's edge, 513 keys with self, is inside
    g = torch.Generator().manual_seed(1)
    id_T = torch.randint(0, SPEC.vocab_size, (count,), generator=g)
    k_TKD, v_TKD = (torch.randn(count, K, D, generator=g) for _ in range(2))
    with torch.no_grad():
        ours = draft.forward_packed(id_T, torch.arange(count), k_TKD, v_TKD, [0, count], lag)
        theirs = released_layer(weights, id_T, k_TKD, v_TKD, lag)
    torch.testing.assert_close(ours, theirs, atol=2e-4, rtol=2e-4)
    draft.config.settings.window = WINDOW - 1  # one key fewer is seen from the row at which it falls out
    with torch.no_grad():
        narrow = draft.forward_packed(id_T, torch.arange(count), k_TKD, v_TKD, [0, count], lag)
    assert torch.equal(narrow[: WINDOW - 1], ours[: WINDOW - 1])
    assert float((narrow[WINDOW - 1 :] - ours[WINDOW - 1 :]).abs().max()) > 2e-3


def test_out_and_in_again_keeps_every_weight_and_zeroes_what_nothing_reads(tmp_path: Path) -> None:
    weights = published(dtype=torch.float16)
    export_longspec(import_longspec(write(tmp_path / "in", weights), SPEC), tmp_path / "out")
    back = load_file(tmp_path / "out" / "model.safetensors")
    assert back.keys() == weights.keys()
    for name, weight in weights.items():
        unused = name.startswith(("cross_attn.k_proj", "cross_attn.v_proj"))
        assert torch.equal(back[name], torch.zeros_like(weight) if unused else weight), name
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["architectures"] == ["LlamaGlideDecoderLayer"]
    assert (config["hidden_size"], config["torch_dtype"]) == (E, "float16")


def test_our_draft_without_biases_survives_the_way_out_and_in(tmp_path: Path) -> None:
    draft = tiny_draft(TARGET, window=WINDOW)
    export_longspec(draft, tmp_path / "out")
    again = import_longspec(tmp_path / "out", SPEC)
    for name, weight in again.state_dict().items():
        assert torch.equal(weight, draft.state_dict().get(name, torch.zeros_like(weight))), name


@pytest.mark.parametrize("prefix", ["draft_model.", "glide.", "model."])
def test_a_training_state_with_the_targets_weights_beside_is_read(prefix: str, tmp_path: Path) -> None:
    weights = published()
    state = {prefix + name: w for name, w in weights.items()}
    state["lm_head.weight"] = torch.zeros(3)
    state[prefix + "self_attn.rotary_emb.inv_freq"] = torch.zeros(D // 2)
    draft = import_longspec(write(tmp_path / "p", state), SPEC)
    assert torch.equal(draft.self_attn.q_proj.bias, weights["self_attn.q_proj.bias"])


def test_shards_are_read_by_their_index(tmp_path: Path) -> None:
    weights, folder = published(), tmp_path / "p"
    folder.mkdir()
    names = sorted(weights)
    parts = {"a.safetensors": names[:5], "b.safetensors": names[5:]}
    for file, part in parts.items():
        save_file({n: weights[n] for n in part}, folder / file)
    index = {"weight_map": {n: file for file, part in parts.items() for n in part}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert torch.equal(import_longspec(folder, SPEC).mlp.up_proj.weight, weights["mlp.up_proj.weight"])
    index["weight_map"][names[0]] = "../elsewhere.safetensors"
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match="outside its folder"):
        import_longspec(folder, SPEC)


def test_what_is_no_such_draft_is_refused_by_name(tmp_path: Path) -> None:
    weights = published()
    missing = {n: w for n, w in weights.items() if n != "cross_attn.q_proj.bias"}
    with pytest.raises(CheckpointError, match=r"misses weights cross_attn\.q_proj\.bias"):
        import_longspec(write(tmp_path / "missing", missing), SPEC)
    with pytest.raises(CheckpointError, match=r"unknown weights fc\.weight"):
        import_longspec(write(tmp_path / "unknown", weights | {"fc.weight": torch.zeros(1)}), SPEC)
    with pytest.raises(CheckpointError, match=r"mlp\.up_proj\.weight is \(1, 2\)"):
        import_longspec(write(tmp_path / "shape", weights | {"mlp.up_proj.weight": torch.zeros(1, 2)}), SPEC)
    (tmp_path / "pickled").mkdir()
    (tmp_path / "pickled" / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin, which is not read"):
        import_longspec(tmp_path / "pickled", SPEC)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"window": 512}, "window=512"),
        ({"window": WINDOW, "final_norm": True}, "final_norm"),
        ({"window": WINDOW, "cross_q_norm": True}, "cross_q_norm"),
        ({"window": WINDOW, "head_tokens": 9}, "head_tokens=9"),
        ({"window": WINDOW, "cross_layers": [0]}, "cross_layers="),
        ({"window": WINDOW, "cross_group": 1}, "cross_group=1"),
        ({"window": WINDOW, "newest_lags": 2}, "newest_lags=2"),
    ],
)
def test_a_draft_that_the_released_layer_cannot_hold_is_not_exported(
    settings: dict[str, Any], named: str, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match=named):
        export_longspec(tiny_draft(TARGET, **settings), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_the_command_imports_and_exports(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = str(tiny_model("llama", tmp_path / "target"))
    source = str(write(tmp_path / "p", published()))
    ours, back = str(tmp_path / "ours"), str(tmp_path / "back")
    assert cli.main(["drafts", "import", source, "--target", target, "--output", ours]) == 0
    facts = read_config(ours)["longdraft"]["training"]
    assert (facts["max_lag"], facts["anchors"], facts["max_position"]) == (4, 4, 16384)
    assert load_draft(ours, SPEC).config.settings.window == WINDOW
    assert cli.main(["drafts", "export", ours, "--target", target, "--output", back]) == 0
    assert torch.equal(
        load_file(back + "/model.safetensors")["self_attn.v_proj.bias"], published()["self_attn.v_proj.bias"]
    )
    assert cli.main(["drafts", "import", str(tmp_path / "no"), "--target", target, "--output", ours]) == 2
    assert "safetensors" in capsys.readouterr().err
    save_draft(tiny_draft(TARGET, window=8), tmp_path / "narrow", "t")
    assert cli.main(["drafts", "export", str(tmp_path / "narrow"), "--target", target, "--output", back]) == 2
