"""Times of a step's phases: nothing when off, one line a step when on, and the table made of them."""

import json
from pathlib import Path

import pytest
import torch

from longdraft.bench.step_times import breakdown, main, read_lines, table
from longdraft.errors import UserError
from longdraft.serve.step_clock import OFF, make_clock


def test_off_is_one_shared_object_and_writes_nothing(tmp_path: Path) -> None:
    clock = make_clock(None, torch.device("cpu"))
    assert clock is OFF
    assert clock.step(3) is clock.phase("draft") is clock.phase("verify")


def test_a_step_is_one_line_with_its_phases(tmp_path: Path) -> None:
    path = tmp_path / "new" / "times.jsonl"
    clock = make_clock(str(path), torch.device("cpu"))
    for _ in range(2):
        with clock.step(3):
            for name in ("draft", "verify", "verify"):
                with clock.phase(name):
                    pass
    first, second = read_lines(path)
    assert first["batch"] == 3
    assert list(first["host_ms"]) == ["draft", "verify"]
    assert sum(first["host_ms"].values()) <= first["wall_ms"]
    assert first["gap_ms"] is None
    assert second["gap_ms"] >= 0


def test_a_phase_that_fails_is_counted_and_the_error_goes_on(tmp_path: Path) -> None:
    clock = make_clock(str(tmp_path / "t"), torch.device("cpu"))
    with clock.step(1):
        with pytest.raises(RuntimeError), clock.phase("verify"):
            raise RuntimeError
        with clock.phase("verify"):
            pass
    assert list(read_lines(tmp_path / "t")[0]["host_ms"]) == ["verify"]


@pytest.mark.parametrize(
    ("text", "told"), [(None, "cannot be read (No such file"), ('{"text": 1}', ":1 is no step of a server")]
)
def test_a_file_of_something_else_is_named(text: str | None, told: str, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / "t").write_text(text)
    with pytest.raises(UserError) as error:
        main([f"a={tmp_path / 't'}", "--out", str(tmp_path / "p.png")])
    assert told in str(error.value)


def line(batch: int, gap: float | None, **device: float) -> dict[str, object]:
    host = {"draft": 2.0, "verify": 5.0, "sampling": 1.0, "keep": 0.5}
    return {"batch": batch, "wall_ms": 9.0, "gap_ms": gap, "host_ms": host, "device_ms": device}


def test_the_breakdown_takes_the_devices_times_and_leaves_the_rest_to_the_gaps() -> None:
    steps = [line(4, 99.0)] * 3 + [line(4, 1.0, draft=1.5, verify=4.0)] * 5 + [line(2, None)]
    assert breakdown(steps) == {
        4: {"draft": 1.5, "verify": 4.0, "sampling": 1.0, "keep": 0.5, "host gaps": 3.0, "step": 10.0}
    }


def test_table_and_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    steps = tmp_path / "after"
    steps.write_text("\n".join(json.dumps(line(1, 1.0)) for _ in range(9)) + '\n{"batch"')
    assert (
        main(
            [
                f"before={steps}",
                f"after={steps}",
                "--out",
                str(tmp_path / "a" / "b.png"),
                "--record",
                str(tmp_path / "r.json"),
            ]
        )
        == 0
    )
    printed = capsys.readouterr().out
    assert "| ms a step | before, batch 1 | after, batch 1 |" in printed
    assert "| step | 10.00 | 10.00 |" in printed
    assert (tmp_path / "a" / "b.png").stat().st_size > 1000
    assert json.loads((tmp_path / "r.json").read_text())["figures"]["after_batch_1_step"] == 10.0
    assert table({}).startswith("| ms a step |")


def test_too_few_steps_say_so(tmp_path: Path) -> None:
    steps = tmp_path / "few"
    steps.write_text(json.dumps(line(1, 1.0)))
    with pytest.raises(UserError, match="8 steps"):
        main([f"few={steps}", "--out", str(tmp_path / "b.png")])
