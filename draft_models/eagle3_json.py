"""A SpecForge draft JSON, the architecture without weights, as the settings of an EAGLE-3 draft that we train."""

import json
from pathlib import Path
from typing import Any

import torch

from longdraft.draft_models.eagle3_config import Eagle3Config, Eagle3Settings
from longdraft.draft_models.eagle3_import import published_settings
from longdraft.draft_models.target import TargetSpec
from longdraft.errors import UserError

ARCHITECTURE = "LlamaForCausalLMEagle3"


def settings_of_json(path: str | Path, target: TargetSpec) -> Eagle3Settings:
    """Read the JSON that SpecForge's ``model.draft_model_config`` names.

    ``norm_output`` means another thing there than in SGLang: whether the head reads normed rows, which ours always does.

    Args:
        path: the file, or a folder with ``config.json``.
        target: that the draft is for.

    Raises:
        UserError: no such file, another architecture, or an architecture that is not served; names the field.
    """
    path = Path(path)
    path = path / "config.json" if path.is_dir() else path
    try:
        config: Any = json.loads(path.read_text())
    except OSError as error:
        raise UserError(f"draft JSON {str(path)!r} cannot be read ({error.strerror}): give SpecForge's file") from None
    except ValueError as error:
        raise UserError(f"{path}: not valid JSON ({error}): give SpecForge's file") from None
    found = config.get("architectures") if isinstance(config, dict) else None
    if found != [ARCHITECTURE]:
        raise UserError(f"{path}: architectures={found}, only {[ARCHITECTURE]} is an EAGLE-3 draft")
    if config.pop("norm_output", True) is not True:
        raise UserError(f"{path}: norm_output=False: our head, as SGLang's, reads normed rows; leave it out")
    rows = config.get("draft_vocab_size") or target.vocab_size
    head = torch.empty(rows, target.hidden_size, device="meta")
    try:
        settings = published_settings(config, {"lm_head.weight": head}, target)
        Eagle3Config(target, settings)
    except UserError as error:
        raise UserError(f"{path}: {error}") from None
    return settings


def recipe_section(settings: Eagle3Settings) -> str:
    """The settings that are not a default, as the YAML of a recipe."""
    import yaml

    given = settings.model_dump(mode="json", exclude_defaults=True)
    if settings.rope is not None:
        given["rope"] = settings.rope.model_dump(mode="json", exclude_none=True)
    return yaml.safe_dump({"draft": {"arch": "eagle3"}, "eagle3": given}, sort_keys=False)
