"""The drafter that the server's options ask for."""

import logging
from typing import Any

import torch

from longdraft.draft_models.checkpoint import load_draft, read_config, training_facts
from longdraft.draft_models.longspec import LongSpecDraft
from longdraft.draft_models.target import TargetSpec
from longdraft.serve.drafters.base import Drafter
from longdraft.serve.drafters.longspec import LongSpecDrafter
from longdraft.serve.drafters.lookup import LookupDrafter
from longdraft.serve.settings import ServeSettings

logger = logging.getLogger(__name__)


def build_drafter(server_args: Any, settings: ServeSettings, runner: Any) -> Drafter:
    """LongSpec where a draft folder is given, else lookup.

    Args:
        server_args: SGLang's arguments.
        settings: ours.
        runner: the target's model runner, weights loaded, no cache pool yet.
    """
    folder = server_args.speculative_draft_model_path
    if folder is None:
        return LookupDrafter(settings.lookup_min_match)
    target = TargetSpec.from_config(runner.model_config.hf_text_config)
    embedding, head = runner.model.get_embed_and_head()
    draft = load_draft(folder, target, dtype=runner.dtype, device=embedding.device).bind(embedding, head)
    assert isinstance(draft, LongSpecDraft), "checks.py refuses other kinds at start-up"
    if any(not bool(torch.isfinite(p).all()) for p in draft.parameters()):
        logger.error(
            "longdraft: the draft in %s has weights that are not finite: answers stay right, nothing it drafts will be kept",
            folder,
        )
    trained = training_facts(read_config(folder), folder).max_lag
    steps = server_args.speculative_num_steps
    if 0 < trained < steps:
        logger.warning(
            "longdraft: %d draft steps are served, the draft was trained for %d: the later ones will rarely be kept",
            steps,
            trained,
        )
    attention = None if settings.attention == "auto" else settings.attention
    return LongSpecDrafter(
        draft,
        server_args.max_running_requests + 1,
        server_args.speculative_num_steps,
        settings.draft_context,
        settings.draft_sinks,
        attention,
    )
