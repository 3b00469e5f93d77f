"""The drafter that the server's options ask for."""

import logging
from typing import Any

import torch

from longdraft.draft_models.checkpoint import load_draft, read_config, training_facts
from longdraft.draft_models.eagle3 import Eagle3Draft
from longdraft.draft_models.longspec import LongSpecDraft
from longdraft.draft_models.shares import Share, split
from longdraft.draft_models.target import TargetSpec
from longdraft.draft_models.token_counts import TokenCounts
from longdraft.serve.draft_lm_checks import is_causal_lm
from longdraft.serve.drafters.base import Drafter
from longdraft.serve.drafters.eagle3 import Eagle3Drafter
from longdraft.serve.drafters.lend import lend
from longdraft.serve.drafters.longspec import LongSpecDrafter
from longdraft.serve.drafters.lookup import LookupDrafter
from longdraft.serve.drafters.nothing import NothingDrafter
from longdraft.serve.ranks import ALONE, Ranks
from longdraft.serve.settings import ServeSettings
from longdraft.serve.target_weights import TargetWeights
from longdraft.serve.tree_shape import CHAIN

logger = logging.getLogger(__name__)


def build_drafter(
    server_args: Any, settings: ServeSettings, runner: Any, weights: TargetWeights, ranks: Ranks = ALONE
) -> Drafter:
    """The draft that a folder holds where one is given, else lookup.

    Args:
        server_args: SGLang's arguments.
        settings: ours.
        runner: the target's model runner, weights loaded, no cache pool yet.
        weights: what the target lends.
        ranks: that serve together; a draft of ours is divided among them here, a language model by SGLang.
    """
    folder = server_args.speculative_draft_model_path
    if settings.self_draft:
        return NothingDrafter()
    if folder is None:
        return LookupDrafter(settings.lookup_min_match)
    if is_causal_lm(folder):
        return _standalone(server_args, settings, runner)
    target = TargetSpec.from_config(runner.model_config.hf_text_config)
    draft = load_draft(folder, target, dtype=runner.dtype, device=weights.embedding_VE.device)
    if isinstance(draft, LongSpecDraft) and settings.draft_head_tokens is not None:
        _narrow(draft, settings, target.vocab_size)
    share = None if ranks.size == 1 else Share(ranks.rank, ranks.size, ranks.total, ranks.joined)
    if share is not None:
        shared = split(draft, share)
        logger.info("longdraft: of the draft the ranks share: %s", ", ".join(shared) or "nothing")
    lend(draft, weights, share)
    if any(not bool(torch.isfinite(p).all()) for p in draft.parameters()):
        logger.error(
            "longdraft: the draft in %s has weights that are not finite: answers stay right, nothing it drafts will be kept",
            folder,
        )
    trained = training_facts(read_config(folder), folder).max_lag
    steps = server_args.speculative_num_steps  # a tree's depth, where there is one
    if 0 < trained < steps:
        logger.warning(
            "longdraft: %d draft steps are served, the draft was trained for %d: the later ones will rarely be kept",
            steps,
            trained,
        )
    attention = draft_attention(settings)
    context, ahead = reach(settings, steps, runner.model_config.context_len)
    rows, reads = server_args.max_running_requests + 1, (context, settings.draft_sinks)
    if isinstance(draft, Eagle3Draft):
        return Eagle3Drafter(draft, rows, steps, *reads, attention, ranks)
    return LongSpecDrafter(draft, rows, steps, *reads, attention, ahead, ranks, share)


def _narrow(draft: LongSpecDraft, settings: ServeSettings, vocab: int) -> None:
    """Some rows of the head, as the settings say."""
    assert settings.draft_head_tokens is not None and settings.draft_head_counts is not None
    counts = TokenCounts.load(settings.draft_head_counts, vocab)
    draft.narrow_head(ids := counts.top(settings.draft_head_tokens))
    logger.info(
        "longdraft: the draft proposes %d of %d tokens, %.2f %% of the counted text",
        len(ids),
        vocab,
        100 * counts.coverage(ids),
    )


def reach(settings: ServeSettings, steps: int, most: int) -> tuple[int, int]:
    """Cached tokens that a draft reads at most, and how many may be drafted behind the last certain one, beside the chain.

    Args:
        settings: of the server.
        steps: of a chain.
        most: tokens of the server's context: no request has more, whatever the settings allow.
    """
    if not settings.viewed:
        return min(settings.draft_context, most), 0
    return min(max(settings.draft_context, settings.view_width(steps + 1)), most), settings.pending  # it reads the view


def _standalone(server_args: Any, settings: ServeSettings, runner: Any) -> Drafter:
    """A causal language model as the draft."""
    from longdraft.serve.draft_lm import DraftLM
    from longdraft.serve.drafters.standalone import StandaloneDrafter

    steps = server_args.speculative_num_steps
    context, ahead = reach(settings, steps, runner.model_config.context_len)
    model = DraftLM(server_args, runner, settings.attention)
    rows = server_args.max_running_requests + 1
    return StandaloneDrafter(model, runner.model_config.vocab_size, rows, steps, context, settings.draft_sinks, ahead)


def draft_attention(settings: ServeSettings) -> str | None:
    """Backend of the draft's attention. Trees' loops know lengths on the device alone, and FlashInfer plans on the host."""
    unfit = settings.attention == "flashinfer" and settings.tree != CHAIN
    return None if unfit or settings.attention == "auto" else settings.attention
