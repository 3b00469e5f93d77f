"""From two scores of single tokens to the one set of columns that a sparse verification reads in all layers (Dustin, Eq. 6).

Legend: B requests, N columns of a cache, V columns of a list.
"""

from dataclasses import dataclass

import torch

from longdraft.errors import UserError
from longdraft.kernels.token_set import token_set
from longdraft.serve.views.choose import Chosen


@dataclass(frozen=True)
class SparseBudget:
    """Cached tokens that a sparse verification reads. Sinks and window count, tokens that are not yet accepted do not.

    Attributes:
        tokens: k, exactly as many, or the whole context where it has no more.
        sinks: first tokens of a context, always in.
        window: last committed tokens at the time of choosing, always in.
        lookahead: m, tokens outside of both that the draft's scores choose; the target's choose the rest. 0 leaves all to
            the target, :attr:`most_lookahead` to the draft.

    Raises:
        UserError: a number that is out of range, or no room for one token beside sinks and window.
    """

    tokens: int = 512
    sinks: int = 4
    window: int = 16
    lookahead: int = 192  # the middle one of the splits that the calibration starts from; the best m is the pair's own

    def __post_init__(self) -> None:
        for name in ("sinks", "window", "lookahead"):
            if (value := getattr(self, name)) < 0:
                raise UserError(f"{name}={value}: write 0 or more tokens")
        least = self.sinks + self.window + 1
        if self.tokens < least:
            raise UserError(
                f"tokens={self.tokens} has no room for sinks={self.sinks}, window={self.window} and one token more: "
                f"write {least} or more"
            )
        if self.lookahead > self.most_lookahead:
            raise UserError(
                f"lookahead={self.lookahead}: tokens={self.tokens} leaves {self.most_lookahead} beside "
                f"sinks={self.sinks} and window={self.window}: write 0 to {self.most_lookahead}"
            )

    @property
    def most_lookahead(self) -> int:
        """The largest m: all that is not protected."""
        return self.tokens - self.sinks - self.window

    @property
    def columns(self) -> int:
        """Width of a list of chosen columns: V of :func:`choose_tokens`. The window is no part of the list."""
        return self.tokens - self.window


def choose_tokens(
    draft_BN: torch.Tensor | None, target_BN: torch.Tensor | None, length_B: torch.Tensor, budget: SparseBudget
) -> Chosen:
    """Sinks, window, the ``lookahead`` best by the draft's scores and, of what is left, the best by the target's (Eq. 6).

    Of equal scores the first column is taken; NaN and -inf rank last. Nothing waits for the device, and shapes alone decide
    what runs.

    Args:
        draft_BN: lookahead scores of the columns, float32 or narrower; None, or a row that is nowhere above zero outside of
            sinks and window, is no score, and the target's take its place.
        target_BN: history scores alike, in whose place the draft's are taken. One of the two must be there. There may be more
            columns than a request has; what is scored there, or in the window, does not matter.
        length_B: int64 committed columns of each request. Up to ``budget.tokens`` of them are all read: no list, a window from
            0 on.
        budget: what is read.

    Returns:
        Lists of the fixed width ``budget.columns``; a request's ``start_B`` is the first column of its window. List and window
        together are ``budget.tokens`` columns of a longer context.

    Raises:
        ValueError: no scores, or two of different shapes.
    """
    draft_BN = target_BN if draft_BN is None else draft_BN
    target_BN = draft_BN if target_BN is None else target_BN
    if draft_BN is None or target_BN is None:
        raise ValueError("draft_BN=None and target_BN=None: one of them must score the columns")
    if draft_BN.shape != target_BN.shape:
        raise ValueError(
            f"draft_BN scores {list(draft_BN.shape)}, target_BN {list(target_BN.shape)}: score the same columns"
        )
    parts = budget.tokens, budget.sinks, budget.window, budget.lookahead
    return Chosen(*token_set(draft_BN, target_BN, length_B, *parts))
