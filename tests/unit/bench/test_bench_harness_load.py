"""The load section of bench speed with a played client, step times of a cell, and the YAML front of bench arr."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from harness_world import EXACT, FULL, PLAIN, World, record_of, target, world, write

from longdraft import cli
from longdraft.bench import arr as measurement
from longdraft.bench.harness import arr, load, speed
from longdraft.draft_models.sparse_recipe import LayerHeads, SparseRecipe
from longdraft.errors import UserError

__all__ = ["target", "world"]
REPORT = {
    "completed": 3, "output_throughput": 123.4567, "median_ttft_ms": 80.0, "p99_ttft_ms": 95.5, "median_itl_ms": 5.0,
    "p99_itl_ms": 12.0, "request_rate": 2.0,
}  # fmt: skip
METRICS = """# HELP longdraft:verifications_total of requests
longdraft:verifications_total{model_name="m",mode="exact",context="<2K",kind="partial"} %d
longdraft:verifications_total{model_name="m",mode="exact",context="2K-8K",kind="partial"} 10.0
longdraft:verifications_total{model_name="m",mode="exact",context="<2K",kind="full"} %d
longdraft:rounds_total{model_name="m",mode="exact",context="<2K"} 99.0
"""
LOAD = {"rates": [2, 8], "requests": 3, "input_tokens": 64, "output_tokens": 8}


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, Any]:
    """What plays the client: a program that writes ``report`` and ends with ``status``."""
    told: dict[str, Any] = {"report": REPORT, "status": 0, "commands": []}
    original = load.client_command

    def command(*arguments: Any) -> list[str]:
        words = original(*arguments)
        told["commands"].append(words)
        out = words[words.index("--output-file") + 1]
        program = (
            f"open({out!r}, 'w').write({json.dumps(told['report'])!r} + chr(10)); raise SystemExit({told['status']})"
        )
        return [sys.executable, "-c", program]

    monkeypatch.setattr(load, "client_command", command)
    return told


def test_rates_are_rows(
    tmp_path: Path, target: Path, world: World, client: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    counted = iter([{}, {}, {}, {}, {"partial": 10.0, "full": 5.0}, {"partial": 40.0, "full": 15.0}] + [{}] * 2)
    monkeypatch.setattr(load, "verifications", lambda server: next(counted))
    assert speed.main([str(write(tmp_path, target, systems=[PLAIN, EXACT], load=LOAD))]) == 0
    rows = [row for row in record_of(tmp_path)["rows"] if "rate" in row]
    assert [(row["label"], row["rate"]) for row in rows] == [(s, r) for s in ("plain", "exact 512") for r in (2.0, 8.0)]
    row = rows[2]
    assert row["ok"] and row["n"] == row["requests"] == 3 and row["tok_s"] == 123.457 and row["partial_share"] == 0.75
    assert (row["ttft_p50_ms"], row["ttft_p99_ms"], row["itl_p50_ms"], row["itl_p99_ms"]) == (80.0, 95.5, 5.0, 12.0)
    assert "partial_share" not in rows[0], "plain decoding verifies nothing"
    words = client["commands"][0]
    assert words[1:3] == ["-m", "sglang.bench_serving"] and words[words.index("--request-rate") + 1] == "2.0"
    assert words[words.index("--seed") + 1] == "0" and "--tokenize-prompt" in words


@pytest.mark.parametrize(
    ("told", "why"),
    [
        ({"status": 3}, "sglang.bench_serving ended with 3, see"),
        ({"report": {**REPORT, "completed": 2}}, "2 of 3 requests were answered, see"),
        ({"report": {"completed": 3}}, "is no report of sglang.bench_serving"),
    ],
)
def test_a_rate_that_fails_is_a_row(
    told: dict[str, Any], why: str, tmp_path: Path, target: Path, world: World, client: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    client |= told
    monkeypatch.setattr(load, "verifications", lambda server: {})
    speed.main([str(write(tmp_path, target, systems=[PLAIN], load={**LOAD, "rates": [2]}))])
    grid, rate = record_of(tmp_path)["rows"]
    assert grid["ok"] and not rate["ok"] and why in rate["why"]


def test_partial_verifications_are_read_from_the_metrics(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    page = tmp_path / "metrics"
    page.write_text(METRICS % (7, 3))
    server: Any = type("Server", (), {"address": tmp_path.as_uri()})
    assert load.verifications(server) == {"partial": 17.0, "full": 3.0}
    page.unlink()
    assert load.verifications(server) == {}


def test_step_times_of_a_cell_are_its_phases(tmp_path: Path, target: Path, world: World) -> None:
    def write_steps(mode: str | None) -> None:
        if mode != "full":
            return
        host = {"draft": 2.0, "verify": 5.0, "sampling": 0.5, "select": 0.25}
        line = {"batch": 2, "wall_ms": 8.0, "gap_ms": 1.0, "host_ms": host, "device_ms": {"verify": 6.0}}
        with (tmp_path / "logs" / "full.steps.jsonl").open("a") as file:
            file.write(f"{json.dumps(line)}\n" * 12)

    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "full.steps.jsonl").write_text(
        '{"batch": 2, "wall_ms": 99, "gap_ms": 1, "host_ms": {}, "device_ms": {}}\n' * 20
    )
    world.at_each = write_steps
    assert speed.main([str(write(tmp_path, target, systems=[PLAIN, FULL], phases=True))]) == 0
    plain, full = record_of(tmp_path)["rows"]
    assert full["phases"] == {"draft": 2.0, "verify": 6.0, "sample": 0.5, "select": 0.25, "gap": 0.25}
    assert full["steady_ms_step"] == 9.0 and "phases" not in plain, (
        "lines of the warm-up and of an earlier cell are not counted"
    )


def arr_file(folder: Path, **more: Any) -> Path:
    recipe = SparseRecipe(target=LayerHeads(layer=2, heads=[1]), draft=[], lookahead=0, budget=40, provenance={})
    recipe.save(folder / "recipe.json")
    said = {
        "target": "T",
        "recipe": folder / "recipe.json",
        "documents": folder / "d.jsonl",
        "record": folder / "r.json",
    }
    path = folder / "arr.yaml"
    path.write_text("".join(f"{key}: {value}\n" for key, value in {**said, **more}.items()))
    return path


def test_arr_from_a_file_is_the_same_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[str]] = []
    monkeypatch.setattr(measurement, "main", lambda words: asked.append(list(words)) or 0)
    path = arr_file(tmp_path, budgets=[40, 80], own=True, kl_points=3)
    assert cli.main(["bench", "arr", str(path), "count=2"]) == 0
    args = measurement.parse(asked[0])
    assert (args.budgets, args.own, args.kl_points, args.count) == ([40, 80], True, 3, 2)
    assert (
        args.windows
        == measurement.parse(["--target", "T", "--recipe", "R", "--documents", "D", "--record", "R"]).windows
    )
    assert cli.main(["bench", "arr", "--target", "T", "--count", "3"]) == 0
    assert asked[1] == ["--target", "T", "--count", "3"], "options go on as they are"


def test_the_recipe_of_arr_is_one_call(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(Path(__file__).parents[3])
    asked: list[list[str]] = []
    monkeypatch.setattr(measurement, "main", lambda words: asked.append(list(words)) or 0)
    monkeypatch.setattr(arr, "fetch", lambda name: tmp_path / name)
    assert arr.main(["recipes/bench/smollm2_arr.yaml", f"record={tmp_path / 'r.json'}"]) == 0
    args = measurement.parse(asked[0])
    assert (
        args.target == str(tmp_path / "smollm2") and Path(args.draft, "config.json").is_file() and args.recipe.is_file()
    )


def test_arr_is_not_measured_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[list[str]] = []
    monkeypatch.setattr(measurement, "main", lambda words: asked.append(list(words)) or 0)
    path = arr_file(tmp_path)
    assert arr.main([str(path)]) == 0 and len(asked) == 1
    args = measurement.parse(asked[0])
    made = {"settings": measurement.settings_of(args, SparseRecipe.load(args.recipe))}
    (tmp_path / "r.json").write_text(json.dumps(made, default=str))
    assert (
        arr.main([str(path)]) == 0 and len(asked) == 1 and "is there and of these settings" in capsys.readouterr().out
    )
    assert arr.main([str(path), "seed=1"]) == 0 and len(asked) == 2
    (tmp_path / "r.json").write_text("{")
    with pytest.raises(UserError, match="is no record of `longdraft bench arr`: move it away"):
        arr.main([str(path)])


@pytest.mark.parametrize(
    ("more", "said"),
    [({"bugdets": [64]}, "did you mean 'budgets'?"), ({"lags": 3}, "lags=3: Input should be a valid list")],
)
def test_arr_names_what_a_file_has_wrong(
    more: dict[str, Any], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["bench", "arr", str(arr_file(tmp_path, **more))]) == 2
    assert said in capsys.readouterr().err


def test_a_report_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is no report"):
        load.read_report(tmp_path / "none.jsonl", 3)
