"""A draft's weights before the first step: from the seed, the target, a fit to it, or another draft.

Legend: T packed tokens.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import cycle, islice, pairwise
from typing import Any

import torch

from longdraft.draft_models.checkpoint import load_draft
from longdraft.draft_models.config import LongSpecConfig
from longdraft.draft_models.copy_start import CopyBatch, chosen_heads, copy_shares, fit_queries
from longdraft.draft_models.eagle3 import Eagle3Draft
from longdraft.draft_models.initialise import (
    FitBatch,
    fit_cross_output,
    fit_newest_row,
    fit_to_hidden,
    initialise_from_target,
)
from longdraft.draft_models.longspec import LongSpecDraft
from longdraft.draft_models.newest_key import Keys, newest_key_queries, start_at_newest_key
from longdraft.errors import UserError
from longdraft.kernels.linear_cross_entropy import IGNORED
from longdraft.train.config import TrainSettings
from longdraft.train.documents import Documents
from longdraft.train.engine import Group
from longdraft.train.ranked_head import most_frequent
from longdraft.train.samples import Packed, SampleStream
from longdraft.train.target import FrozenTarget, resolve_dtype

CHOICE_BATCHES = 2  # micro-batches by which the heads to copy are chosen
KEY_DOCUMENTS, KEYS = 48, 1024  # documents, and keys of each, that constant queries are fitted to


def build_draft(settings: TrainSettings, target: FrozenTarget) -> LongSpecDraft:
    """The draft in its training dtype, from ``draft.init_from``, the target or the seed, bound to the target.

    Raises:
        UserError: a folder to start from that does not fit the target.
    """
    dtype = resolve_dtype(settings.engine.dtype, target.device)
    if settings.draft.init_from is not None:
        loaded = load_draft(settings.draft.init_from, target.spec, dtype, target.device)
        if not isinstance(loaded, LongSpecDraft):
            raise UserError(
                f"draft.init_from={settings.draft.init_from!r} holds an EAGLE-3 draft: give a LongSpec draft"
            )
        if settings.data.features and loaded.config.settings.cross_layers != settings.draft.cross_layers:
            raise UserError(
                f"draft.cross_layers={settings.draft.cross_layers} are in data.features, the draft of draft.init_from reads "
                f"{loaded.config.settings.cross_layers}: capture these"
            )
        draft = loaded
    else:
        torch.manual_seed(settings.run.seed)
        draft = LongSpecDraft(LongSpecConfig(target.spec, settings.draft.architecture))
        if settings.draft.init == "target":
            initialise_from_target(draft, target.model)
        cast_draft(draft, dtype, target.device)
    return draft.train().bind(target.embedding_VE, target.head_VE)


def cast_draft(draft: LongSpecDraft | Eagle3Draft, dtype: torch.dtype, device: torch.device) -> None:
    """Move a draft to its training dtype in place; its frequencies stay float32, or far positions would bend."""
    frequencies = draft.rotary.inverse
    draft.to(device=device, dtype=dtype)
    draft.rotary.inverse = frequencies.to(device)


def rank_head(draft: LongSpecDraft, settings: TrainSettings, corpus: Documents, tokenizer: Any) -> None:
    """Give a new draft's ranked head its tokens; a draft of another folder brings its own."""
    if draft.head_ids is not None and settings.draft.init_from is None:
        draft.rank_head(most_frequent(corpus, tokenizer.all_special_ids, draft))


def fit(
    draft: LongSpecDraft, target: FrozenTarget, settings: TrainSettings, corpus: Documents, limit: int, group: Group
) -> int:
    """``draft.fit_tokens``: fit the MLP's output on the first samples; every rank ends with rank 0's weights.

    ``draft.newest_heads`` of the cross-attention are fitted before.

    Returns:
        Rows that were fitted; 0 if the fit is off or the run starts from another draft.

    Raises:
        UserError: more newest heads than a key head has query heads, or a draft that norms its queries.
    """
    if not settings.draft.fit_tokens or settings.draft.init_from is not None:
        return 0
    if settings.draft.newest_heads:
        _fit_newest_heads(draft, target, settings, corpus, limit, group)
    if draft.newest is not None:
        if group.rank == 0:
            fit_newest_row(draft, _batches(draft, target, settings, corpus, limit))
        share_first(group, [draft.newest.norm.weight, draft.newest.proj.weight])
    if settings.draft.copy_queries:
        _start_copying(draft, target, settings, corpus, limit, group)
    rows = fit_to_hidden(draft, _batches(draft, target, settings, corpus, limit)) if group.rank == 0 else 0
    share_first(group, [draft.mlp.down_proj.weight])
    return int(group.totals(rows)[0])


def _start_copying(
    draft: LongSpecDraft, target: FrozenTarget, settings: TrainSettings, corpus: Documents, limit: int, group: Group
) -> None:
    """``draft.copy_queries``: the target's own queries, and the output that makes the most of what they find."""
    cross, groups = draft.cross_attn, target.spec.num_heads // target.spec.num_kv_heads
    if cross.q_norm is not None:
        raise UserError(
            "draft.copy_queries fits queries as they are, this draft norms them: set draft.cross_q_norm=false"
        )
    if draft.config.cross_group > groups:
        raise UserError(
            f"draft.cross_group={draft.config.cross_group}, the target has {groups} query heads a key head to copy: give {groups} or less"
        )
    if group.rank == 0:
        batches = partial(_copy_batches, draft, target, settings, corpus, limit)
        shares = copy_shares(islice(batches(), CHOICE_BATCHES), target.head_VE, draft.rotary, settings.lag.min)
        if len(shares):
            fit_queries(draft, chosen_heads(shares, groups, draft.config.cross_group), batches())
            fit_cross_output(draft, _batches(draft, target, settings, corpus, limit))
    newest = [] if cross.newest_q_proj is None else [cross.newest_q_proj.weight]
    bias = [] if cross.q_proj.bias is None else [cross.q_proj.bias]
    share_first(group, [cross.q_proj.weight, cross.o_proj.weight, *newest, *bias])


