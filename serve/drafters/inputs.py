"""What a draft loop reads of a batch, in buffers whose addresses never change, and how it chooses tokens.

Legend: B requests, W page-list width, K drafted tokens a request, V vocabulary.
"""

import math

import torch

from longdraft.serve.drafters.base import Pick
from longdraft.serve.drafters.running import Running
from longdraft.serve.sampling.rows import RowParams

Variant = str | Pick
GREEDY, NOISY, FILTERED = "greedy", "noisy", "filtered"


class LoopInputs:
    """Static inputs and the output of a draft loop, for up to ``most`` requests; padding holds nothing that is read."""

    def __init__(self, most: int, width: int, steps: int, device: torch.device, idle_row: int) -> None:
        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
            return torch.zeros(*shape, dtype=dtype, device=device)

        self.idle_row = idle_row
        self.ids_3B = zeros(3, most)  # state row, newest token, its position: one copy from the host fills them
        self.lens_B = zeros(most, dtype=torch.int32)
        self.pages_BW = zeros(most, width, dtype=torch.int32)
        self.cu_B1 = torch.arange(most + 1, dtype=torch.int32, device=device)
        self.drafted_BK = zeros(most, steps)
        self.params = RowParams(
            torch.ones(most, 1, device=device),
            zeros(most, 1),
            torch.full((most, 1), math.inf, device=device),
            torch.zeros(most, 1, device=device),
            zeros(most),
            torch.ones(most, dtype=torch.bool, device=device),
            False,
            True,
        )

    def fill(
        self,
        rows: list[int],
        roots: list[int],
        positions: list[int],
        pages: list[torch.Tensor],
        pick: Pick,
        size: int,
    ) -> Variant:
        """Write a batch and its padding to ``size``; the variant of :meth:`pick` that its sampling parameters need.

        Args:
            rows: where each request's draft state lies.
            roots, positions: the newest tokens and where they stand.
            pages: cache slots that each request's draft reads, at most W.
            pick: RowParams of one row a request, whose numbers are copied, or a function, which is the variant itself.
            size: batch size with padding, whose requests read nothing and whose state is the idle row.
        """
        pad = [0] * (size - len(rows))
        host = torch.tensor([rows + [self.idle_row] * len(pad), roots + pad, positions + pad])
        self.ids_3B[:, :size].copy_(host, non_blocking=True)
        self.lens_B[:size].copy_(torch.tensor([len(p) for p in pages] + pad, dtype=torch.int32), non_blocking=True)
        for b, page_W in enumerate(pages):
            self.pages_BW[b, : len(page_W)] = page_W
        return self._sampling(pick, len(rows), size)

    def take(
        self, row_B: torch.Tensor, running: Running, view: tuple[torch.Tensor, torch.Tensor], pick: Pick, size: int
    ) -> Variant:
        """:meth:`fill` of a batch that the device alone knows; waits for nothing.

        Args:
            row_B: where each request's draft state lies.
            running: the batch.
            view: of :meth:`Running.view`, as wide as W.
            pick: as in :meth:`fill`.
            size: as in :meth:`fill`.
        """
        count = len(row_B)
        self.ids_3B[0, count:size] = self.idle_row
        self.ids_3B[1:, count:size] = 0
        self.lens_B[count:size] = 0
        for at, given_B in enumerate((row_B, running.newest_B, running.length_B)):
            self.ids_3B[at, :count] = given_B
        self.pages_BW[:count], self.lens_B[:count] = view
        return self._sampling(pick, count, size)

    def _sampling(self, pick: Pick, count: int, size: int) -> Variant:
        if not isinstance(pick, RowParams):
            return pick
        if pick.greedy:
            return GREEDY
        for name in ("temperature_N1", "top_k_N1", "top_p_N1", "min_p_N1", "seed_N", "greedy_N"):
            getattr(self.params, name)[:count] = getattr(pick, name)
        self.params.greedy_N[count:size] = True
        return FILTERED if pick.filtered else NOISY

    def scores(
        self, logits_BMN: torch.Tensor, position_B: torch.Tensor, id_N: torch.Tensor | None, variant: Variant
    ) -> torch.Tensor:
        """What trees are grown by (:meth:`RowParams.scores`), by the batch's parameters as they are when this runs."""
        if variant == GREEDY:
            return torch.log_softmax(logits_BMN.float(), -1)
        return self.params.first(len(logits_BMN), variant == FILTERED).scores(logits_BMN, position_B, id_N)

    def pick(self, logits_BV: torch.Tensor, position_B: torch.Tensor, variant: Variant) -> torch.Tensor:
        """Choose as the target will (:meth:`RowParams.choose`), by the batch's parameters as they are when this runs."""
        if callable(variant):
            return variant(logits_BV, position_B)
        if variant == GREEDY:
            return logits_BV.argmax(-1)
        return self.params.first(len(logits_BV), variant == FILTERED).choose(logits_BV, position_B)
