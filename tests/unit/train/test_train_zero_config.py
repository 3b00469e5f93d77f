"""The DeepSpeed file and the run's settings: each decides its own things, and a conflict names both."""

from pathlib import Path

import pytest
import torch

from longdraft.errors import UserError
from longdraft.schema import load_settings
from longdraft.train.config import TrainSettings
from longdraft.train.engines.zero_config import offloads, read_zero_file, zero_config

RECIPES = Path(__file__).parents[3] / "recipes" / "deepspeed"


def settings(config: str | Path, *more: str) -> TrainSettings:
    base = ["target.path=tiny-random:llama", "data.train=x.jsonl", "engine.name=deepspeed", f"engine.config={config}"]
    return load_settings(TrainSettings, None, [*base, *more])


@pytest.mark.parametrize("name", ["zero1", "zero2", "zero3", "zero2_offload", "zero3_offload"])
def test_every_shipped_file_makes_a_configuration(name: str) -> None:
    run = settings(f"recipes/deepspeed/{name}.yaml", "schedule.accumulate=3", "optim.clip=0.5")
    config = zero_config(run, torch.bfloat16)
    assert config["zero_optimization"]["stage"] == int(name[4])
    assert config["gradient_accumulation_steps"] == 3
    assert config["gradient_clipping"] == 0.5
    assert config["bf16"]["enabled"]
    assert not zero_config(run, torch.float32)["bf16"]["enabled"]
    assert offloads(config, "offload_optimizer") == name.endswith("offload")


def test_all_shipped_files_are_covered() -> None:
    assert {p.stem for p in RECIPES.iterdir()} == {"zero1", "zero2", "zero3", "zero2_offload", "zero3_offload"}


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("gradient_clipping: 1.0", ["gradient_clipping", "optim.clip"]),
        ("train_batch_size: 8", ["train_batch_size", "schedule.micro_batch"]),
        ("gradient_accumulation_steps: 2", ["gradient_accumulation_steps", "schedule.accumulate"]),
        ("optimizer: {type: Adam}", ["optimizer", "optim"]),
        ("bf16: {enabled: true}", ["bf16", "engine.dtype"]),
        ("zero_optimisation: {stage: 2}", ["zero_optimisation", "unknown"]),
    ],
)
def test_a_key_with_another_owner_is_refused_by_name(tmp_path: Path, line: str, words: list[str]) -> None:
    path = tmp_path / "zero.yaml"
    path.write_text(f"zero_optimization: {{stage: 2}}\n{line}\n")
    with pytest.raises(UserError) as error:
        read_zero_file(settings(path))
    assert all(word in str(error.value) for word in words)


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("zero_optimization: {stage: 0}", "stage=0"),
        ("zero_optimization: {stage: 2, offload_optimizer: {device: nvme}}", "nvme"),
        ("- 1", "no zero_optimization section"),
        ("a: [", "cannot be read"),
    ],
)
def test_a_file_that_cannot_work_is_one_line(tmp_path: Path, text: str, word: str) -> None:
    path = tmp_path / "zero.yaml"
    path.write_text(text)
    with pytest.raises(UserError, match=word) as error:
        read_zero_file(settings(path))
    assert "\n" not in str(error.value)


def test_settings_that_contradict_each_other_are_refused() -> None:
    zero2 = "recipes/deepspeed/zero2.yaml"
    with pytest.raises(UserError, match=r"target\.shard=true needs ZeRO stage 3"):
        read_zero_file(settings(zero2, "target.shard=true"))
    with pytest.raises(UserError, match=r"draft\.init=target reads the whole target"):
        settings("recipes/deepspeed/zero3.yaml", "target.shard=true", "draft.init=target")
    with pytest.raises(UserError, match=r"optim\.name=muon"):
        settings(zero2, "optim.name=muon")
    with pytest.raises(UserError, match=r"engine\.config is for engine\.name=deepspeed"):
        settings(zero2, "engine.name=torch")
    with pytest.raises(UserError, match=r"needs engine\.config"):
        load_settings(TrainSettings, None, ["target.path=x", "data.train=x", "engine.name=deepspeed"])
