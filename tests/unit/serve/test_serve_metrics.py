"""Counters for ``/metrics``: every round once, by mode and by the context that it was read at, and never at a server's cost."""

from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

from longdraft.serve import stats
from longdraft.serve.metrics import EVERY, SERIES, ServingMetrics, make_metrics, totals

TOKEN = 100  # bytes


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


@pytest.fixture
def metrics(registry: CollectorRegistry) -> ServingMetrics:
    return ServingMetrics("model", TOKEN, registry)


def request(mode: str, prompt: int, output: int = 0) -> Any:
    req = SimpleNamespace(customized_info=None, origin_input_ids=[0] * prompt, output_ids=[0] * output)
    stats.attach(req, mode)
    return req


def counters(req: Any) -> stats.RequestStats:
    found = stats.attached(req)
    assert found is not None
    return found


def value(registry: CollectorRegistry, name: str, mode: str, context: str, **kind: str) -> float | None:
    labels = {"model_name": "model", "mode": mode, "context": context, **kind}
    return registry.get_sample_value(f"longdraft_{name}_total", labels)


def test_rounds_on_whole_caches_give_tau(metrics: ServingMetrics, registry: CollectorRegistry) -> None:
    req = request("full", 100)
    counters(req).count(drafted=4, accepted=3, read=100)
    counters(req).count(drafted=4, accepted=0, read=104)
    counters(req).failures += 1
    metrics.look(req)
    metrics.look(req)  # nothing is new
    values = {
        name: value(registry, name, "full", "<2K")
        for name in ("rounds", "tokens", "drafted_tokens", "proposed_tokens", "refreshes", "draft_failures")
    }
    assert values == {
        "rounds": 2, "tokens": 5, "drafted_tokens": 8, "proposed_tokens": 0, "refreshes": 0, "draft_failures": 1
    }  # fmt: skip
    assert value(registry, "verifications", "full", "<2K", kind="full") == 2
    assert value(registry, "verifications", "full", "<2K", kind="partial") == 0
    assert value(registry, "cache_read_bytes", "full", "<2K", kind="full") == 204 * TOKEN
    assert counters(req).summary()["tau"] == 5 / 2


def test_cycles_say_what_was_confirmed_and_what_views_read(
    metrics: ServingMetrics, registry: CollectorRegistry
) -> None:
    exact, partial = request("exact", 9000), request("partial", 9000)
    counters(exact).cycles.add(rounds=2, full=True, proposed=8, confirmed=6, fell=False, read=(1000, 9000))
    counters(exact).count(drafted=10, accepted=6, read=0)
    counters(exact).cycles.add(rounds=0, full=True, proposed=0, confirmed=0, fell=True, read=(0, 9007))
    counters(exact).count(drafted=4, accepted=1, read=0)
    counters(exact).count(drafted=4, accepted=1, read=9009)  # on the host, without a view
    counters(partial).cycles.add(rounds=0, full=False, proposed=0, confirmed=0, fell=False, read=(500, 0))
    counters(partial).cycles.lossy(approximate=3, refreshed=True)
    counters(partial).count(drafted=4, accepted=2, read=0)
    for req in (exact, partial):
        metrics.look(req)
    got = {
        (mode, kind): (
            value(registry, "verifications", mode, "8K-32K", kind=kind),
            value(registry, "cache_read_bytes", mode, "8K-32K", kind=kind),
        )
        for mode in ("exact", "partial")
        for kind in ("partial", "full")
    }
    assert got == {
        ("exact", "partial"): (2, 1000 * TOKEN),
        ("exact", "full"): (3, 27016 * TOKEN),
        ("partial", "partial"): (1, 500 * TOKEN),
        ("partial", "full"): (0, 0),
    }
    assert value(registry, "proposed_tokens", "exact", "8K-32K") == 8
    assert value(registry, "confirmed_tokens", "exact", "8K-32K") == 6
    assert value(registry, "drafted_tokens", "exact", "8K-32K") == 18
    assert value(registry, "fallbacks", "exact", "8K-32K") == 1
    assert value(registry, "refreshes", "partial", "8K-32K") == 1


def test_a_request_that_grows_moves_to_the_next_bucket(metrics: ServingMetrics, registry: CollectorRegistry) -> None:
    req = request("full", 2000, output=40)
    counters(req).count(4, 4, 2040)
    metrics.look(req)
    req.output_ids += [0] * 8
    counters(req).count(4, 2, 2045)
    metrics.look(req)
    assert value(registry, "tokens", "full", "<2K") == 5 and value(registry, "tokens", "full", "2K-8K") == 3


def test_running_requests_are_looked_at_now_and_then(metrics: ServingMetrics, registry: CollectorRegistry) -> None:
    req = request("full", 50)
    for _ in range(EVERY - 1):
        counters(req).count(4, 1, 50)
        metrics.ran([req])
    assert value(registry, "rounds", "full", "<2K") is None
    metrics.ran([req])
    assert value(registry, "rounds", "full", "<2K") == EVERY - 1
    metrics.look(SimpleNamespace(customized_info=None))  # one that no round has seen


def test_what_fails_ends_the_series_and_nothing_else(
    metrics: ServingMetrics, registry: CollectorRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full_disk(*_: str) -> list[Any]:
        raise OSError("no space left on device")

    req = request("full", 50)
    counters(req).count(4, 1, 50)
    with monkeypatch.context() as patched:
        patched.setattr(metrics, "_children", full_disk)
        metrics.look(req)
    counters(req).count(4, 1, 50)
    metrics.look(req)
    assert value(registry, "rounds", "full", "<2K") is None


def test_a_server_without_metrics_has_none() -> None:
    assert make_metrics(SimpleNamespace(enable_metrics=False), TOKEN) is None


def test_series_have_names_that_every_scraper_gets_alike(registry: CollectorRegistry, metrics: ServingMetrics) -> None:
    """No colon: prometheus_client writes one as an underscore to scrapers that ask for OpenMetrics."""
    req = request("full", 50)
    counters(req).count(4, 1, 50)
    metrics.look(req)
    for accept in ("text/plain", "application/openmetrics-text; version=1.0.0"):
        write, _ = choose_encoder(accept)
        written = write(registry).decode()
        for series in SERIES:
            assert f"\n{series.exported}{{" in written
    assert [series.name for series in SERIES] == [f.name.removeprefix("longdraft_") for f in registry.collect()]
    width = sum(len(series.kinds) or 1 for series in SERIES)
    assert len(totals(counters(req), TOKEN)) == width
