"""bench.harness with what people and machines do to it: two runs at once, kills, foreign and damaged records, servers that hang."""

import http.server
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import yaml
from harness_world import EXACT, FULL, PLAIN, World, record_of, target, world, write

from longdraft import cli
from longdraft.bench import server
from longdraft.bench.harness import run, speed
from longdraft.bench.harness.answers import Answer
from longdraft.bench.harness.ledger import Ledger, alone
from longdraft.errors import UserError

__all__ = ["target", "world"]
TASK = {"name": "ruler_single", "count": 1, "prompt_tokens": [400]}


def refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """The one line of a user's error."""
    assert cli.main(["bench", *words]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1
    return error


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"batches": [1, 2, 1]}, "size 1 stands there twice"),
        ({"contexts": [50, 50]}, "size 50 stands there twice"),
        ({"load": {"rates": [1, 1]}}, "rate 1.0 stands there twice"),
        ({"load": {"rates": [float("inf")]}}, "Input should be a finite number"),
        ({"load": {"rates": [float("nan")]}}, "Input should be a finite number"),
        ({"force": {"accept_length": float("inf")}}, "Input should be a finite number"),
        ({"systems": [PLAIN, {**FULL, "label": " "}]}, "give 1 to 60 printable characters"),
        ({"systems": [PLAIN, {**FULL, "label": "two\nlines"}]}, "give 1 to 60 printable characters"),
        ({"systems": [PLAIN, {**FULL, "label": "x" * 61}]}, "give 1 to 60 printable characters"),
        ({"record": "/proc/record.json"}, "record '/proc/record.json' cannot be written"),
        ({"record": "x" * 300}, "cannot be written (File name too long)"),
        ({"record": "."}, "record '.' is a folder"),
        ({"logs": __file__}, "cannot be made (File exists): give another folder"),
        ({"max_minutes": 1e-9}, "max_minutes=1e-09 were over before a cell was measured: give more"),
    ],
)
def test_what_does_not_fit(
    changes: dict[str, Any], said: str, tmp_path: Path, target: Path, world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    assert said in refused(["speed", str(write(tmp_path, target, **changes))], capsys)
    assert not world.asked and not list(tmp_path.glob("*.lock")), "nothing was measured, nothing is held"


@pytest.mark.parametrize(
    ("tasks", "said"),
    [
        ([TASK, {**TASK, "count": 2}], "task 'ruler_single' stands there twice"),
        ([{**TASK, "prompt_tokens": [8000, 8192]}], "bucket '8K' stands there twice"),
        ([{**TASK, "prompt_tokens": [0]}], "give lengths of at least 1"),
    ],
)
def test_tasks_that_would_go_under(
    tasks: list[Any], said: str, tmp_path: Path, target: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "x.yaml"
    own = {"name": "x", "record": str(tmp_path / "r.json"), "target": {"path": str(target)}, "systems": [PLAIN]}
    path.write_text(yaml.safe_dump({**own, "tasks": tasks}))
    assert said in refused(["acceptance", str(path)], capsys)


def test_a_target_without_a_tokenizer_that_serves(
    tmp_path: Path, world: World, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    bare = tmp_path / "bare"
    bare.mkdir()
    (bare / "config.json").write_text("{")
    path = str(write(tmp_path, bare, prompts="library"))
    assert "has no tokenizer that loads (" in refused(["speed", path], capsys)
    slow = SimpleNamespace(is_fast=False)
    monkeypatch.setattr("transformers.AutoTokenizer.from_pretrained", lambda folder: slow)
    assert "has a slow tokenizer: put a tokenizer.json into its folder" in refused(["speed", path], capsys)


def test_a_label_names_no_folder(tmp_path: Path, target: Path, world: World) -> None:
    asked = [PLAIN, {**FULL, "label": "../../a/b c"}]
    assert speed.main([str(write(tmp_path, target, systems=asked))]) == 0
    assert world.started == ["plain", "..-..-a-b-c"] and record_of(tmp_path)["rows"][1]["label"] == "../../a/b c"
    assert {path.name for path in (tmp_path / "logs").iterdir()} == {"plain.log", "..-..-a-b-c.log"}


def test_one_run_a_record(tmp_path: Path, target: Path, world: World, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(write(tmp_path, target))
    with alone(tmp_path / "record.json"):
        assert "another run writes record" in refused(["speed", path], capsys)
    assert not world.asked and speed.main([path]) == 0
    world.at_each = lambda mode: pytest.fail("all is measured")
    (tmp_path / ".record.json.lock").write_text("")  # of a run that was killed: nothing holds it
    assert speed.main([path]) == 0 and not list(tmp_path.glob(".*"))


def test_a_record_of_another_file_is_left_alone(
    tmp_path: Path, target: Path, world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    speed.main([str(write(tmp_path, target))])
    before = (tmp_path / "record.json").read_bytes()
    error = refused(["speed", str(write(tmp_path, target, name="other"))], capsys)
    assert "it is of a file named 'try', this one is 'other'" in error
    assert (tmp_path / "record.json").read_bytes() == before


@pytest.mark.parametrize("damage", [{"sitting": 7}, {"sitting": None}, {"ok": "yes"}, {"cell": 3}, {"label": None}])
def test_a_damaged_row_is_one_line(
    damage: dict[str, Any], tmp_path: Path, target: Path, world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(write(tmp_path, target, systems=[PLAIN]))
    speed.main([path])
    record = record_of(tmp_path)
    (tmp_path / "record.json").write_text(json.dumps({**record, "rows": [record["rows"][0] | damage]}))
    assert "a row of it is damaged" in refused(["speed", path], capsys)


def test_a_line_cut_short_takes_no_other_with_it(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "record.json", "quality", {})
    ledger.begin()
    one = Answer("a", [1], 1, 1, 1)
    ledger.add("c1", [{"ok": True}], [one])
    with ledger.answers_path.open("a") as file:
        file.write('{"cell": "c2", "ans')  # killed here
    ledger.add("c2", [{"ok": True}], [one])
    assert Ledger(tmp_path / "record.json", "quality", {}).answers == {"c1": [one], "c2": [one]}


def test_plain_answers_that_are_gone_are_asked_for_again(tmp_path: Path, target: Path, world: World) -> None:
    speed.main([str(write(tmp_path, target, systems=[PLAIN, FULL]))])
    (tmp_path / "record.answers.jsonl").unlink()
    world.asked = []
    assert speed.main([str(write(tmp_path, target))]) == 0
    assert set(world.asked) == {None, "exact"} and all(row["ok"] for row in record_of(tmp_path)["rows"])


def test_a_server_that_hangs_does_not_stand_beside_the_next_cell(tmp_path: Path, target: Path, world: World) -> None:
    world.hang = "full"
    assert speed.main([str(write(tmp_path, target, contexts=[50, 60]))]) == 0
    rows = record_of(tmp_path)["rows"]
    assert [row["ok"] for row in rows] == [True, True, False, False, True, True]
    assert rows[2]["why"] == "timed out (see full.log)"
    assert world.started == ["plain", "full", "full", "exact-512"]


def test_answers_that_end_early_do_not_count(tmp_path: Path, target: Path, world: World) -> None:
    world.texts = {"partial": [7 * i for i in range(30)]}
    asked = [PLAIN, {**EXACT, "system": "partial"}]
    for force in (None, {}):
        speed.main([str(write(tmp_path, target, systems=asked, force=force))])
        plain, partial = record_of(tmp_path)["rows"]
        assert plain["ok"] and "speedup" not in partial
        assert partial["why"] == "2 of 2 answers ended early (one after 30 of 48 tokens)"


def test_steps_that_none_were_are_no_division_by_zero(
    tmp_path: Path, target: Path, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(speed, "rounds", lambda replies: [3] * len(replies))
    assert speed.main([str(write(tmp_path, target, systems=[PLAIN]))]) == 0
    assert record_of(tmp_path)["rows"][0]["why"] == "40 more tokens took no more verifications: raise new_tokens"


def test_what_a_server_refuses_is_said_in_its_words(tmp_path: Path) -> None:
    class Refusing(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            body = b'{"error": {"message": "the input is longer than the context"}}'
            self.send_response(400)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None: ...

    with http.server.HTTPServer(("127.0.0.1", 0), Refusing) as there:
        thread = threading.Thread(target=there.serve_forever)
        thread.start()
        own = server.Server("plain", [], tmp_path / "log")
        own.port = there.server_port
        with pytest.raises(UserError, match=r"answered 400 on /generate: .*longer than the context") as raised:
            server.generate(own, [[1]], 5)
        there.shutdown()
        thread.join()
    assert "longer than the context" in run.reason(raised.value)


@pytest.mark.skipif(sys.platform != "linux", reason="a signal of Linux")
def test_a_killed_run_leaves_no_server(tmp_path: Path) -> None:
    code = (
        "import sys, time; from pathlib import Path; from longdraft.bench.server import Server\n"
        "server = Server('x', [sys.executable, '-c', 'import time; time.sleep(600)'], Path(sys.argv[1]))\n"
        "print(server._start().pid, flush=True); time.sleep(600)"
    )
    parent = subprocess.Popen([sys.executable, "-c", code, str(tmp_path / "log")], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = psutil.Process(int(parent.stdout.readline()))
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait()
    end = time.monotonic() + 20
    while time.monotonic() < end and child.is_running() and child.status() != psutil.STATUS_ZOMBIE:
        time.sleep(0.1)
    assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE
