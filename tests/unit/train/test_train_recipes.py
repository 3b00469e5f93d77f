"""Every shipped recipe parses and plans without network or weights, says what it is, and costs what its settings say."""

import re
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from longdraft.draft_models.target import TargetSpec
from longdraft.errors import UserError
from longdraft.schema import load_settings
from longdraft.train import target as target_module
from longdraft.train.config import TargetSettings, TrainSettings
from longdraft.train.estimate import plan_text
from longdraft.train.long_draft import main
from longdraft.train.target import plan_config

RECIPES = Path(__file__).parents[3] / "recipes"
TRAINING = [path for path in sorted(RECIPES.rglob("*.yaml")) if "schedule:" in path.read_text()]
CURRICULA = sorted(path.parent for path in RECIPES.glob("longspec/*/stage1_short.yaml"))
STAGES = ["stage1_short", "stage2_long", "stage3_answers"]


def name(path: Path) -> str:
    return path.relative_to(RECIPES).as_posix()


def recipe(path: Path) -> TrainSettings:
    return load_settings(TrainSettings, path)


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = AutoConfig.from_pretrained

    def local(path: Any, **kwargs: Any) -> Any:
        assert Path(path).exists(), f"a plan asked the network for {path}"
        return honest(path, **kwargs)

    monkeypatch.setattr(target_module.AutoConfig, "from_pretrained", local)


@pytest.mark.parametrize("path", TRAINING, ids=name)
def test_recipes_are_labelled_and_can_be_planned(path: Path) -> None:
    settings = recipe(path)
    if settings.target.path == "SET-ME":  # a folder that `make demo` fills
        settings.target.path = "HuggingFaceTB/SmolLM2-135M-Instruct"
    text = plan_text(settings, max(settings.recipe.gpus, 1))
    assert re.search(r"^recipe +(smoke|real), for (a CPU|\d+ GPUs?).*; expects \w", text, re.MULTILINE)
    assert "memory" in text
    head = path.read_text().split("recipe:")[0]
    assert f"--config recipes/{name(path)}" in head, "the command stands in the file's head"


@pytest.mark.parametrize("folder", CURRICULA, ids=lambda folder: folder.name)
def test_a_curriculum_is_three_stages_that_start_from_each_other(folder: Path) -> None:
    stages = [recipe(folder / f"{stage}.yaml") for stage in STAGES]
    assert {path.stem for path in folder.glob("*.yaml")} == set(STAGES)
    for before, after in zip(stages, stages[1:], strict=False):
        assert after.draft.init_from == str(before.folder / "checkpoints/latest/draft")
        assert after.target == before.target
        assert after.data.max_length >= before.data.max_length
        assert after.optim.lr <= before.optim.lr
    assert stages[0].positions.offset_share == 1 and stages[0].positions.random_anchors
    assert stages[-1].objective.rows == "answers"
    assert {stage.lag.max for stage in stages} == {4}


def eagle3_flops(settings: TrainSettings, one_row_in: int) -> float:
    """Of an EAGLE-3 draft: keys and values of all rows once, the other steps, MLPs and heads of supervised rows.

    A weight costs two in each of two forward passes (the second one is recomputed) and four in the backward pass; the head makes
    its gradients at once, and a teacher row serves all steps.
    """
    s, own = TargetSpec.from_config(plan_config(settings.target)), settings.eagle3
    assert own.draft_vocab_size is not None and settings.ttt.recompute
    hidden, wide, narrow, steps = (
        s.hidden_size,
        s.num_heads * s.head_dim,
        s.num_kv_heads * s.head_dim,
        settings.ttt.steps,
    )
    key_value, row = 4 * hidden * narrow, 3 * hidden * wide + 3 * hidden * s.intermediate_size
    a_step = 8 * row + 6 * settings.data.max_length * wide
    head = hidden * (own.draft_vocab_size * (6 * steps + 2) + 2 * s.vocab_size)
    return 8 * (3 * hidden**2 + key_value) + (steps * a_step + (steps - 1) * 8 * key_value + head) / one_row_in


def flops_a_token(settings: TrainSettings, one_row_in: int) -> float:
    """Of the frozen target's pass, the draft's two, and the head: matrices twice a weight, causal attention over half a sample."""
    s = TargetSpec.from_config(plan_config(settings.target))
    wide, narrow = s.num_heads * s.head_dim, s.num_kv_heads * s.head_dim
    layer = s.hidden_size * (2 * wide + 2 * narrow) + 3 * s.hidden_size * s.intermediate_size
    attention = 2 * settings.data.max_length * wide
    frozen = s.num_layers * (2 * layer + attention)
    if settings.draft.arch == "eagle3":
        return frozen + eagle3_flops(settings, one_row_in)
    scored = settings.draft.head_tokens or s.vocab_size
    head = scored * s.hidden_size * (4 if settings.objective.name == "ce" else 6)
    return frozen + 6 * (layer + 2 * s.hidden_size * wide) + 3 * attention + head


