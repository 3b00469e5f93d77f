"""The pictures of the report: which rows each shows, and how."""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any, TypeVar

from longdraft.bench.report import findings
from longdraft.bench.report.derive import (
    BASELINES,
    LOSSLESS,
    Cost,
    Speedup,
    Tradeoff,
    buckets_of,
    budget_curves,
    choosing,
    front,
    gains,
    mean_score,
    names_of,
    short,
    speedups,
    steps_of,
    tradeoffs,
)
from longdraft.bench.report.drawing import (
    FILLS,
    HATCHES,
    Picture,
    from_zero,
    height_for,
    legend,
    lengths_axis,
    panels_of,
    style,
)
from longdraft.bench.report.reading import Book
from longdraft.bench.report.rows import Acceptance, Load, Quality, Row, Speed, Steps

A = TypeVar("A", Acceptance, Quality)
ORDER = ("draft", "partial", "verify", "select", "sample", "keep", "gap")  # parts of a step that come first
PANEL = 26  # characters over a panel
ACROSS = 80  # characters of all panels' ticks that stand side by side
BARS = 24  # of steps in one picture; more are a picture a batch
PAPERS_CHOICE = (0.0046, 0.0075)  # Dustin, Appendix G: shares of full-cache attention
INSIDE = 0.06  # share of the longest bar from which a part has its figure in it


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
    if costs := choosing(book):
        found.append(choosing_picture(book, costs))
    return found


def _many(rows: list[A]) -> list[A]:
    """Rows of enough answers to be looked at; all where none has."""
    return [row for row in rows if row.n >= findings.FEWEST] or rows


def _numbers(rows: Sequence[Row]) -> dict[tuple[str, str], tuple[int, str]]:
    """A style and a name for each label of each record."""
    return {key: (number, name) for number, (key, name) in enumerate(names_of(rows).items())}


def forced_note(rows: Sequence[Speed]) -> str:
    """A sentence where acceptance was forced."""
    forced = sorted({row.forced_accept for row in rows if row.forced_accept})
    lengths = ", ".join(f"{length:g}" for length in forced)
    return f" Acceptance was forced to {lengths} tokens a verification, which proves time only." if forced else ""


def speed_picture(book: Book, baseline: str, found: Sequence[Speedup]) -> Picture:
    """Speedup against context, a panel for each batch; bars of spread where repeats have one."""
    finding, base = findings.speed(baseline, found), BASELINES[baseline]
    rows = [each.row for each in found]
    shown = gains(found)
    styles = _numbers([each.row for each in shown])
    batches = sorted({row.batch for row in rows})

    def paint(figure: Any) -> None:
        axes = panels_of(figure, len(batches))
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
            lengths_axis(panel, [row.context for row in rows], "context (tokens)")
        from_zero(axes, max(each.value + (each.spread or 0.0) for each in found))
        axes[0].set_ylabel(f"speed of decoding,\ntimes {base}")
        legend(figure, axes)

    caption = f"The line at 1 is {base} of the same record.{forced_note(rows)} {book.where(rows)}."
    return Picture(
        f"speedup_{baseline}",
        finding,
        caption,
        height_for(len(batches), [name for _, name in styles.values()], finding),
        paint,
    )


