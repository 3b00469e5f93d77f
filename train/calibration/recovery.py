"""Attention recovery and the sets of tokens that it judges (Dustin, equations 1 to 6).

Attention is normalised over the committed tokens, those that a set is chosen from: what the rows of a verification read of each other
they read in any case, so no set can lose it.

Legend: W windows (verifications), N tokens, any leading dimensions before them.
"""

from dataclasses import dataclass

import torch

from longdraft.draft_models.sparse_recipe import PROTECTED
from longdraft.kernels.stable_topk import stable_topk

SINKS = 4
RECENT = PROTECTED - SINKS


@dataclass(frozen=True)
class Split:
    """A set's size: ``budget`` tokens in all (k), ``lookahead`` of them for the draft's scores (m)."""

    budget: int
    lookahead: int = 0

    @property
    def most(self) -> int:
        """Tokens beside sinks and window, which is as many as the lookahead can have."""
        return self.budget - PROTECTED


def valid(length_W: torch.Tensor, tokens: int) -> torch.Tensor:
    """Bool ``[W, N]``: the committed tokens of each window."""
    return torch.arange(tokens, device=length_W.device) < length_W[:, None]


def _take(score_WN: torch.Tensor, free_WN: torch.Tensor, count: int) -> torch.Tensor:
    """Bool ``[W, N]``: the ``count`` free tokens with the largest scores, of equal ones the first; all where there are fewer."""
    count = min(count, score_WN.shape[-1])
    if count <= 0:
        return torch.zeros_like(free_WN)
    ranked_WN = score_WN.float().masked_fill(~free_WN, float("-inf"))
    taken_WN = torch.zeros_like(ranked_WN, dtype=torch.bool)
    return taken_WN.scatter_(-1, stable_topk(ranked_WN, count)[1], True) & free_WN


def choose_sets(
    history_WN: torch.Tensor, lookahead_WN: torch.Tensor | None, length_W: torch.Tensor, split: Split
) -> torch.Tensor:
    """Sets of tokens for verifications, bool ``[W, N]`` (equation 6).

    Sinks and the most recent tokens, the tokens with the largest lookahead scores outside of them, and for what is left of the budget
    those with the largest history scores outside of both. A context within the budget is taken whole.

    Args:
        history_WN: the target's scores (equation 5).
        lookahead_WN: the draft's; None only where the split gives it nothing.
        length_W: int64 committed tokens.
        split: of the budget.
    """
    assert 0 <= split.lookahead <= max(split.most, 0)
    place_N = torch.arange(history_WN.shape[-1], device=history_WN.device)
    committed_WN = valid(length_W, len(place_N))
    set_WN = committed_WN & ((place_N < SINKS) | (place_N >= length_W[:, None] - RECENT))
    if split.lookahead:
        assert lookahead_WN is not None, "a lookahead share without a draft's scores"
        set_WN = set_WN | _take(lookahead_WN, committed_WN & ~set_WN, split.lookahead)
    set_WN = set_WN | _take(history_WN, committed_WN & ~set_WN, split.most - split.lookahead)
    return torch.where((length_W <= split.budget)[:, None], committed_WN, set_WN)


def oracle_sets(attention_WN: torch.Tensor, length_W: torch.Tensor, budget: int) -> torch.Tensor:
    """The sets that recover most: the tokens with the largest attention in the window itself, bool ``[W, N]`` (equation 3)."""
    return _take(attention_WN, valid(length_W, attention_WN.shape[-1]), budget)


def recovery(attention_WN: torch.Tensor, set_WN: torch.Tensor) -> torch.Tensor:
    """Attention recovery rate ``[..., W]`` (equations 1, 2 and 4).

    Args:
        attention_WN: mean of a window's rows of attention over the committed tokens, each row summing to 1; the mean over rows and the
            sum over a set may be swapped, so this is equation 2 too. Leading dimensions, such as layers, are kept.
        set_WN: bool.
    """
    return (attention_WN * set_WN).sum(-1)
