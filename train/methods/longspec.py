"""LongSpec: next tokens under Anchor-Offset positions and one Flash Noisy lag a step (LongSpec, section 3.2)."""

from collections.abc import Callable

import torch

from longdraft.draft_models.config import TrainingFacts
from longdraft.draft_models.longspec import LongSpecDraft
from longdraft.kernels.linear_cross_entropy import IGNORED
from longdraft.train.config import TrainSettings
from longdraft.train.methods.base import Method, StepLoss
from longdraft.train.objective import longspec_loss
from longdraft.train.positions import lag_of_step
from longdraft.train.samples import Packed
from longdraft.train.sequence import SampleShare, shared_loss
from longdraft.train.target import FrozenTarget


class LongSpecMethod(Method):
    """The lag of a step is the same on all ranks and micro-batches; depth d of the counts is lag d + 1."""

    def __init__(self, settings: TrainSettings, target: FrozenTarget, draft: LongSpecDraft) -> None:
        super().__init__(settings, target)
        self.draft = draft
        self.divided: Callable[[Packed], SampleShare] | None = None  # where all ranks train on one sample

    @property
    def depths(self) -> int:
        return self.settings.lag.max

    def lag(self, step: int) -> int:
        s = self.settings
        return lag_of_step(step, s.lag.min, s.lag.max, s.run.seed)

    def forward(self, batch: Packed, step: int) -> StepLoss:
        lag, label_T = self.lag(step), batch.label_T
        if self.divided is None:
            summed = longspec_loss(self.draft, self.target, batch, lag, self.settings.objective)
        else:
            share = self.divided(batch)
            label_T = share.label_R
            summed = shared_loss(self.draft, self.target, share, lag, self.settings.objective)
        hits_K, rows_K = (torch.zeros(self.depths, dtype=torch.int64, device=summed.loss.device) for _ in range(2))
        # Counted on the device: a number in Python would wait for the whole forward pass.
        hits_K[lag - 1], rows_K[lag - 1] = summed.correct, (label_T != IGNORED).sum()
        return StepLoss(summed.loss, hits_K, rows_K)

    def figures(self, step: int) -> dict[str, float]:
        return {"lag": self.lag(step)}

    def facts(self, facts: TrainingFacts) -> TrainingFacts:
        s = self.settings
        own = {"anchors": s.positions.anchors, "max_lag": s.lag.max, "views": s.views.budgets if s.views.share else []}
        return facts.model_copy(update=own)
