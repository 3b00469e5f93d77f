"""A real SGLang server process on the CPU for tests: ``with ServerProcess(model, [...]) as server: server.generate(...)``."""

import json
import os
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from warm_python import CPU, warm

from longdraft.bench.server import Server

CPU_ARGUMENTS = [
    "--device",
    "cpu",
    "--dtype",
    "float32",
    "--attention-backend",
    "torch_native",
    "--disable-overlap-schedule",
    "--skip-server-warmup",
    "--sleep-on-idle",
    "--max-running-requests",
    "8",
    "--chunked-prefill-size",
    "512",
    "--log-level",
    "info",
]

SPECULATIVE = ["--speculative-algorithm", "LONGDRAFT", "--speculative-num-steps", "4"]
STRICT = {"SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1"}


class HttpError(Exception):
    """An answer that is not 200."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(f"HTTP {status}: {text}")
        self.status, self.text = status, text


class WarmServer(Server):
    """Starts in a Python that has imported SGLang already."""

    def _start(self) -> Any:
        return warm.start(self.command[1:], self.environment, self.log)


class ServerProcess:
    """SGLang on a free port, up when its context is entered, every process of it ended on exit.

    Args:
        model: its folder.
        arguments: more of SGLang's.
        log: file for its output.
        environment: added to this process's.
        max_total_tokens: slots of its cache.
        overlap: whether SGLang's overlap schedule is on.
        cold: start as a user does, with nothing imported before.
    """

    def __init__(
        self,
        model: Path,
        arguments: Sequence[str],
        log: Path,
        environment: dict[str, str] | None = None,
        max_total_tokens: int = 40000,
        overlap: bool = False,
        cold: bool = False,
    ) -> None:
        common = [a for a in CPU_ARGUMENTS if not (overlap and a == "--disable-overlap-schedule")]
        command = [sys.executable, "-m", "sglang.launch_server", "--model-path", str(model), *common]
        command += ["--max-total-tokens", str(max_total_tokens), *arguments]
        fixed = {**CPU, "SGLANG_PLUGINS": "longdraft"}
        threads = {"OMP_NUM_THREADS": os.environ["OMP_NUM_THREADS"]}
        self.server = (Server if cold else WarmServer)(
            "test", command, log, {**fixed, **threads, **(environment or {})}
        )
        self.log = log

    @property
    def command(self) -> list[str]:
        """The command line, to be changed before the start."""
        return self.server.command

    def __enter__(self) -> "ServerProcess":
        self.server.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self.server.stop(patience=0)  # SGLang takes longer than any patience, and has nothing to save

    @property
    def alive(self) -> bool:
        return self.server.process.poll() is None

    @property
    def overlaps(self) -> bool:
        """Whether SGLang prepares a round while the one before runs."""
        return not json.loads(self.get("/get_server_info"))["disable_overlap_schedule"]

    def post(self, path: str, body: dict[str, Any], timeout: float = 300) -> Any:
        """JSON answer of a POST, or :class:`HttpError`."""
        with self.open(path, body, timeout) as reply:
            return json.load(reply)

    def open(self, path: str, body: dict[str, Any], timeout: float = 300) -> Any:
        request = urllib.request.Request(
            self.server.address + path, json.dumps(body).encode(), {"content-type": "application/json"}
        )
        try:
            return urllib.request.urlopen(request, timeout=timeout)
        except urllib.error.HTTPError as error:
            raise HttpError(error.code, error.read().decode(errors="replace")) from None

    def get(self, path: str) -> str:
        with urllib.request.urlopen(self.server.address + path, timeout=60) as reply:
            return str(reply.read().decode())

    def generate(self, ids: Sequence[int], params: dict[str, Any] | None = None, **body: Any) -> dict[str, Any]:
        """SGLang's native answer for a prompt of token ids; greedy unless ``params`` say otherwise."""
        sampling = {"temperature": 0, "max_new_tokens": 32, **(params or {})}
        answer: dict[str, Any] = self.post("/generate", {"input_ids": list(ids), "sampling_params": sampling, **body})
        return answer

    def stream(self, ids: Sequence[int], params: dict[str, Any] | None = None, **body: Any) -> Iterator[dict[str, Any]]:
        """Chunks of a streamed answer; closing the iterator drops the connection."""
        sampling = {"temperature": 0, "max_new_tokens": 32, **(params or {})}
        with self.open(
            "/generate", {"input_ids": list(ids), "sampling_params": sampling, "stream": True, **body}
        ) as reply:
            for line in reply:
                text = line.decode().strip()
                if text.startswith("data: ") and text != "data: [DONE]":
                    yield json.loads(text[6:])

    def idle_slots(self) -> int:
        """Free plus evictable cache slots once nothing runs.

        From the load that the scheduler publishes as it falls idle. The gauges of ``/metrics`` follow 30 seconds later, and
        with them on this address fails in SGLang under the newer FastAPI.
        """
        for _ in range(150):
            load = json.loads(self.get("/v1/loads"))["loads"][0]
            if not load["num_running_reqs"] + load["num_waiting_reqs"] + load["num_used_tokens"]:
                return int(load["max_total_num_tokens"])
            time.sleep(0.2)
        raise TimeoutError(f"the server is still busy, or has lost slots: {load}")


def tokens(answer: dict[str, Any]) -> list[int]:
    return list(answer["output_ids"])


def counters(answer: dict[str, Any]) -> dict[str, Any]:
    """Our totals of a finished request."""
    return dict(answer["meta_info"]["longdraft"][-1])


def refused(target: Path, log: Path, *arguments: str, **settings: Any) -> str:
    """The one line with which a start that must fail ends; ``settings`` are ours."""
    command = ["-m", "sglang.launch_server", "--model-path", str(target), "--port", "1", *CPU_ARGUMENTS]
    own = {"SGLANG_PLUGINS": "longdraft", "LONGDRAFT_SETTINGS": json.dumps(settings)}
    ended = warm.start([*command, *SPECULATIVE, *arguments], {**os.environ, **CPU, **own}, log)
    status, text = ended.wait(120), log.read_text()
    assert status == 2, text[-2000:]
    assert "Traceback" not in text
    errors = [line for line in text.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    return errors[0]
