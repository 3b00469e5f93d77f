"""A running batch as the device knows it: between two rounds nothing of it has to be read on the host.

Legend: B requests, R rows of SGLang's page table, W columns of a page list.
"""

from dataclasses import dataclass

import torch

from longdraft.kernels.plan import AttentionPlan


@dataclass(frozen=True)
class Running:
    """Requests between two rounds.

    Attributes:
        rids: their ids.
        row_B: int64 rows of the page table.
        table_RW: SGLang's page table.
        length_B: int64 tokens that the target's cache holds of each.
        newest_B: int64 newest token of each, which has no cache yet.
        host_lengths: whether attention needs the lengths on the host, so that outside of graphs they are read, once a plan.
        chosen: int32 cache slots ``[B, W]`` that have been chosen for each request to read, and the int32 number of them; None
            where nothing was chosen.
    """

    rids: tuple[str, ...]
    row_B: torch.Tensor
    table_RW: torch.Tensor
    length_B: torch.Tensor
    newest_B: torch.Tensor
    host_lengths: bool = False
    chosen: tuple[torch.Tensor, torch.Tensor] | None = None

    @property
    def reads_lengths(self) -> bool:
        """A CPU reads them for nothing, and then finds runs of slots that it need not copy."""
        return self.host_lengths or self.row_B.device.type == "cpu"

    def only(self, b: int) -> "Running":
        """One request."""
        one = slice(b, b + 1)
        facts = self.row_B[one], self.table_RW, self.length_B[one], self.newest_B[one]
        chosen = None if self.chosen is None else (self.chosen[0][one], self.chosen[1][one])
        return Running(self.rids[one], *facts, self.host_lengths, chosen)

    def last_slot(self) -> torch.Tensor:
        """Cache slot of each request's last cached token, int64 ``[B]``."""
        return self.table_RW[self.row_B, (self.length_B - 1).clamp_min(0)].long()

    def view(self, first: int, sinks: int, recent: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Cache slots of tokens ``first ..`` of each request: all, or its sinks and the most recent.

        Returns:
            int32 ``[B, sinks + recent]`` and the int32 number of them that count; what stands behind those is some slot.
        """
        most = sinks + recent
        count_B = (self.length_B - first).clamp_min(0)
        column_W = torch.arange(most, device=self.row_B.device)
        skipped_B = (count_B - most).clamp_min(0)
        column_BW = first + column_W + torch.where(column_W < sinks, 0, skipped_B[:, None])
        column_BW = torch.minimum(column_BW, (self.length_B - 1).clamp_min(0)[:, None])
        return self.table_RW[self.row_B[:, None], column_BW].int(), count_B.clamp_max(most).int()

    def read(self, sinks: int, recent: int) -> tuple[torch.Tensor, torch.Tensor]:
        """What a draft reads of the target's cache: :meth:`view`, or what was chosen where that is no more."""
        plain_BW, count_B = self.view(0, sinks, recent)
        if self.chosen is None:
            return plain_BW, count_B
        chosen_BW, chosen_B = self.chosen
        most, fits_B = sinks + recent, chosen_B <= sinks + recent
        more = max(0, most - chosen_BW.shape[1])
        chosen_BW = torch.nn.functional.pad(chosen_BW, (0, more))[:, :most]
        return torch.where(fits_B[:, None], chosen_BW, plain_BW), torch.where(fits_B, chosen_B, count_B)

    def view_plan(self, view: tuple[torch.Tensor, torch.Tensor], width: int) -> AttentionPlan | list[AttentionPlan]:
        """:meth:`plan` of a page list that has been made, its length on the device; of lists for each layer, one of each."""
        if view[0].dim() == 3:
            return [self._view_plan(pages_BW, lens_B, width) for pages_BW, lens_B in zip(*view, strict=True)]
        return self._view_plan(*view, width)

    def _view_plan(self, pages_BW: torch.Tensor, lens_B: torch.Tensor, width: int) -> AttentionPlan:
        batch = len(self.row_B)
        if self.reads_lengths:
            return AttentionPlan.build(pages_BW, lens_B.tolist(), [width] * batch)
        cu_B1 = torch.arange(batch + 1, dtype=torch.int32, device=pages_BW.device) * width
        return AttentionPlan.on_device(pages_BW, lens_B, cu_B1, list(range(0, (batch + 1) * width, width)))

    def plan(self, columns: int, width: int) -> AttentionPlan:
        """What ``width`` new tokens of each request read, for a forward outside of graphs.

        Args:
            columns: no request holds more tokens, nor has more slots.
            width: new tokens of each. Where a row of the page table has no slots for them they stand on slot 0, which nobody owns.
        """
        batch, device = len(self.row_B), self.row_B.device
        pages_BW = torch.nn.functional.pad(self.table_RW[self.row_B, :columns].int(), (0, width))
        if self.reads_lengths:
            return AttentionPlan.build(pages_BW, self.length_B.tolist(), [width] * batch)
        cu_B1 = torch.arange(batch + 1, dtype=torch.int32, device=device) * width
        return AttentionPlan.on_device(pages_BW, self.length_B.int(), cu_B1, list(range(0, (batch + 1) * width, width)))
