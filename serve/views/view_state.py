"""What every request's partial verifications read, by row of SGLang's page table; all of it on the device.

Legend: L lists, one or one a layer, R rows of the page table, B requests, V columns of a view, W columns of a page list, N tokens of a
run, I remembered ids.
"""

import torch

from longdraft.serve.drafters.running import Running
from longdraft.serve.views.choose import Chosen


class ViewState:
    """Views, how much of each request's cache is exact, and its latest tokens.

    A request's view is its chosen columns and everything from a start on: recent tokens and all that comes later. Its cache is
    exact up to ``exact_R``; what lies behind was written by partial verifications (the pending tokens) and is written anew by
    the next full one.
    """

    def __init__(
        self,
        rows: int,
        columns: int,
        view: int,
        remembered: int,
        device: torch.device,
        lists: int = 1,
        sinks: int = 16,
    ) -> None:
        """Allocate.

        Args:
            rows, columns: of SGLang's page table.
            view: chosen columns at most.
            remembered: latest tokens that are kept of each request.
            device: of the page table.
            lists: of each request: one, or one for every layer of the target.
            sinks: leading tokens that are read of a request whose view held everything and has become too long.
        """
        self.sinks = sinks
        self.columns, self.lists = columns, lists
        self.column_LRV = torch.zeros(lists, rows, view, dtype=torch.int32, device=device)
        self.count_LR = torch.zeros(lists, rows, dtype=torch.int64, device=device)
        self.start_R = torch.zeros(rows, dtype=torch.int64, device=device)
        self.exact_R = torch.zeros(rows, dtype=torch.int64, device=device)
        self.id_RI = torch.zeros(rows, remembered, dtype=torch.int64, device=device)

    def prefilled(self, row_B: torch.Tensor, length_B: torch.Tensor) -> None:
        """Requests start anew in these rows: all that is cached is exact, and is read."""
        self.count_LR[:, row_B] = 0
        self.start_R[row_B] = 0
        self.exact_R[row_B] = length_B

    def choose(self, row_B: torch.Tensor, chosen: Chosen, where_B: torch.Tensor | None = None) -> None:
        """New views for these rows; only for some of them, where it is said which.

        Args:
            row_B: rows.
            chosen: of every list of every request, one list behind the other.
            where_B: requests that get them; None: all.
        """
        batch = len(row_B)
        count_LB = chosen.count_B.long().view(self.lists, batch)
        column_LBV = chosen.column_BV.view(self.lists, batch, -1)
        start_B = chosen.start_B[:batch]  # follows from the length alone
        if where_B is not None:
            count_LB = torch.where(where_B, count_LB, self.count_LR[:, row_B])
            start_B = torch.where(where_B, start_B, self.start_R[row_B])
            column_LBV = torch.where(where_B[:, None], column_LBV, self.column_LRV[:, row_B])
        self.count_LR[:, row_B], self.start_R[row_B], self.column_LRV[:, row_B] = count_LB, start_B, column_LBV

    def pages(
        self, running: Running, everything_B: torch.Tensor | None, width: int, count: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The page list of a partial verification; of several lists, that of the last layer.

        Args:
            running: the batch.
            everything_B: requests that read their whole cache; None: nobody.
            width: of the list, wide enough for everything that is read.
            count: new tokens of each request, whose slots follow.

        Returns:
            int32 ``[B, width + count]`` and the int32 number of cached tokens that each request reads. What has no slot is 0.
        """
        return self._pages(running, self.lists - 1, everything_B, width, count)

    def listed(self, row_B: torch.Tensor) -> torch.Tensor:
        """Requests that have a list of chosen columns, bool ``[B]``; the others read everything, or what is left of it."""
        return self.count_LR[-1, row_B] > 0

    def layer_pages(self, running: Running, width: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """:meth:`pages` of every list: ``[L, B, width + count]`` and ``[L, B]``; of one list, without the first dimension."""
        if self.lists == 1:
            return self.pages(running, None, width, count)
        pages, lens = zip(*(self._pages(running, at, None, width, count) for at in range(self.lists)), strict=True)
        return torch.stack(pages), torch.stack(lens)

    def _pages(
        self, running: Running, at: int, everything_B: torch.Tensor | None, width: int, count: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        count_B, start_B = self.count_LR[at, running.row_B], self.start_R[running.row_B]
        grown_B = (count_B == 0) & (start_B == 0) & (running.length_B > width)  # no list, and too long to be read whole
        count_B = torch.where(grown_B, min(self.sinks, width), count_B)
        start_B = torch.maximum(start_B, running.length_B + count_B - width)  # the oldest recent tokens make room
        if everything_B is not None:
            count_B, start_B = (torch.where(everything_B, 0, x) for x in (count_B, start_B))
        at_W = torch.arange(width + count, device=count_B.device)
        chosen_BV = self.column_LRV[at, running.row_B]
        if (more := width + count - chosen_BV.shape[1]) > 0:
            chosen_BV = torch.nn.functional.pad(chosen_BV, (0, more))
        chosen_BV = torch.where(grown_B[:, None], torch.arange(chosen_BV.shape[1], device=at_W.device).int(), chosen_BV)
        later_BW = start_B[:, None] + at_W - count_B[:, None]
        column_BW = torch.where(at_W < count_B[:, None], chosen_BV[:, : width + count].long(), later_BW)
        slot_BW = running.table_RW[running.row_B[:, None], column_BW.clamp(0, self.columns - 1)]
        slot_BW = torch.where(column_BW < self.columns, slot_BW, 0).int()
        return slot_BW, (count_B + running.length_B - start_B).int()

    def remember(self, row_B: torch.Tensor, position_B: torch.Tensor, id_BN: torch.Tensor) -> None:
        """Tokens of each request from a position on; later ones replace what was there."""
        at_BN = (position_B[:, None] + torch.arange(id_BN.shape[1], device=row_B.device)) % self.id_RI.shape[1]
        self.id_RI[row_B[:, None], at_BN] = id_BN

    def recall(self, row_B: torch.Tensor, position_B: torch.Tensor, count: int) -> torch.Tensor:
        """``count`` tokens of each request from a position on."""
        at_BN = (position_B[:, None] + torch.arange(count, device=row_B.device)) % self.id_RI.shape[1]
        return self.id_RI[row_B[:, None], at_BN]
