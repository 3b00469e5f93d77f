"""What expressions of dashboards and alerts read: series, and labels that they match or sum by."""

from dataclasses import dataclass, field
from typing import Any

import promql_parser

from longdraft.ops.picture import filled


@dataclass
class Read:
    """Names of the series of an expression, and of the labels that it uses."""

    series: set[str] = field(default_factory=set)
    labels: set[str] = field(default_factory=set)


def read(expr: str) -> Read:
    """Parse an expression, Grafana's variables filled in; ValueError: it is none."""
    found = Read()

    def visit(node: Any) -> None:
        if isinstance(node, promql_parser.VectorSelector):
            matchers = {matcher.name: matcher.value for matcher in node.matchers.matchers}
            found.series.add(node.name or matchers.pop("__name__").replace("[:_]", ":"))
            found.labels |= set(matchers)
        if isinstance(node, promql_parser.AggregateExpr) and node.modifier is not None:
            found.labels |= set(node.modifier.labels)

    promql_parser.walk(promql_parser.parse(filled(expr)), visit)
    return found
