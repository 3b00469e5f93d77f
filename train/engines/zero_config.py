"""DeepSpeed's configuration of a run: the user's file (ZeRO stage, buckets, offload) with what the run's settings own."""

from pathlib import Path
from typing import Any

import torch
import yaml

from longdraft.errors import UserError
from longdraft.train.config import TrainSettings
from longdraft.train.recipe_files import find_config

# Keys of a DeepSpeed file that the run's own settings decide: two owners would disagree one day.
OWNED = {
    "train_batch_size": "schedule.micro_batch and schedule.accumulate",
    "train_micro_batch_size_per_gpu": "schedule.micro_batch",
    "gradient_accumulation_steps": "schedule.accumulate",
    "managed_gradient_accumulation": "schedule.accumulate",
    "gradient_clipping": "optim.clip",
    "optimizer": "optim",
    "scheduler": "optim.schedule",
    "bf16": "engine.dtype",
    "bfloat16": "engine.dtype",
    "fp16": "engine.dtype",
    "amp": "engine.dtype",
    "torch_autocast": "engine.dtype",
    "data_types": "engine.dtype",
    "communication_data_type": "engine.dtype",
    "zero_force_ds_cpu_optimizer": "optim.name",
    "wandb": "tracking.wandb",
}
ALLOWED = ("zero_optimization", "aio", "wall_clock_breakdown", "memory_breakdown", "comms_logger", "flops_profiler")


def read_zero_file(settings: TrainSettings) -> dict[str, Any]:
    """The file that ``engine.config`` names, checked without importing DeepSpeed.

    Raises:
        UserError: no file, no mapping, a key that the run's settings own, an unknown key, or a stage or offload that cannot be.
    """
    name = settings.engine.config
    assert name is not None, "the settings' own check asks for engine.config"
    path = find_config(name)
    try:
        found = yaml.safe_load(path.read_text())
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise UserError(f"engine.config={name!r} cannot be read ({' '.join(str(error).split())[:200]})") from None
    zero = found.get("zero_optimization") if isinstance(found, dict) else None
    if not isinstance(found, dict) or not isinstance(zero, dict):
        raise UserError(
            f"engine.config={name!r} has no zero_optimization section: start from recipes/deepspeed/zero2.yaml"
        )
    for key in found:
        if key in OWNED:
            raise UserError(f"engine.config={name!r} sets {key}: remove it there and use {OWNED[key]}")
        if key not in ALLOWED:
            raise UserError(f"engine.config={name!r} has the unknown key {key!r}: use {', '.join(ALLOWED)}")
    if zero.get("stage") not in (1, 2, 3):
        raise UserError(f"engine.config={name!r}: zero_optimization.stage={zero.get('stage')!r}: use 1, 2 or 3")
    for part in ("offload_optimizer", "offload_param"):
        device = (zero.get(part) or {}).get("device", "none")
        if device not in ("none", "cpu"):
            raise UserError(f"engine.config={name!r}: zero_optimization.{part}.device={device!r}: use cpu or none")
    if settings.target.shard and zero["stage"] != 3:
        raise UserError(
            f"target.shard=true needs ZeRO stage 3, engine.config={name!r} has {zero['stage']}: "
            "use recipes/deepspeed/zero3.yaml"
        )
    return found


def zero_config(settings: TrainSettings, dtype: torch.dtype) -> dict[str, Any]:
    """What ``deepspeed.initialize`` takes.

    Args:
        settings: of the run.
        dtype: the draft's. Masters, accumulated gradients and their reduction are float32 in either case, as in the torch
            engine.
    """
    half = dtype == torch.bfloat16
    return read_zero_file(settings) | {
        "train_micro_batch_size_per_gpu": settings.schedule.micro_batch,
        "gradient_accumulation_steps": settings.schedule.accumulate,
        "gradient_clipping": settings.optim.clip,
        "bf16": {"enabled": half, "check_grad_overflow": True},
        "data_types": {"grad_accum_dtype": "fp32"},
        "communication_data_type": "fp32",
        # torch's own AdamW steps in every case: DeepSpeed's would be compiled on the machine, and round otherwise.
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 1 << 31,
    }


def offloads(zero_file: dict[str, Any], part: str) -> bool:
    """Whether ``offload_optimizer`` or ``offload_param`` moves something to the host."""
    return bool((zero_file["zero_optimization"].get(part) or {}).get("device", "none") == "cpu")


def config_path(settings: TrainSettings) -> Path:
    """Where the file is."""
    assert settings.engine.config is not None
    return find_config(settings.engine.config)
