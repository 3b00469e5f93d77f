"""An EAGLE-3 draft's settings and config: its own vocabulary, rotation, window, and which target layers it reads.

**Aux layers, the one convention.** An aux layer is named by the target layer whose *output* it is, counted from 0: the stream
behind the layer's second residual addition, transformers' ``hidden_states[id + 1]``. Checkpoints store the same numbers as
``eagle_config.eagle_aux_hidden_state_layer_ids``. SGLang adds one to them and captures what *enters* layer ``id + 1``, which is
the same tensor; its own default ``[2, n // 2, n - 3]`` is written in entered layers, so here it reads ``[1, n // 2 - 1, n - 4]``.
Nothing enters behind the last layer, so its output cannot be an aux layer, and SGLang captures in ascending order.
"""

import dataclasses
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from longdraft.draft_models.config import FORMAT_VERSION, TrainingFacts, vars_of
from longdraft.draft_models.target import TargetSpec
from longdraft.errors import UserError

AUX_LAYERS = 3
FEWEST_LAYERS = AUX_LAYERS + 1


class RopeSettings(BaseModel):
    """Rotation of the draft's own, where it is not the target's (transformers' ``rope_parameters``)."""

    model_config = ConfigDict(extra="forbid")

    rope_type: Literal["default", "linear", "llama3", "yarn"] = "default"
    rope_theta: float | None = Field(
        None, gt=0, allow_inf_nan=False, description="base of the frequencies; None: the target's"
    )
    factor: float | None = Field(
        None, ge=1, allow_inf_nan=False, description="how many times the original length is stretched"
    )
    original_max_position_embeddings: int | None = Field(
        None, ge=1, description="length that the unscaled rotation covers"
    )
    low_freq_factor: float = Field(
        1.0, gt=0, allow_inf_nan=False, description="llama3: wavelengths longer than original / this are stretched"
    )
    high_freq_factor: float = Field(
        4.0, gt=0, allow_inf_nan=False, description="llama3: wavelengths shorter than original / this are kept"
    )
    beta_fast: float = Field(
        32.0,
        gt=0,
        allow_inf_nan=False,
        description="yarn: rotations over the original length above which nothing changes",
    )
    beta_slow: float = Field(
        1.0, gt=0, allow_inf_nan=False, description="yarn: rotations below which everything is stretched"
    )
    attention_factor: float | None = Field(
        None, gt=0, allow_inf_nan=False, description="yarn: scale of cosine and sine; None: from factor"
    )

    @model_validator(mode="after")
    def _complete(self) -> "RopeSettings":
        if self.rope_type != "default" and self.factor is None:
            raise ValueError(f"rope_type={self.rope_type!r} needs factor")
        if self.rope_type == "llama3" and self.low_freq_factor >= self.high_freq_factor:
            raise ValueError(f"low_freq_factor={self.low_freq_factor:g} must be below high_freq_factor")
        if self.rope_type == "yarn" and self.beta_slow > self.beta_fast:
            raise ValueError(f"beta_slow={self.beta_slow:g} must not be above beta_fast={self.beta_fast:g}")
        if self.rope_type in ("llama3", "yarn") and self.original_max_position_embeddings is None:
            raise ValueError(f"rope_type={self.rope_type!r} needs original_max_position_embeddings")
        return self

    def parameters(self, target_theta: float) -> dict[str, Any]:
        """The ``rope_parameters`` of these settings, only what the kind reads."""
        fields = {"rope_type", "rope_theta"}
        if self.rope_type != "default":
            fields |= {"factor", "original_max_position_embeddings"}
        if self.rope_type == "llama3":
            fields |= {"low_freq_factor", "high_freq_factor"}
        if self.rope_type == "yarn":
            fields |= {"beta_fast", "beta_slow", "attention_factor"}
        given = self.model_dump(include=fields, exclude_none=True)
        return dict(sorted({"rope_theta": target_theta, **given}.items()))