@pytest.mark.parametrize("path", [path for path in TRAINING if "gpu_hours" in path.read_text()], ids=name)
def test_gpu_hours_follow_from_the_settings(path: Path) -> None:
    """The head's arithmetic: tokens, GFLOP a token and the assumed rate give the hours that the recipe states."""
    settings, text = recipe(path), " ".join(path.read_text().replace("#", "").split())
    s = settings.schedule
    tokens = s.max_steps * s.micro_batch * s.accumulate * settings.recipe.gpus * settings.data.max_length
    said = re.search(r"= ([\d.]+e\d+) tokens", text)
    gflop = re.search(r"at the head: ([\d.]+)\. At (\d+) TFLOP/s", text)
    assert said and gflop and settings.recipe.gpu_hours is not None
    share = re.search(r"one row in (\d+) supervised", text)
    assert bool(share) == (settings.draft.arch == "eagle3" and settings.objective.rows == "answers")
    assert float(said[1]) == pytest.approx(tokens, rel=0.03)
    assert float(gflop[1]) == pytest.approx(flops_a_token(settings, int(share[1]) if share else 1) / 1e9, rel=0.04)
    hours = float(said[1]) * float(gflop[1]) * 1e9 / (float(gflop[2]) * 1e12) / 3600
    assert settings.recipe.gpu_hours == pytest.approx(hours, rel=0.06)
    assert f"that is {settings.recipe.gpu_hours:g} H200 hours" in text


LARGE = [path for path in sorted(RECIPES.glob("eagle3/*/*.yaml")) if path.with_name("short.yaml").exists()]


@pytest.mark.parametrize("path", LARGE, ids=name)
def test_an_eagle3_recipe_trains_what_its_draft_is_served_at(path: Path) -> None:
    """Longer ones start from the short draft of their folder, and a stretched rotation starts where that one ended."""
    settings, short = recipe(path), recipe(path.with_name("short.yaml"))
    assert settings.draft.arch == "eagle3" and settings.positions.offset_share == 0
    assert settings.eagle3.draft_vocab_size == short.eagle3.draft_vocab_size == 32000
    assert settings.target == short.target
    if path.stem != "short":
        assert settings.draft.init_from == str(short.folder / "checkpoints/latest/draft")
        assert settings.optim.lr < short.optim.lr
    if rope := settings.eagle3.rope:
        assert rope.factor and rope.original_max_position_embeddings == short.data.max_length
        assert rope.factor * rope.original_max_position_embeddings >= settings.data.max_length + settings.ttt.steps + 1
    assert (path.stem == "yarn") == (settings.eagle3.rope is not None)


def test_a_published_drafts_rotation_is_stretched_by_overrides() -> None:
    """As the head of the YaRN recipes says; a factor too small is refused by the plan."""
    path = RECIPES / "eagle3/llama-3.1-8b/yarn.yaml"
    changes = ["eagle3.rope.original_max_position_embeddings=2048", "eagle3.rope.factor=32"]
    assert "memory" in plan_text(load_settings(TrainSettings, path, changes), 8)
    with pytest.raises(UserError, match=r"data.max_length=32768 and 5 draft tokens pass the 32768 .*factor to 17"):
        plan_text(load_settings(TrainSettings, path, [changes[0], "eagle3.rope.factor=16"]), 8)


def test_the_smoke_curriculum_runs_its_three_stages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for stage in STAGES:
        assert main(["--config", f"recipes/longspec/tiny-random/{stage}.yaml", "schedule.max_steps=2"]) == 0
    assert (tmp_path / "runs/longspec-tiny-random-stage3/checkpoints/latest/draft/model.safetensors").is_file()


def test_the_table_names_every_recipe() -> None:
    table = (RECIPES / "README.md").read_text()
    for path in TRAINING:
        listed = name(path.parent) if path.parent in CURRICULA else name(path)
        assert f"| `{listed}` | {recipe(path).recipe.label} |" in table


def test_a_folder_is_planned_by_its_own_config_and_an_unknown_name_asks_the_hub(tmp_path: Path) -> None:
    """Shipped shapes stand in for a name alone, and only in plans."""
    folder = tmp_path / "qwen3-8b"
    changed = plan_config(TargetSettings(path="Qwen/Qwen3-8B"))
    assert changed.num_hidden_layers == 36
    changed.num_hidden_layers = 2
    changed.layer_types = changed.layer_types[:2]
    changed.save_pretrained(folder)
    assert plan_config(TargetSettings(path=str(folder))).num_hidden_layers == 2
    with pytest.raises(AssertionError, match="asked the network for somebody/unknown"):
        plan_config(TargetSettings(path="somebody/unknown"))
    with pytest.raises(AssertionError, match="asked the network for Qwen/Qwen3-8B"):
        target_module.load_config(TargetSettings(path="Qwen/Qwen3-8B"))
