"""Training processes that are killed, stopped and split over ranks: the weights come out the same."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from training_process import ENTRY, SHORT, TORCHRUN, assert_same, finish, last_state, start, wait_for_line


def test_two_ranks_killed_in_the_middle_resume_to_the_same_weights(
    tmp_path: Path, cleanup: list[subprocess.Popen[bytes]]
) -> None:
    def launch(name: str, log: str) -> tuple[subprocess.Popen[bytes], Path]:
        command = [*TORCHRUN, *ENTRY, *SHORT, f"run.output_dir={tmp_path}", f"run.name={name}"]
        process = start(command, tmp_path / log)
        cleanup.append(process)
        return process, tmp_path / log

    finish(*launch("whole", "whole.log"))
    process, log = launch("killed", "killed.log")
    wait_for_line(process, log, "step 27/60")
    os.killpg(process.pid, signal.SIGKILL)  # torchrun's ranks have groups of their own; they must not train on
    assert process.wait() == -signal.SIGKILL
    process, log = launch("killed", "resumed.log")
    finish(process, log)
    assert "resumes from step-00000020" in log.read_text()
    assert_same(tmp_path / "whole", tmp_path / "killed")
    steps = [json.loads(line)["step"] for line in (tmp_path / "killed" / "metrics.jsonl").read_text().splitlines()]
    assert steps == list(range(1, 61))


def test_sigterm_saves_exits_0_and_the_rest_follows(tmp_path: Path, cleanup: list[subprocess.Popen[bytes]]) -> None:
    def launch(name: str, log: str) -> tuple[subprocess.Popen[bytes], Path]:
        command = [sys.executable, *ENTRY, *SHORT, f"run.output_dir={tmp_path}", f"run.name={name}"]
        process = start(command, tmp_path / log)
        cleanup.append(process)
        return process, tmp_path / log

    finish(*launch("whole", "whole.log"))
    process, log = launch("stopped", "stopped.log")
    wait_for_line(process, log, "step 7/60")
    process.send_signal(signal.SIGTERM)
    finish(process, log)
    assert "signal received: saving and stopping at step" in log.read_text()
    stopped = json.loads((tmp_path / "stopped/checkpoints/latest/progress.json").read_text())["step"]
    assert 7 <= stopped < 60
    finish(*launch("stopped", "resumed.log"))
    assert_same(tmp_path / "whole", tmp_path / "stopped")


def test_two_ranks_and_one_give_the_same_loss_and_gradient(
    tmp_path: Path, cleanup: list[subprocess.Popen[bytes]]
) -> None:
    """Unpacked documents of unequal length; with eps = 1 AdamW does not magnify rounding."""
    shared = ["data.packing=false", "optim.eps=1.0", "optim.lr=1.0", "optim.clip=1000.0", "schedule.max_steps=3"]
    shared += ["schedule.log_every=1", "evaluation.prompts=2", "evaluation.new_tokens=8", f"run.output_dir={tmp_path}"]
    for name, launcher, accumulate in (("one", [sys.executable], 4), ("two", TORCHRUN, 2)):
        command = [*launcher, *ENTRY, *shared, f"run.name={name}", f"schedule.accumulate={accumulate}"]
        process = start(command, tmp_path / f"{name}.log")
        cleanup.append(process)
        finish(process, tmp_path / f"{name}.log")
    one, two = (
        [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        for name in ("one", "two")
    )
    for a, b in zip(one, two, strict=True):
        assert b["supervised"] == a["supervised"]
        assert b["loss"] == pytest.approx(a["loss"], rel=1e-5)
        assert b["grad_norm"] == pytest.approx(a["grad_norm"], rel=1e-4)
    a, b = last_state(tmp_path / "one"), last_state(tmp_path / "two")
    for name in (key for key in a if key.startswith("master.")):
        torch.testing.assert_close(a[name], b[name], rtol=1e-4, atol=1e-5)
    facts = [json.loads((tmp_path / n / "checkpoints/latest/draft/config.json").read_text()) for n in ("one", "two")]
    assert facts[0]["longdraft"]["training"] == facts[1]["longdraft"]["training"]
    evaluations = [json.loads((tmp_path / name / "evaluations.jsonl").read_text()) for name in ("one", "two")]
    assert evaluations[0]["buckets"]["all"]["prompts"] == evaluations[1]["buckets"]["all"]["prompts"] == 2