class Eagle3Settings(BaseModel):
    """Architecture choices of an EAGLE-3 draft; what is None is the target's.

    There is no bias setting: SGLang builds the draft's projections without biases and would skip them silently.
    """

    model_config = ConfigDict(extra="forbid")

    draft_vocab_size: int | None = Field(None, ge=1, description="tokens that the draft can propose; None: all")
    window: int | None = Field(
        None,
        ge=1,
        description="keys that the draft's attention sees, self included; None: all. Counted at served positions",
    )
    sinks: int = Field(0, ge=0, description="leading keys that a window keeps in sight")
    fc_norm: bool = Field(False, description="RMS norm on each of the three features")
    norm_output: bool = Field(False, description="the next step reads the normed hidden row, not the raw one")
    aux_layers: tuple[int, int, int] | None = Field(
        None, description="target layers whose outputs are read, from 0; None: SGLang's choice"
    )
    rope: RopeSettings | None = Field(None, description="rotation of the draft; None: the target's")
    max_position: int | None = Field(
        None, ge=1, description="positions that the draft covers; None: what its rotation covers"
    )
    intermediate_size: int | None = Field(None, ge=1, description="width of the MLP")
    num_heads: int | None = Field(None, ge=1, description="query heads")
    num_kv_heads: int | None = Field(None, ge=1, description="key and value heads")
    head_dim: int | None = Field(None, ge=1, description="size of a head")
    rms_norm_eps: float | None = Field(None, gt=0, allow_inf_nan=False, description="epsilon of the norms")

    @model_validator(mode="after")
    def _sinks_need_a_window(self) -> "Eagle3Settings":
        if self.sinks and self.window is None:
            raise ValueError(f"sinks={self.sinks} needs a window: without one every key is in sight")
        return self


