"""A Python that has imported SGLang already and runs commands in forks of itself: ``warm.start(["-m", "module", ...], ...)``.

A server is three processes, each of which imports SGLang for eight seconds; most tests are about what a server answers and
not about how it starts. Here it is imported once. What SGLang spawns is forked as well; all else is as ever. Servers that
must show how they start are started cold.
"""

import atexit
import contextlib
import json
import os
import runpy
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

CPU = {"SGLANG_USE_CPU_ENGINE": "1", "CUDA_VISIBLE_DEVICES": ""}  # read as SGLang is imported


class Forked:
    """What tests use of a ``subprocess.Popen``."""

    def __init__(self, python: "WarmPython", pid: int) -> None:
        self.python, self.pid = python, pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            self.returncode = self.python.ask({"poll": self.pid})
        return self.returncode

    def wait(self, timeout: float = 60) -> int:
        end = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > end:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout)
            time.sleep(0.05)
        return code


class WarmPython:
    """Started with its first command, ended with this process."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.process: subprocess.Popen[str] | None = None

    def start(self, arguments: Sequence[str], environment: Mapping[str, str], log: Path) -> Forked:
        """``python ARGUMENTS`` in a process group of its own, its output in the log."""
        pid = self.ask({"arguments": list(arguments), "environment": dict(environment), "log": str(log)})
        return Forked(self, pid)

    def ask(self, question: dict[str, Any]) -> Any:
        with self.lock:
            if self.process is None:
                pipe = subprocess.PIPE
                command = [sys.executable, __file__]
                self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env={**os.environ, **CPU})
                atexit.register(self.process.communicate)  # the end of its input is its end
            assert self.process.stdin is not None and self.process.stdout is not None
            self.process.stdin.write(json.dumps(question) + "\n")
            self.process.stdin.flush()
            return json.loads(self.process.stdout.readline())


warm = WarmPython()


def answer_questions() -> None:
    """Imports first, then a line for a line: a new process's id, or how one ended (null while it runs)."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # imports say things
    import sglang.srt.entrypoints.http_server
    import sglang.srt.managers.detokenizer_manager
    import sglang.srt.managers.scheduler
    import sglang.srt.models.registry  # noqa: F401

    ended: dict[int, int] = {}

    def reap(*_: object) -> None:
        with contextlib.suppress(ChildProcessError):
            while (found := os.waitpid(-1, os.WNOHANG))[0]:
                ended[found[0]] = os.waitstatus_to_exitcode(found[1])

    signal.signal(signal.SIGCHLD, reap)  # at once: whoever ends a server waits until its processes are gone
    for line in sys.stdin:
        question = json.loads(line)
        if "poll" in question:
            answer = ended.get(question["poll"])
        else:
            sys.stdout.flush()
            answer = os.fork()
            if answer == 0:
                answers.close()
                run(**question)
        print(json.dumps(answer), file=answers, flush=True)


def run(arguments: list[str], environment: dict[str, str], log: str) -> None:
    """In a fork: become the command; does not return."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.setsid()
    nothing, out = os.open(os.devnull, os.O_RDONLY), os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for source, target in ((nothing, 0), (out, 1), (out, 2)):
        os.dup2(source, target)
    os.environ.clear()
    os.environ.update(environment)
    code = 1
    try:
        prepare()
        if arguments[0] == "-m":
            sys.argv = ["python", *arguments[2:]]
            runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = arguments
            runpy.run_path(arguments[0], run_name="__main__")
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError):
                stream.flush()
        os._exit(code)


def prepare() -> None:
    """Fork what would be spawned; no two processes draw the same ports and seeds."""
    import random
    from multiprocessing import context, popen_fork

    import numpy as np
    import torch

    context.SpawnProcess._Popen = staticmethod(popen_fork.Popen)  # type: ignore[assignment]
    random.seed()
    np.random.seed()  # noqa: NPY002
    torch.seed()


if __name__ == "__main__":
    answer_questions()
