"""EAGLE-3: training-time test of K steps against the target's distribution over the draft's vocabulary (EAGLE-3, section 3.1).

Legend: T packed tokens, N chains, K steps, M supervised rows of all steps, E hidden size, V the target's vocabulary.
"""

import torch

from longdraft.draft_models.config import TrainingFacts
from longdraft.draft_models.eagle3 import Eagle3Draft
from longdraft.draft_models.eagle3_ttt import forward_ttt
from longdraft.kernels.linear_soft_cross_entropy import linear_soft_cross_entropy
from longdraft.train.chains import Chains, supervised_chains, unshifted_chains
from longdraft.train.config import TrainSettings
from longdraft.train.methods.base import Method, StepLoss
from longdraft.train.objective import greedy_choice
from longdraft.train.samples import Packed
from longdraft.train.target import Capture, FrozenTarget


class Eagle3Method(Method):
    """Queries, MLP and head run for supervised rows alone; keys and values of the first step for all rows.

    A row whose target choice is not in the draft's vocabulary is no lesson (``ttt.out_of_vocab``), but it is a row: the loss is
    divided by all supervised rows, and the accuracy counts it as a miss, as serving does.
    """

    draft: Eagle3Draft

    def __init__(self, settings: TrainSettings, target: FrozenTarget, draft: Eagle3Draft) -> None:
        super().__init__(settings, target)
        self.draft = draft
        self.forge = settings.ttt.compat == "specforge-0.2.0"

    @property
    def depths(self) -> int:
        return self.settings.ttt.steps

    def denominator(self, batch: Packed) -> int:
        return len(batch.id_T) if self.forge else batch.supervised

    def facts(self, facts: TrainingFacts) -> TrainingFacts:
        anchors = self.settings.positions.anchors
        return facts.model_copy(update={"anchors": anchors, "max_lag": self.settings.ttt.steps})

    def capture(self, batch: Packed) -> Capture:
        """Features of a micro-batch: stored ones, or the target's forward pass."""
        layers = self.draft.config.aux_layers
        return batch.capture or self.target.capture(
            batch.id_T, batch.position_T, batch.cu, hidden=True, aux=layers, kv_layers=()
        )

    def forward(self, batch: Packed, step: int) -> StepLoss:
        seen, ttt = self.capture(batch), self.settings.ttt
        chains = (unshifted_chains if self.forge else supervised_chains)(batch.label_T, batch.cu, ttt.steps)
        if len(chains.row_N) == 0:
            nothing_K = batch.id_T.new_zeros(ttt.steps)
            return StepLoss(self._no_loss(), nothing_K, nothing_K)
        assert seen.aux_TA is not None and seen.hidden_TE is not None
        position_T = batch.position_T
        steps = forward_ttt(
            self.draft, seen.aux_TA, batch.id_T, position_T, batch.cu, chains.row_N, ttt.steps, ttt.recompute
        )
        normed = [out.normed_NE.index_select(0, n) for out, n in zip(steps, chains.supervised(), strict=True)]
        return self._loss(torch.cat(normed), chains, seen.hidden_TE)

    def _no_loss(self) -> torch.Tensor:
        """Zero with a gradient for every weight, so that engines which wait for all of them go on."""
        return sum((p.sum() * 0 for p in self.draft.parameters()), torch.zeros((), device=self.target.device)).float()

    def _loss(self, normed_ME: torch.Tensor, chains: Chains, hidden_TE: torch.Tensor) -> StepLoss:
        """Loss and hits of the supervised rows, which lie step by step."""
        draft, ttt = self.draft, self.settings.ttt
        teacher_M, step_M = chains.teacher_KN[chains.valid_KN], chains.valid_KN.nonzero()[:, 0]
        head_VE = self.target.head_VE[: draft.config.target.vocab_size]
        chosen_M = self._choices(teacher_M, hidden_TE, head_VE)
        weight_M = ttt.decay ** step_M.to(torch.float32)
        if self.forge or ttt.out_of_vocab == "drop":
            weight_M = weight_M * draft.t2d[chosen_M]
        ids_N = draft.target_ids
        loss, choice_M = linear_soft_cross_entropy(
            normed_ME,
            draft.lm_head.weight,
            hidden_TE,
            head_VE[ids_N],
            teacher_M,
            weight_M,
            self.settings.objective.chunk,
        )
        hit_M = (ids_N[choice_M] == chosen_M).to(torch.int64)
        hits_K = hit_M.new_zeros(ttt.steps).index_add_(0, step_M, hit_M)
        return StepLoss(loss, hits_K, chains.valid_KN.sum(1))

    def _choices(self, teacher_M: torch.Tensor, hidden_TE: torch.Tensor, head_VE: torch.Tensor) -> torch.Tensor:
        """The target's own choice behind each teacher row, int64 target ids; each row of the target is asked once."""
        row_J, which_M = torch.unique(teacher_M, return_inverse=True)
        return greedy_choice(hidden_TE[row_J], head_VE, self.settings.objective.chunk)[which_M]
