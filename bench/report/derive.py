"""What follows from rows: speedups over a baseline of the same record, curves by context and budget, the Pareto front."""

import math
import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from longdraft.bench.lengths import lengths_in, tokens_word
from longdraft.bench.report.reading import Book
from longdraft.bench.report.rows import Acceptance, Quality, Row, Speed, Steps

ATTENTION = re.compile(r"fa3_bf16_page1_b(\d+)_c(\d+)_r6_us")
BASELINES = {"plain": "plain decoding", "eagle3": "SGLang's EAGLE-3"}
LONGEST = 48  # characters of a name in a picture
LOSSLESS = frozenset({"plain", "eagle3", "ngram", "full", "exact", "self"})  # whose tokens are the target's own


@dataclass(frozen=True)
class Speedup:
    """A row beside its record's baseline at the same batch and context; ``spread`` from both rows' spreads, if they have some."""

    row: Speed
    base: Speed
    value: float
    spread: float | None


def _relative(row: Speed) -> float | None:
    return None if row.tok_s_spread is None else row.tok_s_spread / row.tok_s


def speedups(book: Book) -> dict[str, list[Speedup]]:
    """By baseline, plain decoding before SGLang's EAGLE-3: rows of records that measured it, against the best such row.

    A record that has plain decoding is given against that alone.
    """
    cells = defaultdict[tuple[str, int, int], list[Speed]](list)
    for row in book.of(Speed):
        cells[row.source, row.batch, row.context].append(row)
    plain = {row.source for row in book.of(Speed) if row.system == "plain"}
    found: dict[str, list[Speedup]] = {}
    for (source, *_), rows in cells.items():
        system = "plain" if source in plain else "eagle3"
        base = next((row for row in rows if row.system == system), None)
        for row in rows if base else ():
            assert base is not None
            value, parts = row.rate / base.rate, (_relative(row), _relative(base))
            spread = None if None in parts else value * math.hypot(*(p for p in parts if p is not None))
            found.setdefault(system, []).append(Speedup(row, base, value, None if row is base else spread))
    return {system: found[system] for system in BASELINES if system in found}


def gains(found: Sequence[Speedup]) -> list[Speedup]:
    """Those that are not the baseline itself."""
    return [each for each in found if each.row is not each.base]


def short(words: str, most: int = LONGEST) -> str:
    """Words of a record as pictures and sentences show them: printable, the middle left out of long ones."""
    line = " ".join("".join(c if c.isprintable() else " " for c in words).split())
    line = line.lstrip("_ ") or "?"  # what begins so, legends of matplotlib leave out
    return line if len(line) <= most else f"{line[: most - most // 3 - 1]}…{line[-(most // 3) :]}"


def names_of(rows: Sequence[Row]) -> dict[tuple[str, str], str]:
    """A name for each label of each record: the label alone where no other record has it."""
    sources = defaultdict[str, dict[str, None]](dict)
    for row in rows:
        sources[row.name][row.source] = None
    found: dict[tuple[str, str], str] = {}
    for name, own in sources.items():
        for source in own:
            told = short(name) if len(own) == 1 else f"{short(name)} ({short(source)})"
            found[name, source] = told if told not in found.values() else f"{told}, {len(found) + 1}"
    return found


def bucket_key(bucket: str) -> tuple[float, str]:
    """Buckets in the order of their lengths: ``<2K``, ``2K``, ``2K-8K``, ``>32K``; whatever says no length comes last."""
    if not (found := lengths_in(bucket)):
        return math.inf, bucket
    return found[0] + {"<": -0.5, ">": 0.5}.get(bucket[:1], 0.0), bucket


def buckets_of(rows: Sequence[Acceptance | Quality]) -> list[str]:
    """Buckets that there are, short ones first."""
    return sorted({row.bucket for row in rows}, key=bucket_key)


def steps_of(book: Book) -> list[Steps]:
    """Breakdowns of steps: records of their own, and speed rows that have phases."""
    own = [
        Steps(
            system=row.system, label=row.name, n=row.n, source=row.source, batch=row.batch, context=tokens_word(row.context),
            phases=row.phases, step=max(row.ms_step or 0.0, sum(row.phases.values())),
        )
        for row in book.of(Speed)
        if row.phases
    ]  # fmt: skip
    return [*book.of(Steps), *own]


def budget_curves(rows: Sequence[Quality]) -> dict[str, list[Quality]]:
    """Rows with a budget by name without the budget's own word in it ("partial 4K" and "partial 2K" are one curve)."""
    curves = defaultdict[str, list[Quality]](list)
    for row in rows:
        if row.view_tokens is not None:
            curves[short(row.bare_name)].append(row)
    return {name: sorted(own, key=lambda row: row.view_tokens or 0) for name, own in curves.items()}


