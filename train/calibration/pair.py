"""The two models of a calibration: a target and, of any kind, a draft for it."""

import json
from pathlib import Path
from typing import Any

import torch

from longdraft.draft_models.attention_rows import can_look
from longdraft.draft_models.checkpoint import load_draft
from longdraft.draft_models.longspec import LongSpecDraft
from longdraft.errors import UserError
from longdraft.train.calibration.lookahead import (
    Eagle3Lookahead,
    LongSpecLookahead,
    Lookahead,
    StandaloneLookahead,
)
from longdraft.train.config import TargetSettings
from longdraft.train.target import FrozenTarget, load_model, load_target, load_tokenizer, resolve_dtype


def load_looked_at(settings: TargetSettings, device: torch.device) -> FrozenTarget:
    """Load a target whose attention can be looked at.

    Raises:
        UserError: a target that is not there, or whose attention is not transformers' own.
    """
    target = load_target(settings, device)
    if not can_look(target.model):
        raise UserError(
            f"target.path={settings.path!r} brings code of its own: its attention scores cannot be seen, use a model of "
            "transformers"
        )
    return target


def is_trained_draft(path: str) -> bool:
    """Whether a folder holds a draft of ours: one made for a target, not a language model of its own."""
    try:
        return "longdraft" in json.loads((Path(path) / "config.json").read_text())
    except (OSError, ValueError):
        return False


def load_lookahead(path: str, settings: TargetSettings, target: FrozenTarget, tokenizer: Any) -> Lookahead:
    """Load a draft.

    Args:
        path: folder of a draft of ours, or folder or name of a causal language model.
        settings: the target's, whose dtype a language model is loaded in.
        target: loaded.
        tokenizer: the target's.

    Raises:
        UserError: neither is there, a draft for another target, or a model with another vocabulary.
    """
    if is_trained_draft(path):
        draft = load_draft(path, target.spec, dtype=target.embedding_VE.dtype, device=target.device)
        draft.bind(target.embedding_VE, target.head_VE)
        return LongSpecLookahead(draft) if isinstance(draft, LongSpecDraft) else Eagle3Lookahead(draft)
    own = TargetSettings(path=path, dtype=settings.dtype, trust_remote_code=settings.trust_remote_code)
    try:
        other = load_tokenizer(own)
        model = load_model(own, resolve_dtype(own.dtype, target.device)).to(target.device).eval().requires_grad_(False)
    except UserError as error:
        raise UserError(str(error).replace("target.path", "draft")) from None
    if not can_look(model):
        raise UserError(
            f"draft={path!r} brings code of its own: its attention scores cannot be seen, use another draft"
        )
    if other.get_vocab() != tokenizer.get_vocab():
        raise UserError(
            f"draft={path!r} has another vocabulary than target.path={settings.path!r}: give a model of the same family"
        )
    return StandaloneLookahead(model)
