"""What every request's partial verifications read, by row of SGLang's page table; all of it on the device.

Legend: L lists, one or one a layer, R rows of the page table, B requests, V columns of a view, W columns of a page list, N tokens of a
run, I remembered ids.
"""

import torch

from longdraft.kernels.chain_inputs import remember
from longdraft.kernels.view_pages import Lists, view_pages
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
            chosen: of every list of every request, one list behind the other, or one list of each for all of its lists; no wider
                than a view.
            where_B: requests that get them; None: all.
        """
        batch = len(row_B)
        count_LB = chosen.count_B.long().view(-1, batch)
        more = self.column_LRV.shape[2] - chosen.column_BV.shape[1]
        column_LBV = torch.nn.functional.pad(chosen.column_BV, (0, more)).view(len(count_LB), batch, -1)
        start_B = chosen.start_B[:batch]  # follows from the length alone
        if where_B is not None:
            count_LB = torch.where(where_B, count_LB, self.count_LR[:, row_B])
            start_B = torch.where(where_B, start_B, self.start_R[row_B])
            column_LBV = torch.where(where_B[:, None], column_LBV, self.column_LRV[:, row_B])
        self.count_LR[:, row_B], self.start_R[row_B], self.column_LRV[:, row_B] = count_LB, start_B, column_LBV

    def pages(
        self, running: Running, everything_B: torch.Tensor | None, width: int, count: int, fill: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The page list of a partial verification; of several lists, that of the last layer.

        Args:
            running: the batch.
            everything_B: requests that read their whole cache; None: nobody.
            width: of the list, wide enough for everything that is read.
            count: new tokens of each request, whose slots follow.
            fill: whether more recent tokens fill up what a short list leaves of the width.

        Returns:
            int32 ``[B, width + count]`` and the int32 number of cached tokens that each request reads. What has no slot is 0.
        """
        first = self.lists - 1
        lists = self._filled(running, width) if fill else Lists(*self._from(first), self.start_R, self.sinks)
        slot_LBW, read_LB = self._view_pages(lists, running, everything_B, width, count)
        return slot_LBW[0], read_LB[0]

    def _filled(self, running: Running, width: int) -> Lists:
        """The last layer's lists with windows that begin earlier, and without what those hold."""
        column_1RV, count_1R = self._from(self.lists - 1)
        row_B, start_R = running.row_B, self.start_R.clone()
        count_B, column_BV = count_1R[0, row_B], column_1RV[0, row_B]
        start_B = torch.minimum(start_R[row_B], (running.length_B + count_B - width).clamp_min(0))
        there_BV = torch.arange(column_BV.shape[1], device=row_B.device) < count_B[:, None]
        left_B = (there_BV & (column_BV < start_B[:, None])).sum(1)  # columns ascend: the first of them
        count_1R, start_R[row_B] = count_1R.index_copy(1, row_B, left_B[None]), start_B
        return Lists(column_1RV, count_1R, start_R, self.sinks)

    def _from(self, first: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Lists from a first one on."""
        return self.column_LRV[first:], self.count_LR[first:]

    def listed(self, row_B: torch.Tensor) -> torch.Tensor:
        """Requests that have a list of chosen columns, bool ``[B]``; the others read everything, or what is left of it."""
        return self.count_LR[-1, row_B] > 0

    def layer_pages(self, running: Running, width: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """:meth:`pages` of every list: ``[L, B, width + count]`` and ``[L, B]``; of one list, without the first dimension."""
        if self.lists == 1:
            return self.pages(running, None, width, count)
        lists = Lists(*self._from(0), self.start_R, self.sinks)
        return self._view_pages(lists, running, None, width, count)

    def _view_pages(
        self, lists: Lists, running: Running, everything_B: torch.Tensor | None, width: int, count: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return view_pages(lists, running.table_RW, running.row_B, running.length_B, everything_B, width, count)

    def blocks(self, running: Running, at: int, width: int, block: int, blocks: int) -> torch.Tensor:
        """Blocks of which a partial verification read some column, or which its new tokens stand in; bool ``[B, N]``.

        Args:
            running: the batch before the verification.
            at: which list it read.
            width: of that list, without the new tokens.
            block: columns of a block.
            blocks: N.
        """
        lists = Lists(self.column_LRV[at : at + 1], self.count_LR[at : at + 1], self.start_R, self.sinks)
        device, column_C = (
            running.row_B.device,
            torch.arange(self.columns, dtype=torch.int32, device=running.row_B.device),
        )
        table_RC = column_C.expand(len(self.start_R), -1)  # a page table whose slots are its columns
        column_LBW, read_LB = view_pages(lists, table_RC, running.row_B, running.length_B, None, width, 0)
        there_BW = torch.arange(width, device=device) < read_LB[0][:, None]
        block_BW = torch.where(there_BW, column_LBW[0].long() // block, blocks).clamp_max(blocks)
        read_BN = torch.zeros(len(running.row_B), blocks + 1, dtype=torch.bool, device=device).scatter_(
            1, block_BW, True
        )
        return read_BN[:, :-1] | (torch.arange(blocks, device=device) >= (running.length_B // block)[:, None])

    def remember(self, row_B: torch.Tensor, position_B: torch.Tensor, id_BN: torch.Tensor) -> None:
        """Tokens of each request from a position on; later ones replace what was there."""
        remember(self.id_RI, row_B, position_B, id_BN)

    def recall(self, row_B: torch.Tensor, position_B: torch.Tensor, count: int) -> torch.Tensor:
        """``count`` tokens of each request from a position on."""
        at_BN = (position_B[:, None] + torch.arange(count, device=row_B.device)) % self.id_RI.shape[1]
        return self.id_RI[row_B[:, None], at_BN]
