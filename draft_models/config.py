"""A LongSpec draft's own settings, as stored in its checkpoint beside the target's identity."""

from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from longdraft.draft_models.target import TargetSpec
from longdraft.errors import UserError

FORMAT_VERSION = 1


class LongSpecSettings(BaseModel):
    """Architecture choices of a LongSpec draft; every other size is the target's."""

    model_config = ConfigDict(extra="forbid")

    window: int = Field(512, ge=1, description="keys that the draft's self-attention sees, self included")
    qkv_bias: bool = Field(
        False, description="biases on the q, k and v projections (LongSpec's released drafts have them)"
    )
    cross_q_norm: bool | None = Field(
        None, description="RMS norm on the cross-attention queries; None: as the target has"
    )
    cross_layers: list[int] = Field(
        [],
        description="target layers, from 0 and ascending, whose cached keys and values the cross-attention reads, each with query "
        "heads of its own; empty: the last layer alone (LongSpec)",
    )
    cross_group: int | None = Field(
        None,
        ge=1,
        description="the cross-attention's query heads for each cached key head; None: as many as the target's",
    )
    newest_lags: int = Field(
        0,
        ge=0,
        description="read the newest cached row of the cross layers directly too, with an offset for each of so many lags; 0: no "
        "(LongSpec has none)",
    )
    final_norm: bool = Field(False, description="RMS norm before the head (LongSpec has none)")
    head_tokens: int | None = Field(
        None,
        ge=1,
        description="ranked head: the draft proposes only the training text's most frequent tokens; None: the whole vocabulary",
    )


class TrainingFacts(BaseModel):
    """How a checkpoint was trained; serving warns beyond it."""

    model_config = ConfigDict(extra="forbid")

    steps: int = 0
    tokens: int = 0
    max_length: int = Field(0, description="longest trained sample in tokens")
    max_position: int = Field(0, description="largest trained position plus one, offsets included")
    anchors: int = Field(0, description="leading positions that Anchor-Offset Indices leave in place")
    max_lag: int = Field(0, description="largest Flash Noisy Training lag; the deepest served step")
    views: list[int] = Field(
        [], description="budgets of the cache views that it was trained to read; empty: whole caches only"
    )


class LongSpecConfig:
    """Everything that builds a LongSpec draft: the target's shapes and the draft's settings."""

    kind = "longspec"
    title = "LongSpec"
    # Keys of config.json that must be the target's, and those that follow from the draft's own settings.
    target_fields: tuple[str, ...] = (
        "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size",
    )  # fmt: skip
    own_fields: tuple[str, ...] = ()

    def __init__(self, target: TargetSpec, settings: LongSpecSettings | None = None) -> None:
        self.target = target
        self.settings = settings or LongSpecSettings()
        choice = self.settings.cross_q_norm
        self.cross_q_norm: bool = target.qk_norm if choice is None else choice
        layers = self.settings.cross_layers
        if layers != sorted(set(layers)) or any(not 0 <= layer < target.num_layers for layer in layers):
            raise UserError(
                f"draft.cross_layers={layers}: give different layers of the target in ascending order, 0 to {target.num_layers - 1}"
            )

    @property
    def cross_layers(self) -> tuple[int, ...]:
        """Layers of the target that the cross-attention reads, ascending."""
        return tuple(self.settings.cross_layers) or (self.target.num_layers - 1,)

    @property
    def cross_group(self) -> int:
        """Query heads of the cross-attention for each cached key head."""
        return self.settings.cross_group or self.target.num_heads // self.target.num_kv_heads

    @property
    def cross_heads(self) -> int:
        """Query heads of the cross-attention: those of the first layer's first key head come first."""
        return len(self.cross_layers) * self.target.num_kv_heads * self.cross_group

    @property
    def rotary_spec(self) -> TargetSpec:
        """Where the draft's rotation comes from: the target itself, whose rotated keys it reads."""
        return self.target

    def to_json(self, target_name: str, facts: TrainingFacts, versions: dict[str, str]) -> dict[str, Any]:
        """The checkpoint's ``config.json``. Outer keys are what transformers and SGLang parse, ours lie under ``longdraft``."""
        t = self.target
        return {
            "architectures": ["LongSpecDraftModel"],
            "model_type": t.model_type,
            "hidden_size": t.hidden_size,
            "intermediate_size": t.intermediate_size,
            "num_hidden_layers": 1,
            "num_nextn_predict_layers": 0,
            "num_attention_heads": t.num_heads,
            "num_key_value_heads": t.num_kv_heads,
            "head_dim": t.head_dim,
            "vocab_size": t.vocab_size,
            "max_position_embeddings": t.max_position,
            "rms_norm_eps": t.rms_norm_eps,
            "hidden_act": t.hidden_act,
            "tie_word_embeddings": t.tie_embeddings,
            "rope_parameters": t.rope,
            "longdraft": {
                "format_version": FORMAT_VERSION,
                "draft": self.kind,
                "settings": self.settings.model_dump(),
                "target": {"name": target_name, "hash": t.hash, "spec": vars_of(t)},
                "training": facts.model_dump(),
                "versions": versions,
            },
        }


def vars_of(target: TargetSpec) -> dict[str, Any]:
    """The spec as plain JSON values."""
    import dataclasses

    return dataclasses.asdict(target)
