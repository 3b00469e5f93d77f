"""What each picture says, in one sentence, from the rows that it shows."""

from collections.abc import Sequence

from longdraft.bench.lengths import tokens_word
from longdraft.bench.report.derive import (
    BASELINES,
    LOSSLESS,
    Cost,
    Speedup,
    Tradeoff,
    bucket_key,
    budget_curves,
    front,
    gains,
    mean_score,
    names_of,
    short,
)
from longdraft.bench.report.rows import Acceptance, Load, Quality, Steps

BUCKET = 12  # characters of a bucket in a picture
FEWEST = 5  # answers of a row that a sentence is about


def speed(baseline: str, found: Sequence[Speedup]) -> str:
    """Who is fastest, who is among the lossless, and how many cells lose; at least one beside the baseline is measured."""
    own, base = gains(found), BASELINES[baseline]
    best, names = max(own, key=lambda each: each.value), names_of([each.row for each in own])
    named = [best]
    text = f"{names[best.row.name, best.row.source]} decodes {best.value:.2f} times as fast as {base} at batch {best.row.case}"
    if best.value <= 1:
        text = f"nothing is faster than {base}: {text}"
    lossless = [each for each in own if each.row.system in LOSSLESS]
    if lossless and best.row.system not in LOSSLESS:
        second = max(lossless, key=lambda each: each.value)
        named.append(second)
        text += (
            f"; of those whose output is the target's own {names[second.row.name, second.row.source]} is fastest, {second.value:.2f} times at batch "
            f"{second.row.case}"
        )
    if forced := sorted({each.row.forced_accept for each in named if each.row.forced_accept}):
        some = "" if all(each.row.forced_accept for each in named) else "in part "
        text = f"{some}at a forced accept length of {' and '.join(f'{length:g}' for length in forced)}, {text}"
    slower = sum(each.value < 1 for each in own)
    return f"{text}; {slower} of {len(own)} cells {'is' if slower == 1 else 'are'} slower" if slower else text


def acceptance(rows: Sequence[Acceptance]) -> str:
    """The highest τ in the longest bucket, and how its system does in the shortest that it has.

    Rows of fewer than ``FEWEST`` answers are not named where there are others.
    """
    rows = [row for row in rows if row.n >= FEWEST] or rows
    last = max((row.bucket for row in rows), key=bucket_key)
    best = max((row for row in rows if row.bucket == last), key=lambda row: row.tau_micro)
    text = (
        f"at {short(last, BUCKET)} tokens {names_of(rows)[best.name, best.source]} gains {best.tau_micro:.2f} tokens a verification on {short(best.task)} "
        f"({best.tau_micro_no_bonus:.2f} without the bonus token; {best.n} answers)"
    )
    same = [row for row in rows if (row.name, row.task, row.source) == (best.name, best.task, best.source)]
    first = min(same, key=lambda row: bucket_key(row.bucket))
    if first.bucket == last:
        return text
    change = best.tau_micro - first.tau_micro
    word = "as many as" if abs(change) < 0.005 else f"{abs(change):.2f} {'more' if change > 0 else 'fewer'} than"
    return f"{text}, {word} at {short(first.bucket, BUCKET)}"


def quality(rows: Sequence[Quality]) -> str:
    """Which rule is closest to the target's own text at the smallest and at the largest budget that several have."""
    curves = budget_curves([row for row in rows if row.score_own is not None])
    scores = {budget: _comparable(curves, budget) for budget in sorted({row.view_tokens or 0 for row in rows})}
    several = [budget for budget, own in scores.items() if len(own) > 1] or [b for b, own in scores.items() if own]
    told: list[str] = []
    for budget in dict.fromkeys(several[:1] + several[-1:]):
        own = scores[budget]
        best = max(own, key=lambda name: own[name])
        if len(own) == 1:
            told.append(
                f"at {tokens_word(budget)} tokens {best} scores {own[best]:.2f} against the target's own output"
            )
            continue
        verb = "" if told else " is closest to the target's own output"
        told.append(
            f"at {tokens_word(budget)} tokens {best}{verb} ({own[best]:.2f}; the worst of {len(own)} has {min(own.values()):.2f})"
        )
    return ", ".join(told) if told else "no row says how close its text is to the target's own"


def _comparable(curves: dict[str, list[Quality]], budget: int) -> dict[str, float]:
    """Scores at a budget by name, each over the tasks and buckets of the records that all of these names have; empty without such."""
    own = {name: found for name, rows in curves.items() if (found := [r for r in rows if r.view_tokens == budget])}
    asked = [{(r.source, r.task, r.bucket, r.metric) for r in found} for found in own.values()]
    common = set.intersection(*asked) if asked else set()
    means = {
        name: mean_score([r for r in found if (r.source, r.task, r.bucket, r.metric) in common], "score_own")
        for name, found in own.items()
    }
    return {name: score for name, score in means.items() if score is not None}


def pareto(case: str, baseline: str, points: Sequence[Tradeoff]) -> str:
    """The front."""
    told = [f"{p.name} ({p.speedup:.2f}\u00a0×, {p.score:.2f})" for p in front(points)]
    beaten = len(points) - len(told)
    behind = f"; the other {beaten} gain nothing over these" if beaten else ""
    return f"at batch {case} the choice between speed and the target's own output is {', '.join(told)}{behind}"


def steps(found: Sequence[Steps]) -> str:
    """The slowest and the fastest step of the largest case, and their verification's share."""
    batch, context = max(((s.batch, s.context) for s in found), key=lambda key: (key[0], bucket_key(key[1])))
    case = [s for s in found if (s.batch, s.context) == (batch, context)]
    told, names = [], names_of(found)
    slow, fast = max(case, key=lambda s: s.step), min(case, key=lambda s: s.step)
    for one in (slow, fast) if slow is not fast else (slow,):
        verified = one.phases.get("verify", 0.0) + one.phases.get("partial", 0.0)
        told.append(f"{names[one.name, one.source]} {one.step:.1f} ms, {verified / one.step:.0%} of it verification")
    return f"at batch {batch} × {context} a step takes {'; '.join(told)}"


def load(rows: Sequence[Load]) -> str:
    """The highest rate that all served, and who answers fastest there."""
    rates = {row.rate for row in rows}
    common = [
        rate
        for rate in rates
        if all(any(r.name == name and r.rate == rate for r in rows) for name in {r.name for r in rows})
    ]
    rate = max(common or rates)
    own = [row for row in rows if row.rate == rate]
    names = names_of(rows)
    most, quick = max(own, key=lambda r: r.tok_s), min(own, key=lambda r: r.itl_p99_ms)
    return (
        f"at {rate:g} requests a second {names[most.name, most.source]} gives most tokens ({most.tok_s:,.0f} a second) "
        f"and {names[quick.name, quick.source]} the shortest "
        f"pauses (99 % within {quick.itl_p99_ms:.1f} ms)"
    )


def choosing(costs: Sequence[Cost]) -> str:
    """What each way to choose costs where it costs most."""
    told = []
    for name, field, when in (
        ("Dustin's rule", "choice", "once a round"),
        ("Quest's bounds", "bound", "in every layer"),
    ):
        known = [(value, cost.case) for cost in costs if (value := getattr(cost, field)) is not None]
        if known:
            value, case = max(known)
            told.append(f"{value:.1%} by {name} ({when}, {case})")
    return f"choosing takes, of the time of attention to the full cache, at most {' and '.join(told)}"