def acceptance_picture(book: Book, rows: Sequence[Acceptance]) -> Picture:
    """τ against context, a panel for each task: with the bonus token, and thinner without."""
    finding, styles, buckets = findings.acceptance(rows), _numbers(rows), buckets_of(rows)
    tasks = list(dict.fromkeys(row.task for row in rows))
    labels = [short(bucket, findings.BUCKET) for bucket in buckets]
    crowded = min(len(tasks), 3) * len("  ".join(labels)) > ACROSS

    def paint(figure: Any) -> None:
        axes = panels_of(figure, len(tasks))
        for panel, task in zip(axes, tasks, strict=True):
            for key, (number, name) in styles.items():
                own = [row for row in rows if (row.name, row.source) == key and row.task == task]
                own.sort(key=lambda row: buckets.index(row.bucket))
                if own:
                    at = [buckets.index(row.bucket) for row in own]
                    panel.plot(at, [row.tau_micro for row in own], label=name, **style(number))
                    thin = style(number) | {"linewidth": 0.6, "markersize": 3}
                    panel.plot(at, [row.tau_micro_no_bonus for row in own], **thin)
            panel.set_xticks(range(len(buckets)), labels, rotation=90 if crowded else 0)
            panel.set_xlim(-0.4, len(buckets) - 0.6)
            panel.set_title(short(task, PANEL))
            panel.set_xlabel("context (tokens)")
        from_zero(axes, max(row.tau_micro for row in rows))
        axes[0].set_ylabel("accept length τ (tokens a\nverification; thin: no bonus)")
        legend(figure, axes)

    caption = (
        f"Thick: with the bonus token; thin: without. Micro: all tokens over all verifications. {book.where(rows)}."
    )
    height = height_for(len(tasks), [name for _, name in styles.values()], finding, 3.2 if crowded else 2.5)
    return Picture("accept_length", finding, caption, height, paint)


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
        axes = panels_of(figure, len(tasks))
        for panel, (task, metric) in zip(axes, tasks, strict=True):
            curves = budget_curves([row for row in rows if (row.task, row.metric) == (task, metric)])
            for number, name in enumerate(names):
                budgets = sorted({row.view_tokens or 0 for row in curves.get(name, [])})
                groups = [[row for row in curves[name] if row.view_tokens == budget] for budget in budgets]
                _curve(panel, budgets, groups, name, number)
            best = mean_score([row for row in whole if (row.task, row.metric) == (task, metric)], "score_reference")
            if best is not None:
                panel.axhline(best, color="0.0", linewidth=0.6, label="whole cache, to references")
            panel.set_title(f"{short(task, PANEL)}\n({short(metric.replace('_', ' '), PANEL)})")
            lengths_axis(panel, [row.view_tokens or 1 for row in rows], "budget (cached tokens)")
            panel.set_ylim(0, 1.05)
        axes[0].set_ylabel("score (0 to 1), to the target's\nown output (thin: to references)")
        legend(figure, axes)

    caption = f"Thick: against the target's own full-cache output; thin: against references. {book.where(rows)}."
    return Picture(
        "quality", finding, caption, height_for(len(tasks), [*names, "whole cache, to references"], finding), paint
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
        (panel,) = panels_of(figure, 1)
        panel.plot([p.speedup for p in best], [p.score for p in best], color="0.6", linewidth=0.8, zorder=1)
        for number, point in enumerate(points):
            panel.plot([point.speedup], [point.score], label=point.name, **(style(number) | {"linestyle": "none"}))
        panel.set_xlabel(f"speed of decoding at batch {case}, times {BASELINES[baseline]}")
        panel.set_ylabel("score against the target's\nown output (0 to 1)")
        panel.set_ylim(0, 1.05)
        panel.set_xlim(left=0)
        legend(figure, [panel])

    caption = (
        "Right and up is better. Systems whose tokens are the target's own stand at 1. Speeds: "
        f"{book.where(book.of(Speed))}.{forced_note(book.of(Speed))} Scores, over the tasks that all others have: {book.where(book.of(Quality))}."
    )
    return Picture("pareto", finding, caption, height_for(1, [p.name for p in points], finding, 3.2), paint)


def steps_picture(book: Book, found: Sequence[Steps], name: str) -> Picture:
    """Stacked bars of a step's parts, by case; figures stand in parts with room for them."""
    finding = findings.steps(found)
    seen = dict.fromkeys(part for step in found for part in step.phases)
    parts = [*(part for part in ORDER if part in seen), *(part for part in seen if part not in ORDER)]
    cases: dict[tuple[int, str], list[Steps]] = defaultdict(list)
    for step in found:
        cases[step.batch, step.context].append(step)
    longest, names = max(step.step for step in found), names_of(found)
    bars = [
        (f"{names[step.name, step.source]}, {batch}\u00a0×\u00a0{context}", step)
        for (batch, context), own in cases.items()
        for step in own
    ]

    def paint(figure: Any) -> None:
        (panel,) = panels_of(figure, 1)
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
        legend(figure, [panel], 5)

    caption = f"Behind each bar: the whole step, ms; steps of different systems give different numbers of tokens. {book.where(found)}."
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
        axes = panels_of(figure, len(shown), share_y=False)
        for panel, (field, label) in zip(axes, shown, strict=True):
            for key, (number, name) in styles.items():
                own = sorted((r for r in rows if (r.name, r.source) == key), key=lambda r: r.rate)
                panel.plot([r.rate for r in own], [getattr(r, field) for r in own], label=name, **style(number))
            panel.set_xlabel("requests a second")
            panel.set_ylabel(label)
            panel.set_ylim(bottom=0)
        legend(figure, axes)

    return Picture(
        "load", finding, f"{book.where(rows)}.", height_for(3, [name for _, name in styles.values()], finding), paint
    )


def choosing_picture(book: Book, costs: Sequence[Cost]) -> Picture:
    """What choosing tokens costs beside attention to the full cache (Dustin, Figure 8), on a logarithmic axis."""
    finding = findings.choosing(costs)
    shown = (("Quest's bounds, every layer", "bound"), ("Dustin's choice, two layers", "choice"))

    def paint(figure: Any) -> None:
        (panel,) = panels_of(figure, 1)
        for number, (label, field) in enumerate(shown):
            at = [i + 0.36 * number - 0.18 for i, cost in enumerate(costs) if getattr(cost, field) is not None]
            values = [getattr(cost, field) for cost in costs if getattr(cost, field) is not None]
            drawn = panel.bar(
                at, values, 0.34, label=label, edgecolor="black", linewidth=0.5, facecolor=FILLS[number + 1], hatch=HATCHES[number + 1]
            )  # fmt: skip
            panel.bar_label(drawn, [f"{value:.3f}" for value in values], fontsize=7.5)
        panel.axhline(1, color="black", linewidth=0.8, label="attention to the full cache")
        panel.axhspan(*PAPERS_CHOICE, facecolor="0.85", zorder=0, label="the paper's choice, 72B (its text)")
        panel.set_yscale("log")
        panel.set_ylim(PAPERS_CHOICE[0] / 2, 3)
        panel.set_xticks(range(len(costs)), [f"batch {cost.case}" for cost in costs])
        panel.set_xlim(-0.6, len(costs) - 0.4)
        panel.set_ylabel("time, times that of attention\nto the full cache")
        legend(figure, [panel], 2)

    about = [row for cost in costs for row in cost.rows]
    names = [*(label for label, _ in shown), "the paper's choice, 72B (its text)", "attention to the full cache"]
    caption = f"A choice is made once a round, attention runs in every layer. {book.where(about)}."
    return Picture("choosing", finding, caption, height_for(1, names, finding, 2.8), paint)
