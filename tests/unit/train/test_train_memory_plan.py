"""Plans for machines that are not here: memory by engine, and what a plan that does not fit is told to change."""

from pathlib import Path

import pytest
import torch

from longdraft.draft_models.target import TargetSpec
from longdraft.errors import UserError
from longdraft.schema import load_settings
from longdraft.train.config import TrainSettings
from longdraft.train.estimate import count_parameters, plan_text
from longdraft.train.long_draft import main
from longdraft.train.memory_plan import ZERO3, _changed, check_fit, estimate_memory
from longdraft.train.target import plan_config

ROOT = Path(__file__).parents[3]
RECIPE = ROOT / "recipes" / "longspec" / "llama-3.1-8b" / "stage2_long.yaml"
LARGE = ["target.path=meta-llama/Llama-3.3-70B-Instruct", "plan.ranks=64", "plan.gpu_gib=141"]
SPREAD = ["engine.name=deepspeed", f"engine.config={ZERO3}", "target.shard=true"]
GPU = torch.device("cuda")


@pytest.fixture(scope="module")
def large() -> tuple[TargetSpec, tuple[int, int]]:
    settings = load_settings(TrainSettings, RECIPE, LARGE)
    config = plan_config(settings.target)
    spec = TargetSpec.from_config(config)
    return spec, count_parameters(config, spec, settings)


def test_a_70b_target_on_64_gpus_is_refused_whole_and_planned_spread(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--config", str(RECIPE), *LARGE, "--plan"]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "target 131.4" in said  # 70.6e9 weights in 16 bit
    assert "engine.name=deepspeed engine.config=recipes/deepspeed/zero3.yaml target.shard=true" in said
    assert main(["--config", str(RECIPE), *LARGE, *SPREAD, "--plan"]) == 0
    planned = capsys.readouterr().out
    assert "70,553,706,496 parameters" in planned
    assert "x 64 ranks" in planned and "target over 64 ranks" in planned
    assert "a rank on cuda" in planned


def test_what_is_advised_fits(large: tuple[TargetSpec, tuple[int, int]]) -> None:
    settings = load_settings(TrainSettings, RECIPE, LARGE)
    change = {"engine.name": "deepspeed", "engine.config": ZERO3, "target.shard": True}
    advised = _changed(settings, change)
    assert advised.target.shard and advised.data.max_length == settings.data.max_length
    memory = estimate_memory(*large, advised, GPU, 64)
    check_fit(*large, advised, GPU, 64, memory)
    with pytest.raises(UserError, match=r"no single change is enough; nearest comes .* use more or larger GPUs"):
        check_fit(*large, _changed(settings, {"plan.gpu_gib": 16}), GPU, 8, estimate_memory(*large, settings, GPU, 8))


def test_ranks_that_divide_samples_have_their_rows_and_all_keys(capsys: pytest.CaptureFixture[str]) -> None:
    """One document of 128K tokens on 8 cards that hold a 70B target together."""
    long = ["data.max_length=131072", "views.share=0", "schedule.accumulate=16", "plan.ranks=8", "plan.gpu_gib=64"]
    given = ["--config", str(RECIPE), *LARGE[:1], *SPREAD, *long, "--plan"]
    assert main(given) == 2, "a rank that has a document to itself"
    capsys.readouterr()
    assert main([*given, "engine.sequence=true"]) == 0
    said = capsys.readouterr().out
    assert "16 documents of up to 131072 tokens" in said and "x 8 ranks together)" in said
    assert "target over 8 ranks, samples divided by rows" in said

    def activations(world: int) -> int:
        settings = load_settings(TrainSettings, RECIPE, [*LARGE[:1], *long[:2], "engine.sequence=true"])
        config = plan_config(settings.target)
        spec = TargetSpec.from_config(config)
        return estimate_memory(spec, (70_000_000_000, 1_000_000_000), settings, GPU, world).activations

    keys = 131072 * 2 * 8 * 128  # of one layer, all rows
    assert activations(8) - 2 * keys > 0.1 * activations(1), "what all ranks have does not shrink"
    assert activations(8) < 0.25 * activations(1)
    assert main([*given, "engine.sequence=true", "views.share=0.5"]) == 2
    assert "views.share=0.5" in capsys.readouterr().err


def test_more_ranks_take_a_share_each_of_what_is_spread(large: tuple[TargetSpec, tuple[int, int]]) -> None:
    def draft(config: str, world: int) -> int:
        settings = load_settings(
            TrainSettings, RECIPE, [*LARGE, "engine.name=deepspeed", f"engine.config=recipes/deepspeed/{config}.yaml"]
        )
        return estimate_memory(*large, settings, GPU, world).draft

    count = large[1][1]
    assert draft("zero1", 64) == 2 * count + 6 * count + 12 * count // 64
    assert draft("zero1", 8) > draft("zero2", 8) > draft("zero2_offload", 8)
    assert draft("zero2", 64) < draft("zero2", 8)
    spread = load_settings(TrainSettings, RECIPE, [*LARGE, *SPREAD])
    shares = [estimate_memory(*large, spread, GPU, world).target for world in (8, 16, 64)]
    assert shares == sorted(shares, reverse=True)
    tables = 2 * 2 * large[0].vocab_size * large[0].hidden_size
    assert shares[-1] - large[1][0] * 2 // 64 >= tables  # the draft borrows them whole


def test_offload_is_counted_on_the_host(large: tuple[TargetSpec, tuple[int, int]]) -> None:
    offload = ["engine.name=deepspeed", "engine.config=recipes/deepspeed/zero2_offload.yaml"]
    memory = estimate_memory(*large, load_settings(TrainSettings, RECIPE, [*LARGE, *offload]), GPU, 8)
    assert memory.host == 16 * large[1][1] // 8
    assert "GiB on the host" in plan_text(load_settings(TrainSettings, RECIPE, [*LARGE[:2], *offload]), 8)


def test_a_smaller_micro_batch_is_the_first_advice() -> None:
    smaller = ["schedule.micro_batch=64", "plan.gpu_gib=141"]
    with pytest.raises(UserError, match=r"change schedule\.micro_batch=1 schedule\.accumulate=512"):
        plan_text(load_settings(TrainSettings, RECIPE, smaller), 8)
