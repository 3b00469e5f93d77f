"""The method that ``draft.arch`` asks for, with its first weights."""

from typing import Any

from longdraft.train.config import TrainSettings
from longdraft.train.documents import Documents
from longdraft.train.eagle3_weights import build_eagle3, fit_first_step
from longdraft.train.engine import Group
from longdraft.train.first_weights import build_draft, fit, rank_head
from longdraft.train.methods.base import Method
from longdraft.train.methods.eagle3 import Eagle3Method
from longdraft.train.methods.longspec import LongSpecMethod
from longdraft.train.target import FrozenTarget


def build_method(
    settings: TrainSettings,
    target: FrozenTarget,
    corpus: Documents,
    tokenizer: Any,
    limit: int,
    group: Group,
    resumed: bool,
) -> tuple[Method, str]:
    """Build a draft for a target and wrap it with its objective.

    Args:
        settings: of the run.
        target: loaded.
        corpus: the training documents; a new draft's vocabulary is counted there.
        tokenizer: the target's.
        limit: exclusive limit of trained positions.
        group: the ranks; all end with the same weights.
        resumed: a checkpoint follows, so costly first weights are left out.

    Returns:
        The method, and a line for people on how the first weights were made, or an empty one.

    Raises:
        UserError: a draft to start from, or a target, that does not fit.
    """
    if settings.draft.arch == "eagle3":
        eagle3, said = build_eagle3(settings, target, corpus, tokenizer)
        rows = 0 if resumed else fit_first_step(eagle3, target, settings, corpus, limit, group)
        parts = [said, f"its first step was fitted to the target on {rows:,} rows" if rows else ""]
        return Eagle3Method(settings, target, eagle3), "; ".join(part for part in parts if part)
    draft = build_draft(settings, target)
    rank_head(draft, settings, corpus, tokenizer)
    rows = 0 if resumed else fit(draft, target, settings, corpus, limit, group)
    said = f"the MLP's output was fitted to the target on {rows:,} rows" if rows else ""
    return LongSpecMethod(settings, target, draft), said
