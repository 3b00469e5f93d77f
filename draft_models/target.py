"""What a draft needs to know of its target: shapes and rotary parameters, read from the target's Hugging Face config."""

import dataclasses
import hashlib
import json
from dataclasses import dataclass
from typing import Any

from longdraft.errors import UserError

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "qwen2_moe", "qwen3_moe")
ROPE_TYPES = ("default", "linear", "llama3", "yarn")
# SGLang adds legacy aliases to the rotary parameters; only these decide the frequencies.
ROPE_KEYS = (
    "rope_type",
    "rope_theta",
    "factor",
    "original_max_position_embeddings",
    "low_freq_factor",
    "high_freq_factor",
    "attention_factor",
    "beta_fast",
    "beta_slow",
    "mscale",
    "mscale_all_dim",
    "truncate",
)
QK_NORM_FAMILIES = ("qwen3", "qwen3_moe")


@dataclass(frozen=True)
class TargetSpec:
    """The target as a cross-attention draft sees it.

    ``rope`` holds transformers' ``rope_parameters`` (with ``rope_type`` and ``rope_theta``). ``max_position`` counts
    positions. Two configs with the same :attr:`hash` serve the same drafts.
    """

    model_type: str
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_position: int
    rms_norm_eps: float
    hidden_act: str
    tie_embeddings: bool
    qk_norm: bool
    rope: dict[str, Any]

    @property
    def hash(self) -> str:
        """SHA-256 over the fields, 16 hex digits."""
        text = json.dumps(dataclasses.asdict(self), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of the last layer's keys and values a token in 16 bit."""
        return 2 * self.num_kv_heads * self.head_dim * 2

    @staticmethod
    def from_config(config: Any) -> "TargetSpec":
        """Read a transformers config.

        Raises:
            UserError: a target whose last layer a cross-attention draft cannot read, with the reason.
        """
        config = config.get_text_config() if hasattr(config, "get_text_config") else config
        _refuse_unservable(config)
        heads = config.num_attention_heads
        rope = dict(getattr(config, "rope_parameters", None) or {})
        rope.setdefault("rope_type", rope.get("type", "default"))
        rope.setdefault("rope_theta", getattr(config, "rope_theta", 10000.0))
        return TargetSpec(
            model_type=config.model_type,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_layers=config.num_hidden_layers,
            num_heads=heads,
            num_kv_heads=getattr(config, "num_key_value_heads", None) or heads,
            head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
            vocab_size=config.vocab_size,
            max_position=config.max_position_embeddings,
            rms_norm_eps=float(config.rms_norm_eps),
            hidden_act=config.hidden_act,
            tie_embeddings=bool(config.tie_word_embeddings),
            qk_norm=config.model_type in QK_NORM_FAMILIES,
            rope={k: rope[k] for k in sorted(ROPE_KEYS) if rope.get(k) is not None},
        )


def _refuse_unservable(config: Any) -> None:
    family = getattr(config, "model_type", None)
    if getattr(config, "kv_lora_rank", None):
        raise UserError(
            f"target model_type={family!r} keeps compressed keys (kv_lora_rank={config.kv_lora_rank}): a cross-attention "
            "draft reads plain keys and values, use a target with grouped-query attention"
        )
    if family not in FAMILIES:
        raise UserError(
            f"target model_type={family!r} is not one that a LongSpec draft serves: use one of {', '.join(FAMILIES)}"
        )
    layer_types = getattr(config, "layer_types", None)
    sliding = layer_types[-1] == "sliding_attention" if layer_types else bool(getattr(config, "sliding_window", None))
    if sliding:
        raise UserError(
            f"target's last layer is sliding-window attention (sliding_window={config.sliding_window}): a draft needs the "
            "whole context there, use a target whose last layer attends to everything"
        )
    rope = dict(getattr(config, "rope_parameters", None) or {})
    if (kind := rope.get("rope_type", rope.get("type", "default"))) not in ROPE_TYPES:
        raise UserError(f"target rope_type={kind!r} is not supported: use one of {', '.join(ROPE_TYPES)}")
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise UserError(
            f"target partial_rotary_factor={rope['partial_rotary_factor']} is not supported: use a target that rotates whole heads"
        )
