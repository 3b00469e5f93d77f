"""Liger's layers in the target: when, and that one model of the process has them and no other. Their figures: tests/gpu."""

import copy
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import liger_kernel.transformers.monkey_patch as liger
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.llama import modeling_llama

from longdraft.errors import UserError
from longdraft.schema import load_settings
from longdraft.train.config import TargetSettings, TrainSettings
from longdraft.train.fused_layers import FAMILIES, fuse, wants_fusion
from longdraft.train.target import FrozenTarget, load_target

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
ZERO3 = ["engine.name=deepspeed", "engine.config=recipes/deepspeed/zero3.yaml"]
LAYERS = 3


def model_of(family: str, **changes: Any) -> Any:
    config: dict[str, Any] = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": LAYERS,
        "vocab_size": 64,
        "head_dim": 8,
    }
    config |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128}
    if family == "mistral":
        config["sliding_window"] = None
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **config, **changes)).eval()


def settings(*overrides: str) -> TrainSettings:
    return load_settings(TrainSettings, None, ["target.path=tiny-random:llama", "data.train=x.jsonl", *overrides])


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Torch in the place of Liger's kernels, which no CPU runs; counted."""
    seen: Counter[str] = Counter()
    plain_rope = modeling_llama.apply_rotary_pos_emb

    def norm(self: Any, x: torch.Tensor) -> torch.Tensor:
        seen["norm"] += 1
        return self.weight * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.variance_epsilon))

    def mlp(self: Any, x: torch.Tensor) -> torch.Tensor:
        seen["mlp"] += 1
        return self.down_proj(torch.nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))

    def rope(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> Any:
        seen["rope"] += 1
        return plain_rope(q, k, cos, sin)

    monkeypatch.setattr(liger.LigerRMSNorm, "forward", norm)
    monkeypatch.setattr(liger.LigerSwiGLUMLP, "forward", mlp)
    monkeypatch.setattr(liger, "liger_rotary_pos_emb", rope)
    return seen


def seen_by(model: Any) -> dict[str, torch.Tensor]:
    """What training reads, with a jump of the positions."""
    position = torch.tensor([0, 1, *range(40, 50), *range(7)])
    ids = torch.arange(19) * 3 % 64
    return FrozenTarget(model, "x").capture(ids, position, [0, 12, 19], hidden=True, aux=(0, 1, 2)).tensors


@pytest.mark.parametrize("family", FAMILIES)
def test_one_model_is_fused_and_reads_the_same(family: str, calls: Counter[str]) -> None:
    other, model = model_of(family), model_of(family)
    wanted = seen_by(other)
    fuse(model)
    found = seen_by(model)
    norms = 2 * LAYERS + 1 + (2 * LAYERS if family == "qwen3" else 0)
    assert calls == {"norm": norms, "mlp": LAYERS, "rope": LAYERS}, "one pass, two documents side by side"
    for name, tensor in wanted.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_no_other_model_of_the_process_is_touched(family: str, calls: Counter[str]) -> None:
    before = model_of(family)
    module = sys.modules[type(before).__module__]
    names = dict(vars(module))
    fuse(model_of(family))
    assert dict(vars(module)) == names
    after = model_of(family)
    for name, tensor in seen_by(before).items():
        assert torch.equal(seen_by(after)[name], tensor)
    assert not calls


def test_a_failure_on_the_way_leaves_transformers_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    names = dict(vars(modeling_llama))
    monkeypatch.setattr(liger, "_patch_swiglu_module", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        fuse(model_of("llama"))
    assert dict(vars(modeling_llama)) == names


def test_a_fused_target_generates_and_is_copied(calls: Counter[str]) -> None:
    """Evaluation and the transformers backend: prefill, steps over a cache, padding to the left."""
    plain = model_of("llama")
    fused = model_of("llama")
    fuse(fused)
    ids = torch.tensor([[0, 0, 5, 6, 7], [1, 2, 3, 4, 5]])
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])
    arguments = {"attention_mask": mask, "max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    wanted = plain.generate(ids, **arguments)
    assert not calls
    assert torch.equal(fused.generate(ids, **arguments), wanted)
    assert calls["rope"] == 6 * LAYERS
    twin = copy.deepcopy(fused)
    assert all(m.forward.__self__ is m for m in twin.modules())
    assert torch.equal(twin.generate(ids, **arguments), wanted)


def test_auto_is_for_a_gpu_and_for_the_families_that_liger_knows() -> None:
    for family in FAMILIES:
        assert wants_fusion("auto", model_of(family), CUDA)
        assert wants_fusion("on", model_of(family), CUDA)
        assert not wants_fusion("auto", model_of(family), CPU)
        assert not wants_fusion("off", model_of(family), CUDA)
    own_code = type("LlamaForCausalLM", (modeling_llama.LlamaForCausalLM,), {"__module__": "own.code"})
    others = [model_of("llama", hidden_act="gelu"), own_code(model_of("llama").config)]
    others.append(model_of("qwen2_moe", num_experts=2, moe_intermediate_size=8))
    for model in others:
        assert not wants_fusion("auto", model, CUDA)
        with pytest.raises(UserError, match=r"target\.liger=on, but Liger's layers here are for .*use auto or off"):
            wants_fusion("on", model, CUDA)


def test_loading_on_a_cpu() -> None:
    plain = load_target(TargetSettings(path="tiny-random:llama"), CPU)
    assert not any("forward" in vars(module) for module in plain.model.modules())
    with pytest.raises(UserError, match=r"target\.liger=on, but the target runs on cpu: .*use auto or off"):
        load_target(TargetSettings(path="tiny-random:llama", liger="on"), CPU)


def test_on_and_off_are_words_though_yaml_reads_truth_values(tmp_path: Path) -> None:
    assert settings("target.liger=on").target.liger == "on"
    assert settings("tracking.wandb=off").tracking.wandb == "off"
    (tmp_path / "x.yaml").write_text("target: {path: x, liger: off}\ndata: {train: x}\ntracking: {wandb: off}\n")
    read = load_settings(TrainSettings, tmp_path / "x.yaml")
    assert (read.target.liger, read.tracking.wandb) == ("off", "off")
    with pytest.raises(UserError, match=r"tracking\.wandb"):
        settings("tracking.wandb=on")


def test_a_sharded_target_is_not_fused_and_a_run_may_change_it() -> None:
    assert settings(*ZERO3, "target.shard=true").target.liger == "auto"
    with pytest.raises(UserError, match=r"target\.liger=on is for a target that is whole"):
        settings(*ZERO3, "target.shard=true", "target.liger=on")
    assert settings("target.liger=on").trajectory() == settings().trajectory()
