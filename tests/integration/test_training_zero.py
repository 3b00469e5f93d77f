"""DeepSpeed's ZeRO stages beside the torch engine, on gloo: same weights, exact resumes, any number of ranks."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from training_process import ENTRY, SHORT, TORCHRUN, assert_same, finish, last_draft, last_state, start, wait_for_line

STAGES = ("zero1", "zero2", "zero3", "zero2_offload", "zero3_offload")
PROGRAM = "tests/integration/zero_program.py"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of many short runs: one on a single rank, then two ranks, then a single rank again."""
    folder = tmp_path_factory.mktemp("zero")
    for launcher, part in (([sys.executable], "one"), (TORCHRUN, "two"), ([sys.executable], "last")):
        log = folder / f"{part}.log"
        finish(start([*launcher, PROGRAM, str(folder), part], log), log)
    return folder


def assert_close(one: Path, other: Path) -> None:
    """Masters, moments and step counts of two engines: equal up to the order in which floats were added."""
    want, got = last_state(one), last_state(other)
    assert want.keys() == got.keys()
    for name in want:
        assert want[name].dtype == got[name].dtype, name
        torch.testing.assert_close(want[name], got[name], rtol=1e-4, atol=2e-6, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("stage", STAGES)
def test_a_stage_trains_the_weights_that_the_torch_engine_trains(runs: Path, stage: str) -> None:
    assert_close(runs / "torch", runs / stage)
    rows = [
        [json.loads(line) for line in (runs / name / "metrics.jsonl").read_text().splitlines()]
        for name in ("torch", stage)
    ]
    for a, b in zip(*rows, strict=True):
        assert b["grad_norm"] == pytest.approx(a["grad_norm"], rel=1e-5)
        assert b["loss"] == pytest.approx(a["loss"], rel=1e-5)


@pytest.mark.parametrize("stage", STAGES)
def test_a_resumed_stage_ends_with_the_same_bits(runs: Path, stage: str) -> None:
    assert_same(runs / stage, runs / f"{stage}-resumed")


def test_one_engine_resumes_what_another_saved(runs: Path) -> None:
    assert_close(runs / "torch", runs / "torch-to-zero3")
    assert_close(runs / "torch", runs / "zero2-to-torch")


@pytest.mark.parametrize("stage", ["zero1", "zero2", "zero3"])
@pytest.mark.parametrize("change", ["one-to-two", "two-to-one"])
def test_another_number_of_ranks_goes_on_as_the_torch_engine_does(runs: Path, stage: str, change: str) -> None:
    assert_close(runs / f"{change}-torch", runs / f"{change}-{stage}")
    saved = load_file(runs / f"{change}-{stage}" / "checkpoints" / "step-00000003" / "state.safetensors")
    assert not torch.equal(
        saved["master.mlp.up_proj.weight"], last_state(runs / f"{change}-{stage}")["master.mlp.up_proj.weight"]
    )


@pytest.mark.parametrize("stage", ["zero1", "zero2", "zero3"])
def test_a_16_bit_draft_has_float32_masters_under_every_stage(runs: Path, stage: str) -> None:
    assert_close(runs / "torch-half", runs / f"{stage}-half")
    state, draft = last_state(runs / f"{stage}-half"), last_draft(runs / f"{stage}-half")
    for name, weight in draft.items():
        assert weight.dtype == torch.bfloat16
        assert torch.equal(state[f"master.{name}"].to(torch.bfloat16), weight)
        assert state[f"master.{name}"].dtype == torch.float32


def test_zero3_trains_and_evaluates_an_eagle3_draft_as_the_torch_engine_does(runs: Path) -> None:
    assert_close(runs / "eagle3-torch", runs / "eagle3-zero3")
    one, other = ((runs / f"eagle3-{engine}" / "evaluations.jsonl").read_text() for engine in ("torch", "zero3"))
    assert json.loads(one)["buckets"] == json.loads(other)["buckets"]


@pytest.mark.parametrize("source", ["memory", "disk"])
def test_a_sharded_target_teaches_what_the_whole_one_teaches(runs: Path, source: str) -> None:
    assert_close(runs / f"{source}-shard-false", runs / f"{source}-shard-true")
    one, other = ((runs / f"{source}-shard-{s}" / "evaluations.jsonl").read_text() for s in ("false", "true"))
    assert json.loads(one)["buckets"] == json.loads(other)["buckets"]


@pytest.mark.parametrize("stage", STAGES)
def test_a_gradient_that_is_not_finite_leaves_the_weights_alone(runs: Path, stage: str) -> None:
    found = json.loads((runs / "nan.json").read_text())[stage]
    assert found["norm"] in ("inf", "nan")
    assert found["weights_left_alone"]
    assert 0 < found["next_norm"] < float("inf")
    assert found["next_step_moves"]


def test_two_ranks_of_zero3_killed_in_the_middle_resume_to_the_same_weights(
    tmp_path: Path, cleanup: list[subprocess.Popen[bytes]]
) -> None:
    def launch(name: str, log: str) -> tuple[subprocess.Popen[bytes], Path]:
        engine = ["engine.name=deepspeed", "engine.config=recipes/deepspeed/zero3.yaml", "engine.device=cpu"]
        command = [*TORCHRUN, *ENTRY, *SHORT, *engine, f"run.output_dir={tmp_path}", f"run.name={name}"]
        process = start(command, tmp_path / log)
        cleanup.append(process)
        return process, tmp_path / log

    finish(*launch("whole", "whole.log"))
    process, log = launch("killed", "killed.log")
    wait_for_line(process, log, "step 27/60")
    os.killpg(process.pid, signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    process, log = launch("killed", "resumed.log")
    finish(process, log)
    assert "resumes from step-00000020" in log.read_text()
    assert_same(tmp_path / "whole", tmp_path / "killed")
