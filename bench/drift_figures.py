"""What mode ``sparse`` loses as tokens go by since its cache was exact: from answers to bins, errors and a default.

A token is so many tokens away from the last exact key and value as its request had returned since then: its prompt's end or a
refresh. Errors are standard errors over answers, whose tokens are not independent of each other.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

Sums = dict[int, tuple[float, float]]  # of each document's answer: of a numerator and of its denominator
Point = tuple[int, float, float]  # where, numerator, denominator
OFF, CONTROL = "off", "full"  # settings: no refresh; every verification on the whole cache
COUNTERS = ("target_verifications", "accepted", "refreshes", "verified_on_view")
LEAST = 3  # answers without which there is no error to speak of


@dataclass(frozen=True)
class Verified:
    """What the server reported at once, one verification as a rule.

    Attributes:
        at: the answer's token that it began with.
        since: tokens that had been returned since the last exact key and value.
        verifications, tokens: how many, bonus tokens in.
    """

    at: int
    since: int
    verifications: int
    tokens: int


@dataclass(frozen=True)
class Answer:
    """One document's answer under one setting; ``agrees`` says of every token whether the target would have chosen it too."""

    document: int
    tokens: tuple[int, ...]
    verified: tuple[Verified, ...]
    refreshes: int
    on_view: int
    agrees: tuple[bool, ...] = ()

    @property
    def judged(self) -> list[Point]:
        """Of every token that a verification chose: tokens since the last exact key and value, whether it agrees, and 1."""
        since = self.since
        return [(since[i], float(hit), 1.0) for i, hit in enumerate(self.agrees) if i]

    @property
    def accepted(self) -> list[Point]:
        """Of every report but the last, which the answer's end may have cut short: tokens since, gained, verifications."""
        return [(v.since, float(v.tokens), float(v.verifications)) for v in self.verified[:-1]]

    @property
    def since(self) -> list[int]:
        """Tokens since the last exact key and value when each was chosen; 0 of the first one, which the prefill gave."""
        found, starts = [0] * len(self.tokens), {v.at: v.since for v in self.verified}
        for i in range(2, len(found)):
            found[i] = starts.get(i, found[i - 1] + 1)
        return found

    def by_place(self) -> "Answer":
        """With tokens since the prompt's end in their place, which can be compared between settings."""
        return replace(self, verified=tuple(replace(v, since=v.at - 1) for v in self.verified))


def trace(totals: Sequence[dict[str, Any]]) -> tuple[Verified, ...]:
    """Verifications of one answer, from our counters as the stream carried them.

    Args:
        totals: counters so far, one entry a chunk.
    """
    found: list[Verified] = []
    before, at, since = dict.fromkeys(COUNTERS, 0), 1, 0
    for now in totals:
        seen = {key: int(now.get(key, 0)) for key in COUNTERS}
        more, before = {key: seen[key] - before[key] for key in COUNTERS}, seen
        if not more["target_verifications"]:
            continue
        gained = more["accepted"] + more["target_verifications"]
        since = 0 if more["refreshes"] else since
        found.append(Verified(at, since, more["target_verifications"], gained))
        at, since = at + gained, since + more["verified_on_view"]
    return tuple(found)


def unaccounted(answer: Answer) -> int:
    """Tokens of an answer that no verification in its counters gave; the server leaves out the last verification."""
    return len(answer.tokens) - 1 - sum(v.tokens for v in answer.verified)


def ratio(sums: Sums) -> tuple[float, float]:
    """The ratio of two sums over answers, and its standard error (linearised); an infinite one of a single answer."""
    mean, parts = _influences(sums)
    return mean, _error(list(parts.values()))


def difference(a: Sums, b: Sums) -> tuple[float, float]:
    """By how much the ratio of ``a`` is above that of ``b``, and its error; answers to one document are not independent."""
    (mean_a, own), (mean_b, other) = _influences(a), _influences(b)
    return mean_a - mean_b, _error([own.get(at, 0.0) - other.get(at, 0.0) for at in own | other])


def _influences(sums: Sums) -> tuple[float, dict[int, float]]:
    """The ratio, and what each answer adds to its deviation."""
    low = sum(d for _, d in sums.values())
    mean = sum(n for n, _ in sums.values()) / low
    return mean, {at: (n - mean * d) / low for at, (n, d) in sums.items()}


def _error(influences: Sequence[float]) -> float:
    count = len(influences)
    return math.sqrt(count / (count - 1) * sum(x * x for x in influences)) if count > 1 else math.inf


