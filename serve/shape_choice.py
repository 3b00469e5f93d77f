"""Which shape a round drafts: the only one, or the one that pays best by costs and acceptance. It never changes a token."""

from collections.abc import Sequence

from longdraft.serve.acceptance_rates import AcceptanceRates
from longdraft.serve.shape_costs import CostTable, best_shape
from longdraft.serve.tree_shape import TreeShape


class ShapeChoice:
    """Of some shapes, the shallowest first; without costs the last of them."""

    def __init__(self, shapes: Sequence[TreeShape]) -> None:
        self.shapes = {shape.name: shape for shape in shapes}
        self.rates = AcceptanceRates(shapes)
        self.costs: CostTable | None = None

    @property
    def open(self) -> bool:
        """Whether there is anything to choose."""
        return len(self.shapes) > 1

    def pick(self, batch: int) -> TreeShape:
        """The shape of the next round of ``batch`` requests."""
        if self.costs is None:
            return next(reversed(self.shapes.values()))
        self.rates.fade()
        acceptance = {name: self.rates.of(shape) for name, shape in self.shapes.items()}
        return self.shapes[best_shape(self.costs, acceptance, batch)]

    def learn(self, shape: TreeShape, limits: Sequence[int], kept: Sequence[int]) -> None:
        """What a round of this shape kept (:meth:`AcceptanceRates.learn`)."""
        if self.open:
            self.rates.learn(shape, limits, kept)
