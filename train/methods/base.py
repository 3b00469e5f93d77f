"""What differs between drafts in training: how one is built, its loss, and what a checkpoint says of it.

Legend: K draft depths.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from longdraft.draft_models.config import TrainingFacts
from longdraft.train.config import TrainSettings
from longdraft.train.samples import Packed
from longdraft.train.target import FrozenTarget


@dataclass
class StepLoss:
    """Sums over the supervised rows of a micro-batch.

    ``loss`` is float32 and differentiable, to be divided by the supervised rows of the whole global step. ``hits_K`` and
    ``rows_K`` (int64) count by draft depth how often the draft's argmax was the wanted token, and of how many rows.
    """

    loss: torch.Tensor
    hits_K: torch.Tensor
    rows_K: torch.Tensor


class Method(nn.Module, ABC):
    """A draft with its objective. This is the module that an engine trains; its forward pass is the loss.

    The frozen target is no module of it: no optimizer, state dict or sharding engine ever sees the target's weights.
    """

    draft: Any

    def __init__(self, settings: TrainSettings, target: FrozenTarget) -> None:
        super().__init__()
        self.settings, self.target = settings, target

    @property
    @abstractmethod
    def depths(self) -> int:
        """K, the draft depths that :class:`StepLoss` tells apart."""

    @abstractmethod
    def forward(self, batch: Packed, step: int) -> StepLoss:
        """The summed loss of one micro-batch.

        Args:
            batch: on the target's device.
            step: the global step, counted from 1; with the seed it decides every random choice.
        """

    def denominator(self, batch: Packed) -> int:
        """What a micro-batch adds to the number by which the global step's loss is divided: its supervised rows."""
        return batch.supervised

    def figures(self, step: int) -> dict[str, float]:
        """What a log row says of a step beside loss and accuracy."""
        return {}

    def facts(self, facts: TrainingFacts) -> TrainingFacts:
        """The run's facts with this method's own; serving reads them."""
        return facts
