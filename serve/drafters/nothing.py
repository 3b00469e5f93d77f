"""No drafts: on a view, the target's own choices are the draft of a full verification (MagicDec's and TriForce's idea)."""

import torch

from longdraft.serve.drafters.base import Drafter, DraftRequest, Pick
from longdraft.serve.drafters.running import Running


class NothingDrafter(Drafter):
    """Proposes nothing, at no cost."""

    on_device = True

    def propose(self, requests: list[DraftRequest], pick: Pick) -> list[list[int]]:
        return [[] for _ in requests]

    def propose_running(self, running: Running, pick: Pick) -> torch.Tensor:
        return running.row_B.new_zeros(len(running.row_B), 0)

    def committed(self, request: DraftRequest, tokens: list[int]) -> None:
        """Nothing to learn."""

    def forget(self, rid: str) -> None:
        """Nothing is kept."""

    def clear(self) -> None:
        """Nothing is kept."""
