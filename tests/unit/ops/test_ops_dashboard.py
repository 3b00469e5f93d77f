"""Grafana's file: as generated, nothing in it that the published schema does not have, and expressions that name what servers export."""

import json
from pathlib import Path
from typing import Any

import pytest
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.dashboard import Dashboard
from promql import read

from longdraft.ops import grafana
from longdraft.ops.grafana import text, trimmed
from longdraft.ops.panels import EXPORTED, PANELS, Panel, sections
from longdraft.ops.picture import plots
from longdraft.serve.metrics import SERIES

ROOT = Path(__file__).parents[3]
SHOWN: dict[str, Any] = json.loads(text())
LABELS = {"model_name", "mode", "context", "kind", "le"}


def test_the_file_is_the_generated_one(tmp_path: Path) -> None:
    assert grafana.main([str(tmp_path / "made.json")]) == 0
    kept = (ROOT / "ops/grafana.json").read_text()
    assert (tmp_path / "made.json").read_text() == kept, "run python -m longdraft.ops.grafana"


def through_the_schema(data: dict[str, Any]) -> dict[str, Any]:
    """What is left of a dashboard in the SDK's types, which Grafana makes from its schema."""
    return trimmed(json.loads(JSONEncoder().encode(Dashboard.from_json(data))))


def test_the_published_schema_knows_every_field() -> None:
    assert through_the_schema(SHOWN) == SHOWN
    foreign = json.loads(text())
    foreign["panels"][1]["fieldConfig"]["defaults"]["minimum"] = 1
    assert through_the_schema(foreign) != foreign


def test_panels_have_numbers_and_places_of_their_own() -> None:
    assert len({panel["id"] for panel in SHOWN["panels"]}) == len(SHOWN["panels"]) == len(PANELS) + len(sections())
    taken: set[tuple[int, int]] = set()
    for panel in SHOWN["panels"]:
        at = panel["gridPos"]
        cells = {(at["x"] + i, at["y"] + j) for i in range(at["w"]) for j in range(at["h"])}
        assert not cells & taken and max(x for x, _ in cells) < 24
        taken |= cells


def test_the_file_has_the_list_of_panels_in_its_order() -> None:
    found = [(row, panel["title"], [t["expr"] for t in panel["targets"]]) for row, panel in plots(SHOWN)]
    assert found == [(p.section, p.title, [q.expr for q in p.queries]) for p in PANELS]


@pytest.mark.parametrize("panel", PANELS, ids=lambda panel: panel.title)
def test_expressions_name_series_of_the_server(panel: Panel) -> None:
    for query in panel.queries:
        found = read(query.expr)
        assert found.series and found.series <= EXPORTED, query.expr
        assert "model_name" in found.labels <= LABELS, query.expr


def test_every_series_of_ours_is_in_a_panel() -> None:
    shown = {name for panel in PANELS for query in panel.queries for name in read(query.expr).series}
    assert shown == EXPORTED >= {series.exported for series in SERIES}


def test_a_misspelt_expression_would_be_seen() -> None:
    assert read('sum by (mod) (rate(longdraft_token_total{a="b"}[1m]))').series == {"longdraft_token_total"}
    assert read('sum by (mod) (rate(longdraft_token_total{a="b"}[1m]))').labels == {"mod", "a"}
    with pytest.raises(ValueError, match="invalid promql"):
        read("sum by (mode (rate(x[1m])))")


def test_variables_are_those_of_the_expressions() -> None:
    assert {variable["name"] for variable in SHOWN["templating"]["list"]} == {"source", "model"}
    assert "label_values(longdraft_rounds_total, model_name)" in text()
