"""LongSpec as SpecForge's trainer holds it: the registered draft, the model that its engine wraps, and the step's strategy.

SpecForge's run config takes no settings of ours, so what an objective needs lies in the draft's JSON under ``longspec_training``.

Legend: B samples, S padded tokens, T = B S, K key/value heads, D head size.
"""

from typing import Any

import torch
from pydantic import BaseModel, ConfigDict, Field
from specforge.modeling.draft.registry import register_draft
from specforge.training.strategies.base import DraftTrainStrategy, StepContext, StepOutput
from torch import nn
from transformers import PretrainedConfig

from longdraft.draft_models.config import LongSpecConfig, LongSpecSettings
from longdraft.draft_models.longspec import LongSpecDraft
from longdraft.draft_models.rope import Rotary
from longdraft.draft_models.target import TargetSpec
from longdraft.kernels.linear_cross_entropy import CHUNK, IGNORED, linear_cross_entropy
from longdraft.schema import validate
from longdraft.train.positions import lag_of_step

FEATURES = ("input_ids", "loss_mask", "position_ids", "target_key", "target_value")
TRAINING = "longspec_training"


class LongSpecTraining(BaseModel):
    """The objective's settings inside the draft's JSON."""

    model_config = ConfigDict(extra="forbid")

    lag_min: int = Field(1, ge=1)
    lag_max: int = Field(4, ge=1)
    seed: int = 0
    chunk: int = Field(CHUNK, ge=1)


class LongSpecJson(PretrainedConfig):
    """Our ``config.json`` as SpecForge's config loader passes it on; the draft is built from its ``longdraft`` part."""

    model_type = "longspec"
    longdraft: dict[str, Any] | None = None
    longspec_training: dict[str, Any] | None = None


@register_draft
class LongSpecDraftModel(LongSpecDraft):
    """Our draft under the name that its JSON gives in ``architectures``; ``config`` stays ours."""

    config_class = LongSpecJson

    def __init__(self, config: LongSpecJson) -> None:
        assert config.longdraft is not None, "the draft's JSON has no longdraft part"
        target = TargetSpec(**config.longdraft["target"]["spec"])
        super().__init__(LongSpecConfig(target, validate(LongSpecSettings, config.longdraft["settings"])))
        # A resumed run loads weights behind bind(): the ranked head's rows are those of the loaded ids.
        self.register_load_state_dict_post_hook(lambda module, keys: self._gather_head())

    def cast(self, device: torch.device, dtype: torch.dtype) -> "LongSpecDraftModel":
        """Moved and cast, with the rotary frequencies in float32: in 16 bit they would bend far positions."""
        out = self.to(device=device, dtype=dtype)
        out.rotary = Rotary(self.config.target).to(device)
        return out


class LongSpecTrainingModel(nn.Module):
    """What SpecForge's engine wraps. The target's embedding and head are lent to the draft, no engine ever sees them."""

    def __init__(self, draft: LongSpecDraftModel, training: LongSpecTraining) -> None:
        super().__init__()
        self.draft_model, self.training_settings = draft, training

    def forward(
        self,
        input_ids: torch.Tensor,
        loss_mask: torch.Tensor,
        position_ids: torch.Tensor,
        target_key: torch.Tensor,
        target_value: torch.Tensor,
        lag: int,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """``(loss, correct, rows)``: sums over the supervised rows of a right-padded batch, as our own trainer's.

        Args:
            input_ids, loss_mask, position_ids: ``[B, S]``; the mask is True at tokens to predict.
            target_key, target_value: ``[B, S, K, D]`` last-layer cache of the target.
            lag: Flash Noisy lag of the step.
        """
        count, length = input_ids.shape
        label = input_ids.roll(-1, 1).masked_fill(loss_mask.roll(-1, 1) == 0, IGNORED)
        label[:, -1] = IGNORED
        draft, cu = self.draft_model, [i * length for i in range(count + 1)]
        hidden_TE = draft.forward_packed(
            input_ids.flatten(), position_ids.flatten(), target_key.flatten(0, 1), target_value.flatten(0, 1), cu, lag
        )
        head_NE = draft.drafting_head_NE.to(hidden_TE.dtype)
        label_T = draft.ranked_label(label.flatten())
        loss, correct = linear_cross_entropy(hidden_TE, head_NE, label_T, self.training_settings.chunk)
        return loss, correct, (label != IGNORED).sum()


class LongSpecStrategy(DraftTrainStrategy):
    """One step: the lag of the global step, then sums that SpecForge divides by the rows of its whole optimizer window."""

    name = "longspec"
    required_features = set(FEATURES)

    def __init__(self, model: nn.Module, training: LongSpecTraining) -> None:
        self.model, self.settings = model, training

    def trainable_module(self) -> nn.Module:
        return self.model

    def forward_loss(self, batch: Any, ctx: StepContext | None = None) -> StepOutput:
        self.validate_batch(batch)
        s = self.settings
        step = 1 + (0 if ctx is None else ctx.global_step)  # SpecForge counts the steps that are done
        lag = lag_of_step(step, s.lag_min, s.lag_max, s.seed)
        device = next(self.model.parameters()).device
        loss, correct, rows = self.model(**{n: batch.tensors[n].to(device) for n in FEATURES}, lag=lag)
        return StepOutput(
            loss=loss / rows.clamp_min(1),
            metrics={"accuracy": correct / rows.clamp_min(1), "lag": float(lag)},
            loss_terms=(loss, rows.float()),
        )

    def checkpoint_state_filter(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        prefix = "draft_model."
        return {k.split(prefix, 1)[1]: v for k, v in state_dict.items() if prefix in k}