def mean_score(rows: Sequence[Quality], field: str) -> float | None:
    """Mean of a score over rows that have it, each task counting as its answers do."""
    known = [(value, max(row.n, 1)) for row in rows if (value := getattr(row, field)) is not None]
    return sum(value * n for value, n in known) / sum(n for _, n in known) if known else None


@dataclass(frozen=True)
class Tradeoff:
    """A system's speed in one case and how close its text is to the target's own over all tasks."""

    name: str
    system: str
    budget: int | None
    speedup: float
    score: float


def tradeoffs(book: Book) -> tuple[str, str, list[Tradeoff]]:
    """The case (batch × context) in which most systems have a quality too, the largest of such; its baseline; its points.

    Lossless systems need no quality rows: their text is the target's own, 1. Others are scored on the tasks and buckets that all of
    them have; without such there are no points.
    """
    timed = {(row.system, row.view_tokens) for row in book.of(Speed)}
    quality = defaultdict[tuple[str, int | None], list[Quality]](list)
    for scored in book.of(Quality):
        if (
            scored.system not in LOSSLESS
            and scored.score_own is not None
            and (scored.system, scored.view_tokens) in timed
        ):
            quality[scored.system, scored.view_tokens].append(scored)
    asked = [{(row.task, row.bucket, row.metric) for row in rows} for rows in quality.values()]
    common = set.intersection(*asked) if asked else set()
    cases = defaultdict[tuple[str, int, int], dict[str, Tradeoff]](dict)
    for baseline, found in speedups(book).items():
        for each in found:
            row = each.row
            scored_rows = quality.get((row.system, row.view_tokens), [])
            own = [each for each in scored_rows if (each.task, each.bucket, each.metric) in common]
            score = 1.0 if row.system in LOSSLESS else mean_score(own, "score_own")
            if score is not None:
                point = Tradeoff(short(row.name), row.system, row.view_tokens, each.value, score)
                cases[baseline, row.batch, row.context].setdefault(row.name, point)
    lossy = {key: [p for p in points.values() if p.system not in LOSSLESS] for key, points in cases.items()}
    if not any(lossy.values()):
        return "", "", []
    best = max(cases, key=lambda key: (len(lossy[key]), len(cases[key]), key[1] * key[2]))
    return f"{best[1]} × {tokens_word(best[2])}", best[0], list(cases[best].values())


def front(points: Sequence[Tradeoff]) -> list[Tradeoff]:
    """Points that no other one beats in speed or in closeness without losing in the other, the fastest first."""
    best = [
        p
        for p in points
        if not any(
            q.speedup >= p.speedup and q.score >= p.score and (q.speedup, q.score) != (p.speedup, p.score)
            for q in points
        )
    ]
    return sorted(best, key=lambda p: -p.speedup)


@dataclass(frozen=True)
class Cost:
    """Times of choosing tokens at one batch and context over that of attention to the full cache, of records of kernels.

    ``choice``: two layers' scores and the set, once a round, over all layers' attention; ``bound``: Quest's bounds of one layer over
    that layer's attention. ``rows`` name the records.
    """

    case: str
    choice: float | None
    bound: float | None
    rows: tuple[Row, ...]


def _is_time(value: Any) -> bool:
    return type(value) in (int, float) and 0 < value < math.inf


def choosing(book: Book) -> list[Cost]:
    """Costs of the cases whose full-cache attention (FlashAttention-3, bf16, six rows) is in a record, small batches last."""
    records = {source.record["name"]: source for source in book.sources}
    figures = {
        name: {key: value for key, value in source.record.get("figures", {}).items() if _is_time(value)}
        for name, source in records.items()
    }
    layers = records["head_mass"].record.get("settings", {}).get("layers") if "head_mass" in records else None
    found = []
    for name, full in figures.get("prefix_attention", {}).items():
        if not (match := ATTENTION.fullmatch(name)):
            continue
        case = f"bf16_page1_b{match[1]}_c{match[2]}"
        choice, bound = (
            figures.get(n, {}).get(f"{what}_{case}_r5_us")
            for n, what in (("head_mass", "choice"), ("block_lse", "bound"))
        )
        choice = choice if _is_time(layers) else None
        if choice is None and bound is None:
            continue
        used = tuple(
            Row(system="kernels", source=records[n].name)
            for n, value in (("prefix_attention", full), ("head_mass", choice), ("block_lse", bound))
            if value is not None
        )
        label = f"{match[1]}\u00a0×\u00a0{tokens_word(int(match[2]))}"
        found.append(Cost(label, choice and choice / (layers * full), bound and bound / full, used))
    return found
