"""The command line: strict settings, recipes, and a plan that starts nothing."""

import json
import runpy
from pathlib import Path

import pytest
import torch
from tiny import tiny_model, tiny_target

from longdraft.draft_models.config import LongSpecConfig
from longdraft.draft_models.longspec import LongSpecDraft
from longdraft.schema import load_settings
from longdraft.train import loop
from longdraft.train.config import TrainSettings
from longdraft.train.long_draft import main
from longdraft.train.memory_plan import estimate_memory
from longdraft.train.recipe_files import find_config

ROOT = Path(__file__).parents[3]
SMOKE = ROOT / "recipes/smoke/longspec.yaml"


def failing(argv: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """The one line that a user's error prints."""
    assert main(argv) == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error")]
    assert len(lines) == 1
    return lines[0]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("optm.lr=1", "error: unknown key 'optm' (did you mean 'optim'?)"),
        ("optim.learning_rate=1", "error: unknown key 'optim.learning_rate'"),
        ("draft.windw=3", "error: unknown key 'draft.windw' (did you mean 'draft.window'?)"),
        ("schedule.max_steps=none", "error: schedule.max_steps='none'"),
        ("lag.min=9", "error: lag={'max': 3, 'min': 9}: lag.min=9 is above lag.max=3"),
        ("data.max_length=20000", "error: data.max_length=20000 is beyond the target's 16384 positions"),
        ("target.path=tiny-random:gpt", "error: target.path='tiny-random:gpt' is not a tiny target"),
        ("optim.lr", "error: override 'optim.lr' is not of the form a.b=value"),
        ("optim.lr=[", "error: override 'optim.lr=[' is not valid YAML"),
    ],
)
def test_what_does_not_fit_exits_2_with_one_line(
    override: str, message: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    argv = ["--config", str(SMOKE), override, f"run.output_dir={tmp_path}", "--plan"]
    assert failing(argv, capsys).startswith(message)


def test_a_missing_recipe_or_target_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert "nowhere.yaml" in failing(["--config", "nowhere.yaml"], capsys)
    assert failing([], capsys).startswith("error: target is missing")


def test_a_recipe_that_is_no_text_is_named(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe")
    assert "binary.yaml' is not UTF-8 text" in failing(["--config", str(tmp_path / "binary.yaml")], capsys)


def test_a_target_that_no_draft_can_read_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    folder = tiny_model("qwen2", tmp_path / "q", use_sliding_window=True, sliding_window=64, max_window_layers=1)
    line = failing(["--config", str(SMOKE), f"target.path={folder}", "--plan"], capsys)
    assert "sliding-window" in line


def test_a_plan_starts_nothing(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forbidden(*args: object, **kwargs: object) -> None:
        raise AssertionError("a plan must not load, train or join other processes")

    for name in ("train", "Group", "load_target", "Corpus"):
        monkeypatch.setattr(loop, name, forbidden)
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(["--config", str(SMOKE), "--plan", f"run.output_dir={tmp_path}/runs"]) == 0
    text = capsys.readouterr().out
    assert "(new)" in text
    assert "4 samples packed to 512 tokens = at most 2,048 tokens (1 micro-batch x 2 accumulate x 2 ranks)" in text
    assert "unknown: no former run" in text
    assert not (tmp_path / "runs").exists()


def test_a_plan_knows_a_former_run(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    run = tmp_path / "smoke-longspec"
    run.mkdir()
    rows = [{"step": step, "seconds_per_step": 2.0} for step in (50, 100)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert main(["--config", str(SMOKE), "--plan", f"run.output_dir={tmp_path}"]) == 0
    assert "2.000 s a step in the former run of this name; 200 steps left, 6:40" in capsys.readouterr().out


def test_recipes_are_found_from_any_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    assert find_config("recipes/smoke/longspec.yaml").is_file()


def test_the_entry_runs_as_a_script(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr("sys.argv", ["long_draft.py", "--config", str(SMOKE), "--plan", f"run.output_dir={tmp_path}"])
    with pytest.raises(SystemExit) as exit_:
        runpy.run_path(str(ROOT / "train/long_draft.py"), run_name="__main__")
    assert exit_.value.code == 0
    assert "smoke-longspec" in capsys.readouterr().out


def test_the_memory_estimate_counts_what_is_exact() -> None:
    """Weights, optimizer state and the captured cache are known; activations grow with the tokens of a micro-batch."""
    target = tiny_target("llama")
    draft = LongSpecDraft(LongSpecConfig(target.spec))
    counts = sum(p.numel() for p in target.model.parameters()), sum(p.numel() for p in draft.parameters())
    settings = load_settings(TrainSettings, SMOKE)
    small = estimate_memory(target.spec, counts, settings, torch.device("cpu"))
    assert small.target == 4 * counts[0]
    assert small.draft == 16 * counts[1]
    settings.schedule.micro_batch = 4
    large = estimate_memory(target.spec, counts, settings, torch.device("cpu"))
    assert 3 < large.activations / small.activations < 4.5
    settings.engine.dtype = settings.target.dtype = "bfloat16"
    half = estimate_memory(target.spec, counts, settings, torch.device("cuda"))
    assert half.target == 2 * counts[0]
    assert half.activations < large.activations
