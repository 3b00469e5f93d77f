"""Counters of a request, and their way into its response."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from longdraft.draft_models.acceptance import AcceptStats
from longdraft.serve.settings import VIEWED, RequestSettings
from longdraft.serve.views.cycle_plan import Ledger

KEY = "longdraft"


@dataclass
class CycleStats:
    """Of modes with views: partial and full verifications, tokens gained on a view before a full verification
    and how many it confirmed, full verifications that refused one, and how often a request fell back to its whole cache
    because few were confirmed; tokens returned that a view alone verified, and how often pending ones were computed anew;
    cycles, and cached tokens that their verifications read on views and on whole caches.
    """

    partial: int = 0
    full: int = 0
    proposed: int = 0
    confirmed: int = 0
    refused: int = 0
    fallbacks: int = 0
    approximate: int = 0
    refreshes: int = 0
    cycles: int = 0
    read_partial: int = 0
    read_full: int = 0

    def add(self, rounds: int, full: bool, proposed: int, confirmed: int, fell: bool, read: tuple[int, int]) -> None:
        """One cycle: its partial rounds, whether its last verification was a full one, and cached tokens that partial and full
        verifications read.
        """
        self.cycles += 1
        self.read_partial += read[0]
        self.read_full += read[1]
        self.partial += rounds + (not full)
        self.full += full
        self.proposed += proposed
        self.confirmed += confirmed
        self.refused += confirmed < proposed
        self.fallbacks += fell

    def lossy(self, approximate: int, refreshed: bool) -> None:
        """Of a lossy mode's cycle: tokens that a view alone verified, and whether pending ones were computed anew."""
        self.approximate += approximate
        self.refreshes += refreshed

    def summary(self) -> dict[str, Any]:
        """What the response's ``meta_info`` carries."""
        return {
            "partial_verifications": self.partial,
            "full_verifications": self.full,
            "gained_on_view": self.proposed,
            "confirmed": self.confirmed,
            "cycles_refused": self.refused,
            "view_fallbacks": self.fallbacks,
            "verified_on_view": self.approximate,
            "refreshes": self.refreshes,
        }


@dataclass
class RequestStats:
    """Rounds (draft and verification) and target verifications of one request; failures are rounds without a usable draft; shapes are
    how many rounds chose which, where there was a choice; read are cached tokens that rounds without views read; seen is what
    :mod:`longdraft.serve.metrics` has added up already.
    """

    mode: str
    accept: AcceptStats
    rounds: int = 0
    failures: int = 0
    shapes: Counter[str] = field(default_factory=Counter)
    cycles: CycleStats = field(default_factory=CycleStats)
    ledger: Ledger | None = None
    verified_since_choice: int = 0
    own: RequestSettings = field(default_factory=RequestSettings)
    read: int = 0
    seen: tuple[int, ...] = ()

    def count(self, drafted: int, accepted: int, read: int) -> None:
        """One round: drafts, those among them that were kept, and cached tokens that it read whole (0 of a cycle, which counts its own)."""
        self.accept.add(drafted, accepted)
        self.rounds += 1
        self.read += read

    def summary(self) -> dict[str, Any]:
        """What the response's ``meta_info`` carries."""
        chosen = {"shapes": dict(self.shapes)} if self.shapes.total() else {}
        return {
            **chosen,
            **(self.cycles.summary() if self.mode in VIEWED else {}),
            "mode": self.mode,
            "rounds": self.rounds,
            "target_verifications": self.accept.verifications,
            "drafted": self.accept.drafted,
            "accepted": self.accept.accepted,
            "tau": round(self.accept.tau, 4),
            "tau_without_bonus": round(self.accept.tau_without_bonus, 4),
            "draft_failures": self.failures,
        }


class LatestSummary(list[dict[str, Any]]):
    """SGLang sends ``info[first token : last token]`` with every chunk, one entry a token.

    A step of ours returns several tokens, so entries by token make no sense: every slice is the totals so far, and a
    response's last entry is the request's.
    """

    def __init__(self, stats: RequestStats) -> None:
        super().__init__()
        self.stats = stats

    def __getitem__(self, key: Any) -> Any:
        return [self.stats.summary()] if isinstance(key, slice) else self.stats.summary()


def attached(req: Any) -> RequestStats | None:
    """The request's counters, if it has any yet."""
    holder = (req.customized_info or {}).get(KEY)
    return holder.stats if isinstance(holder, LatestSummary) else None


def attach(req: Any, mode: str) -> RequestStats:
    """The request's counters, made on first use and kept with the request (a retraction does not reset them)."""
    found = attached(req)
    if found is None:
        found = RequestStats(mode, AcceptStats())
        req.customized_info = {**(req.customized_info or {}), KEY: LatestSummary(found)}
    return found
