"""Played servers for tests of bench.harness: every mode answers as the test says, and a decode of a token takes ten milliseconds.

``from harness_world import World, target, world, write``; the two fixtures are used by name.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from tiny import tiny_model

from longdraft.bench.harness import answers, run, speed
from longdraft.errors import UserError

PLAIN: dict[str, Any] = {"system": "plain"}
FULL: dict[str, Any] = {"system": "full", "draft": "none"}
EXACT: dict[str, Any] = {"system": "exact", "draft": "none", "budget": 512}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model("llama", tmp_path_factory.mktemp("target"))


class World:
    """Played servers. ``texts`` are answers by mode; ``die``, ``stop`` and ``hang`` name a mode at whose cell a server or the run
    ends, or no answer comes.
    """

    def __init__(self) -> None:
        self.texts: dict[str | None, list[int]] = {}
        self.counters: dict[str | None, dict[str, int]] = {}
        self.sampling: list[dict[str, Any]] = []
        self.started: list[str] = []
        self.asked: list[str | None] = []
        self.die: str | None = None
        self.stop: str | None = None
        self.hang: str | None = None
        self.room = 100_000
        self.refuses = False
        self.at_each: Callable[[str | None], None] = lambda mode: None  # told the mode of every request

    def text(self, mode: str | None, count: int) -> list[int]:
        return self.texts.get(mode, [7 * i for i in range(1000)])[:count]


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    played = World()

    class Process:
        code: int | None = None

        def poll(self) -> int | None:
            return self.code

    class Played:
        def __init__(self, name: str, command: list[str], log: Path, environment: dict[str, str]) -> None:
            self.name, self.log, self.address = name, log, f"here/{len(played.started)}"
            self.process = Process()

        def __enter__(self) -> "Played":
            if played.refuses:
                raise UserError("the server ended with 1, see log:\nLoading\nRuntimeError: CUDA out of memory\nbye")
            self.log.parent.mkdir(parents=True, exist_ok=True)
            self.log.write_text("INFO fine\ntorch.OutOfMemoryError: CUDA out of memory. Tried 9 GiB\nINFO bye\n")
            played.started.append(self.name)
            return self

        def __exit__(self, *_: object) -> None: ...

        def stop(self) -> None:
            self.process.code = -15

        def flush(self) -> None: ...

        def info(self) -> dict[str, int]:
            return {"max_total_num_tokens": played.room}

    def generate(server: Any, ids: list[list[int]], new: int, sampling: list[dict[str, Any]]) -> Any:
        mode = sampling[0].get("custom_params", {}).get("longdraft", {}).get("mode")
        played.asked.append(mode)
        played.sampling += sampling
        played.at_each(mode)
        if mode is not None and mode == played.stop:
            raise KeyboardInterrupt
        if mode is not None and mode == played.hang:
            raise TimeoutError("timed out")
        if mode is not None and mode == played.die:
            server.process.code = -9
            raise ConnectionResetError("gone")
        text = played.text(mode, new)
        meta: dict[str, Any] = {
            "completion_tokens": len(text),
            "spec_verify_ct": 0 if mode is None else max(1, (new - 1) // 2),
        }
        meta |= {"longdraft": [played.counters[mode]]} if mode in played.counters else {}
        return 0.01 * new, [{"output_ids": text, "meta_info": meta} for _ in ids]

    monkeypatch.setattr(run, "Server", Played)
    monkeypatch.setattr(speed, "generate", generate)
    monkeypatch.setattr(answers, "generate", generate)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    return played


def write(folder: Path, tiny: Path, **changes: Any) -> Path:
    """A file that ``speed`` takes."""
    said: dict[str, Any] = {
        "name": "try", "record": str(folder / "record.json"), "logs": str(folder / "logs"), "systems": [PLAIN, FULL, EXACT],
        "target": {"path": str(tiny)}, "prompts": "random", "batches": [2], "contexts": [50], "new_tokens": 40, "repeats": 2,
    }  # fmt: skip
    path = folder / "try.yaml"
    path.write_text(yaml.safe_dump({**said, **changes}))
    return path


def record_of(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / "record.json").read_text()))
