"""Failing writes without a full disk: what a save leaves behind and says."""

import errno
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from safetensors import SafetensorError

from longdraft.errors import UserError
from longdraft.train import checkpoints
from longdraft.train.checkpoints import check_room
from longdraft.train.long_draft import main
from longdraft.train.tracking import JsonLines, read_rows


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    (tmp_path / "data.jsonl").write_text("".join(json.dumps({"text": text * 9}) + "\n" for text in ("abc ", "de f")))
    config = {
        "run": {"name": "r", "output_dir": str(tmp_path / "runs")},
        "target": {"path": "tiny-random:llama"},
        "data": {"train": "data.jsonl", "max_length": 100},
        "schedule": {"max_steps": 4, "save_every": 2},
    }
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


def fail_on_call(call: int, real: Callable[..., Any], error: Exception) -> Callable[..., Any]:
    count = 0

    def write(*args: Any, **kwargs: Any) -> Any:
        nonlocal count
        count += 1
        if count == call:
            raise error
        return real(*args, **kwargs)

    return write


@pytest.mark.parametrize(
    ("function", "error"),
    [
        ("save_file", SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")),
        ("save_draft", OSError(errno.EDQUOT, "Disk quota exceeded")),
        ("_flush", OSError(errno.ENOSPC, "No space left on device")),
    ],
)
def test_a_write_that_fails_leaves_the_checkpoint_before_and_one_line(
    recipe: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], function: str, error: Exception
) -> None:
    calls = {"save_file": 2, "save_draft": 2, "_flush": 9}[function]  # the second save; a save flushes six paths
    monkeypatch.setattr(checkpoints, function, fail_on_call(calls, getattr(checkpoints, function), error))
    assert main(["--config", str(recipe)]) == 1
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "step-00000004 cannot be written" in said and "step-00000002: free some space" in said
    assert str(error).split("(")[0].strip() in said
    folder = recipe.parent / "runs" / "r" / "checkpoints"
    assert sorted(path.name for path in folder.iterdir()) == ["latest", "step-00000002"]
    monkeypatch.undo()
    assert main(["--config", str(recipe)]) == 0
    assert (folder / "latest").resolve().name == "step-00000004"


def test_a_folder_without_room_for_one_checkpoint_is_refused_at_the_start(
    recipe: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    usage = shutil.disk_usage(recipe.parent)._replace(free=1 << 10)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    assert main(["--config", str(recipe)]) == 2
    said = capsys.readouterr().err
    assert "a checkpoint needs about" in said and "run.output_dir" in said
    assert not list((recipe.parent / "runs" / "r").glob("metrics*"))


def test_room_is_measured_where_the_folder_will_be(tmp_path: Path) -> None:
    check_room(tmp_path / "not" / "yet", 1)
    with pytest.raises(UserError, match="free space"):
        check_room(tmp_path / "not" / "yet", 1 << 62)


def test_a_log_row_that_finds_no_room_is_lost_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = JsonLines(tmp_path / "log.jsonl", 0)
    log.write({"step": 1})
    with monkeypatch.context() as patched:
        patched.setattr(Path, "open", lambda *a: (_ for _ in ()).throw(OSError(errno.ENOSPC, "full")))
        log.write({"step": 2})
    with log.path.open("a") as file:
        file.write('{"step": 2, "lo')  # what a full disk may have kept of it
    log.write({"step": 3})
    log.write({"step": 4})
    assert [row["step"] for row in read_rows(log.path)] == [1, 3, 4]
