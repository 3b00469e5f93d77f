"""What a run's folder says: its two logs and how it was started."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from longdraft.bench.dashboard.panels import Series
from longdraft.bench.dashboard.serving import read_served
from longdraft.errors import UserError
from longdraft.train.tracking import EVALUATIONS, METRICS, read_rows

TAUS = ("tau", "tau_without_bonus")
Points = list[tuple[int, float]]


@dataclass
class RunLog:
    """A run as logged; ``starts`` holds ``run.yaml`` and one for each resumption, in order; ``serving`` what records say of its draft."""

    name: str
    metrics: list[dict[str, Any]]
    evaluations: list[dict[str, Any]]
    starts: list[dict[str, Any]] = field(default_factory=list)
    serving: list[dict[str, Any]] = field(default_factory=list)

    def lines(self, series: Series) -> dict[str, Points]:
        """Points ``(step, value)`` by label; one line, or one for each depth or system, and none without figures."""
        if series.log == "serving":
            return self._served(series.path[0])
        by_depth: dict[int, Points] = {}
        for row in self.metrics if series.log == "metrics" else self.evaluations:
            value: Any = row
            for key in series.path[:-1] if series.deep else series.path:
                value = value.get(key) if isinstance(value, dict) else None
            deep = enumerate(value if isinstance(value, list) else [], 1)
            for depth, number in deep if series.deep else [(0, value)]:
                if isinstance(number, int | float):
                    by_depth.setdefault(depth, []).append((row["step"], float(number)))
        return {f"{series.label} {d}" if d else series.label: points for d, points in sorted(by_depth.items())}

    def _served(self, figure: str) -> dict[str, Points]:
        """A figure of serving by system; of two records that have one point the later one."""
        merged: dict[str, dict[int, float]] = {}
        for record in self.serving:
            for label, points in record["lines"].get(figure, {}).items():
                merged.setdefault(label, {}).update({int(x): float(value) for x, value in points})
        return {label: sorted(points.items()) for label, points in sorted(merged.items())}


def read_run(folder: Path, name: str) -> RunLog:
    """Read a run's folder.

    Raises:
        UserError: no such folder, or one without a logged step.
    """
    metrics = [_figures(row) for row in read_rows(folder / METRICS) if _is_number(row["step"])]
    evaluations = [
        {"step": row["step"], "buckets": buckets}
        for row in read_rows(folder / EVALUATIONS)
        if _is_number(row["step"]) and (buckets := _buckets(row.get("buckets")))
    ]
    if not metrics and not evaluations:
        what = "holds no logged steps" if folder.is_dir() else "does not exist"
        raise UserError(f"run folder {str(folder)!r} {what}: give the folder of a run, which has {METRICS}")
    return RunLog(name, metrics, evaluations, starts(folder), read_served(folder))


def _is_number(value: Any) -> bool:
    """What a figure may be: integers that a float could not hold are damage."""
    return type(value) is float or (type(value) is int and abs(value) < 1 << 63)


def _figures(row: dict[str, Any]) -> dict[str, Any]:
    """A row's numbers, and lists of numbers: whatever else a damaged or foreign log holds is left out."""
    return {
        key: value
        for key, value in row.items()
        if _is_number(value) or (isinstance(value, list) and all(v is None or _is_number(v) for v in value))
    }


def _buckets(found: Any) -> dict[str, Any]:
    """The buckets of an evaluation that say all that is shown of one; τ is None where every output loops."""
    buckets = {}
    for name, values in found.items() if isinstance(found, dict) else ():
        taus = {key: values.get(key) for key in TAUS} if isinstance(values, dict) else {"": ""}
        if not all(tau is None or _is_number(tau) for tau in taus.values()):
            continue
        figures = _figures(values)
        figures = {key: value for key, value in figures.items() if isinstance(value, list) == (key == "reached_depth")}
        if "prompts" in figures and None not in figures.get("reached_depth", []):
            buckets[name] = taus | figures
    return buckets


def starts(folder: Path) -> list[dict[str, Any]]:
    """``run.yaml`` and those of resumptions, in order."""
    resumed = sorted(folder.glob("run-from-*.yaml"), key=lambda path: (len(path.name), path.name))
    found = []
    for path in [folder / "run.yaml", *resumed]:
        try:
            record = json.loads(json.dumps(yaml.safe_load(path.read_text()), default=str))  # dates and the like as text
        except (
            OSError,
            ValueError,
            TypeError,
            RecursionError,
            yaml.YAMLError,
        ):  # a report of the rest is better than none
            continue
        if isinstance(record, dict):
            found.append(record)
    return found


def read_runs(folders: Sequence[Path]) -> list[RunLog]:
    """Several runs, under names that tell them apart: the folders', or the paths if those are alike."""
    names = [folder.resolve().name for folder in folders]
    if len(set(names)) < len(names):
        names = [str(folder) for folder in folders]
    return [read_run(folder, name) for folder, name in zip(folders, names, strict=True)]


def find_runs(parent: Path) -> list[Path]:
    """Folders below a folder that hold logs, by name."""
    return sorted({path.parent for name in (METRICS, EVALUATIONS) for path in parent.glob(f"*/{name}")})
