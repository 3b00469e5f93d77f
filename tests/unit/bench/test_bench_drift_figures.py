"""Drift of mode sparse from answers made by hand: verifications, distances, bins, errors, the sentence and the default."""

import math
import random
import statistics
from dataclasses import replace
from typing import Any

import pytest

from longdraft.bench import drift_figures as df


def totals(*steps: tuple[int, int, int]) -> list[dict[str, Any]]:
    """Counters after verifications that kept so many drafts, refreshed before or not, and were on a set or not."""
    now = dict.fromkeys(df.COUNTERS, 0)
    found: list[dict[str, Any]] = [{"mode": "sparse", **now}]  # of the prefill
    for kept, refreshed, on_view in steps:
        gains = (1, kept, refreshed, on_view * (kept + 1))
        now = {key: now[key] + gain for key, gain in zip(df.COUNTERS, gains, strict=True)}
        found.append({"mode": "sparse", **now})
    return found


def answer(document: int, hits: list[int], every: int = 4, refreshed: tuple[int, ...] = ()) -> df.Answer:
    """Of ``1 + every * n`` tokens, verified ``every`` at a time, refreshed before some of these verifications."""
    steps = [(every - 1, int(i in refreshed), 1) for i in range((len(hits) - 1) // every)]
    agrees = tuple(map(bool, hits))
    return df.Answer(document, tuple(range(len(hits))), df.trace(totals(*steps)), len(refreshed), len(hits) - 1, agrees)


def test_verifications_are_found_in_the_counters() -> None:
    seen = df.trace(totals((2, 0, 1), (0, 0, 1), (4, 1, 1), (1, 0, 1)))
    assert [(v.at, v.since, v.tokens) for v in seen] == [(1, 0, 3), (4, 3, 1), (5, 0, 5), (10, 5, 2)]
    assert all(v.verifications == 1 for v in seen)


def test_what_whole_caches_verified_is_exact() -> None:
    """As long as a context fits into its set."""
    seen = df.trace(totals((2, 0, 0), (3, 0, 0), (1, 0, 1), (1, 0, 1)))
    assert [v.since for v in seen] == [0, 0, 0, 2]


def test_chunks_that_were_put_together_are_several_verifications() -> None:
    every = totals((2, 0, 1), (0, 0, 1), (4, 0, 1))
    [both, last] = df.trace([every[0], every[2], every[2], every[3]])
    assert (both.at, both.verifications, both.tokens) == (1, 2, 4) and (last.at, last.since) == (5, 4)


def test_tokens_know_how_far_from_an_exact_cache_they_are() -> None:
    own = answer(0, [1] * 13, refreshed=(2,))
    assert own.since == [0, 0, 1, 2, 3, 4, 5, 6, 7, 0, 1, 2, 3]
    assert own.judged == [(at, 1.0, 1.0) for at in own.since[1:]], "the prefill's token is nobody's"
    assert own.by_place().since == [0, *range(12)]
    assert own.accepted == [(0, 4.0, 1.0), (4, 4.0, 1.0)], "the last verification may have been cut short"
    assert df.unaccounted(own) == 0
    longer = replace(own, tokens=(*own.tokens, 7, 7))
    assert df.unaccounted(longer) == 2 and longer.since[-2:] == [4, 5]


def test_the_error_is_that_of_answers_and_not_of_tokens() -> None:
    same = {0: (9.0, 10.0), 1: (9.0, 10.0), 2: (9.0, 10.0)}
    assert df.ratio(same) == (pytest.approx(0.9), pytest.approx(0))
    shares = [0.5, 0.7, 0.9, 1.0]
    mean, error = df.ratio({i: (100 * share, 100.0) for i, share in enumerate(shares)})
    assert mean == pytest.approx(statistics.mean(shares))
    assert error == pytest.approx(statistics.stdev(shares) / math.sqrt(len(shares)))
    assert df.ratio({0: (1.0, 2.0)}) == (0.5, math.inf)


def test_the_error_is_what_repeated_measurements_scatter_by() -> None:
    draw = random.Random(0)

    def measure() -> dict[int, tuple[float, float]]:
        found = {}
        for i in range(30):
            share, count = draw.uniform(0.6, 1.0), draw.randrange(5, 60)  # answers differ, and so do their lengths
            found[i] = (float(sum(draw.random() < share for _ in range(count))), float(count))
        return found

    repeated = [df.ratio(measure()) for _ in range(400)]
    assert statistics.mean(e for _, e in repeated) == pytest.approx(statistics.stdev(m for m, _ in repeated), rel=0.12)


def test_answers_to_one_document_go_together_in_a_difference() -> None:
    """Documents that are hard under both settings do not blur what lies between them; one that only one setting has is no matter."""
    a = {i: (10 * share, 10.0) for i, share in enumerate((0.2, 0.6, 0.9))}
    b = {i: (n - 1, d) for i, (n, d) in a.items()}
    assert df.difference(a, b) == (pytest.approx(0.1), pytest.approx(0))
    assert df.difference(b, a)[0] == pytest.approx(-0.1)
    other = {i + 10: sums for i, sums in b.items()}
    apart = df.difference(a, other)[1]
    assert apart == pytest.approx(math.hypot(df.ratio(a)[1], df.ratio(b)[1]), rel=0.12)
    assert math.isfinite(df.difference(a, {**b, 7: (5.0, 10.0)})[1])


def test_bins_hold_what_lies_in_them_and_enough_answers() -> None:
    points = {
        0: [(0, 1.0, 1.0), (3, 1.0, 1.0), (4, 0.0, 1.0)],
        1: [(1, 0.0, 1.0), (5, 1.0, 1.0)],
        2: [(2, 1.0, 1.0), (7, 1.0, 1.0), (9, 1.0, 1.0)],
    }
    first, second = df.bins(points, 4)
    assert (first["from"], first["to"], first["mean"], first["answers"], first["count"]) == (0, 4, 0.75, 3, 4)
    assert (second["from"], second["mean"]) == (4, pytest.approx(2 / 3, abs=1e-4)), "9 is one answer's alone: no bin"
    assert first["error"] > 0
    assert df.bins({}, 4) == []


def test_cheap_settings_come_first() -> None:
    assert df.cheapest_first(["64", "off", "256", "8"]) == ["off", "256", "64", "8"]


def sums(*hits: float) -> dict[int, tuple[float, float]]:
    return {i: (n, 100.0) for i, n in enumerate(hits)}


@pytest.mark.parametrize(
    ("off", "often", "chosen"),
    [
        ((90, 92, 94, 96), (90, 92, 94, 96), "off"),  # as good
        ((90, 92, 94, 96), (95, 97, 99, 100), "64"),  # worse in every document
        ((90, 99, 94, 96), (95, 92, 99, 94), "off"),  # here better, there worse
        ((95, 97, 99, 100), (90, 92, 94, 96), "off"),  # the best itself
    ],
)
def test_the_default_is_the_cheapest_within_the_error(off: Any, often: Any, chosen: str) -> None:
    assert df.recommended({"64": sums(*often), "off": sums(*off)}) == chosen


@pytest.mark.parametrize(
    ("late", "verb", "default"),
    [
        (
            (80, 83, 84, 86),
            "falls from 95.0 % in the first quarter of an answer to 83.2 %",
            "a refresh every 64 tokens",
        ),
        ((95, 94, 96, 95), "does not change by more than twice its error, from 95.0 % in the first", "no refresh"),
        ((99, 98, 99, 99), "rises from 95.0 % in the first quarter of an answer to 98.8 %", "no refresh"),
    ],
)
def test_the_sentence_says_what_the_figures_say(late: Any, verb: str, default: str) -> None:
    early = {"off": sums(94, 95, 96, 95), "64": sums(95, 95, 95, 95)}
    said = df.finding(early, {"off": sums(*late), "64": sums(95, 95, 95, 95)})
    assert said.startswith("No refresh: agreement " + verb) and said.endswith("recommended: " + default)
    alone = df.finding({"64": early["64"]}, {"64": sums(95, 95, 95, 95)})
    assert alone.startswith("A refresh every 64 tokens: agreement does not change") and alone.endswith(
        "every 64 tokens"
    )


def test_figures_of_a_setting() -> None:
    """Three answers of 33 tokens, which disagree in their last quarter alone."""
    own = [answer(i, [1] * 25 + [0, 1] * 4, refreshed=(4,)) for i in range(3)]
    found = df.figures_of(own, 33)
    assert found["answers"] == 3 and found["agreement"] == pytest.approx(28 / 32) and found["agreement_error"] == 0
    assert found["early_agreement"] == 1 and found["late_agreement"] == 0.5
    assert (
        found["accept_length"] == 4 and found["accept_length_without_bonus"] == 3 and found["late_accept_length"] == 4
    )
    assert found["refreshes_per_1000_tokens"] == pytest.approx(1000 / 33, abs=1e-3)
    assert found["on_view_share"] == pytest.approx(32 / 33, abs=1e-4) and found["first_token_agreement"] == 1
    early, late = df.quarters(own, 33)
    assert early == dict.fromkeys(range(3), (8.0, 8.0)) and late == dict.fromkeys(range(3), (4.0, 8.0))
