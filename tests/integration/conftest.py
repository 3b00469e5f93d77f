"""Real SGLang servers on the CPU, one of a kind a session: plain and with LONGDRAFT, over tiny random targets.

Starting one takes about 30 seconds of processor time, nearly all of it imports: what tests can share is made here once.
"""

import contextlib
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from server_process import SPECULATIVE, STRICT, ServerProcess
from tiny import tiny_model
from tiny_draft import train_tiny_draft, train_tiny_eagle3
from tiny_lm import shaken_lm


@pytest.fixture(scope="session")
def tiny_target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model("llama", tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="session")
def tiny_draft(tiny_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train_tiny_draft(tiny_target, tmp_path_factory.mktemp("draft") / "draft", steps=45)


@pytest.fixture(scope="session")
def plain(tiny_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """SGLang without speculation."""
    with ServerProcess(tiny_target, [], tmp_path_factory.mktemp("plain") / "log") as server:
        yield server


@pytest.fixture(scope="session")
def drafted(tiny_target: Path, tiny_draft: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """SGLang with LONGDRAFT, a LongSpec draft and the overlap schedule; every step checks that no cache slot is lost."""
    arguments = [*SPECULATIVE, "--speculative-draft-model-path", str(tiny_draft)]
    log = tmp_path_factory.mktemp("drafted") / "log"
    with ServerProcess(tiny_target, arguments, log, STRICT, overlap=True) as server:
        yield server


@pytest.fixture(scope="session")
def deep_target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Five layers: EAGLE-3 drafts read three of them."""
    return tiny_model("llama", tmp_path_factory.mktemp("deep") / "target", num_hidden_layers=5)


@pytest.fixture(scope="session")
def deep_longspec(deep_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train_tiny_draft(deep_target, tmp_path_factory.mktemp("deep-longspec") / "draft")


@pytest.fixture(scope="session")
def deep_eagle3(deep_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train_tiny_eagle3(deep_target, tmp_path_factory.mktemp("deep-eagle3") / "draft")


@pytest.fixture(scope="session")
def deep_lm(deep_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A language model that is nearly the target."""
    return shaken_lm(deep_target, tmp_path_factory.mktemp("deep-lm") / "draft")


@pytest.fixture(scope="session")
def deep_plain(deep_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """SGLang without speculation over five layers."""
    with ServerProcess(deep_target, [], tmp_path_factory.mktemp("deep-plain") / "log") as server:
        yield server


@pytest.fixture
def cleanup() -> Iterator[list[subprocess.Popen[bytes]]]:
    """Processes that a failed test must not leave behind."""
    processes: list[subprocess.Popen[bytes]] = []
    yield processes
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