def _copy_batches(
    draft: LongSpecDraft, target: FrozenTarget, settings: TrainSettings, corpus: Documents, limit: int
) -> Iterator[CopyBatch]:
    """With the target online: stored features hold no queries."""
    layers = draft.config.cross_layers
    for micro, lag in zip(fit_samples(settings, corpus, limit, target.device), _lags(settings), strict=False):
        place = micro.id_T, micro.position_T, micro.cu
        seen = target.capture(*place, hidden=True, kv_layers=layers, q_layers=layers)
        assert seen.hidden_TE is not None
        run = partial(draft.forward_packed, *place[:2], seen.k_TKD, seen.v_TKD, micro.cu, lag)
        yield CopyBatch(
            run, *place, seen.q_THD, seen.k_TKD, seen.hidden_TE, (micro.label_T != IGNORED).nonzero().flatten()
        )


def _fit_newest_heads(
    draft: LongSpecDraft, target: FrozenTarget, settings: TrainSettings, corpus: Documents, limit: int, group: Group
) -> None:
    heads, most = settings.draft.newest_heads, draft.config.cross_group
    if heads > most:
        raise UserError(
            f"draft.newest_heads={heads}, the cross-attention has {most} query heads a key head: give {most} or less"
        )
    if draft.cross_attn.q_norm is not None:
        raise UserError(
            f"draft.newest_heads={heads} needs queries of any length, this draft norms them: set draft.cross_q_norm=false"
        )
    lags = settings.lag.min, settings.lag.max
    if group.rank == 0:
        documents = _newest_documents(draft, target, settings, corpus, limit)
        start_at_newest_key(draft, newest_key_queries(documents, draft.rotary, lags, settings.run.seed), heads)
    bias = draft.cross_attn.q_proj.bias
    assert bias is not None
    share_first(group, [draft.cross_attn.q_proj.weight, bias])


def _newest_documents(
    draft: LongSpecDraft, target: FrozenTarget, settings: TrainSettings, corpus: Documents, limit: int
) -> list[Keys]:
    """Keys of the first long enough documents.

    Raises:
        UserError: there are none among the tokens of the fit.
    """
    found: list[Keys] = []
    most = max(KEYS, 4 * settings.lag.max)
    for micro in fit_samples(settings, corpus, limit, target.device):
        seen = micro.capture or target.capture(
            micro.id_T, micro.position_T, micro.cu, kv_layers=draft.config.cross_layers
        )
        assert seen.k_TKD is not None
        for a, b in pairwise(micro.cu):
            if b - a > 4 * settings.lag.max:
                end = min(b, a + most)
                found.append(Keys(seen.k_TKD[a:end].clone(), micro.position_T[a:end]))
            if len(found) == KEY_DOCUMENTS:
                return found
    if not found:
        raise UserError(
            f"draft.newest_heads: no document of the first {settings.draft.fit_tokens} tokens is longer than "
            f"{4 * settings.lag.max}: raise draft.fit_tokens"
        )
    return found


def _lags(settings: TrainSettings) -> Iterator[int]:
    """Every lag in turn: a fit to the smallest alone left a draft with newest rows that named nothing at the others."""
    return cycle(range(settings.lag.min, settings.lag.max + 1))


def share_first(group: Group, weights: Sequence[torch.Tensor]) -> None:
    """Give all ranks rank 0's weights."""
    for weight in weights:
        own = weight.detach().float() if group.rank == 0 else torch.zeros_like(weight, dtype=torch.float32)
        weight.data.copy_(group.sum(own))


def fit_samples(settings: TrainSettings, corpus: Documents, limit: int, device: torch.device) -> Iterator[Packed]:
    """The run's first micro-batches, on the device, up to ``draft.fit_tokens``."""
    stream, cursor, tokens = SampleStream(corpus, settings, limit, 0, 1), 0, 0
    while tokens < settings.draft.fit_tokens:
        micros, cursor = stream.window(cursor)
        for micro in micros:
            yield micro.to(device)
            tokens += len(micro.id_T)


def _batches(
    draft: LongSpecDraft, target: FrozenTarget, settings: TrainSettings, corpus: Documents, limit: int
) -> Iterator[FitBatch]:
    for micro, lag in zip(fit_samples(settings, corpus, limit, target.device), _lags(settings), strict=False):
        seen = micro.capture or target.capture(
            micro.id_T, micro.position_T, micro.cu, hidden=True, kv_layers=draft.config.cross_layers
        )
        assert seen.hidden_TE is not None
        cache = seen.k_TKD, seen.v_TKD
        run = partial(draft.forward_packed, micro.id_T, micro.position_T, *cache, micro.cu, lag)
        yield run, seen.hidden_TE, (micro.label_T != IGNORED).nonzero().flatten()
