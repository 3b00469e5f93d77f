"""The part of the target's cache that a draft reads in the reference decoder, chosen anew each round as a server would.

Legend: N cached keys, M blocks, H query heads, K key/value heads, D head size.
"""

import torch

from longdraft.draft_models.longspec import CrossAttend
from longdraft.kernels.dense_attention import dense_attention
from longdraft.kernels.view_attention import View


class ViewReader:
    """Cross-attention of a draft, one object a request.

    A view without room for blocks is sinks and the most recent keys. Blocks are those on which the cross-attention of the
    last committed token, known from the round before, puts most; the first round, which has none, reads the most recent.
    """

    def __init__(self, view: View | None, scale: float) -> None:
        self.view, self.scale = view, scale
        self.queries: list[torch.Tensor] = []
        self.last_HD: torch.Tensor | None = None

    def begin(self, k_NKD: torch.Tensor, v_NKD: torch.Tensor) -> CrossAttend:
        """A round's attention over the cache as it is now; None as the view, or a cache within its budget, is all of it."""
        self.queries.clear()
        if self.view is not None and len(k_NKD) > self.view.budget:
            key_N = visible_keys(self.view, k_NKD, self.last_HD, self.scale)
            k_NKD, v_NKD = k_NKD[key_N], v_NKD[key_N]

        def cross_attend(q_BHD: torch.Tensor) -> torch.Tensor:
            self.queries.append(q_BHD)
            return dense_attention(q_BHD, k_NKD, v_NKD, self.scale)[0]

        return cross_attend

    def committed(self, kept: int) -> None:
        """The round is verified: its first ``kept`` drafts stand behind the root. Nothing before the first round."""
        if self.queries:  # the last draft of a chain is never a query
            self.last_HD = self.queries[min(kept, len(self.queries) - 1)][0]


def visible_keys(view: View, k_NKD: torch.Tensor, query_HD: torch.Tensor | None, scale: float) -> torch.Tensor:
    """Numbers of the keys in a view, int64, ascending, at most ``view.budget`` of them.

    Args:
        view: smaller than the cache.
        k_NKD: all cached keys.
        query_HD: rotated query that chooses the blocks; None leaves their room to the most recent keys.
        scale: factor of the scores.
    """
    count = len(k_NKD)
    recent = view.window if view.blocks and query_HD is not None else view.budget - view.sinks
    block_M = torch.zeros(0, dtype=torch.int64)
    if view.blocks and query_HD is not None:
        mass_N = attention_mass(query_HD, k_NKD, scale)
        mass_N[: view.sinks] = 0  # these are in the view whatever happens
        mass_N[count - view.window :] = 0
        choices = view.between(count - view.window)
        block_mass = torch.nn.functional.pad(mass_N, (0, -count % view.block)).view(-1, view.block).sum(1)
        block_M = block_mass[choices.start : choices.stop].topk(min(view.blocks, len(choices))).indices + choices.start
    seen_N = view.picked(count, block_M)
    seen_N[count - recent :] = True
    return seen_N.nonzero().flatten().to(k_NKD.device)


def attention_mass(query_HD: torch.Tensor, k_NKD: torch.Tensor, scale: float) -> torch.Tensor:
    """Attention probability of each key for one query, the mean over heads, float32 ``[N]``."""
    heads, size = query_HD.shape
    grouped = query_HD.float().view(k_NKD.shape[1], -1, size)
    score_KGN = torch.einsum("kgd,nkd->kgn", grouped, k_NKD.float()) * scale
    return score_KGN.softmax(-1).sum((0, 1)) / heads
