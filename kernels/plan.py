"""What one batch's attention reads, prepared once for all layers.

Legend: B requests, T new tokens of all requests, W page-list width.
"""

from dataclasses import dataclass
from itertools import accumulate

import torch

MOST_RUNS = 8  # a prompt from the prefix cache and what was generated behind it are two or three


@dataclass(frozen=True)
class AttentionPlan:
    """Page lists and row offsets of a batch, on the host and on the device (built once, read by every layer).

    Attributes:
        pages_BW: int32 pages of ``page_size`` consecutive cache slots. Of the slots that they name, ``0 .. lens[b]`` are the
            prefix that every new token of request b sees; ``lens[b] .. lens[b] + rows_b`` are the new tokens' own, in order.
            What stands behind those is never read.
        host_lens: prefix length of each request, may be 0; None where the device alone knows.
        cu_rows: row offsets of the requests in the flat new tokens, ``B + 1`` entries from 0 to T.
        lens_B, cu_rows_B1: the same as int32 tensors on the device.
        runs: on a CPU, each prefix as a few runs of consecutive cache rows; None where there are too many.
        page_size: slots of a page; page p is slots ``p * page_size`` and on.
    """

    pages_BW: torch.Tensor
    host_lens: list[int] | None
    cu_rows: list[int]
    lens_B: torch.Tensor
    cu_rows_B1: torch.Tensor
    runs: tuple[tuple[slice, ...] | None, ...]
    page_size: int = 1

    @staticmethod
    def build(pages_BW: torch.Tensor, lens: list[int], rows: list[int], page_size: int = 1) -> "AttentionPlan":
        """Plan for ``rows[b]`` new tokens of request b over ``lens[b]`` cached slots.

        Raises:
            ValueError: a page list too narrow for its length, or lists of unequal length.
        """
        if not len(lens) == len(rows) == pages_BW.shape[0]:
            raise ValueError(
                f"plan of {pages_BW.shape[0]} page lists got {len(lens)} lengths and {len(rows)} row counts"
            )
        if lens and max(lens) > pages_BW.shape[1] * page_size:
            raise ValueError(
                f"a request reads {max(lens)} slots, its page list holds {pages_BW.shape[1] * page_size}: widen the list"
            )
        cu = list(accumulate(rows, initial=0))
        device = pages_BW.device
        return AttentionPlan(
            pages_BW.to(torch.int32),
            list(lens),
            cu,
            torch.tensor(lens, dtype=torch.int32, device=device),
            torch.tensor(cu, dtype=torch.int32, device=device),
            tuple(consecutive_runs(_slots(pages_BW[b], n, page_size)) for b, n in enumerate(lens)),
            page_size,
        )

    @staticmethod
    def on_device(
        pages_BW: torch.Tensor, lens_B: torch.Tensor, cu_rows_B1: torch.Tensor, cu_rows: list[int], page_size: int = 1
    ) -> "AttentionPlan":
        """Plan of fixed shapes whose page lists and lengths, int32, are filled in later on the device: for a CUDA graph."""
        assert pages_BW.dtype == lens_B.dtype == cu_rows_B1.dtype == torch.int32
        return AttentionPlan(pages_BW, None, cu_rows, lens_B, cu_rows_B1, (None,) * len(lens_B), page_size)

    @property
    def lens(self) -> list[int]:
        """Prefix lengths on the host; waits for the device where it alone knows them."""
        return self.lens_B.tolist() if self.host_lens is None else self.host_lens

    def slots(self, b: int, count: int) -> torch.Tensor:
        """The first ``count`` slots of request b, int64."""
        return _slots(self.pages_BW[b], count, self.page_size)

    @property
    def max_rows(self) -> int:
        return max((b - a for a, b in zip(self.cu_rows, self.cu_rows[1:], strict=False)), default=0)

    def rows_of(self, b: int) -> slice:
        """Rows of request b among the flat new tokens."""
        return slice(self.cu_rows[b], self.cu_rows[b + 1])

    def __len__(self) -> int:
        return self.pages_BW.shape[0]


def _slots(pages_W: torch.Tensor, count: int, page_size: int) -> torch.Tensor:
    pages = pages_W[: -(-count // page_size)].long()
    if page_size == 1:
        return pages
    return (pages[:, None] * page_size + torch.arange(page_size, device=pages.device)).flatten()[:count]


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
