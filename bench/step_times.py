"""python -m longdraft.bench.step_times eager=FILE graphs=FILE --out breakdown.png

Where decode steps spend their time, from the lines that ``step_times`` has the server write: a table and a picture.
"""

import argparse
import json
import statistics
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from longdraft.bench.record import make_record, write_record
from longdraft.errors import UserError
from longdraft.serve.step_clock import PHASES

PARTS = (*PHASES, "host gaps")
STEP = {"batch", "wall_ms", "gap_ms", "host_ms", "device_ms"}  # what a line says
SKIPPED = 3  # first steps of a batch size, in which things are built
HATCHES = ("", "//", "", "..", "xx", "", "\\\\")  # for readers without colours
LABEL = {"facecolor": "white", "edgecolor": "none", "alpha": 0.75, "pad": 0.8}
FEWEST = 5  # steps beside these without which a batch size says nothing: one that was passed through


def breakdown(lines: Sequence[dict[str, Any]]) -> dict[int, dict[str, float]]:
    """Median milliseconds of each part by batch size, and ``step``, the time from step to step.

    Device time of a phase where there is any, else the host's. ``host gaps`` is what no phase accounts for: the time from
    step to step less the phases.
    """
    by_batch: dict[int, list[dict[str, float]]] = defaultdict(list)
    for line in lines:
        if line["gap_ms"] is None:
            continue
        parts = {name: line["device_ms"].get(name, ms) for name, ms in line["host_ms"].items()}
        step = line["wall_ms"] + line["gap_ms"]
        by_batch[line["batch"]].append({**parts, "host gaps": max(0.0, step - sum(parts.values())), "step": step})
    return {
        batch: {
            name: statistics.median(s.get(name, 0.0) for s in steps[SKIPPED:])
            for name in (*PARTS, "step")
            if any(name in s for s in steps)
        }
        for batch, steps in sorted(by_batch.items())
        if len(steps) >= SKIPPED + FEWEST
    }


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Steps in a file that may end within a line.

    Raises:
        UserError: no such file, or a line that is no step.
    """
    try:
        lines = path.read_text().splitlines()
    except OSError as error:
        raise UserError(
            f"{str(path)!r} cannot be read ({error.strerror}): give NAME=FILE, a file of step_times"
        ) from None
    found = []
    for number, text in enumerate(lines, 1):
        try:
            line = json.loads(text)
        except ValueError:
            continue
        if not isinstance(line, dict) or not line.keys() >= STEP:
            raise UserError(f"{path}:{number} is no step of a server: give NAME=FILE, a file of step_times")
        found.append(line)
    return found


def write_lines(path: Path, lines: Sequence[dict[str, Any]]) -> None:
    """Steps as :func:`read_lines` reads them."""
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def seen(columns: dict[str, dict[str, float]]) -> list[str]:
    """Parts that there are."""
    return [part for part in PARTS if any(part in column for column in columns.values())]


def table(columns: dict[str, dict[str, float]]) -> str:
    """Markdown: one row a part, one column a case."""
    rows = [["ms a step", *columns], ["---"] * (len(columns) + 1)]
    for part in (*seen(columns), "step"):
        rows.append([part, *(f"{column.get(part, 0.0):.2f}" for column in columns.values())])
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def picture(columns: dict[str, dict[str, float]], path: Path) -> None:
    """Stacked bars, one a case, from left to right; what a part takes stands in it where there is room."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(11, 0.42 * len(columns) + 1.2), layout="constrained")
    before, longest = [0.0] * len(columns), max(column["step"] for column in columns.values())
    names = [name.replace("\n", ", ") for name in columns]
    for number, part in enumerate(seen(columns)):
        widths = [column.get(part, 0.0) for column in columns.values()]
        bars = axis.barh(
            names, widths, left=before, label=part, edgecolor="white", hatch=HATCHES[number % len(HATCHES)]
        )
        texts = [f"{width:.1f}" if width > 0.035 * longest else "" for width in widths]
        axis.bar_label(bars, texts, label_type="center", fontsize=8, color="black", bbox=LABEL)
        before = [b + w for b, w in zip(before, widths, strict=True)]
    axis.invert_yaxis()
    axis.set_xlabel("ms a scheduler step (medians)")
    axis.legend(loc="lower right")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table and draw the picture of one or more files."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", nargs="+", metavar="NAME=FILE", help="what a server wrote to its step_times")
    parser.add_argument("--out", type=Path, required=True, help="picture")
    parser.add_argument("--record", type=Path, help="write the table as a record here")
    args = parser.parse_args(argv)
    columns: dict[str, dict[str, float]] = {}
    for name, _, path in (word.partition("=") for word in args.files):
        columns |= {f"{name}\nbatch {b}": parts for b, parts in breakdown(read_lines(Path(path))).items()}
    if not columns:
        raise UserError(f"no file has {SKIPPED + FEWEST} steps of one batch size: let the server run longer")
    print(table({name.replace("\n", ", "): parts for name, parts in columns.items()}))
    picture(columns, args.out)
    if args.record is not None:
        figures = {
            f"{name} {part}".replace("\n", " ").replace(" ", "_"): round(ms, 3)
            for name, parts in columns.items()
            for part, ms in parts.items()
        }
        write_record(make_record("step_times", {"unit": "ms"}, figures, {}), args.record)
    return 0


if __name__ == "__main__":
    sys.exit(main())
