"""python -m longdraft.ops.grafana ops/grafana.json

Writes the dashboard of a server's metrics, for Grafana to import. Grafana's own SDK builds it from the types of the published schema.
"""

import json
import sys
from collections.abc import Sequence
from itertools import count
from pathlib import Path
from typing import Any

from grafana_foundation_sdk.builders import common, dashboard, prometheus, timeseries
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.common import LegendDisplayMode, LegendPlacement
from grafana_foundation_sdk.models.dashboard import DataSourceRef, VariableRefresh

from longdraft.ops.panels import Panel, sections
from longdraft.ops.written import write_made
from longdraft.serve.metrics import SERIES

SOURCE = DataSourceRef(type_val="prometheus", uid="${source}")
WIDE, HIGH = 6, 8  # four panels in Grafana's grid of 24 columns


def plot(panel: Panel) -> timeseries.Panel:
    """One panel, without its place."""
    built = (
        timeseries.Panel()
        .title(panel.title)
        .description(panel.read)
        .datasource(SOURCE)
        .unit(panel.unit)
        .span(WIDE)
        .height(HIGH)
        .span_nulls(False)
        .legend(
            common.VizLegendOptions()
            .display_mode(LegendDisplayMode.LIST)
            .placement(LegendPlacement.BOTTOM)
            .show_legend(True)
        )
    )
    if panel.least is not None:
        built = built.min(panel.least)
    if panel.most is not None:
        built = built.max(panel.most)
    for letter, query in zip("ABCDE", panel.queries, strict=False):
        built = built.with_target(
            prometheus.Dataquery().ref_id(letter).expr(query.expr).legend_format(query.legend).range()
        )
    return built


def build() -> dashboard.Dashboard:
    """The dashboard: a row for each section, and the choice of a data source and of models."""
    built = (
        dashboard.Dashboard("longdraft serving")
        .uid("longdraft-serving")
        .description("Drafts, views and their cost, of servers with --enable-metrics.")
        .tags(["longdraft"])
        .readonly()
        .refresh("10s")
        .time("now-30m", "now")
        .with_variable(dashboard.DatasourceVariable("source").label("Prometheus").type("prometheus"))
        .with_variable(
            dashboard.QueryVariable("model")
            .label("Model")
            .datasource(SOURCE)
            .query(f"label_values({SERIES[0].exported}, model_name)")
            .refresh(VariableRefresh.ON_TIME_RANGE_CHANGED)
            .multi(True)
            .include_all(True)
            .all_value(".*")
        )
    )
    numbers = count(1)  # Grafana wants every panel to have one of its own
    for name, panels in sections().items():
        built = built.with_row(dashboard.Row(name).id(next(numbers)))
        for panel in panels:
            built = built.with_panel(plot(panel).id(next(numbers)))
    return built


def trimmed(made: dict[str, Any]) -> dict[str, Any]:
    """Without what the SDK writes and the schema does not have."""
    made.pop("style")
    for variable in made["templating"]["list"]:
        for name in ("auto", "auto_count", "auto_min", "id"):
            variable.pop(name)
    return made


def text() -> str:
    """The dashboard as Grafana's JSON."""
    made = trimmed(json.loads(JSONEncoder().encode(build().build())))
    return json.dumps(made, sort_keys=True, indent=2, ensure_ascii=False) + "\n"


def main(argv: Sequence[str] | None = None) -> int:
    """Write the file that is named on the command line."""
    return write_made(argv, "longdraft.ops.grafana", __doc__, Path("ops/grafana.json"), text)


if __name__ == "__main__":
    sys.exit(main())
