"""Computes pending tokens anew: what partial verifications wrote to the cache is replaced by what plain decoding would have written.

Legend: B requests, T tokens of a verification.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from sglang.srt.managers.schedule_batch import ScheduleBatch

from longdraft.kernels.transfer import to_device
from longdraft.kernels.tree_attention import MAX_TREE
from longdraft.serve.device_step import DeviceStep
from longdraft.serve.device_verify import verify_running
from longdraft.serve.drafters.running import Running
from longdraft.serve.roster import Roster
from longdraft.serve.sampling.rows import RowParams
from longdraft.serve.views.view_state import ViewState

ROWS = 512  # of a verification without graphs, whose logits take memory


class RecomputeStep(DeviceStep):
    """As :class:`DeviceStep`, with the state of views, which says what is pending."""

    views: ViewState

    def _recomputed(
        self, batch: ScheduleBatch, roster: Roster, running: Running, members: Sequence[int], most: int
    ) -> bool:
        """Verify the pending tokens of some requests on their whole caches, in place and piece by piece; they are exact then.

        What the verifications choose is dropped: the tokens have been returned. Other requests are not read.

        Args:
            batch: the running batch.
            roster, running: of it.
            members: which requests.
            most: none of them has more pending.

        Returns:
            Whether that could be done; if not, what is pending stays so.
        """
        try:
            self.views.remember(running.row_B, running.length_B, running.newest_B[:, None])
            self._recompute(batch, roster, running, members, most)
        except Exception:
            self.ranks.failed("longdraft: pending tokens could not be computed anew, they stay as they are")
            return False
        return True

    def _recompute(
        self, batch: ScheduleBatch, roster: Roster, running: Running, members: Sequence[int], most: int
    ) -> None:
        reqs = [roster.reqs[b] for b in members]
        own = running if len(reqs) == len(roster.reqs) else _only(running, members)
        params = RowParams.build(reqs, [1] * len(reqs), own.length_B.device)
        # A stride has graphs; where more is pending, reading everything once more costs more than to do without them.
        start_B, width = self.views.exact_R[own.row_B], max(self.stride, min(most, ROWS // len(reqs), MAX_TREE))
        for _ in range(0, most, width):
            [id_BT] = self.ranks.first("pending tokens", self.views.recall(own.row_B, start_B, width))
            # Of one that has fewer pending than another its newest token is computed, which its next round writes again.
            limit_B = (own.length_B - start_B - 1).clamp(0, width - 1)
            base = replace(own, length_B=start_B, newest_B=id_BT[:, 0])
            in_graph = self._graph_width(len(reqs), width) is not None
            given = id_BT[:, 1:], limit_B, params, self.observer
            verify_running(self.target_worker, batch, reqs, base, *given, in_graph, self.clock)
            start_B = torch.minimum(start_B + limit_B + 1, own.length_B)
        self.views.exact_R[own.row_B] = start_B


def _only(running: Running, members: Sequence[int]) -> Running:
    """Some requests of a batch."""
    at_M = to_device(list(members), torch.int64, running.row_B.device)
    rids = tuple(running.rids[b] for b in members)
    facts = running.row_B[at_M], running.table_RW, running.length_B[at_M], running.newest_B[at_M]
    return Running(rids, *facts, running.host_lengths)
