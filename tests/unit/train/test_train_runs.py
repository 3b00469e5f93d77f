"""Whole runs in this process: bitwise resume, loss normalisation, non-finite losses, what a run leaves behind."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from train_case import TEXTS, final_state, recipe, rows, train

from longdraft.draft_models.checkpoint import load_draft
from longdraft.train import checkpoints as checkpoints_module
from longdraft.train import loop
from longdraft.train.checkpoints import Checkpoints
from longdraft.train.config import TargetSettings
from longdraft.train.engine import TorchEngine
from longdraft.train.long_draft import main
from longdraft.train.methods import longspec
from longdraft.train.objective import SummedLoss
from longdraft.train.positions import lag_of_step
from longdraft.train.target import load_target

__all__ = ["recipe"]  # a fixture


@pytest.mark.parametrize(("packing", "optimizer"), [("false", "adamw"), ("true", "adamw"), ("true", "muon")])
def test_a_resumed_run_ends_with_the_same_bits(recipe: Path, packing: str, optimizer: str) -> None:
    """Weights, moments, step counts and the generator; the log has every step once."""
    extra = (f"data.packing={packing}", f"optim.name={optimizer}", "schedule.accumulate=2")
    whole = train(recipe, "whole", *extra)
    train(recipe, "parts", *extra, "schedule.max_steps=3")
    (recipe.parent / "runs" / "parts" / "metrics.jsonl").open("a").write(
        '{"step": 4, "loss": 0, "accu'
    )  # a killed write
    parts = train(recipe, "parts", *extra)
    want, got = final_state(whole), final_state(parts)
    assert want.keys() == got.keys()
    moments = {key.rsplit(".", 1)[-1] for key in want if key.startswith("optimizer.")}
    assert moments == {"exp_avg", "exp_avg_sq", "step"} | ({"momentum_buffer"} if optimizer == "muon" else set())
    assert all(torch.equal(want[key], got[key]) for key in want)
    assert [row["step"] for row in rows(parts)] == list(range(1, 7))
    assert [row["loss"] for row in rows(parts)] == [row["loss"] for row in rows(whole)]
    lags = [lag_of_step(step, 1, 3, seed=3) for step in range(1, 7)]
    assert [row["lag"] for row in rows(parts)] == [row["lag"] for row in rows(whole)] == lags
    assert len(set(lags)) > 1


def test_runs_with_views_resume_bit_for_bit_and_without_noise_have_lag_1(recipe: Path) -> None:
    """Every ablation of the curriculum is a setting: views, random anchors, Flash Noisy lags off."""
    views = ("views.share=0.5", "views.budgets=[12,24]", "views.sinks=2", "views.window=4", "views.block=3")
    extra = (*views, "positions.random_anchors=true", "lag.max=1")
    whole = train(recipe, "whole", *extra)
    train(recipe, "parts", *extra, "schedule.max_steps=3")
    parts = train(recipe, "parts", *extra)
    want, got = final_state(whole), final_state(parts)
    assert all(torch.equal(want[key], got[key]) for key in want)
    assert [row["lag"] for row in rows(whole)] == [1] * 6
    config = json.loads((whole / "checkpoints/latest/draft/config.json").read_text())
    assert config["longdraft"]["training"]["views"] == [12, 24]
    plain = train(recipe, "plain", "positions.random_anchors=true", "lag.max=1")
    assert [row["loss"] for row in rows(plain)] != [row["loss"] for row in rows(whole)]


def test_a_finished_run_is_evaluated_again_under_another_view(recipe: Path) -> None:
    """The same command with other evaluation settings: no step is trained, the log says what the draft read."""
    extra = ("evaluation.prompts=2", "evaluation.new_tokens=8", "views.sinks=4", "views.window=8", "views.block=4")
    run = train(recipe, "r", *extra)
    for view in ("recent", "mass"):
        train(recipe, "r", *extra, "evaluation.context=16", f"evaluation.view={view}")
    seen = [json.loads(line) for line in (run / "evaluations.jsonl").read_text().splitlines()]
    assert [(row["step"], row.get("context"), row.get("view")) for row in seen] == [
        (6, None, None),
        (6, 16, "recent"),
        (6, 16, "mass"),
    ]


def test_a_16_bit_draft_keeps_float32_masters_and_resumes_too(recipe: Path) -> None:
    """A learning rate below bfloat16's step moves the masters; the exported draft is 16 bit."""
    half = ("engine.dtype=bfloat16", "target.dtype=bfloat16", "optim.lr=1e-6", "optim.weight_decay=0")
    whole = train(recipe, "whole", *half)
    train(recipe, "parts", *half, "schedule.max_steps=3")
    parts = train(recipe, "parts", *half)
    want, got = final_state(whole), final_state(parts)
    assert all(torch.equal(want[key], got[key]) for key in want)
    draft = load_file(whole / "checkpoints/latest/draft/model.safetensors")
    assert {weight.dtype for weight in draft.values()} == {torch.bfloat16}
    masters = {name: want[f"master.{name}"] for name in draft}
    assert all(torch.equal(masters[name].bfloat16(), weight) for name, weight in draft.items())
    assert any(not torch.equal(masters[name], weight.float()) for name, weight in draft.items())


