"""A disk that is full when a checkpoint is due: the one before stays whole, one line says what happened, a resume loses nothing."""

import json
import os
import random
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from training_process import ENTRY, SHORT, TORCHRUN, assert_same, finish, start, wait_for_line

ROOM = "1000k"  # one checkpoint of the smoke recipe is about 630 KiB


def mounts() -> bool:
    """Whether a small file system of our own can be had here without being root."""
    probe = ["unshare", "-rm", "sh", "-c", "mount -t tmpfs -o size=64k tmpfs /mnt"]
    try:
        return subprocess.run(probe, capture_output=True, timeout=20).returncode == 0
    except (OSError, subprocess.SubprocessError):
        return False


pytestmark = pytest.mark.skipif(not mounts(), reason="no user namespace with a tmpfs here")


def on_a_small_disk(words: list[str], folder: Path) -> list[str]:
    """A command that trains on a small disk of its own and copies what it left there, since the disk goes with it."""
    disk, left = folder / "disk", folder / "left"
    for path in (disk, left):
        path.mkdir()
    command = shlex.join([*words, *ENTRY, *SHORT, "schedule.keep=1", f"run.output_dir={disk}", "run.name=full"])
    return [
        "unshare",
        "-rm",
        "sh",
        "-c",
        f"mount -t tmpfs -o size={ROOM} tmpfs {disk} || exit 99; {command} & echo $! > {folder}/pid; wait $!; "
        f"status=$?; cp -a {disk}/. {left}/; exit $status",
    ]


def assert_the_former_checkpoint_is_whole(run: Path) -> None:
    names = sorted(path.name for path in (run / "checkpoints").iterdir())
    assert names == ["latest", "step-00000020"]  # and no hidden half of the next
    assert os.readlink(run / "checkpoints" / "latest") == "step-00000020"
    assert json.loads((run / "checkpoints/latest/progress.json").read_text())["step"] == 20


def said(log: Path) -> str:
    lines = [line for line in log.read_text().splitlines() if "error: checkpoint" in line]
    assert len(lines) == 1, log.read_text()
    return lines[0]


def test_killed_at_a_random_step_on_a_full_disk_keeps_the_former_checkpoint(
    tmp_path: Path, cleanup: list[subprocess.Popen[bytes]]
) -> None:
    whole = start([sys.executable, *ENTRY, *SHORT, f"run.output_dir={tmp_path}", "run.name=whole"], tmp_path / "w.log")
    cleanup.append(whole)
    finish(whole, tmp_path / "w.log")

    step = random.randint(21, 36)
    log = tmp_path / "full.log"
    process = start(on_a_small_disk([sys.executable], tmp_path), log)
    cleanup.append(process)
    wait_for_line(process, log, f"step {step}/60")
    os.kill(int((tmp_path / "pid").read_text()), signal.SIGTERM)
    finish(process, log, status=1)

    message = said(log)
    assert "signal received: saving and stopping" in log.read_text()
    assert "No space left on device" in message
    assert "needs about 0.6 MiB" in message
    assert "last good checkpoint is" in message and "step-00000020: free some space" in message
    assert "Traceback" not in log.read_text()
    assert_the_former_checkpoint_is_whole(tmp_path / "left" / "full")

    again = [sys.executable, *ENTRY, *SHORT, f"run.output_dir={tmp_path / 'left'}", "run.name=full"]
    resumed = start(again, tmp_path / "resumed.log")
    cleanup.append(resumed)
    finish(resumed, tmp_path / "resumed.log")
    assert "resumes from step-00000020" in (tmp_path / "resumed.log").read_text()
    assert_same(tmp_path / "whole", tmp_path / "left" / "full")


def test_two_ranks_stop_together_when_rank_0_finds_the_disk_full(
    tmp_path: Path, cleanup: list[subprocess.Popen[bytes]]
) -> None:
    log = tmp_path / "full.log"
    process = start(on_a_small_disk(TORCHRUN, tmp_path), log)
    cleanup.append(process)
    began = time.monotonic()
    finish(process, log, status=1)
    assert time.monotonic() - began < 120  # no rank waits out the group's timeout
    assert "checkpoint step-00000040 cannot be written" in said(log)
    assert "SaveFailed" not in log.read_text()
    assert_the_former_checkpoint_is_whole(tmp_path / "left" / "full")