def sums_of(points: dict[int, list[Point]], begin: float = 0, end: float = math.inf) -> Sums:
    """Of each document's points from ``begin`` up to ``end``; documents that have none there are left out."""
    found = {}
    for document, own in points.items():
        if inside := [(n, d) for at, n, d in own if begin <= at < end]:
            found[document] = sum(n for n, _ in inside), sum(d for _, d in inside)
    return found


def bins(points: dict[int, list[Point]], width: int) -> list[dict[str, float]]:
    """Ratios by distance, of bins that at least :data:`LEAST` answers reach.

    Args:
        points: of each document's answer.
        width: distances of a bin.
    """
    last = max((at for own in points.values() for at, _, _ in own), default=-1)
    found = []
    for begin in range(0, last + 1, width):
        sums = sums_of(points, begin, begin + width)
        if len(sums) >= LEAST:
            mean, error = ratio(sums)
            row = {"from": begin, "to": begin + width, "mean": round(mean, 5), "error": round(error, 5)}
            found.append(row | {"answers": len(sums), "count": sum(d for _, d in sums.values())})
    return found


def cheapest_first(settings: Sequence[str]) -> list[str]:
    """No refresh, and then the longer from one to the next the cheaper."""
    return sorted(settings, key=lambda name: -math.inf if name == OFF else -int(name))


def recommended(late: dict[str, Sums]) -> str:
    """The cheapest setting whose agreement late in the answers is within one standard error of the difference of the best one's.

    Args:
        late: by setting, agreement of each answer.
    """
    best = max(cheapest_first(list(late)), key=lambda name: ratio(late[name])[0])
    for name in cheapest_first(list(late)):
        behind, error = difference(late[best], late[name])
        if behind <= error:
            return name
    raise AssertionError("the best is as good as itself")


def finding(early: dict[str, Sums], late: dict[str, Sums]) -> str:
    """One sentence of what the cheapest setting loses within its answers, and the recommended one.

    Args:
        early, late: by setting, agreement of each answer in its first and in its last quarter.
    """
    name, chosen = cheapest_first(list(late))[0], recommended(late)
    change, error = difference(late[name], early[name])
    a, b = (100 * ratio(part[name])[0] for part in (early, late))
    verb = (
        "does not change by more than twice its error, "
        if abs(change) <= 2 * error
        else "falls "
        if change < 0
        else "rises "
    )
    first = f"{label(name)}: agreement {verb}from {a:.1f} % in the first quarter of an answer to {b:.1f} % in the last"
    return f"{first[0].upper()}{first[1:]}; recommended: {label(chosen)}"


def label(setting: str) -> str:
    """For people."""
    return {OFF: "no refresh", CONTROL: "whole cache"}.get(setting, f"a refresh every {setting} tokens")


def quarters(answers: Sequence[Answer], new_tokens: int) -> tuple[Sums, Sums]:
    """Agreement of each answer in its first and in its last quarter, by place in the answer and not by refreshes."""
    points = {answer.document: answer.by_place().judged for answer in answers}
    cut = new_tokens // 4
    return sums_of(points, 0, cut), sums_of(points, new_tokens - cut - 1)


def figures_of(answers: Sequence[Answer], new_tokens: int) -> dict[str, float]:
    """Flat figures of one setting."""
    early, late = quarters(answers, new_tokens)
    accepted = {a.document: a.by_place().accepted for a in answers}
    parts = {
        "agreement": sums_of({a.document: a.judged for a in answers}),
        "early_agreement": early,
        "late_agreement": late,
        "accept_length": sums_of(accepted),
        "late_accept_length": sums_of(accepted, new_tokens - new_tokens // 4 - 1),
    }
    found: dict[str, float] = {"answers": len(answers)}
    for name, sums in parts.items():
        if len(sums) > 1:  # few verifications may begin in the last quarter of short answers
            found[name], found[f"{name}_error"] = (round(value, 5) for value in ratio(sums))
    tokens = sum(len(a.tokens) for a in answers)
    found["accept_length_without_bonus"] = round(found["accept_length"] - 1, 5)
    found["refreshes_per_1000_tokens"] = round(1000 * sum(a.refreshes for a in answers) / tokens, 3)
    found["on_view_share"] = round(sum(a.on_view for a in answers) / tokens, 4)
    found["first_token_agreement"] = round(sum(a.agrees[0] for a in answers) / len(answers), 4)
    return found
