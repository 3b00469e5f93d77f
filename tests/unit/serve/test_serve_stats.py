"""Counters of a request on their way into its response, and forced acceptance for timing runs."""

import json
import statistics
from types import SimpleNamespace

import pytest

from longdraft.draft_models.acceptance import AcceptStats
from longdraft.serve import stats
from longdraft.serve.simulate import forced_acceptance, hit_rate
from longdraft.serve.stats import LatestSummary, RequestStats


def counters() -> RequestStats:
    accept = AcceptStats()
    accept.add(4, 2)
    accept.add(4, 1)
    return RequestStats("full", accept, rounds=2, failures=1)


def test_the_summary_gives_both_taus_and_is_json() -> None:
    """V5: with the bonus token and without."""
    summary = counters().summary()
    assert summary == {
        "mode": "full",
        "rounds": 2,
        "target_verifications": 2,
        "drafted": 8,
        "accepted": 3,
        "tau": 2.5,
        "tau_without_bonus": 1.5,
        "draft_failures": 1,
    }
    assert json.loads(json.dumps(summary)) == summary


def test_every_slice_is_the_totals_so_far() -> None:
    """SGLang cuts by token and sends what it cut; a stream's last chunk must carry the final totals."""
    mine = counters()
    info = LatestSummary(mine)
    assert info[0:1] == [mine.summary()]
    assert info[7:300] == [mine.summary()]
    mine.accept.add(4, 4)
    assert info[300:301][-1]["accepted"] == 7
    assert info[0]["accepted"] == 7


def test_counters_are_made_once_and_stay_with_their_request() -> None:
    """A retraction keeps the request object; others' information is left alone."""
    req, other = (SimpleNamespace(customized_info=None) for _ in range(2))
    first = stats.attach(req, "full")
    first.rounds = 3
    assert stats.attach(req, "off") is first
    assert first.mode == "full"
    assert stats.attach(other, "off") is not first
    kept = SimpleNamespace(customized_info={"else": [1]})
    stats.attach(kept, "full")
    assert kept.customized_info["else"] == [1]
    assert list(kept.customized_info) == ["else", "longdraft"]


@pytest.mark.parametrize("steps", [1, 3, 5])
@pytest.mark.parametrize("share", [0.0, 0.3, 0.9, 1.0])
def test_the_hit_rate_gives_the_length_asked_for(steps: int, share: float) -> None:
    length = 1 + share * steps
    q = hit_rate(length, steps)
    assert 0 <= q <= 1
    assert 1 + sum(q**i for i in range(1, steps + 1)) == pytest.approx(length, abs=1e-6)


def test_a_length_past_the_chain_is_the_whole_chain() -> None:
    assert hit_rate(9.0, 3) == 1.0
    assert forced_acceptance([3, 1, 0], 9.0) == [3, 1, 0]


def test_forced_acceptance_meets_its_mean_within_the_drafts() -> None:
    kept = [n for _ in range(3000) for n in forced_acceptance([4, 4], 2.8)]
    assert min(kept) >= 0
    assert max(kept) <= 4
    assert statistics.mean(kept) == pytest.approx(1.8, abs=0.15)
    assert forced_acceptance([4], 1.0) == [0]
