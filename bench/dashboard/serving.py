"""Evaluations of a run's draft in serving: from records of ``longdraft bench`` into the run's folder, and to its run at W&B.

A record's rows become lines over the context or over the budget, one a system: ``serving.jsonl`` beside the training's logs keeps them.
"""

import json
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from longdraft.bench.dashboard.figures import FIGURES, Lines, lines_of
from longdraft.errors import UserError
from longdraft.train.tracking import EVALUATIONS, METRICS, JsonLines, read_rows
from longdraft.train.wandb_log import WandbRun

SERVING = "serving.jsonl"


def read_record(path: Path) -> dict[str, Any]:
    """What the run's folder keeps of a record.

    Raises:
        UserError: no such file, no record, or none with rows of acceptance, quality or speed.
    """
    try:
        record = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"--record {str(path)!r} cannot be read ({error}): give a record of longdraft bench") from None
    rows = record.get("rows") if isinstance(record, dict) else None
    rows = [row for row in rows if isinstance(row, dict)] if isinstance(rows, list) else []
    try:
        lines = lines_of(rows)
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise UserError(f"--record {str(path)!r} has a damaged row ({error!r}): make the record again") from None
    if not lines:
        raise UserError(
            f"--record {str(path)!r} holds no row of acceptance, quality or speed that passed its checks: give a record of "
            "longdraft bench acceptance, quality or speed"
        )
    kept = {key: record.get(key) for key in ("name", "command", "commit", "date", "device")}
    excluded = sum(not row.get("ok") for row in rows)
    return {**kept, "rows": len(rows), "excluded": excluded, "lines": lines}


def read_served(folder: Path) -> list[dict[str, Any]]:
    """What a run's folder keeps of records; what is damaged is left out."""

    def sound(points: Any) -> bool:
        return isinstance(points, list) and all(
            isinstance(p, list) and len(p) == 2 and all(type(v) in (int, float) and abs(v) < 1e30 for v in p)
            for p in points
        )

    kept = []
    for row in read_rows(folder / SERVING):
        lines = row.get("lines")
        figures = lines.values() if isinstance(lines, dict) else [None]
        if all(isinstance(by, dict) and all(sound(points) for points in by.values()) for by in figures):
            kept.append(row)
    return kept


def add(folder: Path, records: Sequence[Path], start: dict[str, Any], say: Callable[[str], None]) -> None:
    """Keep records in a run's folder and send them to its run at W&B, if the training went there.

    Rows there come behind the training's, since W&B takes no row for a step that it has passed: of a training that is resumed
    afterwards, as many of its first rows are missing in its charts there.

    Args:
        folder: the run's.
        records: files of ``longdraft bench``.
        start: the run's ``run.yaml``.
        say: prints one line for people.
    """
    read = [read_record(path) for path in records]
    there = read_rows(folder / SERVING)
    new = [r for r in read if not any(all(old.get(k) == r[k] for k in r) for old in there)]
    step = max((row["step"] for name in (METRICS, EVALUATIONS, SERVING) for row in read_rows(folder / name)), default=0)
    log, sent = JsonLines(folder / SERVING, step), []
    for record in new:
        points = list(rows_there(record["lines"]))
        sent += [(step + i, point) for i, point in enumerate(points, 1)]
        step += len(points)
        log.write({"step": step, **record})
    say(f"{folder / SERVING} has {len(new)} new records, {len(read) - len(new)} were there")
    settings = start.get("settings") or {}
    asked = (settings.get("tracking") or {}).get("wandb", "off")
    if sent and asked != "off":
        send(folder, settings, asked, sent, say)


def rows_there(lines: dict[str, Lines]) -> Iterator[dict[str, float]]:
    """Rows for W&B, a point each: ``serving/tau/partial_4K`` over ``serving/context_tokens``."""
    for figure, by_label in lines.items():
        for label, points in by_label.items():
            for x, value in points:
                yield {FIGURES[figure][0]: x, f"serving/{figure}/{name_there(label)}": value}


def name_there(label: str) -> str:
    """A line's name in letters, digits and underscores."""
    return re.sub(r"[^A-Za-z0-9]+", "_", label).strip("_") or "unnamed"


def send(
    folder: Path,
    settings: dict[str, Any],
    asked: str,
    rows: list[tuple[int, dict[str, float]]],
    say: Callable[[str], None],
) -> None:
    """Log rows to the training's own run there; offline they lie in its folder, for ``wandb sync``."""
    project, name = (
        settings["tracking"].get("project", "longdraft"),
        (settings.get("run") or {}).get("name", folder.name),
    )
    run = WandbRun(folder, project, name, asked, {}, resumed=True, say=say)
    for figure, (x, _, _) in FIGURES.items():
        run.define(f"serving/{figure}/*", x)
    for step, row in rows:
        run.log(step, row)
    run.finish()
