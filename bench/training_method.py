"""Stands in for ``longdraft.train.methods.eagle3`` until it is there: the same parts, put together for the measurement.

Legend: T packed rows, N chains, K steps, M valid rows of all steps, E hidden size, D draft vocabulary.
"""

import torch

from longdraft.draft_models.eagle3 import Eagle3Draft
from longdraft.draft_models.eagle3_ttt import forward_ttt
from longdraft.kernels.linear_soft_cross_entropy import linear_soft_cross_entropy
from longdraft.train.chains import supervised_chains, unshifted_chains
from longdraft.train.config import TrainSettings
from longdraft.train.methods.base import Method, StepLoss
from longdraft.train.samples import Packed
from longdraft.train.target import FrozenTarget

DECAY = 0.8


class ChainMethod(Method):
    """Soft cross-entropy of K steps against the target's rows, weighted 0.8^k, summed over supervised rows.

    ``compat``: SpecForge's rows, and none whose target's choice is outside the draft's vocabulary.
    """

    def __init__(
        self, settings: TrainSettings, target: FrozenTarget, draft: Eagle3Draft, steps: int, compat: bool
    ) -> None:
        super().__init__(settings, target)
        self.draft, self.steps, self.compat = draft, steps, compat

    @property
    def depths(self) -> int:
        return self.steps

    def forward(self, batch: Packed, step: int) -> StepLoss:
        draft, device = self.draft, batch.id_T.device
        seen = batch.capture or self.target.capture(
            batch.id_T, batch.position_T, batch.cu, hidden=True, aux=draft.config.aux_layers, cache=False
        )
        assert seen.hidden_TE is not None
        chains = (unshifted_chains if self.compat else supervised_chains)(batch.label_T, batch.cu, self.steps)
        valid_KN = chains.valid_KN
        choice_T = self.choices(seen.hidden_TE, chains.teacher_KN[valid_KN])
        if self.compat:
            valid_KN = valid_KN & draft.t2d[choice_T[chains.teacher_KN]]
        parts, teachers, weights = [], [], []
        given = seen.aux_TA, batch.id_T, batch.position_T, batch.cu, chains.row_N, self.steps
        for out in forward_ttt(draft, *given):
            keep_M = valid_KN[out.step].nonzero().flatten()
            parts.append(out.normed_NE[keep_M])
            teachers.append(chains.teacher_KN[out.step][keep_M])
            weights.append(torch.full((len(keep_M),), DECAY**out.step, device=device))
        head_DE = self.target.head_VE[draft.target_ids].to(seen.hidden_TE.dtype)
        loss, pick_M = linear_soft_cross_entropy(
            torch.cat(parts), draft.lm_head.weight, seen.hidden_TE, head_DE, torch.cat(teachers), torch.cat(weights)
        )
        right = [
            (draft.target_ids[pick] == choice_T[teacher]).sum()
            for pick, teacher in zip(pick_M.split([len(t) for t in teachers]), teachers, strict=True)
        ]
        return StepLoss(loss, torch.stack(right), valid_KN.sum(1))

    @torch.no_grad()
    def choices(self, hidden_TE: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        """``[T]`` the target's own choice behind each row that teaches; elsewhere 0."""
        choice_T = torch.zeros(len(hidden_TE), dtype=torch.int64, device=hidden_TE.device)
        for rows in torch.unique(wanted).split(1024):
            choice_T[rows] = (hidden_TE[rows] @ self.target.head_VE.to(hidden_TE.dtype).t()).argmax(-1)
        return choice_T
