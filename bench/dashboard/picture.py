"""Draws a panel with matplotlib: into the HTML report as SVG, or all panels into one PNG."""

import io
import math
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

from longdraft.bench.dashboard.logs import Points, RunLog
from longdraft.bench.dashboard.panels import STEP, Panel, sections

# Colours that differ in hue and lightness (Okabe and Ito's) and are seen on white and on near-black.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#8C6BB1", "#7F7F7F")
DASHES = ("solid", "dashed", "dotted", "dashdot", (0, (5, 1, 1, 1, 1, 1)), (0, (1, 3)), (0, (8, 3)))
MARKERS = "osD^vPX"
INK, FAINT = "#010203", "#040506"  # stand for the page's own colours in an SVG
SHORT = 25  # a line of fewer points shows each of them
COLUMNS = 4


def present(panel: Panel, runs: Sequence[RunLog]) -> bool:
    """Whether any run has a figure for the panel."""
    return any(run.lines(series) for run in runs for series in panel.series)


def run_colours(runs: Sequence[RunLog]) -> list[tuple[str, str]]:
    """Name and colour of each run, where there are several; a run alone gives its colours to the lines."""
    return [(run.name, COLOURS[i % len(COLOURS)]) for i, run in enumerate(runs)] if len(runs) > 1 else []


def draw(axes: Any, panel: Panel, runs: Sequence[RunLog]) -> None:
    """Lines of all runs. Several runs: a colour each, lines told by dashes; one run: lines told by both."""
    labels = _labels(panel, runs)
    scale = 100.0 if panel.unit == "%" else 1.0
    lowest, highest = math.inf, -math.inf
    for i, run in enumerate(runs):
        for label, points in ((label, p) for series in panel.series for label, p in run.lines(series).items()):
            style = _style(i if len(runs) > 1 else labels[label], labels[label], points)
            values = [value * scale for _, value in points]
            axes.plot([step for step, _ in points], values, **style)
            finite = [value for value in values if math.isfinite(value)]
            lowest, highest = min([lowest, *finite]), max([highest, *finite])
    _scale(axes, panel, lowest, highest)
    axes.set_title(panel.title, loc="left")
    axes.set_ylabel(panel.unit)
    axes.set_xlabel(panel.x_title)
    axes.grid(True)
    axes.locator_params(axis="x", nbins=6, integer=True)
    if len(labels) > 1 or panel.x != STEP:  # a system is named also where it is alone
        _legend(axes, labels, several=len(runs) > 1)


def _labels(panel: Panel, runs: Sequence[RunLog]) -> dict[str, int]:
    """Of all lines that have figures, in order, each with its place in the list: a bucket looks alike in every panel."""
    places: dict[str, int] = {}
    for i, series in enumerate(panel.series):
        for run in runs:
            for label in run.lines(series):
                places[label] = i + (int(label.rsplit(" ", 1)[1]) - 1 if series.deep and panel.x == STEP else 0)
    if panel.x != STEP:
        return {label: i for i, label in enumerate(sorted(places))}
    return dict(sorted(places.items(), key=lambda item: item[1]))


def _style(colour: int, dash: int, points: Points) -> dict[str, Any]:
    style: dict[str, Any] = {"color": COLOURS[colour % len(COLOURS)], "linestyle": DASHES[dash % len(DASHES)]}
    if len(points) < SHORT:  # smaller from line to line, so that equal ones show
        style |= {"marker": MARKERS[dash % len(MARKERS)], "markersize": max(6.0 - dash, 2.5)}
    return style


