"""SGLang servers as child processes that can be held still, and the few requests that measurements need."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from longdraft.errors import UserError
from longdraft.processes import end_with_parent


def free_port() -> int:
    """A port of the loopback interface that nothing listens on now; SGLang derives another one 10,000 above it."""
    while True:
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            port = int(s.getsockname()[1])
        if port < 55_000:
            return port


@dataclass(frozen=True)
class Generation:
    """One greedy answer: its tokens, decoding speed (first token to last, prefill out) and our counters, if it has any."""

    tokens: list[int]
    text: str
    tokens_per_s: float
    counters: dict[str, Any]


class Server:
    """A server process and its children; ``with`` starts it, waits until it answers and ends all of them.

    Args:
        name: for messages.
        command: its command line; ``--port`` is added.
        log: file for its output.
        environment: added to this process's.
    """

    def __init__(self, name: str, command: Sequence[str], log: Path, environment: dict[str, str] | None = None) -> None:
        self.name, self.log, self.port = name, log, free_port()
        self.command = [*command, "--port", str(self.port)]
        self.environment = {**os.environ, **(environment or {})}

    def __enter__(self) -> "Server":
        self.log.parent.mkdir(parents=True, exist_ok=True)
        self.process = self._start()
        try:
            self._wait_until_up()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _start(self) -> subprocess.Popen[bytes]:
        # Left over by a killed measurement it would keep its memory and a card; its own children end with it.
        with self.log.open("w") as log:
            return subprocess.Popen(
                self.command, env=self.environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
                preexec_fn=end_with_parent,  # noqa: PLW1509  # one call of the C library, looked up before
            )  # fmt: skip

    def _wait_until_up(self, seconds: float = 300) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if self.process.poll() is not None:
                tail = "\n".join(self.log.read_text(errors="replace").splitlines()[-15:])
                raise UserError(f"the {self.name} server ended with {self.process.returncode}, see {self.log}:\n{tail}")
            with contextlib.suppress(OSError), urllib.request.urlopen(f"{self.address}/health", timeout=5):
                return
            time.sleep(0.25)
        raise UserError(f"the {self.name} server did not answer within {seconds:.0f} s, see {self.log}")

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def _processes(self) -> list[psutil.Process]:
        try:
            top = psutil.Process(self.process.pid)
            return [top, *top.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def _signal(self, number: signal.Signals) -> None:
        for process in self._processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(number)

    def pause(self) -> None:
        """Stop every process of the server; it keeps its memory and its prefix cache and takes no processor time."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    def stop(self, patience: float = 5) -> None:
        """End the server and all its children, paused or not; what is left after ``patience`` seconds is killed."""
        processes = self._processes()
        for number in (signal.SIGCONT, signal.SIGTERM):
            self._signal(number)
        _, left = psutil.wait_procs(processes, timeout=patience)
        for process in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(left, timeout=5)
        with contextlib.suppress(ProcessLookupError):  # orphans of a child that ended before its own
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def post(self, path: str, body: dict[str, Any], timeout: float) -> Any:
        """What the server answers, open for reading.

        Raises:
            UserError: it refused; says why.
            OSError: it is gone, or took too long.
        """
        request = urllib.request.Request(
            self.address + path, json.dumps(body).encode(), {"content-type": "application/json"}
        )
        try:
            return urllib.request.urlopen(request, timeout=timeout)
        except urllib.error.HTTPError as error:
            text = error.read().decode(errors="replace")
            raise UserError(f"the {self.name} server answered {error.code} on {path}: {text}") from None

    def info(self) -> dict[str, Any]:
        """What the server says of itself: its arguments, and ``max_total_num_tokens``, the tokens that its cache holds."""
        with urllib.request.urlopen(f"{self.address}/server_info", timeout=60) as reply:
            return dict(json.load(reply))

    def flush(self) -> None:
        """Empty the prefix cache; the server has to be idle."""
        self.post("/flush_cache?timeout=30", {}, 60).close()

    def stream(self, ids: Sequence[int], sampling: dict[str, Any], timeout: float = 600) -> Iterator[dict[str, Any]]:
        """Chunks of an answer to token ids over the native endpoint, greedy unless ``sampling`` says otherwise.

        Our counters in ``meta_info.longdraft`` grow by one entry a chunk that the scheduler sent, whatever was put together later.
        """
        body = {"input_ids": list(ids), "sampling_params": {"temperature": 0, **sampling}, "stream": True}
        with self.post("/generate", body, timeout) as reply:
            yield from server_sent(reply)

    def generate(
        self, ids: Sequence[int], new_tokens: int, timeout: float = 600, mode: str | None = None
    ) -> Generation:
        """Greedy continuation of token ids over the native endpoint, streamed and timed; in a mode of ours, None: the server's."""
        own = {} if mode is None else {"custom_params": {"longdraft": {"mode": mode}}}
        times: list[tuple[float, int]] = []
        last: dict[str, Any] = {}
        for last in self.stream(ids, {"max_new_tokens": new_tokens, **own}, timeout):
            times.append((time.perf_counter(), int(last["meta_info"]["completion_tokens"])))
        if not times:
            raise UserError(f"the {self.name} server sent no answer, see {self.log}")
        (begin, first), (end, total) = times[0], times[-1]
        speed = (total - first) / (end - begin) if total > first else 0.0
        ours = last["meta_info"].get("longdraft") or [{}]
        return Generation(list(last["output_ids"]), str(last["text"]), speed, dict(ours[-1]))

    def chat(self, messages: list[dict[str, str]], new_tokens: int, timeout: float = 600) -> str:
        """Greedy answer of the OpenAI-compatible chat endpoint."""
        body = {"model": "default", "messages": messages, "temperature": 0, "max_tokens": new_tokens}
        with self.post("/v1/chat/completions", body, timeout) as reply:
            return str(json.load(reply)["choices"][0]["message"]["content"])


def generate(
    server: Server, ids: list[list[int]], new_tokens: int, sampling: list[dict[str, Any]] | None = None
) -> tuple[float, list[dict[str, Any]]]:
    """Seconds and the answers of one batch, greedy unless each request's ``sampling`` is given.

    Raises:
        UserError: the server refused it; says why.
    """
    common = {"max_new_tokens": new_tokens, "temperature": 0, "ignore_eos": True}
    params = [common | own for own in sampling or [{}] * len(ids)]
    start = time.perf_counter()
    with server.post("/generate", {"input_ids": ids, "sampling_params": params}, 500) as reply:
        answers = json.load(reply)
    return time.perf_counter() - start, answers if isinstance(answers, list) else [answers]


def rounds(answers: list[dict[str, Any]]) -> list[int]:
    """Scheduler steps of each request."""
    return [a["meta_info"].get("spec_verify_ct") or a["meta_info"]["completion_tokens"] - 1 for a in answers]


def server_sent(lines: Iterator[bytes]) -> Iterator[dict[str, Any]]:
    """The JSON objects of a server-sent event stream."""
    for line in lines:
        text = line.decode().strip()
        if text.startswith("data: ") and text != "data: [DONE]":
            yield json.loads(text.removeprefix("data: "))
