"""What a run's folder says: its two logs and how it was started."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from longdraft.bench.dashboard.panels import Series
from longdraft.errors import UserError
from longdraft.train.tracking import EVALUATIONS, METRICS, read_rows

Points = list[tuple[int, float]]


@dataclass
class RunLog:
    """A run as logged; ``starts`` holds ``run.yaml`` and one for each resumption, in order."""

    name: str
    metrics: list[dict[str, Any]]
    evaluations: list[dict[str, Any]]
    starts: list[dict[str, Any]] = field(default_factory=list)

    def lines(self, series: Series) -> dict[str, Points]:
        """Points ``(step, value)`` by label; one line, or one for each depth, and none without figures."""
        by_depth: dict[int, Points] = {}
        for row in self.metrics if series.log == "metrics" else self.evaluations:
            value: Any = row
            for key in series.path[:-1] if series.deep else series.path:
                value = value.get(key) if isinstance(value, dict) else None
            for depth, number in enumerate(value or [], 1) if series.deep else [(0, value)]:
                if isinstance(number, int | float):
                    by_depth.setdefault(depth, []).append((row["step"], float(number)))
        return {f"{series.label} {d}" if d else series.label: points for d, points in sorted(by_depth.items())}


def read_run(folder: Path, name: str) -> RunLog:
    """Read a run's folder.

    Raises:
        UserError: no such folder, or one without a logged step.
    """
    metrics, evaluations = (
        [row for row in read_rows(folder / file) if isinstance(row, dict) and keys <= row.keys()]
        for file, keys in ((METRICS, {"step"}), (EVALUATIONS, {"step", "buckets"}))
    )
    if not metrics and not evaluations:
        what = "holds no logged steps" if folder.is_dir() else "does not exist"
        raise UserError(f"run folder {str(folder)!r} {what}: give the folder of a run, which has {METRICS}")
    return RunLog(name, metrics, evaluations, _starts(folder))


def _starts(folder: Path) -> list[dict[str, Any]]:
    resumed = sorted(folder.glob("run-from-*.yaml"), key=lambda path: (len(path.name), path.name))
    found = []
    for path in [folder / "run.yaml", *resumed]:
        try:
            record = yaml.safe_load(path.read_text())
        except (OSError, ValueError, yaml.YAMLError):  # a report of what is there is better than none
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
