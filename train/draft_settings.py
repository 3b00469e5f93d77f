"""Settings of a training run that belong to one kind of draft: first weights, and EAGLE-3's training-time test."""

from typing import Literal

from pydantic import Field

from longdraft.draft_models.config import LongSpecSettings
from longdraft.schema import Settings


class DraftSettings(LongSpecSettings):
    arch: Literal["longspec", "eagle3"] = Field(
        "longspec", description="eagle3 takes its architecture from section eagle3 and its objective from ttt"
    )
    init: Literal["random", "target"] = Field(
        "random",
        description="first weights; target: the target's first layer, which already reads token embeddings "
        "(eagle3: the rows of its head and its last norm)",
    )
    init_from: str | None = Field(None, description="draft folder whose weights and architecture the run starts from")

    fit_tokens: int = Field(
        0,
        ge=0,
        description="before the first step, fit the MLP's output (eagle3: the whole first step) to the target on so many "
        "tokens; 0 is off",
    )
    newest_heads: int = Field(
        0,
        ge=0,
        description="query heads of every key head that start out reading the target's newest key; needs qkv_bias and "
        "fit_tokens",
    )

    copy_queries: bool = Field(
        False,
        description="let the cross-attention start where the target itself looks: queries fitted to the target's own in the layers "
        "that it reads (`longdraft induction` finds those that copy); needs fit_tokens, best with newest_lags",
    )

    @property
    def architecture(self) -> LongSpecSettings:
        """What is stored in the checkpoint."""
        return LongSpecSettings(**self.model_dump(include=set(LongSpecSettings.model_fields)))


class TttSettings(Settings):
    steps: int = Field(
        7, ge=1, description="K of EAGLE-3's training-time test; the deepest draft step that will be served"
    )
    decay: float = Field(0.8, gt=0, le=1, description="weight of a step's loss against the step before")
    out_of_vocab: Literal["drop", "keep"] = Field(
        "drop", description="rows whose target choice the draft cannot name; they always count as misses"
    )
    recompute: bool = Field(True, description="compute projections and MLP again in the backward pass")
    compat: Literal["none", "specforge-0.2.0"] = Field(
        "none", description="specforge-0.2.0: its loss mask (not shifted) and its mean over all rows"
    )
