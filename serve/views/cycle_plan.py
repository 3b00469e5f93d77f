"""What the host decides before a cycle: how many partial rounds, and who is verified fully behind them, or computed anew before.

The host may be a round behind, so it counts with what rounds usually gain; the device keeps what is pending within the room that a
full verification has.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from longdraft.serve.settings import LONGEST_REFRESH, LOSSY, ServeSettings
from longdraft.serve.views.round_choice import RoundChoice

SHARE_BLEND = 0.1  # of the newest cycle in a request's share of confirmed tokens
CHANCE_BLEND = 0.01  # of one token in a request's chance of tokens to be confirmed
PRIOR_BLEND = 0.001  # and in the server's, with which requests begin
PAUSE = 16  # cycles for which a request that confirms badly reads its whole cache, and a server whose verification failed goes gently


PARTIAL, FULL, REPAIRED = (
    0,
    1,
    2,
)  # what a round was: on a view, on whole caches, or on a view behind pending tokens computed anew


def rooms(pending: int) -> list[int]:
    """Numbers of pending tokens that last verifications are made for, ascending: each a shape of its own on a card."""
    return sorted({pending * 2 // 5, pending * 3 // 5, pending} - {0})


def blended(chance: float, blend: float, confirmed: int, tried: int) -> float:
    """A chance with the newest of so many trials, each of weight ``blend``."""
    return chance + (1 - (1 - blend) ** tried) * (confirmed / tried - chance)


@dataclass
class Ledger:
    """One request, as the host knows it.

    Attributes:
        length: cached tokens after the rounds that the scheduler has processed.
        exact: leading ones among them that no partial verification wrote.
        waiting: for each round that it has not processed, oldest first, what it was.
        share: of tokens gained on a view, how many were confirmed.
        chance: of a token to be confirmed, where all before it were.
        paused: cycles that it still reads its whole cache.
        doubtful: whether a token was chosen with too small a margin, or its view missed too much, and no full verification has been
            launched since.
        budget: tokens of a sparse set; 0 in other modes.
        refresh: tokens at most from one full verification to the next; None: as the server has it.
    """

    length: int
    exact: int
    waiting: list[int] = field(default_factory=list)
    share: float = 1.0
    chance: float = 0.95
    paused: int = 0
    doubtful: bool = False
    budget: int = 0
    refresh: int | None = None

    def pending(self, gain: float) -> float:
        """Tokens behind the last full verification when the next round starts, if rounds gain so many."""
        known: float = self.length - self.exact
        for kind in self.waiting:
            known = {PARTIAL: known + gain, FULL: 0, REPAIRED: gain}[kind]
        return known


@dataclass(frozen=True)
class CyclePlan:
    """One step of a batch.

    Attributes:
        rounds: partial rounds before the last verification.
        full: of each request, whether the last verification reads its whole cache, and so computes pending tokens anew.
        everything: of each request, whether its partial rounds read its whole cache too.
        room: pending tokens that the last verification has room for; 0 for a chain's.
        repaired: of each request, whether its pending tokens are computed anew before the cycle; for sparse ones, whose sets cannot
            share a last verification with whole caches without making it one.
    """

    rounds: int
    full: tuple[bool, ...]
    everything: tuple[bool, ...]
    room: int
    repaired: tuple[bool, ...] = ()

    def kind(self, b: int) -> int:
        """What the cycle is for a request."""
        return FULL if self.full[b] else REPAIRED if self.repaired and self.repaired[b] else PARTIAL


class CyclePlanner:
    """Plans cycles."""

    def __init__(self, settings: ServeSettings, chain: int, choice: RoundChoice) -> None:
        """Set up.

        Args:
            settings: of the server.
            chain: tokens at most that a round gains.
            choice: of the number of partial rounds.
        """
        self.settings, self.chain, self.choice = settings, chain, choice
        self.stride = chain + settings.pending  # tokens at most that a cycle returns
        self.rooms = rooms(settings.pending)
        self.chance = 0.95  # of a token to be confirmed, over all requests
        self.prefill_waits = False
        self.careful = 0  # cycles that still do without partial rounds
        self.unable = 0  # and without computing anything anew

    def plan(self, ledgers: Sequence[Ledger], modes: Sequence[str], lengths: Sequence[int]) -> CyclePlan:
        """The next cycle of a batch.

        Args:
            ledgers, modes: of its requests.
            lengths: cached tokens of each, as far as the host knows.
        """
        both = list(zip(modes, ledgers, strict=True))
        lost = tuple(mode == "partial" and self._lost(ledger) for mode, ledger in both)
        short = tuple(mode in LOSSY and self._short(ledger) for mode, ledger in both)
        repaired = self._repaired(
            [mode == "sparse" and not small for small, mode in zip(short, modes, strict=True)], ledgers
        )
        everything = tuple(
            small or gone or mode == "full" or (mode == "exact" and ledger.paused > 0)
            for small, gone, (mode, ledger) in zip(short, lost, both, strict=True)
        )
        if "exact" not in modes:
            due = tuple(
                mode == "partial" and not small and not gone and self._due(ledger)
                for small, gone, (mode, ledger) in zip(short, lost, both, strict=True)
            )
            full = tuple(
                refresh or mode == "off" or (all_ and not gone)
                for all_, refresh, gone, mode in zip(everything, due, lost, modes, strict=True)
            )
            return CyclePlan(0, full, everything, self.settings.pending if any(due) else 0, repaired)
        on_view = [
            ledger for (mode, ledger), all_ in zip(both, everything, strict=True) if mode == "exact" and not all_
        ]
        rounds = self._rounds(on_view, lengths)
        room = self.settings.pending if "partial" in modes else self._room(rounds)
        full = tuple(
            not gone and (mode != "sparse" or small) for gone, small, mode in zip(lost, short, modes, strict=True)
        )
        return CyclePlan(rounds, full, everything, room, repaired)

    def _repaired(self, sparse: Sequence[bool], ledgers: Sequence[Ledger]) -> tuple[bool, ...]:
        """Whose pending tokens are computed anew: weights are read once for all, so those that are half way to it go along."""
        self.unable = max(0, self.unable - 1)
        due = [of and self._worn(ledger, 1.0) for of, ledger in zip(sparse, ledgers, strict=True)]
        if self.unable or not any(due):
            return ()
        return tuple(of and self._worn(ledger, 0.5) for of, ledger in zip(sparse, ledgers, strict=True))

    def _short(self, ledger: Ledger) -> bool:
        """Whether a lossy request is verified fully in every round: nothing is pending, and a view would hold it."""
        return not ledger.pending(1) and self._fits(ledger)

    def _fits(self, ledger: Ledger) -> bool:
        if ledger.budget:  # a set is no wider: whatever is on its way must fit
            return ledger.length + len(ledger.waiting) * self.stride + self.chain <= ledger.budget
        return ledger.length + 2 * self.chain <= self.settings.view_tokens

    def _worn(self, ledger: Ledger, share: float) -> bool:
        """Whether a sparse request is so far on its way to a refresh, and its pending tokens can be computed anew: their ids are kept."""
        gain, most = self.choice.gain, self._refresh(ledger)
        due = ledger.doubtful or (most is not None and ledger.pending(gain) + gain > share * most)
        return due and ledger.pending(1) > 0 and ledger.pending(self.stride) <= LONGEST_REFRESH + self.stride

    def _refresh(self, ledger: Ledger) -> int | None:
        return ledger.refresh or self.settings.refresh_every

    def _lost(self, ledger: Ledger) -> bool:
        """Whether more is pending than a full verification has room for, since several have failed: the request goes on over its
        whole cache as it is, and hands back what was exact before.
        """
        return ledger.pending(1) >= self.settings.pending + self.chain

    def _room(self, rounds: int) -> int:
        """For what so many rounds usually gain: every token more costs the last verification a row of each request."""
        usual = round(rounds * self.choice.gain)
        return 0 if not rounds else next((room for room in self.rooms if room >= usual), self.settings.pending)

    def _due(self, ledger: Ledger) -> bool:
        """Whether one more partial round would leave more pending than is wanted, as rounds usually gain.

        Where one gains more, the device returns no more than there is room for, and at least one token: a chain's drafts are
        left out of the full verification for every token that is pending beyond the room.
        """
        most = min(self.settings.pending, self._refresh(ledger) or self.settings.pending)
        usual = ledger.pending(self.choice.gain) + self.choice.gain
        least = ledger.pending(1) + 1
        few = ledger.doubtful or self._fits(ledger)
        return few or usual > max(most, self.chain) or least > most + self.chain - 1

    def _rounds(self, on_view: Sequence[Ledger], lengths: Sequence[int]) -> int:
        most = self.settings.pending // self.chain
        if self.careful:
            self.careful -= 1
            return 0
        if self.settings.rounds is not None:
            wanted = min(self.settings.rounds, self.settings.pending)
        else:
            wanted = self.choice.pick([ledger.chance for ledger in on_view], lengths, most)
        return min(wanted, 1) if self.prefill_waits else wanted

    def read(self, plan: CyclePlan, b: int, ledger: Ledger) -> tuple[int, int]:
        """Cached tokens that a cycle reads of a request on views, at most, and on whole caches; the ledger is from before it."""
        view = ledger.budget or self.settings.view_tokens + ledger.length - ledger.exact
        each = ledger.length if plan.everything[b] else min(ledger.length, view)
        whole = plan.full[b] or plan.kind(b) == REPAIRED
        return (plan.rounds + (not plan.full[b])) * each, whole * ledger.length

    def failed(self) -> None:
        """A wide verification failed, for want of memory perhaps: the next cycles do without what makes it wide."""
        self.careful = PAUSE

    def unrepaired(self) -> None:
        """Pending tokens could not be computed anew: the next cycles do not try."""
        self.unable = PAUSE

    def launched(self, ledgers: Sequence[Ledger], plan: CyclePlan) -> None:
        """A cycle of the batch is on its way."""
        for b, ledger in enumerate(ledgers):
            ledger.waiting.append(plan.kind(b))
            ledger.paused = max(0, ledger.paused - 1)
            ledger.doubtful = ledger.doubtful and plan.kind(b) == PARTIAL

    def processed(self, ledger: Ledger, gained: int, proposed: int, confirmed: int, doubtful: bool) -> bool:
        """The scheduler comes to a cycle of a request.

        Args:
            ledger: of the request.
            gained: tokens that it returned.
            proposed, confirmed: tokens that partial rounds gained, and how many of them the full verification kept.
            doubtful: whether one was chosen with too small a margin, or by a view that missed too much.

        Returns:
            Whether the request reads its whole cache from now on, for a while.
        """
        if not ledger.waiting:  # it was computed anew since
            return False
        kind = ledger.waiting.pop(0)
        if kind == REPAIRED:
            ledger.exact = ledger.length
        ledger.length += gained
        if kind == FULL:
            ledger.exact = ledger.length
        else:
            ledger.doubtful |= doubtful and not any(ledger.waiting)  # one that is on its way makes it good
        if not proposed or ledger.paused:
            return False
        tried = min(proposed, confirmed + 1)
        ledger.chance = blended(ledger.chance, CHANCE_BLEND, confirmed, tried)
        self.chance = blended(self.chance, PRIOR_BLEND, confirmed, tried)
        ledger.share += SHARE_BLEND * (confirmed / proposed - ledger.share)
        if ledger.share >= self.settings.confirm_floor:
            return False
        ledger.paused, ledger.share = PAUSE, 1.0
        return True
