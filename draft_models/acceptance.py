"""Acceptance of a drafted chain: one rule for training's evaluation, the reference decoder and the server.

Legend: B requests, K drafted tokens a request.
"""

from dataclasses import dataclass

import torch


def accepted_drafts(draft_BK: torch.Tensor, choice_BK1: torch.Tensor, drafted_B: torch.Tensor) -> torch.Tensor:
    """How many drafts each request keeps: the longest prefix that equals the target's own choices.

    The target's choice at a position is its argmax, or its argmax under the noise of that seed and position (shared
    noise); either way the emitted tokens are the target's choices ``0 .. kept``, so the draft cannot change them.

    Args:
        draft_BK: drafted token ids.
        choice_BK1: the target's choice behind the root and behind each draft.
        drafted_B: valid drafts of each row, the rest is padding.

    Returns:
        int64 ``[B]``; the request gains that many tokens and one bonus token.
    """
    width = draft_BK.shape[1]
    valid_BK = torch.arange(width, device=draft_BK.device) < drafted_B[:, None]
    hit_BK = (draft_BK == choice_BK1[:, :width]) & valid_BK
    return hit_BK.long().cumprod(1).sum(1)


@dataclass
class AcceptStats:
    """Tokens gained over verifications. τ is always given with and without the bonus token."""

    verifications: int = 0
    drafted: int = 0
    accepted: int = 0

    def add(self, drafted: int, accepted: int) -> None:
        self.verifications += 1
        self.drafted += drafted
        self.accepted += accepted

    def merge(self, other: "AcceptStats") -> None:
        self.verifications += other.verifications
        self.drafted += other.drafted
        self.accepted += other.accepted

    @property
    def tau(self) -> float:
        """Tokens a verification, bonus token in; 0 without any."""
        return 1 + self.tau_without_bonus if self.verifications else 0.0

    @property
    def tau_without_bonus(self) -> float:
        return self.accepted / self.verifications if self.verifications else 0.0
