"""How much of the cache a partial verification may read."""

import math
from dataclasses import dataclass

from longdraft.errors import UserError


@dataclass(frozen=True)
class Budget:
    """Cache slots of a KV view. Sinks and window count, tokens that are pending or in the tree do not.

    Attributes:
        tokens: slots at most.
        sinks: first tokens of a context, always in; rounded up to whole blocks.
        recent: last tokens at the time of choosing, always in; rounded up to whole blocks.
        block: consecutive tokens that are chosen together.
        mass: of the blocks in between, only as many as bring the view to this share of the attention (top-p); None takes
            all that there is room for.

    Raises:
        UserError: a number that is out of range, or no room for one block beside sinks and window.
    """

    tokens: int
    sinks: int = 32
    recent: int = 128
    block: int = 16
    mass: float | None = None

    def __post_init__(self) -> None:
        if self.block < 1:
            raise UserError(f"block={self.block}: a block has at least one token, 16 is the usual size")
        for name in ("sinks", "recent"):
            value = getattr(self, name)
            if value < 0:
                raise UserError(f"{name}={value}: write 0 or more tokens")
            object.__setattr__(self, name, -(-value // self.block) * self.block)
        if self.mass is not None and not (math.isfinite(self.mass) and 0 < self.mass <= 1):
            raise UserError(
                f"mass={self.mass}: write a share of the attention above 0 and up to 1, such as 0.95, or none"
            )
        least = self.sinks + self.recent + self.block
        if self.tokens < least:
            raise UserError(
                f"tokens={self.tokens} has no room for sinks={self.sinks}, recent={self.recent} and one block of "
                f"{self.block}: write {least} or more"
            )

    @property
    def columns(self) -> int:
        """Width of a list of chosen columns: V of :func:`longdraft.serve.views.choose.choose_columns`."""
        return self.tokens // self.block * self.block