def default_aux_layers(num_layers: int) -> tuple[int, int, int]:
    """SGLang's low, middle and high layer; spread evenly where a target is too small for it.

    Raises:
        UserError: a target of fewer than four layers.
    """
    if num_layers < FEWEST_LAYERS:
        raise UserError(
            f"target num_hidden_layers={num_layers}: an EAGLE-3 draft reads the outputs of three layers before the last one, "
            f"use a target of at least {FEWEST_LAYERS} layers"
        )
    chosen = 1, num_layers // 2 - 1, num_layers - 4
    return chosen if chosen[0] < chosen[1] < chosen[2] else (0, (num_layers - 2) // 2, num_layers - 2)


class Eagle3Config:
    """Everything that builds an EAGLE-3 draft: the target's shapes and the draft's settings, None resolved.

    Raises:
        UserError: settings that do not fit the target or each other, with field, value and remedy.
    """

    kind = "eagle3"
    title = "EAGLE-3"
    target_fields: tuple[str, ...] = ("hidden_size", "vocab_size")
    own_fields: tuple[str, ...] = (
        "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "draft_vocab_size",
        "max_position_embeddings", "rms_norm_eps", "fc_norm", "norm_output", "eagle_config", "rope_parameters",
    )  # fmt: skip

    def __init__(self, target: TargetSpec, settings: Eagle3Settings | None = None) -> None:
        s = settings or Eagle3Settings()
        self.target, self.settings = target, s
        self.vocab_size = s.draft_vocab_size or target.vocab_size
        if self.vocab_size > target.vocab_size:
            raise UserError(
                f"draft_vocab_size={self.vocab_size}, the target's vocabulary has {target.vocab_size}: give that or less"
            )
        self.aux_layers = s.aux_layers or default_aux_layers(target.num_layers)
        low, middle, high = self.aux_layers
        if not 0 <= low < middle < high <= target.num_layers - 2:
            raise UserError(
                f"aux_layers={list(self.aux_layers)}: give three ascending layers from 0 to {target.num_layers - 2}, the last "
                "layer's output cannot be read"
            )
        self.intermediate_size = s.intermediate_size or target.intermediate_size
        self.num_heads = s.num_heads or target.num_heads
        self.num_kv_heads = s.num_kv_heads or target.num_kv_heads
        self.head_dim = s.head_dim or target.head_dim
        if self.num_heads % self.num_kv_heads:
            raise UserError(
                f"num_heads={self.num_heads} is no multiple of num_kv_heads={self.num_kv_heads}: each key head serves as many query heads"
            )
        if self.head_dim % 2:
            raise UserError(f"head_dim={self.head_dim} is odd: the rotation turns pairs, give an even number")
        if target.hidden_size % self.num_heads:
            raise UserError(
                f"num_heads={self.num_heads} does not divide hidden_size={target.hidden_size}: SGLang reads the draft with "
                "transformers' Llama config, which refuses that, give a divisor"
            )
        self.rms_norm_eps = s.rms_norm_eps or target.rms_norm_eps
        self.rope = target.rope if s.rope is None else s.rope.parameters(target.rope["rope_theta"])
        reach = rope_reach(self.rope)
        usual = target.max_position if reach is None or s.rope is None else reach
        self.max_position = s.max_position or (usual if reach is None else min(usual, reach))
        check_reach(self, self.max_position, 0)

    @property
    def rotary_spec(self) -> TargetSpec:
        """Shapes and rotation from which :class:`longdraft.draft_models.rope.Rotary` is made."""
        return dataclasses.replace(
            self.target,
            head_dim=self.head_dim,
            num_heads=self.num_heads,
            max_position=self.max_position,
            rope=self.rope,
        )

    def to_json(self, target_name: str, facts: TrainingFacts, versions: dict[str, str]) -> dict[str, Any]:
        """The checkpoint's ``config.json``, which SGLang's stock ``EAGLE3`` reads as it is.

        The rotation stands there twice: ``rope_parameters`` is transformers' new name, ``rope_scaling`` and
        ``rope_theta`` are what older readers know.
        """
        t = self.target
        scaling = {k: v for k, v in self.rope.items() if k != "rope_theta"}
        return {
            "architectures": ["LlamaForCausalLMEagle3"],
            "model_type": "llama",
            "hidden_size": t.hidden_size,
            "target_hidden_size": t.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": 1,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "vocab_size": t.vocab_size,
            "draft_vocab_size": self.vocab_size,
            "max_position_embeddings": self.max_position,
            "rms_norm_eps": self.rms_norm_eps,
            "hidden_act": t.hidden_act,
            "attention_bias": False,
            "tie_word_embeddings": False,
            "fc_norm": self.settings.fc_norm,
            # Only where true: SpecForge takes false for a head without the norm before it.
            **({"norm_output": True} if self.settings.norm_output else {}),
            "eagle_config": {
                "use_aux_hidden_state": True,
                "eagle_aux_hidden_state_layer_ids": list(self.aux_layers),
            },
            "rope_parameters": self.rope,
            "rope_scaling": None if self.rope["rope_type"] == "default" else scaling,
            "rope_theta": self.rope["rope_theta"],
            "longdraft": {
                "format_version": FORMAT_VERSION,
                "draft": self.kind,
                "settings": self.settings.model_dump(mode="json"),
                "target": {"name": target_name, "hash": t.hash, "spec": vars_of(t)},
                "training": facts.model_dump(),
                "versions": versions,
            },
        }


def rope_reach(rope: dict[str, Any]) -> int | None:
    """Positions that a stretched rotation covers, ``original * factor``; None where that bounds nothing (llama3 keeps on)."""
    original = rope.get("original_max_position_embeddings")
    return int(original * rope["factor"]) if rope["rope_type"] in ("yarn", "linear") and original else None


def check_reach(config: Eagle3Config, context: int, draft_tokens: int) -> None:
    """Check that a draft covers a context and the tokens drafted behind it.

    Beyond ``original * factor`` a stretched rotation has no meaning, and SGLang 0.5.14 fills those rows of its YaRN table
    wrongly without a word.

    Args:
        config: the draft's.
        context: tokens of a request, prompt and answer.
        draft_tokens: drafted tokens a verification, root included.

    Raises:
        UserError: the rotation or ``max_position`` ends before that.
    """
    need, covered = context + draft_tokens, rope_reach(config.rope)
    if covered is not None and covered < need:
        factor, original = config.rope["factor"], config.rope["original_max_position_embeddings"]
        raise UserError(
            f"rope.factor={factor:g} over original_max_position_embeddings={original} covers {covered} positions, {need} are "
            f"needed (context {context} and {draft_tokens} draft tokens): train with rope.factor={-(-need // original)} or use "
            f"a context of at most {covered - draft_tokens}"
        )
    if config.max_position < need:
        raise UserError(
            f"max_position={config.max_position} of the draft is below the {need} positions needed (context {context} and "
            f"{draft_tokens} draft tokens): use a context of at most {config.max_position - draft_tokens}"
        )