def test_training_lowers_the_loss_and_the_draft_folder_loads(recipe: Path) -> None:
    run = train(recipe, "r", "schedule.max_steps=40", "positions.offset_share=0", "lag.max=1")
    losses = [row["loss"] for row in rows(run)]
    assert sum(losses[-5:]) < 0.6 * sum(losses[:5])
    target = load_target(TargetSettings(path="tiny-random:llama"), torch.device("cpu"))
    draft = load_draft(run / "checkpoints" / "latest" / "draft", target.spec)
    assert all(torch.equal(p, final_state(run)[f"master.{name}"]) for name, p in draft.named_parameters())
    facts = json.loads((run / "checkpoints/latest/draft/config.json").read_text())["longdraft"]["training"]
    assert facts == {
        "steps": 40, "tokens": rows(run)[-1]["tokens"], "max_length": 200, "max_position": 200, "anchors": 4, "max_lag": 1,
        "views": [],
    }  # fmt: skip


def test_the_loss_is_normalised_over_the_whole_step(recipe: Path) -> None:
    """Documents of 9 to 200 tokens: a mean of means would weigh the short ones up and give another gradient."""
    figures = []
    # With eps = 1 AdamW's first steps are proportional to the gradient, so a wrong gradient shows and noise does not grow.
    plain = ("optim.eps=1.0", "optim.lr=1.0", "optim.clip=1000.0", "schedule.max_steps=2", "run.seed=4")
    for micro, accumulate in ((4, 1), (2, 2), (1, 4)):
        run = train(recipe, f"m{micro}", *plain, f"schedule.micro_batch={micro}", f"schedule.accumulate={accumulate}")
        figures.append((rows(run), final_state(run)))
    for other, state in figures[1:]:
        for a, b in zip(figures[0][0], other, strict=True):
            assert b["supervised"] == a["supervised"]
            assert b["loss"] == pytest.approx(a["loss"], rel=1e-5)
            assert b["grad_norm"] == pytest.approx(a["grad_norm"], rel=1e-4)
        for name, weight in figures[0][1].items():
            if name.startswith("master."):
                torch.testing.assert_close(weight, state[name], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("extra", [(), ("draft.head_tokens=20",)], ids=["whole-head", "ranked-head"])
@pytest.mark.parametrize("objective", ["kl", "greedy"])
def test_what_the_target_says_on_all_rows_trains_too(recipe: Path, objective: str, extra: tuple[str, ...]) -> None:
    settings = (f"objective.name={objective}", "objective.rows=all", "schedule.max_steps=30", *extra)
    losses = [row["loss"] for row in rows(train(recipe, "r", *settings))]
    assert sum(losses[-5:]) < 0.9 * sum(losses[:5])


def test_a_loss_that_is_not_finite_stops_with_step_and_samples(
    recipe: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    honest, calls = longspec.longspec_loss, []

    def poisoned(draft: Any, target: Any, batch: Any, lag: int, settings: Any) -> SummedLoss:
        out = honest(draft, target, batch, lag, settings)
        calls.append(batch.names)
        return SummedLoss(out.loss * float("nan"), out.correct) if len(calls) == 4 else out

    monkeypatch.setattr(longspec, "longspec_loss", poisoned)
    assert main(["--config", str(recipe), "schedule.save_every=2"]) == 1
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("error: step 4: loss is nan")
    assert all(name in error for name in calls[3])
    assert not any(name in error for name in set(calls[2]) - set(calls[3]))
    assert "step-00000002" in error
    kept = Checkpoints(recipe.parent / "runs" / "r", 2).all()
    assert [path.name for path in kept] == ["step-00000002"]
    assert all(
        bool(torch.isfinite(w).all()) for k, w in final_state(recipe.parent / "runs" / "r").items() if "master" in k
    )


def test_an_infinite_gradient_leaves_the_weights_alone(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    honest = longspec.longspec_loss

    def exploding(*args: Any) -> SummedLoss:
        out = honest(*args)
        return SummedLoss(out.loss.detach() + 0 * out.loss / 0.0, out.correct)

    kept: dict[str, torch.Tensor] = {}
    monkeypatch.setattr(longspec, "longspec_loss", exploding)
    monkeypatch.setattr(loop.Run, "_diagnosis", lambda self, *_: kept.update(self.engine.weights()) or "")
    assert main(["--config", str(recipe)]) == 1
    assert kept
    assert all(bool(torch.isfinite(weight).all()) for weight in kept.values())


def test_rotation_keeps_the_newest_and_latest_points_at_the_last(recipe: Path) -> None:
    run = train(recipe, "r", "schedule.save_every=1", "schedule.keep=2")
    assert [path.name for path in Checkpoints(run, 2).all()] == ["step-00000005", "step-00000006"]
    assert (run / "checkpoints" / "latest").resolve().name == "step-00000006"


def test_a_save_that_dies_leaves_the_one_before(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process ends while files are written: the half checkpoint is invisible, and the next save clears it away."""
    whole = train(recipe, "whole")
    run = train(recipe, "r", "schedule.max_steps=3")
    with monkeypatch.context() as patch:
        patch.setattr(checkpoints_module, "_flush", lambda path: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            main(["--config", str(recipe), "run.name=r"])
    folder = run / "checkpoints"
    assert [p.name for p in folder.iterdir() if p.name.startswith(".step-00000006")]
    assert Checkpoints(run, 2).latest() == folder / "step-00000003"
    train(recipe, "r")
    assert not [p for p in folder.iterdir() if p.name.startswith(".")]
    assert all(torch.equal(weight, final_state(run)[name]) for name, weight in final_state(whole).items())


def test_a_time_limit_saves_and_the_rest_can_follow(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = train(recipe, "r", "schedule.max_steps=100000", "schedule.max_seconds=0.5")
    steps = json.loads((run / "checkpoints/latest/progress.json").read_text())["step"]
    assert 0 < steps < 100000
    assert f"time is up: saving and stopping at step {steps}" in capsys.readouterr().out
    train(recipe, "r", f"schedule.max_steps={steps + 1}")
    assert rows(run)[-1]["step"] == steps + 1


def test_a_resumed_run_may_not_change_what_decides_its_weights(
    recipe: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(recipe, "r", "schedule.max_steps=1")
    assert main(["--config", str(recipe), "lag.max=2"]) == 2
    assert (
        capsys.readouterr()
        .err.strip()
        .endswith("error: lag.max=2, but run 'r' was started with 3: give it another run.name, or the former value")
    )
    assert main(["--config", str(recipe), "run.resume=never"]) == 2
    assert main(["--config", str(recipe), "schedule.save_every=1", "schedule.max_steps=2"]) == 0


def test_two_processes_never_share_a_run_folder(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = train(recipe, "r", "schedule.max_steps=1")
    with checkpoints_module.lock_folder(run):
        assert main(["--config", str(recipe)]) == 2
    assert "is in use by another process" in capsys.readouterr().err
    train(recipe, "r", "schedule.max_steps=2")


def test_damaged_resume_state_is_a_users_error(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = train(recipe, "r", "schedule.max_steps=1")
    state = run / "checkpoints/latest/state.safetensors"
    state.write_bytes(state.read_bytes()[:-100])
    assert main(["--config", str(recipe)]) == 2
    assert "state.safetensors is damaged" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"step": "1"}, "progress.json is damaged"),
        ({"step": -1}, "counts that no run has"),
        ({"cursors": []}, "counts that no run has"),
        ({"cursors": [10**30]}, "progress.json is damaged"),
        ({"trajectory": []}, "progress.json is damaged"),
    ],
)
def test_damaged_progress_is_a_users_error(
    recipe: Path, capsys: pytest.CaptureFixture[str], change: dict[str, Any], message: str
) -> None:
    file = train(recipe, "r", "schedule.max_steps=1") / "checkpoints/latest/progress.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    assert main(["--config", str(recipe)]) == 2
    error = capsys.readouterr().err.strip()
    assert message in error and "resume from the one before" in error and "\n" not in error


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("rng.torch", None, "rng.torch is missing"),
        ("rng.torch", torch.zeros(3), "rng.torch is missing or of another size"),
        ("master.mlp.down_proj.weight", torch.full((64, 96), float("nan")), "mlp.down_proj.weight is not finite"),
        ("optimizer.mlp.down_proj.weight.exp_avg_sq", None, "down_proj.weight.exp_avg_sq missing"),
        ("optimizer.mlp.down_proj.weight.exp_avg", torch.zeros(1), "down_proj.weight.exp_avg (1,)"),
    ],
)
def test_a_resume_state_that_would_end_otherwise_is_refused(
    recipe: Path, capsys: pytest.CaptureFixture[str], name: str, value: torch.Tensor | None, message: str
) -> None:
    file = train(recipe, "r", "schedule.max_steps=1") / "checkpoints/latest/state.safetensors"
    state = load_file(file)
    del state[name]
    save_file(state | ({} if value is None else {name: value}), file)
    assert main(["--config", str(recipe)]) == 2
    assert message in capsys.readouterr().err


def test_a_record_that_fails_late_leaves_what_was_trained(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Ids are held to the vocabulary when a record is rendered; by then steps may have been trained."""
    bad = json.dumps({"input_ids": [5, 300] * 9, "supervised_from": 1}) + "\n"
    with (recipe.parent / "data.jsonl").open("a") as file:
        file.write(bad)
    words = ["--config", str(recipe), "data.shuffle=false"]
    assert main(words) == 2
    error = capsys.readouterr().err.strip()
    assert "data.jsonl:6: input_ids holds 300" in error and "\n" not in error
    run = recipe.parent / "runs" / "r"
    assert Checkpoints.progress(run / "checkpoints/latest").step == 2
    (recipe.parent / "data.jsonl").write_text(
        "".join(json.dumps({"text": text}) + "\n" for text in [*TEXTS, "repaired"])
    )
    assert main(words) == 0, "the same command goes on once the record is repaired"


def test_a_run_records_its_command_versions_settings_and_evaluations(
    recipe: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = train(
        recipe, "r", "evaluation.prompts=3", "evaluation.new_tokens=12", "schedule.eval_every=3", "optim.lr=0.002"
    )
    record = yaml.safe_load((run / "run.yaml").read_text())
    assert "optim.lr=0.002" in record["command"]
    assert record["settings"]["optim"]["lr"] == 0.002
    assert {"torch", "transformers"} <= record["versions"].keys()
    evaluations = [json.loads(line) for line in (run / "evaluations.jsonl").read_text().splitlines()]
    assert [row["step"] for row in evaluations] == [3, 6]
    total = evaluations[-1]["buckets"]["all"]
    assert total["prompts"] == 3
    assert total["tau"] == pytest.approx(total["tau_without_bonus"] + 1)
    assert len(total["reached_depth"]) == 3
    assert "eval step 6" in capsys.readouterr().out
    again = yaml.safe_dump(record["settings"])
    (recipe.parent / "again.yaml").write_text(again)
    assert main(["--config", str(recipe.parent / "again.yaml"), "--plan"]) == 0


def test_weights_that_are_not_finite_are_never_saved(
    recipe: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An update can overflow behind a finite loss and gradient."""
    honest, calls = TorchEngine.step, []

    def overflowing(engine: TorchEngine, lr: float) -> float:
        norm = honest(engine, lr)
        calls.append(norm)
        if len(calls) == 4:
            engine.live["mlp.down_proj.weight"].data[0, 0] = float("inf")
        return norm

    monkeypatch.setattr(TorchEngine, "step", overflowing)
    assert main(["--config", str(recipe), "schedule.save_every=2", "schedule.max_steps=4"]) == 1
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("error: step 4: weights mlp.down_proj.weight are not finite") and "step-00000002" in error
    assert [path.name for path in Checkpoints(recipe.parent / "runs" / "r", 2).all()] == ["step-00000002"]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("run.output_dir=/proc/nowhere", "cannot be written (No such file or directory)"),
        ("run.output_dir=recipe.yaml", "cannot be written (Not a directory)"),
        ("data.train=[]", "data.train=[]"),
        ("optim.lr=.inf", "optim.lr=inf"),
        (f"run.seed={1 << 63}", "run.seed="),
        ('run.name="a\\0b"', "cannot be written (embedded null byte)"),
        ("optim.betas=[1.0,0.9]", "optim.betas.0=1.0"),
        ("optim.weight_decay=.inf", "optim.weight_decay=inf"),
        ("target.attn=foo", "target.attn='foo' is not to be had here"),
        ("target.path=tiny-random:llama:0", "is not a tiny target"),
    ],
)
def test_what_cannot_be_run_is_one_line(
    recipe: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], override: str, message: str
) -> None:
    monkeypatch.chdir(recipe.parent)
    assert main(["--config", str(recipe), override]) == 2
    error = capsys.readouterr().err.strip()
    assert error.startswith("error: ") and message in error and "\n" not in error
