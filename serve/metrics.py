"""Counters on SGLang's ``/metrics``: what requests of each mode gained and read, by context bucket.

SGLang's scheduler collects in prometheus_client's multiprocess directory, and so does this, in the same process. The source is what
the host counts of its requests anyway (:mod:`longdraft.serve.stats`): nothing waits for the device, and a request is looked at once in
:data:`EVERY` rounds and when its cache is handed back.
"""

import logging
from collections.abc import Sequence
from typing import Any

from longdraft.draft_models.buckets import bucket_of
from longdraft.serve import stats
from longdraft.serve.stats import RequestStats

logger = logging.getLogger(__name__)

EVERY = 16  # rounds from one look at the running requests to the next
LABELS = ("model_name", "mode", "context")

NO_KIND: list[tuple[str, ...]] = [()]
# Series, by name: what they count, and their label ``kind`` where they have one.
SERIES: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("rounds", "Scheduler steps of requests.", ()),
    ("tokens", "Tokens that rounds gained, the target's own choice behind the drafts in.", ()),
    ("verifications", "Verifications of requests, on a view or on the whole cache.", ("partial", "full")),
    ("proposed_tokens", "Mode exact: tokens gained on a view, which a full verification is to confirm.", ()),
    ("confirmed_tokens", "Mode exact: tokens among the proposed ones that it confirmed.", ()),
    ("refreshes", "Modes partial and sparse: how often pending keys and values were computed anew.", ()),
    ("cache_read_bytes", "Keys and values that verifications read, of views at most.", ("partial", "full")),
)


def totals(counters: RequestStats, token_bytes: int) -> tuple[int, ...]:
    """A request's values of all series, in their order; none of them ever falls."""
    cycles, accept = counters.cycles, counters.accept
    full = cycles.full + counters.rounds - cycles.cycles  # a round that is no cycle is one full verification
    return (
        *(counters.rounds, accept.accepted + accept.verifications, cycles.partial, full),
        *(cycles.proposed, cycles.confirmed, cycles.refreshes),
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
            (Counter(f"longdraft:{name}", text, (*LABELS, "kind") if kinds else LABELS, registry=registry or REGISTRY), kinds)
            for name, text, kinds in SERIES
        ]  # fmt: skip
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
