"""What a training sends to Weights & Biases, read back from its offline file, and what it does when W&B fails."""

import hashlib
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from wandb_file import Stored, read

from longdraft.errors import UserError
from longdraft.train.long_draft import main
from longdraft.train.tracking import read_rows
from longdraft.train.wandb_log import WandbRun, best_taus, evaluation_metrics, run_id, step_metrics

SECRET = "hf_thisisnotforothers"


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    """A run of seconds with a secret in its settings."""
    lines = [{"text": f"line {i}: " + "some words " * (i + 2)} for i in range(5)]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    config = {
        "run": {"name": "r", "output_dir": str(tmp_path / "runs")},
        "target": {"path": "tiny-random:llama", "revision": SECRET},
        "draft": {"window": 16},
        "data": {"train": "data.jsonl", "eval": "data.jsonl", "max_length": 64},
        "positions": {"max_position": 500},
        "lag": {"max": 2},
        "schedule": {"max_steps": 4, "save_every": 2, "eval_every": 2, "log_every": 1},
        "evaluation": {"prompts": 2, "new_tokens": 12},
        "tracking": {"wandb": "auto", "project": "p"},
    }
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


def train(recipe: Path, *words: str) -> Path:
    assert main(["--config", str(recipe), *words]) == 0
    return recipe.parent / "runs" / "r"


def stored(run: Path) -> list[Stored]:
    parts = [read(path) for path in (run / "wandb").glob("offline-run-*/*.wandb")]
    return sorted(parts, key=lambda part: part.rows[0]["_step"])


