"""The dashboard's picture and the chart of modes: what is in them, and where their numbers come from."""

import json
import math
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import pytest
from prometheus_client import CollectorRegistry, start_http_server

from longdraft.bench.server import free_port
from longdraft.errors import UserError
from longdraft.ops import flow_chart
from longdraft.ops.flow_chart import ARROWS, BOXES, HIGH, WIDE, centre
from longdraft.ops.grafana import text
from longdraft.ops.panels import PANELS
from longdraft.ops.picture import ASKED, MODES, UNITS, draw, evaluate, legend, picture, plots, style
from longdraft.ops.prometheus import Line, Prometheus
from longdraft.serve.metrics import ServingMetrics
from longdraft.serve.settings import Mode

ROOT = Path(__file__).parents[3]
PROGRAM = os.environ.get("PROMETHEUS") or shutil.which("prometheus")
DASHBOARD = json.loads(text())
PNG = b"\x89PNG\r\n\x1a\n"


def panel(title: str) -> dict[str, Any]:
    return next(panel for _, panel in plots(DASHBOARD) if panel["title"] == title)


def test_lines_are_named_as_grafana_names_them() -> None:
    assert legend("{{mode}}, {{ kind }}", {"mode": "exact", "kind": "full"}) == "exact, full"
    assert legend("p50", {"mode": "exact"}) == "p50"
    assert legend("{{mode}}", {}) == ""


def test_a_mode_has_one_colour_everywhere() -> None:
    assert style("exact", 0)["color"] == style("exact", 3)["color"] == style("exact, partial", 5)["color"]
    assert len({style(mode, 0)["color"] for mode in MODES}) == len(MODES) == len(get_args(Mode))
    assert style("exact, full", 0)["linestyle"] != style("exact, partial", 0)["linestyle"]
    assert {mode for mode, _ in ASKED} == set(MODES)


def test_every_panel_has_a_unit_that_can_be_drawn() -> None:
    assert {panel.unit for panel in PANELS} <= set(UNITS)


def test_a_panel_asks_for_its_expressions_with_the_variables_filled_in() -> None:
    asked: list[str] = []

    def answer(expr: str, start: float, end: float, step: float) -> list[Line]:
        asked.append(expr)
        return [Line({"mode": "full"}, [start, end], [2.0, 3.0])]

    found = evaluate(SimpleNamespace(range=answer), panel("Requests"), 10.0, 20.0)
    assert set(found) == {"running", "waiting"} and found["running"].values == [2.0, 3.0]
    assert len(asked) == 2 and not any("$" in expr for expr in asked)


def drawn(title: str, lines: dict[str, Line]) -> Any:
    from matplotlib.figure import Figure

    axes = Figure().subplots()
    draw(axes, panel(title), lines, start=100.0)
    return axes


def test_a_panel_shows_the_values_in_its_unit_and_gaps_where_there_are_none() -> None:
    axes = drawn("Drafted tokens that were kept", {"full": Line({}, [100.0, 102.0, 104.0], [0.5, math.nan, 0.25])})
    (line,) = axes.get_lines()
    assert list(line.get_xdata()) == [0.0, 2.0, 4.0]
    assert line.get_ydata()[0] == 50.0 and math.isnan(line.get_ydata()[1])
    assert axes.get_ylabel() == "%" and axes.get_ylim()[0] == 0.0 and 100 <= axes.get_ylim()[1] < 110
    (broken,) = drawn("Tokens a second by mode", {"full": Line({}, [100.0, 102.0, 110.0], [1.0, 2.0, 3.0])}).get_lines()
    assert list(broken.get_xdata()) == [0.0, 2.0, 4.0, 10.0] and math.isnan(broken.get_ydata()[2])
    flat = drawn("Mode exact: fallbacks a round", {"<2K": Line({}, [100.0], [0.0])})
    assert flat.get_ylim() == (0.0, 1.0)
    empty = drawn("Mode exact: confirmed share", {})
    assert [t.get_text() for t in empty.texts] == ["no data"] and not empty.get_lines()


def test_a_picture_is_written_of_all_panels(tmp_path: Path) -> None:
    lines = [{"full": Line({}, [0.0, 1.0], [1.0, 2.0])} for _ in PANELS]
    lines[3] = {}
    picture(DASHBOARD, lines, 0.0, "made up", tmp_path / "p.png")
    assert (tmp_path / "p.png").read_bytes().startswith(PNG)
    assert (ROOT / "docs/grafana.png").read_bytes().startswith(PNG)
    with pytest.raises(ValueError, match="zip"):
        picture(DASHBOARD, lines[1:], 0.0, "one panel has no lines", tmp_path / "q.png")


def test_a_program_that_is_not_there_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="--prometheus 'no-such-program'"):
        Prometheus("no-such-program", "127.0.0.1:1", tmp_path)


@pytest.fixture
def exporter() -> Iterator[tuple[int, ServingMetrics]]:
    """Our counters behind an address that can be scraped."""
    registry, port = CollectorRegistry(), free_port()
    server, thread = start_http_server(port, "127.0.0.1", registry=registry)
    yield port, ServingMetrics("m", 100, registry)
    server.shutdown()
    thread.join()


@pytest.mark.skipif(PROGRAM is None, reason="prometheus is not installed (Debian: package prometheus)")
def test_a_real_prometheus_evaluates_a_panel(exporter: tuple[int, ServingMetrics], tmp_path: Path) -> None:
    port, metrics = exporter
    children = metrics._children("full", "<2K")
    with Prometheus(str(PROGRAM), f"127.0.0.1:{port}", tmp_path) as prometheus:
        start, lines = time.time(), {}
        while not lines and time.time() < start + 60:  # it looks for its targets first
            children[0].inc(10)  # rounds
            children[1].inc(30)  # tokens
            time.sleep(0.2)
            lines = evaluate(prometheus, panel("τ by mode (tokens a round)"), start, time.time())
        (line,) = lines.values()
        assert line.labels == {"mode": "full"}
        assert line.values[-1] == pytest.approx(3.0)
        with pytest.raises(UserError, match="Prometheus refuses"):
            prometheus.range("sum by (", start, time.time(), 1)
        assert prometheus.version()[0].isdigit()


def test_the_chart_is_the_generated_one_and_its_boxes_stand_apart(tmp_path: Path) -> None:
    assert flow_chart.main([str(tmp_path / "made.svg")]) == 0
    made = (tmp_path / "made.svg").read_text()
    assert all(
        line in made
        for box in BOXES.values()
        for line in box.text.replace("'", "&apos;").split("\n")
        if "&" not in line
    )
    assert (ROOT / "docs/choose.svg").read_text().count("<text") == made.count("<text")
    places = [centre(box) for box in BOXES.values()]
    apart = [
        abs(ax - bx) >= WIDE + 1 or abs(ay - by) >= HIGH + 0.5
        for ax, ay in places
        for bx, by in places
        if (ax, ay) != (bx, by)
    ]
    assert all(apart) and len(set(places)) == len(places)


def test_the_chart_ends_in_every_mode_and_asks_nothing_without_answers() -> None:
    leaving = [start for start, _, _ in ARROWS]
    assert {name for name, box in BOXES.items() if box.mode} == set(get_args(Mode))
    for name, box in BOXES.items():
        assert leaving.count(name) == (0 if box.mode else 2), name
    assert {end for _, end, _ in ARROWS} == set(BOXES) - {"same"}
