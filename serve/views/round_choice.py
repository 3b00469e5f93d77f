"""How many partial rounds a cycle of mode ``exact`` should have: by what was confirmed, and what cycles were seen to cost.

A cycle of r rounds gains ``g = r a`` tokens on the view, a a round. Each is confirmed with chance c if all before it were, so that
``c (1 - c^g) / (1 - c)`` are returned, with the last chain's drafts where all were confirmed, and the bonus token. What a cycle
costs is first guessed from the bytes that it reads; then it is timed, and its newest times' median counts: a prefill in between makes
one far too long, and of two cycles that the host comes to late the second seems to take no time. One round fewer and one more than
what seems best are tried at once, and again now and then.
"""

import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

BLEND = 0.1
SURE = 3  # cycles after which a number of rounds counts as timed: one of them may have been disturbed
KEPT = 7  # newest times that count
MOST = 64  # rounds that are thought about
TRIED = 32  # cycles after which a neighbour of the best number is tried


@dataclass(frozen=True)
class Bytes:
    """What a verification and a round of drafting read: bytes of weights, of the cache per token; and tokens of a view.

    ``fixed`` is what a verification takes beside its reading, in bytes that could be read meanwhile.
    """

    weights: float
    draft: float
    token: float
    view: int
    fixed: float = 0.0


def expected(rounds: int, gain: float, chance: float) -> float:
    """Tokens that a cycle returns on average."""
    pending = rounds * gain
    kept = pending if chance >= 1.0 else chance * (1 - chance**pending) / (1 - chance)
    return float(kept + chance**pending * (gain - 1) + 1)


class RoundChoice:
    """Picks the number of rounds with the most tokens a second."""

    def __init__(self, read: Bytes, gain: float = 3.0, max_ms: float | None = None) -> None:
        """Start with a guess.

        Args:
            read: bytes.
            gain: tokens that a round gains, bonus in, until some were counted.
            max_ms: longest cycle.
        """
        self.read, self.gain, self.max_ms = read, gain, max_ms
        self.ms: dict[tuple[int, int], deque[float]] = {}  # of the newest cycles per byte, by requests and rounds
        self.picks = 0

    def bytes(self, rounds: int, lengths: Sequence[int]) -> float:
        """That a cycle reads."""
        full = sum(lengths) * self.read.token
        part = sum(min(n, self.read.view) for n in lengths) * self.read.token
        return (rounds + 1) * (self.read.weights + self.read.draft + self.read.fixed) + rounds * part + full

    def cost(self, rounds: int, lengths: Sequence[int]) -> float:
        """Milliseconds of a cycle, by the nearest number of rounds that was timed; bytes where none was."""
        known = [r for batch, r in self.ms if batch == len(lengths)]
        near = min(known, key=lambda r: (abs(r - rounds), r), default=None)
        return self.bytes(rounds, lengths) * (1.0 if near is None else statistics.median(self.ms[len(lengths), near]))

    def pick(self, chances: Sequence[float], lengths: Sequence[int], most: int) -> int:
        """Rounds of the next cycle.

        Args:
            chances: of a token of each request that reads a view to be confirmed.
            lengths: cached tokens of all requests.
            most: rounds at most.
        """
        if not chances or all(n <= self.read.view for n in lengths):
            return 0
        chance = min(0.999, sum(chances) / len(chances))
        able = [r for r in range(min(most, MOST) + 1) if r == 0 or self._fits(r, lengths)]
        best = max(able, key=lambda r: expected(r, self.gain, chance) / self.cost(r, lengths))
        self.picks += 1
        if self._sure(best, lengths):
            new = [r for r in (best - 1, best + 1) if r in able and not self._sure(r, lengths)]
            if new:
                return new[0]
        if self.picks % TRIED == 0:
            other = best + (1 if self.picks // TRIED % 2 else -1)
            return other if other in able else best
        return best

    def _sure(self, rounds: int, lengths: Sequence[int]) -> bool:
        return len(self.ms.get((len(lengths), rounds), ())) >= SURE

    def _fits(self, rounds: int, lengths: Sequence[int]) -> bool:
        if self.max_ms is None or not any(batch == len(lengths) for batch, _ in self.ms):
            return True
        return self.cost(rounds, lengths) <= self.max_ms

    def gained(self, tokens: int) -> None:
        """A round gained so many tokens on a view, and could have gained a whole chain; 0 says nothing."""
        if tokens:
            self.gain += BLEND * (tokens - self.gain)

    def timed(self, ms: float, rounds: int, lengths: Sequence[int]) -> None:
        """A cycle took so long."""
        newest = self.ms.setdefault((len(lengths), rounds), deque(maxlen=KEPT))
        newest.append(ms / self.bytes(rounds, lengths))