def test_a_resumed_run_continues_the_run_there_with_all_its_figures_and_no_secret(
    recipe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    train(recipe, "schedule.max_steps=2")
    run = train(recipe)
    first, second = stored(run)
    assert first.run_id == second.run_id == (run / "wandb_run_id").read_text().strip()

    metrics = read_rows(run / "metrics.jsonl")
    sent = {row["_step"]: row for part in (first, second) for row in part.rows}
    assert [row["_step"] for row in second.rows] == [3, 4]
    for row in metrics:
        there = sent[row["step"]]
        assert there["step"] == row["step"]
        assert there["train/loss"] == row["loss"]
        assert there["train/tokens_per_s"] == row["tokens_per_s"]
        # A step of a smaller lag has no second depth, here as there.
        assert [there.get(f"train/accuracy_by_depth/{d}") for d in (1, 2)] == row["accuracy_by_depth"]
    for row in read_rows(run / "evaluations.jsonl"):
        figures = row["buckets"]["<2K"]
        assert sent[row["step"]]["eval/under_2K/looping_share"] == figures["looping_share"]
        assert sent[row["step"]]["eval/under_2K/tau_looping_too"] == figures["tau_looping_too"]
        assert sent[row["step"]].get("eval/under_2K/tau") == figures["tau"]
        assert sent[row["step"]].get("eval/under_2K/tau_without_bonus") == figures["tau_without_bonus"]
    assert first.step_metrics["train/*"] == first.step_metrics["eval/*"] == "step"

    config = second.config
    data = (recipe.parent / "data.jsonl").read_bytes()
    entry = {"source": str(recipe.parent / "data.jsonl"), "documents": 5, "bytes": len(data)}
    entry["sha256"] = hashlib.sha256(data).hexdigest()
    assert config["facts"]["data"] == {"train": [entry], "eval": [entry]}
    assert config["optim"]["lr"] == 5e-4
    provenance = yaml.safe_load((run / "run.yaml").read_text())
    assert config["code_commit"] == provenance["commit"]
    assert config["versions"] == provenance["versions"]
    assert provenance["facts"]["data"] == config["facts"]["data"]
    assert config["target"]["revision"] == "***"
    assert [p for p in run.glob("wandb/**/*") if p.is_file() and SECRET.encode() in p.read_bytes()] == []


def test_a_new_run_in_the_folder_is_a_new_run_there(tmp_path: Path) -> None:
    first = run_id(tmp_path, resumed=False)
    assert run_id(tmp_path, resumed=True) == first
    assert run_id(tmp_path, resumed=False) != first


def evaluation(step: int, tau: float | None) -> dict[str, Any]:
    without = None if tau is None else tau - 1
    figures = {"prompts": 2, "tau": tau, "tau_without_bonus": without, "reached_depth": [0.5, 0.25]}
    return {"step": step, "draft_steps": 2, "buckets": {">32K": figures, "all": figures}}


def test_names_there_hold_no_signs_and_what_is_none_is_not_sent() -> None:
    assert evaluation_metrics(evaluation(3, 1.5)) == {
        f"eval/{name}/{key}": value
        for name in ("over_32K", "all")
        for key, value in {
            "prompts": 2, "tau": 1.5, "tau_without_bonus": 0.5, "reached_depth/1": 0.5, "reached_depth/2": 0.25
        }.items()
    }  # fmt: skip
    assert "eval/all/tau" not in evaluation_metrics(evaluation(3, None))
    assert step_metrics({"step": 1, "loss": 2.0, "accuracy_by_depth": [0.5, None]}) == {
        "train/loss": 2.0, "train/accuracy_by_depth/1": 0.5
    }  # fmt: skip


def test_the_summary_names_the_best_accept_length_and_its_step() -> None:
    best = best_taus([evaluation(1, 1.5), evaluation(2, 1.75), evaluation(3, None), evaluation(4, 1.6)])
    assert best == {
        "best/over_32K/tau": 1.75, "best/over_32K/step": 2, "best/all/tau": 1.75, "best/all/step": 2
    }  # fmt: skip


class FakeWandb:
    """Records calls; ``fails`` names what raises."""

    def __init__(self, *fails: str) -> None:
        self.fails, self.inits, self.calls = fails, [], []
        self.summary = SimpleNamespace(update=lambda values: self.note("summary", values))

    def note(self, name: str, *values: Any) -> None:
        self.calls.append((name, *values))
        if name in self.fails:
            raise ConnectionError(f"{name} failed")

    def init(self, **words: Any) -> "FakeWandb":
        self.inits.append(words)
        self.note(words["mode"])
        return self

    def teardown(self) -> None:
        self.note("teardown")

    def define_metric(self, name: str, step_metric: str) -> None:
        self.note("define", name, step_metric)

    def log(self, metrics: dict[str, Any], step: int) -> None:
        self.note("log", metrics, step)

    def finish(self) -> None:
        self.note("finish")


def start(
    fake: FakeWandb,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    asked: str = "auto",
    key: str = "k",
    resumed: bool = False,
) -> tuple[WandbRun, list[str]]:
    said: list[str] = []
    monkeypatch.setitem(sys.modules, "wandb", fake)
    monkeypatch.setenv("WANDB_API_KEY", key)
    return WandbRun(folder, "p", "n", asked, {"a": 1}, resumed, said.append), said


def use(run: WandbRun) -> None:
    run.log(7, {"train/loss": 2.0})
    run.summary({"best/all/tau": 2.0})
    run.finish()


def test_with_a_key_the_run_is_online_and_resumable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeWandb()
    run, said = start(fake, tmp_path, monkeypatch)
    use(run)
    use_again, _ = start(fake, tmp_path, monkeypatch, resumed=True)
    use(use_again)
    first, again = fake.inits
    assert (first["mode"], first["resume"], first["config"]) == ("online", "allow", {"a": 1})
    assert first["id"] == again["id"]
    assert first["settings"]["console"] == "off"
    assert ("log", {"train/loss": 2.0, "step": 7}, 7) in fake.calls
    assert said == []


@pytest.mark.parametrize(
    ("asked", "key", "mode"), [("auto", "", "offline"), ("offline", "k", "offline"), ("online", "", "online")]
)
def test_who_is_online(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: str, key: str, mode: str) -> None:
    fake = FakeWandb()
    start(fake, tmp_path, monkeypatch, asked, key)
    assert [words["mode"] for words in fake.inits] == [mode]


def test_a_server_that_does_not_answer_means_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeWandb("online")
    run, said = start(fake, tmp_path, monkeypatch)
    use(run)
    assert [call[0] for call in fake.calls[:3]] == ["online", "teardown", "offline"]
    assert fake.inits[0]["id"] == fake.inits[1]["id"]
    assert "resume" not in fake.inits[1]
    assert len(said) == 1 and "online failed" in said[0] and "goes on offline" in said[0]
    assert fake.calls[-1] == ("finish",)


@pytest.mark.parametrize("failing", ["offline", "define", "log", "summary", "finish"])
def test_an_error_of_the_library_is_said_once_and_ends_its_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    fake = FakeWandb(failing)
    run, said = start(fake, tmp_path, monkeypatch, "offline")
    use(run)
    use(run)
    assert len(said) == 1 and f"{failing} failed" in said[0] and "goes on without it" in said[0]
    assert fake.calls[-1][0] == failing


def test_a_missing_library_is_the_users_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(UserError, match="pip install wandb"):
        WandbRun(tmp_path, "p", "n", "auto", {}, False, print)
