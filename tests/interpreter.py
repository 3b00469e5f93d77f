"""Triton kernels on a CPU: the cases of ``tests/interpreted`` in a process of their own, since Triton decides at import."""

import os
import subprocess
import sys
from pathlib import Path

CASES = Path(__file__).parent / "interpreted"


def run_interpreted(name: str) -> None:
    """Run one file of cases in Triton's interpreter; its failures are this test's."""
    command = [sys.executable, "-m", "pytest", str(CASES / name), "-q", "-x", "-p", "no:cacheprovider"]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=CASES.parent.parent)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " passed" in done.stdout and " skipped" not in done.stdout, done.stdout[-2000:]
