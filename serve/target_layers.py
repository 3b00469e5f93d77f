"""What the verification's attention does not compute: targets with such layers are refused, since they would be served wrong."""

from typing import Any

from longdraft.errors import UserError
from longdraft.serve.cache_format import attention_layers

REMEDIES = {
    "target": "serve it without --speculative-algorithm LONGDRAFT",
    "draft": "give another draft",
}


def check_architecture(model_config: Any, whose: str = "target") -> None:
    """Refuse by SGLang's model config what its attention layers would only show once the weights are loaded.

    Args:
        model_config: of the target, or of a draft that SGLang runs.
        whose: which of the two.

    Raises:
        UserError: compressed keys, sliding windows, an encoder, or several modalities.
    """
    kinds = {
        "compressed keys (MLA)": getattr(getattr(model_config, "attention_arch", None), "name", "") == "MLA",
        "sliding-window layers": bool(getattr(model_config, "is_hybrid_swa", False)),
        "an encoder": bool(getattr(model_config, "is_encoder_decoder", False)),
        "several modalities": bool(getattr(model_config, "is_multimodal", False)),
    }
    for kind, present in kinds.items():
        if present:
            raise UserError(
                f"the {whose} {model_config.hf_config.architectures[0]} has {kind}, LONGDRAFT verifies dense decoders of text: "
                f"{REMEDIES[whose]}"
            )


def check_layers(model: Any, whose: str = "target") -> None:
    """Refuse attention layers that differ from plain grouped-query attention over a whole cache.

    Args:
        model: SGLang's: the target, or a draft that SGLang runs.
        whose: which of the two.

    Raises:
        UserError: the first such layer, with what it has.
    """
    for name, layer in attention_layers(model):
        has = {
            "a sliding window": layer.sliding_window_size not in (None, -1),
            "capped logits": bool(layer.logit_cap),
            "cross-attention": layer.is_cross_attention,
            "keys and values of unequal size": layer.qk_head_dim != layer.v_head_dim,
            "length-dependent scores": layer.xai_temperature_len > 0,
        }
        for what, present in has.items():
            if present:
                raise UserError(
                    f"the {whose}'s attention layer {name} has {what}, which LONGDRAFT's attention does not compute: "
                    f"{REMEDIES[whose]}"
                )
