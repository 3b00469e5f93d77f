"""python -m longdraft.ops.flow_chart docs/choose.svg

Draws which mode to choose: a question a box, an answer an arrow.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

WIDE, HIGH = 4.6, 1.1  # of a box
STEP_X, STEP_Y = 6.2, 2.0


@dataclass(frozen=True)
class Box:
    """A question, or where arrows end a mode; its place in columns and rows."""

    text: str
    column: float
    row: float
    mode: bool = False


BOXES: dict[str, Box] = {
    "same": Box("Must the output be\nthe target's own?", 0, 0),
    "draft": Box("Does a draft gain much\nhere (τ above 1.2)?", 0, 1),
    "short": Box("Batch 1 and less than\n8K of context, on a GPU?", 0, 2),
    "cache": Box("batch × context\nabove 100K tokens?", 0, 3),
    "confirmed": Box("Is half of what views\ngain confirmed?", 0, 4),
    "quality": Box("How much drift may it\nhave? Measure it.", 1, 0),
    "off": Box("off", 1, 1.5, True),
    "full": Box("full", 1, 3.5, True),
    "exact": Box("exact", 0, 5, True),
    "partial": Box("partial", 2, 0, True),
    "sparse": Box("sparse", 2, 1, True),
}
ARROWS: tuple[tuple[str, str, str], ...] = (
    ("same", "draft", "yes"),
    ("same", "quality", "no"),
    ("draft", "off", "no"),
    ("draft", "short", "yes"),
    ("short", "off", "mostly"),
    ("short", "cache", "no"),
    ("cache", "full", "no"),
    ("cache", "confirmed", "yes"),
    ("confirmed", "full", "no"),
    ("confirmed", "exact", "yes"),
    ("quality", "partial", "little"),
    ("quality", "sparse", "more"),
)


def centre(box: Box) -> tuple[float, float]:
    return STEP_X * box.column, -STEP_Y * box.row


def ends(a: Box, b: Box) -> tuple[tuple[float, float], tuple[float, float]]:
    """Where an arrow leaves a box and meets another: below and above if the boxes stand in one column, else at the sides."""
    (ax, ay), (bx, by) = centre(a), centre(b)
    if a.column == b.column:
        return (ax, ay - HIGH / 2), (bx, by + HIGH / 2)
    return (ax + WIDE / 2, ay), (bx - WIDE / 2, by)


def draw(path: Path) -> None:
    """Write the chart; its text is text."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.patches import FancyBboxPatch

    style = {"svg.fonttype": "none", "svg.hashsalt": "choose", "font.size": 10.5, "font.family": "sans-serif"}
    with matplotlib.rc_context(style):
        figure, axes = pyplot.subplots(figsize=(11, 7.5))
        for box in BOXES.values():
            x, y = centre(box)
            shape = "round,pad=0.0,rounding_size=0.3" if box.mode else "square,pad=0"
            look: dict[str, Any] = {"facecolor": "0.9" if box.mode else "white", "edgecolor": "black"}
            axes.add_patch(FancyBboxPatch((x - WIDE / 2, y - HIGH / 2), WIDE, HIGH, boxstyle=shape, **look))
            axes.text(x, y, box.text, ha="center", va="center", weight="bold" if box.mode else "normal")
        for start, end, answer in ARROWS:
            tail, head = ends(BOXES[start], BOXES[end])
            axes.annotate("", head, tail, arrowprops={"arrowstyle": "->", "linewidth": 1.2})
            middle = ((tail[0] + head[0]) / 2, (tail[1] + head[1]) / 2)
            axes.text(*middle, answer, ha="center", va="center", fontsize=9.5, backgroundcolor="white")
        axes.autoscale_view()
        axes.set_aspect("equal")
        axes.axis("off")
        figure.savefig(path, format="svg", bbox_inches="tight", metadata={"Date": None, "Creator": None})
        pyplot.close(figure)


def main(argv: Sequence[str] | None = None) -> int:
    """Draw the file that is named on the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m longdraft.ops.flow_chart", description=(__doc__ or "").split("\n")[2]
    )
    parser.add_argument("file", nargs="?", type=Path, default=Path("docs/choose.svg"))
    draw(parser.parse_args(argv).file)
    return 0


if __name__ == "__main__":
    sys.exit(main())
