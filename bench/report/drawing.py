"""Pictures of the report: print quality, and told apart without colour by marker, dash, grey and hatch."""

import textwrap
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from longdraft.bench.report import findings
from longdraft.bench.report.derive import (
    BASELINES,
    LOSSLESS,
    Speedup,
    Tradeoff,
    buckets_of,
    budget_curves,
    front,
    gains,
    mean_score,
    names_of,
    speedups,
    steps_of,
    tradeoffs,
)
from longdraft.bench.report.reading import Book
from longdraft.bench.report.rows import Acceptance, Load, Quality, Row, Steps, tokens_word

DPI = 300
WIDTH, LINE = 7.2, 88  # inches, and characters of a title's line in them at most
A = TypeVar("A", Acceptance, Quality)
GREYS = ("0.0", "0.45", "0.2", "0.6", "0.3")
MARKERS = "osD^vPX*<>hd"
DASHES: tuple[Any, ...] = ("solid", (0, (5, 2)), (0, (1, 1.5)), (0, (5, 1.5, 1, 1.5)), (0, (8, 2, 2, 2)), (0, (3, 4)))
HATCHES = ("", "///", "...", "\\\\\\", "xx", "---", "++", "oo", "**")
FILLS = ("0.25", "0.9", "0.75", "1.0", "0.6", "0.95", "0.85", "0.7", "1.0")
PLAIN = {
    "font.size": 9,
    "axes.titlesize": 9,
    "legend.fontsize": 8,
    "axes.spines.top": False,
    "axes.spines.right": False,
}
ORDER = ("draft", "partial", "verify", "select", "sample", "keep", "gap")  # parts of a step that come first
PANELS = 3  # in a row
BARS = 24  # of steps in one picture; more are a picture a batch
APART = 1.2  # of two ticks on a logarithmic axis of lengths
INSIDE = 0.06  # share of the longest bar from which a part has its figure in it


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


def pictures(book: Book) -> list[Picture]:
    """All pictures that the rows have figures for."""
    found = [speed_picture(book, baseline, each) for baseline, each in speedups(book).items() if gains(each)]
    if rows := _many(book.of(Acceptance)):
        found.append(acceptance_picture(book, rows))
    if any(row.view_tokens and row.system not in LOSSLESS for row in book.of(Quality)):
        found.append(quality_picture(book, book.of(Quality)))
    case, baseline, points = tradeoffs(book)
    if points:
        found.append(pareto_picture(book, case, baseline, points))
    if steps := steps_of(book):
        batches = sorted({step.batch for step in steps})
        groups = [[s for s in steps if s.batch == b] for b in batches] if len(steps) > BARS else [steps]
        found += [steps_picture(book, own, f"steps_b{own[0].batch}" if len(groups) > 1 else "steps") for own in groups]
    if loads := book.of(Load):
        found.append(load_picture(book, loads))
    return found


def save(picture: Picture, path: Path) -> None:
    """Draw one picture into a PNG."""
    figure = draw(picture)
    part = path.with_name(f".{path.name}.part")
    figure.savefig(part, dpi=DPI, format="png", metadata={"Software": None})
    part.replace(path)


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


def _columns(names: Sequence[str], most: int = 3) -> int:
    """As many columns of a legend as its longest name leaves room for."""
    return max(1, min(most, int(WIDTH / (0.75 + 0.062 * max(map(len, names))))))


