"""Training processes that tests start, kill and compare: ``from training_process import ...``."""

import os
import subprocess
import sys
import time
from pathlib import Path

import torch
from safetensors.torch import load_file

ROOT = Path(__file__).parents[2]
ENTRY = ["train/long_draft.py", "--config", "recipes/smoke/longspec.yaml"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
SHORT = ("schedule.max_steps=60", "schedule.save_every=20", "schedule.log_every=1", "evaluation.prompts=0")


def start(command: list[str], log: Path) -> subprocess.Popen[bytes]:
    """The command in a process group of its own, from the repository's root as a user types it."""
    path = os.pathsep.join([str(ROOT / "tests"), *filter(None, [os.environ.get("PYTHONPATH")])])
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "PYTHONPATH": path}
    with log.open("wb") as out:
        return subprocess.Popen(
            command, cwd=ROOT, stdout=out, stderr=subprocess.STDOUT, env=env, start_new_session=True
        )


def wait_for_line(process: subprocess.Popen[bytes], log: Path, text: str, seconds: float = 120) -> None:
    end = time.monotonic() + seconds
    while text not in log.read_text():
        assert process.poll() is None, log.read_text()
        assert time.monotonic() < end, log.read_text()
        time.sleep(0.02)


def finish(process: subprocess.Popen[bytes], log: Path, status: int = 0) -> None:
    assert process.wait(timeout=180) == status, log.read_text()


def last_state(run: Path) -> dict[str, torch.Tensor]:
    return load_file(run / "checkpoints" / "latest" / "state.safetensors")


def last_draft(run: Path) -> dict[str, torch.Tensor]:
    return load_file(run / "checkpoints" / "latest" / "draft" / "model.safetensors")


def assert_same(one: Path, other: Path) -> None:
    """All weights, moments and step counts, and the exported drafts, bit for bit."""
    want, got = last_state(one), last_state(other)
    assert want.keys() == got.keys()
    assert [name for name in want if not torch.equal(want[name], got[name])] == []
    a, b = last_draft(one), last_draft(other)
    assert a.keys() == b.keys()
    assert [name for name in a if not torch.equal(a[name], b[name])] == []
