"""What the number format of the target's cache asks of those that read it beside SGLang's own attention.

SGLang's backends for a GPU divide keys and values by a checkpoint's scales as they round them to a float8 cache, and multiply
by them as they read; its backends for a CPU do neither. A verification and a draft read what those have written.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from longdraft.errors import UserError

Scales = tuple[float, float]  # of keys, of values
UNSCALED: Scales = (1.0, 1.0)
FLOAT8 = torch.float8_e4m3fn
CPU_BACKENDS = ("torch_native", "intel_amx")
BLIND = ("flashinfer", "triton")  # multiply by a checkpoint's scales whatever the cache's format


def attention_layers(model: Any) -> Iterator[tuple[str, Any]]:
    """SGLang's attention layers of a model, by name."""
    return ((n, layer) for n, layer in model.named_modules() if type(layer).__name__ == "RadixAttention")


def cache_scales(
    model: Any, cache_dtype: torch.dtype, backends: Sequence[str], whose: str = "target"
) -> Mapping[int, Scales]:
    """What each layer's cached keys and values are to be multiplied by; a layer that is not there is not scaled.

    Args:
        model: SGLang's, weights loaded.
        cache_dtype: of its cache pool.
        backends: names of SGLang's attention backends for prefill and decoding.
        whose: model, for messages.

    Raises:
        UserError: scales that SGLang's backend would apply to a cache that was never divided by them.
    """
    found = {}
    for name, layer in attention_layers(model):
        scales = (layer.k_scale_float, layer.v_scale_float)
        if None in scales or scales == UNSCALED:
            continue
        if cache_dtype == FLOAT8:
            found[layer.layer_id] = scales
        elif blind := next((b for b in backends if b in BLIND), None):
            raise UserError(
                f"the {whose}'s attention layer {name} has scales of a float8 cache {scales}, which --attention-backend {blind} applies "
                f"to a cache of {cache_dtype} too: use --kv-cache-dtype fp8_e4m3, or --attention-backend fa3"
            )
    return {} if all(b in CPU_BACKENDS for b in backends) else found


def verify_backend(attention: str, cache_dtype: torch.dtype, decode_backend: str, device: str) -> str | None:
    """The setting ``attention`` as :func:`longdraft.kernels.hybrid_attention.hybrid_tree_attention` takes it.

    FlashAttention-3 rounds queries to a float8 cache's format, the other backends do not: there ``auto`` stays with the
    server's own kind, since the target's own choices are those of its backend.
    """
    if attention != "auto":
        return attention
    return "triton" if cache_dtype == FLOAT8 and device == "cuda" and decode_backend != "fa3" else None
