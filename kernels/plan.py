"""What one batch's attention reads, prepared once for all layers.

Legend: B requests, T new tokens of all requests, W page-list width.
"""

from dataclasses import dataclass

import torch

MOST_RUNS = 8  # a prompt from the prefix cache and what was generated behind it are two or three


@dataclass(frozen=True)
class AttentionPlan:
    """Page lists and row offsets of a batch, on the host and on the device (built once, read by every layer).

    Attributes:
        pages_BW: int32 cache slots, page size 1. Columns ``0 .. lens[b]`` are the prefix that every new token of
            request b sees; columns ``lens[b] .. lens[b] + rows_b`` are the new tokens' own slots, in order.
        lens: prefix length of each request, may be 0.
        cu_rows: row offsets of the requests in the flat new tokens, ``B + 1`` entries from 0 to T.
        lens_B, cu_rows_B1: the same as int32 tensors on the device.
        runs: on a CPU, each prefix as a few runs of consecutive cache rows; None where there are too many.
    """

    pages_BW: torch.Tensor
    lens: list[int]
    cu_rows: list[int]
    lens_B: torch.Tensor
    cu_rows_B1: torch.Tensor
    runs: tuple[tuple[slice, ...] | None, ...]

    @staticmethod
    def build(pages_BW: torch.Tensor, lens: list[int], rows: list[int]) -> "AttentionPlan":
        """Plan for ``rows[b]`` new tokens of request b over ``lens[b]`` cached slots.

        Raises:
            ValueError: a page list too narrow for its length, or lists of unequal length.
        """
        if not len(lens) == len(rows) == pages_BW.shape[0]:
            raise ValueError(
                f"plan of {pages_BW.shape[0]} page lists got {len(lens)} lengths and {len(rows)} row counts"
            )
        if lens and max(lens) > pages_BW.shape[1]:
            raise ValueError(
                f"a request reads {max(lens)} slots, its page list holds {pages_BW.shape[1]}: widen the list"
            )
        cu = [0]
        for n in rows:
            cu.append(cu[-1] + n)
        device = pages_BW.device
        return AttentionPlan(
            pages_BW.to(torch.int32),
            list(lens),
            cu,
            torch.tensor(lens, dtype=torch.int32, device=device),
            torch.tensor(cu, dtype=torch.int32, device=device),
            tuple(consecutive_runs(pages_BW[b, :n]) for b, n in enumerate(lens)),
        )

    @property
    def max_rows(self) -> int:
        return max((b - a for a, b in zip(self.cu_rows, self.cu_rows[1:], strict=False)), default=0)

    def rows_of(self, b: int) -> slice:
        """Rows of request b among the flat new tokens."""
        return slice(self.cu_rows[b], self.cu_rows[b + 1])

    def __len__(self) -> int:
        return len(self.lens)


def consecutive_runs(slots_N: torch.Tensor, most: int = MOST_RUNS) -> tuple[slice, ...] | None:
    """Slots that follow one another, as slices of cache rows, on a CPU: a view costs nothing, a copy more than the attention.

    Args:
        slots_N: in page-list order.
        most: None comes back where there are more runs than this, and for no slots.
    """
    if not slots_N.numel() or slots_N.device.type != "cpu":
        return None
    starts = [0, *((slots_N[1:] - slots_N[:-1] != 1).nonzero().flatten() + 1).tolist()]
    if len(starts) > most:
        return None
    ends = [*starts[1:], slots_N.numel()]
    first = slots_N[torch.tensor(starts)].tolist()
    return tuple(slice(row, row + b - a) for row, a, b in zip(first, starts, ends, strict=True))
