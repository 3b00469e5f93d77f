"""What a round costs in each shape, and the shape that pays best.

A round's cost is the time of its drafting and its verification, at some batch sizes and between them on straight lines. What a
round gains follows from how often the target keeps drafts of each depth (:mod:`longdraft.serve.acceptance_rates`).
"""

import json
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import mul
from pathlib import Path
from typing import Any

from longdraft.errors import UserError, shown


@dataclass(frozen=True)
class CostTable:
    """Milliseconds of a round: one number for each of ``batches``, ascending, of every shape."""

    batches: tuple[int, ...]
    ms: Mapping[str, tuple[float, ...]]

    def of(self, shape: str, batch: int) -> float:
        """Of a batch; the nearest measured one's outside of what was measured."""
        sizes, costs = self.batches, self.ms[shape]
        at = bisect_left(sizes, batch)
        if at in (0, len(sizes)) or sizes[at] == batch:
            return costs[min(at, len(sizes) - 1)]
        share = (batch - sizes[at - 1]) / (sizes[at] - sizes[at - 1])
        return costs[at - 1] + share * (costs[at] - costs[at - 1])

    def dump(self) -> str:
        """As :meth:`load` reads it."""
        rounded = {name: [round(ms, 4) for ms in row] for name, row in self.ms.items()}
        return json.dumps({"batches": list(self.batches), "ms": rounded})

    @staticmethod
    def load(path: str, shapes: Sequence[str]) -> "CostTable":
        """Read a table.

        Args:
            path: of a JSON file ``{"batches": [1, 16], "ms": {SHAPE: [4.1, 6.3], ...}}``.
            shapes: that it must have; others are left out.

        Raises:
            UserError: no such file, or one that holds something else.
        """
        try:
            data = json.loads(Path(path).read_text())
        except OSError as error:
            raise UserError(
                f"tree_costs={shown(path)} cannot be read ({error.strerror}): give an existing file"
            ) from None
        except (ValueError, RecursionError):
            raise UserError(f"tree_costs={shown(path)} is not JSON: {FORM}") from None
        if not isinstance(data, dict) or not isinstance(data.get("ms"), dict):
            raise UserError(f"tree_costs={shown(path)} holds {shown(data)}: {FORM}")
        batches: Any = data.get("batches")
        if not _numbers(batches, int) or any(a >= b for a, b in zip(batches, batches[1:], strict=False)):
            raise UserError(
                f"tree_costs={shown(path)}: batches is {shown(batches)}: list ascending batch sizes from 1 on"
            )
        for name in shapes:
            if name not in data["ms"]:
                have = shown(sorted(data["ms"]))
                raise UserError(f"tree_costs={shown(path)} has no row {name!r} in ms, only {have}: measure it too")
            row = data["ms"][name]
            if not _numbers(row, (int, float)) or len(row) != len(batches):
                raise UserError(
                    f"tree_costs={shown(path)}: ms.{name} is {shown(row)}: give {len(batches)} milliseconds above 0, one a "
                    "batch size"
                )
        return CostTable(tuple(batches), {name: tuple(map(float, data["ms"][name])) for name in shapes})


LARGEST = 1e12  # a comparison, unlike math.isfinite, takes integers that no float holds; NaN fails it
FORM = 'write {"batches": [1, 16], "ms": {"chain1": [4.1, 6.3], ...}}, as a server logs it at start'


def _numbers(values: Any, kind: Any) -> bool:
    """Whether this is a list of numbers above zero, none of them absurd."""
    return (
        isinstance(values, list)
        and bool(values)
        and all(isinstance(x, kind) and not isinstance(x, bool) and 0 < x <= LARGEST for x in values)
    )


def expected_tokens(rates: Sequence[float]) -> float:
    """Tokens that a request gains in a round, the bonus token in.

    Args:
        rates: of each depth, how likely the target keeps a draft there, if it kept those before.
    """
    return 1.0 + sum(accumulate(rates, mul))


def best_shape(costs: CostTable, acceptance: Mapping[str, Sequence[float]], batch: int) -> str:
    """The shape with the most expected tokens a second.

    Args:
        costs: of at least these shapes.
        acceptance: rates of every shape that may be taken, as :func:`expected_tokens` has them, the shallowest first: of equal
            ones the first is taken, so that nothing is drafted which does not pay.
        batch: requests of the round.
    """
    return max(acceptance, key=lambda name: expected_tokens(acceptance[name]) / costs.of(name, batch))
