"""How often the target keeps drafts of each depth, from what it kept lately, on one server for all requests.

Chains of every depth share their counts: a chain is a longer one's beginning. A tree has its own. Where little was seen, a prior
stands: at a chain's depth the rate of the depth before, at a tree's depth half of what the chain misses there. Counts fade, so that
a shape that was given up is tried again when the prior thinks better of it.
"""

from collections.abc import Sequence

from longdraft.serve.tree_shape import TreeShape

FIRST = 0.7  # rate of a chain's first draft before anything is seen
WEIGHT = 16.0  # drafts for which the prior counts
MEMORY = 0.995  # of the counts, a round


class AcceptanceRates:
    """Counts of drafts that could be kept, since all before them were, and of those that were."""

    def __init__(self, shapes: Sequence[TreeShape]) -> None:
        depths: dict[str, int] = {}
        for shape in shapes:
            depths[_kind(shape)] = max(shape.depth, depths.get(_kind(shape), 0))
        self.tried = {kind: [0.0] * depth for kind, depth in depths.items()}
        self.kept = {kind: [0.0] * depth for kind, depth in depths.items()}

    def fade(self) -> None:
        """A round begins."""
        for counts in (*self.tried.values(), *self.kept.values()):
            counts[:] = [count * MEMORY for count in counts]

    def learn(self, shape: TreeShape, limits: Sequence[int], kept: Sequence[int]) -> None:
        """A round's outcome.

        Args:
            shape: that was drafted.
            limits: depth to which each request could use drafts, 0 for one that did not draft.
            kept: drafts that each one kept.
        """
        tried_D, kept_D = self.tried[_kind(shape)], self.kept[_kind(shape)]
        for limit, count in zip(limits, kept, strict=True):
            for depth in range(min(count + 1, limit, shape.depth)):
                tried_D[depth] += 1
                kept_D[depth] += depth < count

    def of(self, shape: TreeShape) -> list[float]:
        """Rates of the shape's depths, as :func:`longdraft.serve.shape_costs.expected_tokens` takes them."""
        chain = self._rates("chain", shape.depth, [])
        return chain if shape.chain else self._rates(shape.name, shape.depth, chain)

    def _rates(self, kind: str, depth: int, chain: list[float]) -> list[float]:
        tried_D, kept_D = (counts.get(kind, []) for counts in (self.tried, self.kept))
        rates: list[float] = []
        for at in range(depth):
            prior = (1 + chain[at]) / 2 if chain else (rates[-1] if rates else FIRST)
            tried, kept = (tried_D[at], kept_D[at]) if at < len(tried_D) else (0.0, 0.0)
            rates.append((kept + WEIGHT * prior) / (tried + WEIGHT))
        return rates


def _kind(shape: TreeShape) -> str:
    return "chain" if shape.chain else shape.name
