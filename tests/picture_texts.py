"""Texts of a picture of bench.report: which of them overlap, or stand outside of it."""

from itertools import combinations
from typing import Any

from longdraft.bench.report.drawing import Picture, draw


def texts(figure: Any) -> list[tuple[str, Any]]:
    """All texts of a figure that are seen, with their boxes in pixels."""
    from matplotlib.text import Text

    figure.canvas.draw()
    unseen = {label for axes in figure.axes for label in ticks_outside(axes)}
    found = []
    for artist in figure.findobj(Text):
        if artist.get_visible() and artist.get_text().strip() and artist not in unseen:
            box = artist.get_window_extent()
            if box.width > 0:
                found.append((artist.get_text(), box))
    return found


def ticks_outside(axes: Any) -> list[Any]:
    """Labels of ticks that matplotlib keeps beyond an axis's ends, and does not draw."""
    found = []
    for axis in (axes.xaxis, axes.yaxis):
        low, high = sorted(axis.get_view_interval())
        ticks = [*axis.majorTicks, *axis.minorTicks]
        found += [tick.label1 for tick in ticks if not low <= tick.get_loc() <= high]
    return found


def faults(picture: Picture) -> list[str]:
    """Texts that overlap, or stand outside of the picture."""
    figure = draw(picture)
    found, page = texts(figure), figure.bbox
    out = [text for text, box in found if box.x0 < -1 or box.y0 < -1 or box.x1 > page.x1 + 1 or box.y1 > page.y1 + 1]
    crossed = [
        f"{a!r} and {b!r}"
        for (a, one), (b, two) in combinations(found, 2)
        if min(one.x1, two.x1) - max(one.x0, two.x0) > 1 and min(one.y1, two.y1) - max(one.y0, two.y0) > 1
    ]
    return out + crossed
