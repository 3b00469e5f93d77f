"""Counters on SGLang's ``/metrics``: what requests of each mode gained and read, by context bucket.

SGLang's scheduler collects in prometheus_client's multiprocess directory, and so does this, in the same process. The source is what
the host counts of its requests anyway (:mod:`longdraft.serve.stats`): nothing waits for the device, and a request is looked at once in
:data:`EVERY` rounds and when its cache is handed back.

SGLang's own names hold a colon, ours do not: prometheus_client writes colons as underscores or as they are by what a scraper accepts, so
that such a series has another name with every other Prometheus.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from longdraft.draft_models.buckets import bucket_of
from longdraft.serve import stats
from longdraft.serve.stats import RequestStats

logger = logging.getLogger(__name__)

EVERY = 16  # rounds from one look at the running requests to the next
LABELS = ("model_name", "mode", "context")

NO_KIND: list[tuple[str, ...]] = [()]


@dataclass(frozen=True)
class Series:
    """One counter; the page of metrics is made from these.

    Attributes:
        name: without ``longdraft_`` in front and ``_total`` behind it.
        text: what it counts.
        unit: of what it counts.
        read: how to read it, and what to do about which values.
        kinds: values of its label ``kind``, where it has one.
    """

    name: str
    text: str
    unit: str
    read: str
    kinds: tuple[str, ...] = ()

    @property
    def exported(self) -> str:
        """Its name on ``/metrics``."""
        return f"longdraft_{self.name}_total"

    @property
    def labels(self) -> tuple[str, ...]:
        return (*LABELS, "kind") if self.kinds else LABELS


# In the order of :func:`totals`.
SERIES: tuple[Series, ...] = (
    Series(
        "rounds",
        "Scheduler steps of requests.",
        "rounds",
        "what other series are divided by; none while requests run: the metrics could not be written, see the server's log",
    ),
    Series(
        "tokens",
        "Tokens that rounds gained, the target's own choice behind the drafts in.",
        "tokens",
        "by rounds it is τ with the bonus token; near 1: the draft is useless for this text or target, serve with mode off or train "
        "one; far above what it was: answers repeat themselves",
    ),
    Series(
        "drafted_tokens",
        "Tokens that were drafted for the verifications that rounds end with; of a tree its depth.",
        "tokens",
        "(tokens - rounds) / drafted_tokens is the share that was kept; above 0.9: answers repeat themselves, or --steps may grow; "
        "below 0.2: take fewer --steps",
    ),
    Series(
        "verifications",
        "Verifications of requests, on a view or on the whole cache; a batch is verified together, so that beside exact requests "
        "others have partial ones too.",
        "verifications",
        "partial by full says how many reads of views go with one read of everything; none partial in mode exact: views do not pay at "
        "this batch and context, mode full does the same",
        ("partial", "full"),
    ),
    Series(
        "proposed_tokens",
        "Mode exact: tokens gained on a view, which a full verification is to confirm.",
        "tokens",
        "none: no partial rounds were run",
    ),
    Series(
        "confirmed_tokens",
        "Mode exact: tokens among the proposed ones that it confirmed.",
        "tokens",
        "by proposed_tokens it is the confirmed share; below 0.5: views miss what matters, raise --view-tokens or take mode full",
    ),
    Series(
        "fallbacks",
        "Mode exact: how often a request of whose tokens few were confirmed went over to its whole cache for a while.",
        "times",
        "more than a few in 100 rounds: as a low confirmed share",
    ),
    Series(
        "refreshes",
        "Modes partial and sparse: how often pending keys and values were computed anew.",
        "times",
        "each reads a whole cache; in every other round or more: lower --refresh-margin, raise --refresh-missed-mass or --refresh-every",
    ),
    Series(
        "draft_failures",
        "Rounds of requests whose drafter failed, so that they went on without drafts.",
        "rounds",
        "any: the server's log has the reason; answers stay right, only slower",
    ),
    Series(
        "cache_read_bytes",
        "Keys and values that verifications read, of views at most what they may hold; full has the refreshes of sparse in.",
        "bytes",
        "by tokens it is what a token costs; that of a mode with views should lie well under that of full",
        ("partial", "full"),
    ),
)


def totals(counters: RequestStats, token_bytes: int) -> tuple[int, ...]:
    """A request's values of all series, in their order; none of them ever falls."""
    cycles, accept = counters.cycles, counters.accept
    full = cycles.full + counters.rounds - cycles.cycles  # a round that is no cycle is one full verification
    return (
        *(counters.rounds, accept.accepted + accept.verifications, accept.drafted, cycles.partial, full),
        *(cycles.proposed, cycles.confirmed, cycles.fallbacks, cycles.refreshes, counters.failures),
        *(cycles.read_partial * token_bytes, (cycles.read_full + counters.read) * token_bytes),
    )


class ServingMetrics:
    """Adds to the series what requests have gained since they were looked at last."""

    def __init__(self, model_name: str, token_bytes: int, registry: Any = None) -> None:
        """Make the series.

        Args:
            model_name: label of all of them.
            token_bytes: keys and values of one token in all layers.
            registry: of prometheus_client; None: the process's.
        """
        from prometheus_client import REGISTRY, Counter  # not before SGLang has named its directory

        self.model_name, self.token_bytes = model_name, token_bytes
        self.rounds = 0
        self.counters = [
            (Counter(f"longdraft_{s.name}", s.text, s.labels, registry=registry or REGISTRY), s.kinds) for s in SERIES
        ]
        self.children: dict[tuple[str, str], list[Any]] = {}
        self.failed = False

    def ran(self, reqs: Sequence[Any]) -> None:
        """A round of these requests was launched."""
        self.rounds += 1
        if self.rounds % EVERY == 0:
            for req in reqs:
                self.look(req)

    def look(self, req: Any) -> None:
        """Add what a request has gained. What fails here (a full disk, say) costs the series, never the server."""
        counters = stats.attached(req)
        if counters is None or self.failed:
            return
        now = totals(counters, self.token_bytes)
        before, counters.seen = counters.seen or (0,) * len(now), now
        if now == before:
            return
        try:
            context = bucket_of(len(req.origin_input_ids) + len(req.output_ids))
            for child, new, old in zip(self._children(counters.mode, context), now, before, strict=True):
                child.inc(new - old)
        except Exception:
            logger.exception("longdraft: metrics could not be written, they stay as they are")
            self.failed = True

    def _children(self, mode: str, context: str) -> list[Any]:
        """The series of a mode and a bucket, in the order of :func:`totals`."""
        found = self.children.get((mode, context))
        if found is None:
            own = (self.model_name, mode, context)
            found = [
                counter.labels(*own, *more)
                for counter, kinds in self.counters
                for more in [(kind,) for kind in kinds] or NO_KIND
            ]
            self.children[mode, context] = found
        return found


def make_metrics(server_args: Any, token_bytes: int) -> ServingMetrics | None:
    """The series of a server with ``--enable-metrics``; None of another."""
    return ServingMetrics(server_args.served_model_name, token_bytes) if server_args.enable_metrics else None
