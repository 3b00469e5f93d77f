"""Figures of serving: which there are in the rows of ``longdraft bench``'s records, and the lines that they make."""

import math
from collections.abc import Iterable
from typing import Any

from longdraft.bench.lengths import lengths_in

CONTEXT, BUDGET = "serving/context_tokens", "serving/budget_tokens"
Lines = dict[str, list[list[float]]]

# Figure -> its x at W&B, its key in a row, and the key of its weight where rows of several tasks fall on one point.
FIGURES: dict[str, tuple[str, str, str]] = {
    "tau": (CONTEXT, "tau_micro", "verifications"),
    "tau_without_bonus": (CONTEXT, "tau_micro_no_bonus", "verifications"),
    "tok_s": (CONTEXT, "tok_s", "repeats"),
    "quality_own": (BUDGET, "score_own", "n"),
    "quality_reference": (BUDGET, "score_reference", "n"),
}


def tokens_of(bucket: Any) -> float | None:
    """Tokens of a context: of a number, of "8K", or of a bucket's upper end; None: it says none."""
    if isinstance(bucket, int | float):
        return float(bucket)
    found = lengths_in(str(bucket))
    return found[-1] if found else None


def place(figure: str, row: dict[str, Any]) -> tuple[str, float] | None:
    """The line that a row's figure belongs to, and its x; None: it has no such figure."""
    _, key, weight = FIGURES[figure]
    if not row.get("ok") or not isinstance(row.get(key), int | float) or not row.get(weight):
        return None  # rows of quality have a τ too, without verifications: records of acceptance say it better
    system = str(row.get("system"))
    label = str((row.get("settings") or {}).get("label") or row.get("label") or system)
    if figure == "tok_s":
        if "batch" not in row:  # a row of load: its speed goes by the rate
            return None
        return f"{label}, batch {row['batch']}", float(row["context"])
    x = row.get("budget") if FIGURES[figure][0] == BUDGET else tokens_of(row.get("bucket"))
    return None if not isinstance(x, int | float) else (system if FIGURES[figure][0] == BUDGET else label, float(x))


def lines_of(rows: Iterable[dict[str, Any]]) -> dict[str, Lines]:
    """Points ``[x, value]`` by figure and line, in order of x; rows that fall on one point are averaged by their weight.

    Raises:
        ValueError: a figure, its weight or its place is no finite number. Damaged rows raise what reading them does.
    """
    rows, found = list(rows), {}
    for figure, (_, key, weight) in FIGURES.items():
        sums: dict[tuple[str, float], tuple[float, float]] = {}
        for row in rows:
            if (where := place(figure, row)) is not None:
                share = float(row[weight])
                if not (share > 0 and math.isfinite(share) and math.isfinite(row[key]) and math.isfinite(where[1])):
                    raise ValueError(f"{key}={row[key]}, {weight}={share} at {where[1]}")
                total, whole = sums.get(where, (0.0, 0.0))
                sums[where] = total + share * float(row[key]), whole + share
        lines: Lines = {}
        for (label, x), (total, whole) in sorted(sums.items()):
            lines.setdefault(label, []).append([x, total / whole])
        if lines:
            found[figure] = lines
    return found