def _scale(axes: Any, panel: Panel, lowest: float, highest: float) -> None:
    """Logarithmic where figures span much, from the panel's floor otherwise; numbers are written out."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.6g}" if value >= 1 else f"{value:.4g}"))
    if panel.log_scale:
        if lowest > 0 and highest > 4 * lowest:
            axes.set_yscale("log")
            axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
            axes.yaxis.set_minor_formatter(NullFormatter())
    elif lowest >= panel.floor:
        room = 1.08 * (highest - panel.floor) or 1.0
        axes.set_ylim(panel.floor, panel.floor + (min(room, 103.0) if panel.unit == "%" else room))


def _legend(axes: Any, labels: dict[str, int], several: bool) -> None:
    """Below the axes, where it covers no figure."""
    from matplotlib.lines import Line2D

    handles = []
    for place in labels.values():
        style = _style(place, place, [])
        handles.append(Line2D([], [], **(style | {"color": INK} if several else style)))
    axes.legend(
        handles, list(labels), loc="upper center", bbox_to_anchor=(0.5, -0.2), ncols=min(len(labels), 5), frameon=False
    )


@contextmanager
def canvas(columns: int, rows: int, ink: str, faint: str) -> Iterator[tuple[Any, list[Any]]]:
    """A figure with its axes; nothing of a run's own text is read as a formula."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    style = {
        "font.size": 9, "axes.titlesize": 10, "axes.labelsize": 8.5, "legend.fontsize": 8, "legend.handlelength": 2.6,
        "lines.linewidth": 1.4, "axes.spines.top": False, "axes.spines.right": False, "text.parse_math": False,
        "svg.fonttype": "none", "text.color": ink, "axes.labelcolor": ink, "axes.titlecolor": ink, "xtick.color": ink,
        "ytick.color": ink, "axes.edgecolor": ink, "grid.color": faint, "grid.linewidth": 0.6,
    }  # fmt: skip
    with matplotlib.rc_context(style):
        figure, axes = pyplot.subplots(
            rows, columns, figsize=(4.3 * columns, 3.1 * rows), layout="constrained", squeeze=False
        )
        try:
            yield figure, list(axes.flat)
        finally:
            pyplot.close(figure)


def svg(panel: Panel, runs: Sequence[RunLog]) -> str:
    """A panel as an SVG element: its text is text, in the page's colours."""
    import matplotlib

    # Names inside the elements come from the title, so that those of one page differ and a page is repeatable.
    with matplotlib.rc_context({"svg.hashsalt": panel.title}), canvas(1, 1, INK, FAINT) as (figure, axes):
        draw(axes[0], panel, runs)
        axes[0].set_title("", loc="left")  # the page has it
        out = io.StringIO()
        figure.savefig(out, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    text = out.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r' (width|height)="[\d.]+pt"', "", text, count=2)  # it fills its place instead
    return text.replace(INK, "var(--ink)").replace(FAINT, "var(--faint)")


def png(runs: Sequence[RunLog], path: Path) -> None:
    """All panels that have figures, in the list's order, in one picture."""
    groups = [(name, [p for p in panels if present(p, runs)]) for name, panels in sections().items()]
    groups = [(name, panels) for name, panels in groups if panels]
    rows = sum(-(-len(panels) // COLUMNS) for _, panels in groups)
    with canvas(COLUMNS, rows, "black", "0.88") as (figure, axes):
        free = iter(axes)
        for name, panels in groups:
            row_ends = -len(panels) % COLUMNS
            for i, (panel, ax) in enumerate(zip(panels, free, strict=False)):
                draw(ax, panel, runs)
                if i == 0:
                    ax.annotate(name, (0, 1), (0, 24), "axes fraction", "offset points", fontsize=12, weight="bold")
            for ax in islice(free, row_ends):
                ax.set_visible(False)
        _name_runs(figure, runs)
        part = path.with_name(path.name + ".part")
        figure.savefig(part, dpi=110, format="png")
        part.replace(path)


def _name_runs(figure: Any, runs: Sequence[RunLog]) -> None:
    from matplotlib.lines import Line2D

    title = "longdraft training"
    if named := run_colours(runs):
        handles = [Line2D([], [], color=colour, linewidth=3) for _, colour in named]
        names = [name for name, _ in named]
        figure.legend(
            handles, names, title=title, title_fontsize=13, loc="outside upper center", ncols=4, frameon=False
        )
    else:
        figure.suptitle(f"{title}: {runs[0].name}", fontsize=13)