def _legend(figure: Any, axes: Sequence[Any], most: int = 3) -> None:
    """One legend below all panels."""
    handles: dict[str, Any] = {}
    for panel in axes:
        for handle, label in zip(*panel.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    columns = _columns(list(handles), most)
    figure.legend(
        list(handles.values()), list(handles), loc="outside lower center", ncols=columns, frameon=False, handlelength=4
    )


def _lengths(panel: Any, lengths: Sequence[int], label: str) -> None:
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


def _panels(figure: Any, count: int, share_y: bool = True) -> list[Any]:
    """So many panels, three in a row; ones that are not needed are not there."""
    rows = -(-count // PANELS)
    grid = figure.subplots(rows, min(count, PANELS), squeeze=False, sharey=share_y).flatten()
    for panel in grid[count:]:
        panel.remove()
    return list(grid[:count])


def _height(panels: int, names: Sequence[str], title: str, each: float = 2.5) -> float:
    """Inches for panels, a title and a legend."""
    lines = textwrap.fill(title, LINE - 8).count("\n") + 1
    return each * -(-panels // PANELS) + 0.3 + 0.2 * lines + 0.2 * -(-len(names) // _columns(names))


def _from_zero(axes: Sequence[Any], highest: float) -> None:
    """One scale from 0 for panels that share it: set behind all of them, since it ends their scaling by themselves."""
    for panel in axes:
        panel.set_ylim(0, 1.08 * highest)


def _many(rows: list[A]) -> list[A]:
    """Rows of enough answers to be looked at; all where none has."""
    return [row for row in rows if row.n >= findings.FEWEST] or rows


def _numbers(rows: Sequence[Row]) -> dict[tuple[str, str], tuple[int, str]]:
    """A style and a name for each label of each record."""
    return {key: (number, name) for number, (key, name) in enumerate(names_of(rows).items())}


def speed_picture(book: Book, baseline: str, found: Sequence[Speedup]) -> Picture:
    """Speedup against context, a panel for each batch; bars of spread where repeats have one."""
    finding, base = findings.speed(baseline, found), BASELINES[baseline]
    rows = [each.row for each in found]
    shown = gains(found)
    styles = _numbers([each.row for each in shown])
    batches = sorted({row.batch for row in rows})

    def paint(figure: Any) -> None:
        axes = _panels(figure, len(batches))
        for panel, batch in zip(axes, batches, strict=True):
            for key, (number, name) in styles.items():
                own = [e for e in shown if (e.row.name, e.row.source) == key and e.row.batch == batch]
                own.sort(key=lambda each: each.row.context)
                if own:
                    bars = [each.spread or 0.0 for each in own]
                    panel.errorbar(
                        [e.row.context for e in own], [e.value for e in own], yerr=bars if any(bars) else None, label=name,
                        capsize=2, **style(number),
                    )  # fmt: skip
            panel.axhline(1, color="black", linewidth=0.8)
            panel.set_title(f"batch {batch}")
            _lengths(panel, [row.context for row in rows], "context (tokens)")
        _from_zero(axes, max(each.value + (each.spread or 0.0) for each in found))
        axes[0].set_ylabel(f"speed of decoding,\ntimes {base}")
        _legend(figure, axes)

    forced = sorted({row.forced_accept for row in rows if row.forced_accept})
    told = (
        f" Acceptance was forced to {', '.join(f'{f:g}' for f in forced)} tokens a verification, which proves time only."
        if forced
        else ""
    )
    caption = f"The line at 1 is {base} of the same record.{told} {book.where(rows)}."
    return Picture(
        f"speedup_{baseline}",
        finding,
        caption,
        _height(len(batches), [name for _, name in styles.values()], finding),
        paint,
    )


def acceptance_picture(book: Book, rows: Sequence[Acceptance]) -> Picture:
    """τ against context, a panel for each task: with the bonus token, and thinner without."""
    finding, styles, buckets = findings.acceptance(rows), _numbers(rows), buckets_of(rows)
    tasks = list(dict.fromkeys(row.task for row in rows))

    def paint(figure: Any) -> None:
        axes = _panels(figure, len(tasks))
        for panel, task in zip(axes, tasks, strict=True):
            for key, (number, name) in styles.items():
                own = [row for row in rows if (row.name, row.source) == key and row.task == task]
                own.sort(key=lambda row: buckets.index(row.bucket))
                if own:
                    at = [buckets.index(row.bucket) for row in own]
                    panel.plot(at, [row.tau_micro for row in own], label=name, **style(number))
                    thin = style(number) | {"linewidth": 0.6, "markersize": 3}
                    panel.plot(at, [row.tau_micro_no_bonus for row in own], **thin)
            panel.set_xticks(range(len(buckets)), buckets)
            panel.set_xlim(-0.4, len(buckets) - 0.6)
            panel.set_title(task)
            panel.set_xlabel("context (tokens)")
        _from_zero(axes, max(row.tau_micro for row in rows))
        axes[0].set_ylabel("accept length τ (tokens a\nverification; thin: no bonus)")
        _legend(figure, axes)

    caption = (
        f"Thick: with the bonus token; thin: without. Micro: all tokens over all verifications. {book.where(rows)}."
    )
    return Picture(
        "accept_length", finding, caption, _height(len(tasks), [name for _, name in styles.values()], finding), paint
    )


def quality_picture(book: Book, scored: Sequence[Quality]) -> Picture:
    """Scores against budget, a panel for each task: against the target's own output, and thinner against references.

    A horizontal line is what the whole cache scores against references.
    """
    rows = [row for row in scored if row.view_tokens and row.system not in LOSSLESS]
    whole = [row for row in scored if row.system in LOSSLESS]
    finding = findings.quality(rows)
    tasks = list(dict.fromkeys((row.task, row.metric) for row in rows))
    names = list(budget_curves(rows))

    def paint(figure: Any) -> None:
        axes = _panels(figure, len(tasks))
        for panel, (task, metric) in zip(axes, tasks, strict=True):
            curves = budget_curves([row for row in rows if (row.task, row.metric) == (task, metric)])
            for number, name in enumerate(names):
                budgets = sorted({row.view_tokens or 0 for row in curves.get(name, [])})
                groups = [[row for row in curves[name] if row.view_tokens == budget] for budget in budgets]
                _curve(panel, budgets, groups, name, number)
            best = mean_score([row for row in whole if (row.task, row.metric) == (task, metric)], "score_reference")
            if best is not None:
                panel.axhline(best, color="0.0", linewidth=0.6, label="whole cache, to references")
            panel.set_title(f"{task} ({metric.replace('_', ' ')})")
            _lengths(panel, [row.view_tokens or 1 for row in rows], "budget (cached tokens)")
            panel.set_ylim(0, 1.05)
        axes[0].set_ylabel("score (0 to 1), to the target's\nown output (thin: to references)")
        _legend(figure, axes)

    caption = f"Thick: against the target's own full-cache output; thin: against references. {book.where(rows)}."
    return Picture(
        "quality", finding, caption, _height(len(tasks), [*names, "whole cache, to references"], finding), paint
    )


def _curve(panel: Any, budgets: Sequence[int], groups: Sequence[Sequence[Quality]], name: str, number: int) -> None:
    for field, change in (("score_own", {}), ("score_reference", {"linewidth": 0.6, "markersize": 3})):
        points = [(b, s) for b, own in zip(budgets, groups, strict=True) if (s := mean_score(own, field)) is not None]
        if points:
            label = name if field == "score_own" else None
            panel.plot(*zip(*points, strict=True), label=label, **(style(number) | change))


def pareto_picture(book: Book, case: str, baseline: str, points: Sequence[Tradeoff]) -> Picture:
    """Speed against closeness to the target's own text; a line joins those that none beats."""
    finding, best = findings.pareto(case, baseline, points), front(points)

    def paint(figure: Any) -> None:
        (panel,) = _panels(figure, 1)
        panel.plot([p.speedup for p in best], [p.score for p in best], color="0.6", linewidth=0.8, zorder=1)
        for number, point in enumerate(points):
            panel.plot([point.speedup], [point.score], label=point.name, **(style(number) | {"linestyle": "none"}))
        panel.set_xlabel(f"speed of decoding at {case}, times {BASELINES[baseline]}")
        panel.set_ylabel("score against the target's\nown output (0 to 1)")
        panel.set_ylim(0, 1.05)
        panel.set_xlim(left=0)
        _legend(figure, [panel])

    caption = (
        f"Right and up is better. Systems whose tokens are the target's own stand at 1. {book.where(book.of(Quality))}."
    )
    return Picture("pareto", finding, caption, _height(1, [p.name for p in points], finding, 3.2), paint)


def steps_picture(book: Book, found: Sequence[Steps], name: str) -> Picture:
    """Stacked bars of a step's parts, by case; figures stand in parts with room for them."""
    finding = findings.steps(found)
    seen = dict.fromkeys(part for step in found for part in step.phases)
    parts = [*(part for part in ORDER if part in seen), *(part for part in seen if part not in ORDER)]
    cases: dict[tuple[int, str], list[Steps]] = defaultdict(list)
    for step in found:
        cases[step.batch, step.context].append(step)
    bars = [
        (f"{step.name}, {batch}\u00a0×\u00a0{context}", step) for (batch, context), own in cases.items() for step in own
    ]
    longest = max(step.step for step in found)

    def paint(figure: Any) -> None:
        (panel,) = _panels(figure, 1)
        starts = [0.0] * len(bars)
        for number, part in enumerate(parts):
            widths = [step.phases.get(part, 0.0) for _, step in bars]
            drawn = panel.barh(
                range(len(bars)), widths, left=starts, height=0.7, label=part, edgecolor="black", linewidth=0.5,
                facecolor=FILLS[number % len(FILLS)], hatch=HATCHES[number % len(HATCHES)],
            )  # fmt: skip
            texts = [f"{width:.1f}" if width > INSIDE * longest else "" for width in widths]
            room = {"facecolor": "white", "edgecolor": "none", "pad": 0.6}
            for text in panel.bar_label(drawn, texts, label_type="center", fontsize=7):
                if text.get_text():
                    text.set_bbox(room)
            starts = [start + width for start, width in zip(starts, widths, strict=True)]
        for at, (_, step) in enumerate(bars):
            panel.text(max(starts[at], step.step) + 0.01 * longest, at, f"{step.step:.1f}", va="center", fontsize=7)
        panel.set_yticks(range(len(bars)), [name for name, _ in bars], fontsize=7.5)
        panel.invert_yaxis()
        panel.set_xlim(0, 1.08 * longest)
        panel.set_xlabel("time of a scheduler step (ms), medians of its parts")
        _legend(figure, [panel], 5)

    caption = f"Behind each bar: the whole step, ms. {book.where(found)}."
    return Picture(name, finding, caption, 0.24 * len(bars) + 1.3 + 0.2 * finding.count("\n"), paint)


def load_picture(book: Book, rows: Sequence[Load]) -> Picture:
    """Throughput and latency against the rate of requests."""
    finding, styles = findings.load(rows), _numbers(rows)
    shown = (
        ("tok_s", "tokens a second"),
        ("ttft_p99_ms", "time to the first token,\n99 % within (ms)"),
        ("itl_p99_ms", "pause between tokens,\n99 % within (ms)"),
    )

    def paint(figure: Any) -> None:
        axes = _panels(figure, len(shown), share_y=False)
        for panel, (field, label) in zip(axes, shown, strict=True):
            for key, (number, name) in styles.items():
                own = sorted((r for r in rows if (r.name, r.source) == key), key=lambda r: r.rate)
                panel.plot([r.rate for r in own], [getattr(r, field) for r in own], label=name, **style(number))
            panel.set_xlabel("requests a second")
            panel.set_ylabel(label)
            panel.set_ylim(bottom=0)
        _legend(figure, axes)

    return Picture(
        "load", finding, f"{book.where(rows)}.", _height(3, [name for _, name in styles.values()], finding), paint
    )
