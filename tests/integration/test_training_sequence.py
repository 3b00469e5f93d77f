"""Two ranks that divide every sample train what one process trains, under both engines and over a sharded target; and go on alone."""

import json
import sys
from pathlib import Path

import pytest
import torch
from training_process import ENTRY, TORCHRUN, finish, last_state, start

STEPS = (
    "schedule.max_steps=4",
    "schedule.save_every=2",
    "schedule.log_every=1",
    "evaluation.prompts=0",
    "data.max_length=300",
)
ZERO3 = ("engine.name=deepspeed", "engine.config=recipes/deepspeed/zero3.yaml")


def trained(folder: Path, name: str, ranks: int, *more: str, run: str | None = None) -> Path:
    """The folder of a run."""
    log, launcher = folder / f"{name}.log", TORCHRUN if ranks == 2 else [sys.executable]
    where = f"run.name={run or name}", f"run.output_dir={folder}", "engine.device=cpu"
    finish(start([*launcher, *ENTRY, *STEPS, "engine.sequence=true", *where, *more], log), log)
    return folder / (run or name)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained(tmp_path_factory.mktemp("sequence"), "alone", 1)


def assert_trained_alike(one: Path, other: Path) -> None:
    want, got = last_state(one), last_state(other)
    assert want.keys() == got.keys()
    for name in want:
        torch.testing.assert_close(got[name], want[name], rtol=1e-4, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")
    rows = [[json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()] for run in (one, other)]
    for a, b in zip(*rows, strict=True):
        assert b["loss"] == pytest.approx(a["loss"], rel=1e-5) and b["grad_norm"] == pytest.approx(
            a["grad_norm"], rel=1e-5
        )
        assert (a["tokens"], a["step"]) == (b["tokens"], b["step"])


@pytest.mark.parametrize("more", [(), ZERO3, (*ZERO3, "target.shard=true")], ids=["torch", "zero3", "sharded-target"])
def test_two_ranks_on_one_sample_train_what_one_trains(alone: Path, more: tuple[str, ...], tmp_path: Path) -> None:
    assert_trained_alike(alone, trained(tmp_path, "two", 2, *more))


def test_one_rank_goes_on_where_two_have_stopped(alone: Path, tmp_path: Path) -> None:
    trained(tmp_path, "first", 2, "schedule.max_steps=2", run="both")
    assert_trained_alike(alone, trained(tmp_path, "second", 1, run="both"))
