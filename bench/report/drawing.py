"""How pictures of the report are drawn: print quality, and told apart without colour by marker, dash, grey and hatch."""

import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from longdraft.bench.lengths import tokens_word

DPI = 300
WIDTH, LINE = 7.2, 88  # inches, and characters of a title's line in them at most
GREYS = ("0.0", "0.45", "0.2", "0.6", "0.3")
MARKERS = "osD^vPX*<>hd"
DASHES: tuple[Any, ...] = ("solid", (0, (5, 2)), (0, (1, 1.5)), (0, (5, 1.5, 1, 1.5)), (0, (8, 2, 2, 2)), (0, (3, 4)))
HATCHES = ("", "///", "...", "\\\\\\", "xx", "---", "++", "oo", "**")
FILLS = ("0.25", "0.9", "0.75", "1.0", "0.6", "0.95", "0.85", "0.7", "1.0")
PLAIN = {
    "font.size": 9,
    "axes.titlesize": 9,
    "legend.fontsize": 8,
    "text.parse_math": False,  # a dollar in a name is a dollar
    "axes.spines.top": False,
    "axes.spines.right": False,
}
PANELS = 3  # in a row
MADE_BY = "longdraft bench report"  # in every PNG, by which a later report knows an earlier one's
APART = 1.2  # of two ticks on a logarithmic axis of lengths


@dataclass(frozen=True)
class Picture:
    """One picture: a file's name, its finding, what it shows of what, and how it is drawn into a figure of a size."""

    name: str
    finding: str
    caption: str
    height: float
    draw: Callable[[Any], None]

    @property
    def title(self) -> str:
        """The finding as a sentence begins."""
        return self.finding[:1].upper() + self.finding[1:]


def style(number: int) -> dict[str, Any]:
    """How the number-th line looks."""
    return {
        "color": GREYS[number % len(GREYS)],
        "marker": MARKERS[number % len(MARKERS)],
        "linestyle": DASHES[number % len(DASHES)],
        "markersize": 5,
        "markerfacecolor": "white" if number % 2 else GREYS[number % len(GREYS)],
        "linewidth": 1.3,
    }


def save(picture: Picture, path: Path) -> None:
    """Draw one picture into a PNG."""
    figure = draw(picture)
    part = path.with_name(f".{path.name}.part")
    figure.savefig(part, dpi=DPI, format="png", metadata={"Software": None, "Source": MADE_BY})
    part.replace(path)


def is_ours(path: Path) -> bool:
    """Whether a PNG was drawn here."""
    return MADE_BY.encode() in path.read_bytes()[:4096]


def draw(picture: Picture) -> Any:
    """One picture as a figure of matplotlib."""
    from matplotlib import rc_context
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with rc_context(PLAIN):
        figure = Figure(figsize=(WIDTH, picture.height), layout="constrained")
        FigureCanvasAgg(figure)
        picture.draw(figure)
        _title(figure, picture.title)
    return figure


def _title(figure: Any, words: str) -> None:
    """The finding in as many lines as its width on the page needs."""
    title = figure.suptitle("", fontsize=10, fontweight="bold", x=0.01, ha="left")
    for characters in range(LINE, LINE // 2, -2):
        title.set_text(textwrap.fill(words, characters))
        if title.get_window_extent().width <= 0.98 * figure.bbox.width:
            return


def columns_for(names: Sequence[str], most: int = 3) -> int:
    """As many columns of a legend as its longest name leaves room for."""
    return max(1, min(most, int(WIDTH / (0.75 + 0.062 * max(map(len, names))))))


def legend(figure: Any, axes: Sequence[Any], most: int = 3) -> None:
    """One legend below all panels."""
    handles: dict[str, Any] = {}
    for panel in axes:
        for handle, label in zip(*panel.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    columns = columns_for(list(handles), most)
    figure.legend(
        list(handles.values()), list(handles), loc="outside lower center", ncols=columns, frameon=False, handlelength=4
    )


def lengths_axis(panel: Any, lengths: Sequence[int], label: str) -> None:
    """A logarithmic axis of tokens whose ticks are the lengths that there are."""
    from matplotlib.ticker import FixedLocator, NullFormatter

    low, high = min(lengths), max(lengths)
    panel.set_xscale("log", base=2)
    ticks: list[int] = []
    for length in sorted(set(lengths)):
        if not ticks or length > APART * ticks[-1]:  # 32,000 and 32,768 are one tick
            ticks.append(length)
    panel.xaxis.set_major_locator(FixedLocator(ticks))
    panel.xaxis.set_minor_formatter(NullFormatter())
    panel.xaxis.set_major_formatter(lambda value, _: tokens_word(round(value)))
    panel.set_xlim(low / 1.5, high * 1.5)
    panel.set_xlabel(label)


def panels_of(figure: Any, count: int, share_y: bool = True) -> list[Any]:
    """So many panels, three in a row; ones that are not needed are not there."""
    rows = -(-count // PANELS)
    grid = figure.subplots(rows, min(count, PANELS), squeeze=False, sharey=share_y).flatten()
    for panel in grid[count:]:
        panel.remove()
    return list(grid[:count])


def height_for(panels: int, names: Sequence[str], title: str, each: float = 2.5) -> float:
    """Inches for panels, a title and a legend."""
    lines = textwrap.fill(title, LINE - 8).count("\n") + 1
    return each * -(-panels // PANELS) + 0.3 + 0.2 * lines + 0.2 * -(-len(names) // columns_for(names))


def from_zero(axes: Sequence[Any], highest: float) -> None:
    """One scale from 0 for panels that share it: set behind all of them, since it ends their scaling by themselves."""
    for panel in axes:
        panel.set_ylim(0, 1.08 * highest or 1)
