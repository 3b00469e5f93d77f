"""Liger's fused norm, rotation and SwiGLU for the frozen target on a GPU: the same figures in fewer passes over memory.

The target only runs forward, where these three are bound by memory. Its head stays as it is: the losses have chunked ones of
their own.
"""

import sys
from types import FunctionType, MethodType
from typing import Any

import torch

from longdraft.errors import UserError

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")


def wants_fusion(choice: str, model: Any, device: torch.device) -> bool:
    """Whether a loaded target gets fused layers: ``auto`` on a GPU where Liger knows its classes.

    Args:
        choice: ``target.liger``: auto, on or off.
        model: a transformers causal language model.
        device: where it is to run.

    Raises:
        UserError: ``on`` where it cannot be.
    """
    if choice == "off":
        return False
    config = model.config
    # Code that comes with a model may call itself llama and be another.
    known = config.model_type in FAMILIES and type(model).__module__ == _module_name(config.model_type)
    fits = known and config.hidden_act in ("silu", "swish")
    if choice == "auto":
        return device.type == "cuda" and fits
    if device.type != "cuda":
        raise UserError(f"target.liger=on, but the target runs on {device.type}: Liger needs a GPU, use auto or off")
    if not fits:
        raise UserError(
            f"target.liger=on, but Liger's layers here are for transformers' own {', '.join(FAMILIES)} with silu, not for "
            f"{type(model).__name__} with {getattr(config, 'hidden_act', None)}: use auto or off"
        )
    return True


def fuse(model: Any) -> None:
    """Give one model Liger's layers, and no other model of the process.

    Liger binds norms and MLPs to the modules of the instance, but also puts its classes, and its rotation, which attention
    looks up as a global, in the place of those of transformers' module: from then on every model of the family would have
    them, one on the CPU too. So that module is set back, and this model's attention alone keeps the names as Liger left them.
    """
    import liger_kernel.transformers as liger

    names = vars(sys.modules[type(model).__module__])
    before = dict(names)
    apply = getattr(liger, f"apply_liger_kernel_to_{model.config.model_type}")
    try:
        apply(model=model, rope=True, rms_norm=True, swiglu=True, cross_entropy=False, fused_linear_cross_entropy=False)
        fused = dict(names)
    finally:
        names.update(before)
    for layer in model.get_decoder().layers:
        layer.self_attn.forward = MethodType(_with_names(type(layer.self_attn).forward, fused), layer.self_attn)


def _with_names(function: Any, names: dict[str, Any]) -> FunctionType:
    """The function over other globals."""
    copy = FunctionType(
        function.__code__, names, function.__name__, function.__defaults__, closure=function.__closure__
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


def _module_name(family: str) -> str:
    return f"transformers.models.{family}.modeling_{family}"
