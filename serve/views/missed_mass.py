"""How much attention a view has left out: what asks for a refresh in mode ``partial``.

A partial verification does not see what its view lacks, so this is measured beside it: the newest verified row's queries, which the
tap keeps of every verification, are scored over all keys of the measured layers. That is attention recovery (Dustin, eq. 1-4) from
the other side: 1 - ARR of one row.

Legend: B requests, L lists of a view, Q query rows, H query heads, D head size, N blocks of columns, W columns of a page list.
"""

from collections.abc import Sequence
from typing import Any

import torch

from longdraft.kernels.block_lse import block_lse
from longdraft.kernels.mass_sum import mass_sum
from longdraft.serve.device_verify import View
from longdraft.serve.drafters.running import Running
from longdraft.serve.views.chooser import ViewChooser
from longdraft.serve.views.view_state import ViewState


class MissedMass:
    """Compares the attention outside of views with a share; nothing waits for the device."""

    def __init__(self, chooser: ViewChooser, views: ViewState, layers: Sequence[int], share: float) -> None:
        """Take what is measured.

        Args:
            chooser: whose tap keeps queries, and whose keys are read.
            views: of the requests.
            layers: that are measured, some of the tap's.
            share: of the attention, mean over heads and layers, that may lie outside of a view.
        """
        self.chooser, self.views, self.share = chooser, views, share
        self.at = [chooser.tap.layers.index(layer) for layer in layers]

    def over(self, *given: Any) -> torch.Tensor:
        """Requests that miss more than the share, bool ``[B]``; arguments as of :meth:`missed`."""
        return self.missed(*given) > self.share

    def missed(
        self, view: View, running: Running, width: int, last_B: torch.Tensor, end_B: torch.Tensor, longest: int
    ) -> torch.Tensor:
        """Share of its attention that each request's newest verified token has outside of its view, float32 ``[B]``.

        One that read its whole cache misses nothing, and its keys are not read again.

        Args:
            view: what the latest verification read.
            running: the batch before it.
            width: tokens of each request in it.
            last_B: place of the newest token among them that counts.
            end_B: cached tokens behind it.
            longest: nobody has more cached tokens.
        """
        pages, read = view
        layered, block = pages.dim() == 3, self.chooser.budget.block
        whole_B = (read.view(-1, len(end_B)) >= running.length_B).all(0)
        length_B, table = torch.where(whole_B, 0, end_B), running.table_RW
        plan = self.chooser.plan(running.row_B, table, length_B, min(longest, table.shape[1]), 1)
        blocks = -(-plan.pages_BW.shape[1] // block)
        columns = pages.shape[-1] - width
        missed_B = torch.zeros(len(end_B), device=end_B.device)
        queries = self.chooser.tap.of_verification(width, last_B, 1)
        for at in self.at:
            scale = self.chooser.scale * self.chooser.key_scales[at]
            lse_BHN = block_lse(queries[at], self.chooser.keys[at], plan, scale, block, blocks)
            seen_BN = self.views.blocks(running, at if layered else self.views.lists - 1, columns, block, blocks)
            missed_B += mass_sum(lse_BHN, len(end_B)).masked_fill(seen_BN, 0.0).sum(1) / lse_BHN.shape[1]
        return self.chooser.ranks.total(missed_B) / (len(self.at) * self.chooser.ranks.size)
