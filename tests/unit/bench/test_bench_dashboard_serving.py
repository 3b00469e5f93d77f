"""Records of ``longdraft bench`` in a training's dashboard: into its folder, to its W&B run, and into the report."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from wandb_file import read

from longdraft import cli
from longdraft.bench.dashboard import workspace
from longdraft.bench.dashboard.figures import BUDGET, CONTEXT, FIGURES, lines_of, tokens_of
from longdraft.bench.dashboard.logs import read_run
from longdraft.bench.dashboard.page import page
from longdraft.bench.dashboard.panels import PANELS, SERVED, Panel
from longdraft.bench.dashboard.serving import SERVING, name_there
from longdraft.train.tracking import read_rows

SHOWN = [panel for panel in PANELS if panel.section == SERVED]


def row(**values: Any) -> dict[str, Any]:
    return {
        "system": "partial",
        "label": "partial 4K",
        "settings": {},
        "ok": True,
        "why": "",
        "n": 3,
        "seed": 0,
        **values,
    }


ACCEPTANCE = [
    row(task="a", bucket="2K", tau_micro=3.0, tau_micro_no_bonus=2.0, verifications=30, tokens=90),
    row(task="b", bucket="2K", tau_micro=2.0, tau_micro_no_bonus=1.0, verifications=10, tokens=20),
    row(task="a", bucket="8K", tau_micro=2.5, tau_micro_no_bonus=1.5, verifications=4, tokens=10),
    row(task="a", bucket="8K", system="full", label="full", tau_micro=3.5, tau_micro_no_bonus=2.5, verifications=4, tokens=14),
    row(task="c", bucket="8K", ok=False, why="repeats itself", tau_micro=5.0, tau_micro_no_bonus=4.0, verifications=400),
]  # fmt: skip
SPEED = [
    row(batch=16, context=8192, tok_s=900.0, tok_s_spread=3.0, repeats=3, alpha=880.0),
    row(batch=1, context=8192, tok_s=100.0, tok_s_spread=1.0, repeats=3, alpha=99.0),
]
QUALITY = [
    row(task="a", budget=2048, bucket="8K", metric="rouge", score_reference=0.2, score_own=0.5, n=1),
    row(task="b", budget=2048, bucket="8K", metric="rouge", score_reference=0.4, score_own=0.9, n=3),
    row(task="a", budget=4096, bucket="8K", metric="rouge", score_reference=0.3, score_own=1.0),
    row(task="a", budget=None, bucket="8K", metric="rouge", score_reference=0.3, score_own=1.0, system="full"),
]


def record(path: Path, rows: list[dict[str, Any]], name: str = "evaluation") -> Path:
    facts = {"name": name, "command": "longdraft bench", "commit": "c0ffee", "date": "2026-01-01", "device": "a card"}
    path.write_text(json.dumps({**facts, "settings": {}, "figures": {}, "checks": {}, "rows": rows}))
    return path


def training(folder: Path, wandb: str = "off") -> Path:
    folder.mkdir()
    (folder / "metrics.jsonl").write_text('{"step": 7, "loss": 2.0}\n')
    settings = {"tracking": {"wandb": wandb, "project": "p"}, "run": {"name": "r"}}
    (folder / "run.yaml").write_text(yaml.safe_dump({"commit": "abc", "settings": settings}))
    return folder


def panel(figure: str) -> Panel:
    return next(p for p in SHOWN if p.series[0].path[0] == figure)


def test_rows_of_one_point_are_averaged_by_their_weight_and_excluded_ones_left_out() -> None:
    lines = lines_of([*ACCEPTANCE, *SPEED, *QUALITY])
    assert lines["tau"] == {"full": [[8192.0, 3.5]], "partial 4K": [[2048.0, 2.75], [8192.0, 2.5]]}
    assert lines["tau_without_bonus"]["partial 4K"] == [[2048.0, 1.75], [8192.0, 1.5]]
    assert lines["tok_s"] == {"partial 4K, batch 1": [[8192.0, 100.0]], "partial 4K, batch 16": [[8192.0, 900.0]]}
    assert lines["quality_own"] == {"partial": [[2048.0, 0.8], [4096.0, 1.0]]}
    assert lines["quality_reference"] == {"partial": [[2048.0, pytest.approx(0.35)], [4096.0, 0.3]]}
    assert set(lines) == set(FIGURES)


def test_what_a_row_does_not_say_makes_no_line() -> None:
    load, place = row(rate=2.0, requests=9, tok_s=100.0), row(bucket="long", tau_micro=2.0, verifications=3)
    budget, quality = row(budget=None, score_own=1.0), row(bucket="2K", tau_micro=2.0)  # whose τ acceptance says better
    assert lines_of([load, place, budget, quality]) == {}


@pytest.mark.parametrize(
    ("bucket", "tokens"), [("2K", 2048), ("7.6K", 7.6 * 1024), ("<2K", 2048), ("2K-8K", 8192), (">32K", 32768), (3000, 3000), ("512", 512), ("all", None)]
)  # fmt: skip
def test_buckets_have_a_place_on_the_axis(bucket: Any, tokens: float | None) -> None:
    assert tokens_of(bucket) == tokens


def test_records_are_kept_once_and_drawn_from_then_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = training(tmp_path / "r")
    files = [record(tmp_path / f"{i}.json", rows, f"rec{i}") for i, rows in enumerate((ACCEPTANCE, SPEED, QUALITY))]
    words = ["dashboard", "--run", str(run), "--html", str(tmp_path / "o.html")]
    assert cli.main([*words, "--record", *map(str, files), "--png", str(tmp_path / "o.png")]) == 0
    assert cli.main([*words, "--record", str(files[0])]) == 0
    assert "3 new records, 0 were there" in (said := capsys.readouterr().out) and "0 new records, 1 were there" in said
    assert not (run / "wandb").exists()
    kept = read_rows(run / SERVING)
    assert [(r["name"], r["rows"], r["excluded"]) for r in kept] == [("rec0", 5, 1), ("rec1", 2, 0), ("rec2", 4, 0)]
    assert cli.main(words) == 0
    text = (tmp_path / "o.html").read_text()
    assert text.count("no figures in these logs") == len(PANELS) - len(SHOWN) - 1
    assert "partial 4K, batch 16" in text and "rec2" in text and "c0ffee" in text
    assert (tmp_path / "o.png").read_bytes().startswith(b"\x89PNG")


def test_a_later_record_replaces_points_and_lines_have_looks_of_their_own(tmp_path: Path) -> None:
    from matplotlib.figure import Figure

    from longdraft.bench.dashboard.picture import draw

    run = training(tmp_path / "r")
    again = [row(bucket="2K", tau_micro=4.0, tau_micro_no_bonus=3.0, verifications=9)]
    for i, rows in enumerate((ACCEPTANCE, again)):
        assert cli.main(["dashboard", "--run", str(run), "--record", str(record(tmp_path / f"{i}.json", rows)), "--html", str(tmp_path / "o")]) == 0  # fmt: skip
    log = read_run(run, "r")
    assert log.lines(panel("tau").series[0]) == {"full": [(8192, 3.5)], "partial 4K": [(2048, 4.0), (8192, 2.5)]}
    axes = Figure().subplots()
    draw(axes, panel("tau"), [log])
    assert len({line.get_color() for line in axes.lines}) == 2
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["full", "partial 4K"]
    assert axes.get_xlabel() == "tokens of context" and axes.get_ylim()[0] == 1.0


def test_a_trainings_run_at_wandb_gets_the_figures_behind_its_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    run = training(tmp_path / "r", "auto")
    (run / "wandb_run_id").write_text("1a2b3c4d\n")
    words = ["dashboard", "--run", str(run), "--html", str(tmp_path / "o.html"), "--record"]
    assert cli.main([*words, str(record(tmp_path / "a.json", [*ACCEPTANCE, *QUALITY]))]) == 0
    (file,) = (run / "wandb").glob("offline-run-*/*.wandb")
    stored = read(file)
    assert stored.run_id == "1a2b3c4d"
    points = {
        (r.get(CONTEXT) or r.get(BUDGET), k): v for r in stored.rows for k, v in r.items() if k.startswith("serving/")
    }
    assert points[2048.0, "serving/tau/partial_4K"] == 2.75
    assert points[4096.0, "serving/quality_own/partial"] == 1.0
    assert [r["_step"] for r in stored.rows] == list(range(8, 8 + len(stored.rows)))
    assert stored.step_metrics["serving/tau/*"] == CONTEXT and stored.step_metrics["serving/quality_own/*"] == BUDGET
    assert read_rows(run / SERVING)[-1]["step"] == stored.rows[-1]["_step"]


def test_the_workspace_draws_what_is_sent() -> None:
    """Its panels of serving find the names that runs get, over the axis that is defined for them."""
    import re

    spec = workspace.build("me", "p")._to_model().spec.section.panel_bank_config.sections
    (section,) = [s for s in spec if s.name == SERVED]
    for config, shown in zip((p.config for p in section.panels), SHOWN, strict=True):
        figure = shown.series[0].path[0]
        assert config.chart_title == shown.title and config.x_axis == FIGURES[figure][0]
        assert re.search(config.metric_regex, f"serving/{figure}/{name_there('partial 4K, batch 16')}")
        others = [f"serving/{other}/full" for other in FIGURES if other != figure]
        assert not any(re.search(config.metric_regex, other) for other in others)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([row(ok=False, why="x", tau_micro=2.0, bucket="2K")], "holds no row of acceptance, quality or speed"),
        ([row(tok_s=3.0, batch=1, repeats=1)], "has a damaged row"),
        ([row(**{**SPEED[0], "tok_s": float("nan")})], "has a damaged row"),
        ([row(**{**SPEED[0], "repeats": -1})], "has a damaged row"),
        ([row(**{**SPEED[0], "settings": "none"})], "has a damaged row"),
        ([row(**{**SPEED[0], "context": 10**400})], "has a damaged row"),
        ([], "holds no row"),
    ],
)  # fmt: skip
def test_a_record_without_figures_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], rows: list[dict[str, Any]], message: str
) -> None:
    run = training(tmp_path / "r")
    assert cli.main(["dashboard", "--run", str(run), "--record", str(record(tmp_path / "a.json", rows))]) == 2
    error = capsys.readouterr().err.strip()
    assert message in error and len(error.splitlines()) == 1
    assert not (run / SERVING).exists()


@pytest.mark.parametrize("content", [None, "no json", "[" * 100_000, "[1]", '{"rows": 3}', '{"rows": [3]}'])
def test_a_file_that_is_no_record_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str | None
) -> None:
    if content is not None:
        (tmp_path / "a.json").write_text(content)
    run = training(tmp_path / "r")
    assert cli.main(["dashboard", "--run", str(run), "--record", str(tmp_path / "a.json")]) == 2
    assert "a.json" in (error := capsys.readouterr().err.strip()) and len(error.splitlines()) == 1


def test_records_belong_to_one_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [str(training(tmp_path / name)) for name in ("a", "b")]
    path = str(record(tmp_path / "x.json", SPEED))
    assert cli.main(["dashboard", "--run", *runs, "--record", path]) == 2
    assert "--run names 2" in capsys.readouterr().err


@pytest.mark.parametrize(
    "damage", ['{"step": 9, "lines": 3}', '{"step": 9, "lines": {"tau": []}}', '{"step": 9, "lines": {"tau": {"a": [[1]]}}}', '{"step": 9, "lines": {"tau": {"<b>": [["x", 2]]}}}', '{"st']
)  # fmt: skip
def test_what_is_damaged_of_what_was_kept_is_left_out(tmp_path: Path, damage: str) -> None:
    run = training(tmp_path / "r")
    (run / SERVING).write_text(damage + "\n")
    log = read_run(run, "r")
    assert log.serving == [] and "<b>" not in page([log])
