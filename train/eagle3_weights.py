"""An EAGLE-3 draft's first weights: from the seed, the target's head and a fit to it, or another
draft whose vocabulary stays."""

from collections.abc import Iterator
from typing import Any

import torch

from longdraft.draft_models.checkpoint import load_draft
from longdraft.draft_models.eagle3 import Eagle3Draft
from longdraft.draft_models.eagle3_config import Eagle3Config, Eagle3Settings, rope_reach
from longdraft.draft_models.eagle3_fit import Eagle3FitBatch, fit_eagle3
from longdraft.draft_models.target import TargetSpec
from longdraft.errors import UserError
from longdraft.kernels.linear_cross_entropy import IGNORED
from longdraft.train.config import TrainSettings
from longdraft.train.documents import Documents
from longdraft.train.engine import Group
from longdraft.train.features.reader import FeatureCorpus
from longdraft.train.first_weights import cast_draft, fit_samples, share_first
from longdraft.train.ranked_head import DOCUMENTS
from longdraft.train.target import FrozenTarget, resolve_dtype
from longdraft.train.vocabulary import count_tokens

ADAPTABLE = {"rope", "window", "sinks", "max_position"}  # what a warm start may change: no weight depends on it


def build_eagle3(
    settings: TrainSettings, target: FrozenTarget, corpus: Documents, tokenizer: Any
) -> tuple[Eagle3Draft, str]:
    """The draft in its training dtype, bound to the target, and a line for people.

    A warm start keeps the folder's vocabulary: another order of the same head would be noise.

    Raises:
        UserError: a folder to start from that does not fit, or settings that would change its weights' meaning.
    """
    dtype = resolve_dtype(settings.engine.dtype, target.device)
    if settings.draft.init_from is not None:
        draft, said = _warm_start(settings, target)
    else:
        torch.manual_seed(settings.run.seed)
        draft = Eagle3Draft(Eagle3Config(target.spec, settings.eagle3))
        said = _choose_vocabulary(draft, settings, corpus, tokenizer)
        if settings.draft.init == "target":
            _copy_head(draft, target)
    check_trained_positions(draft.config, settings, corpus.positions if isinstance(corpus, FeatureCorpus) else None)
    cast_draft(draft, dtype, target.device)
    return draft.train().bind(target.embedding_VE, target.head_VE), said


def fit_first_step(
    draft: Eagle3Draft, target: FrozenTarget, settings: TrainSettings, corpus: Documents, limit: int, group: Group
) -> int:
    """``draft.fit_tokens``: fit the first step on the first samples; every rank ends with rank 0's weights.

    Returns:
        Rows that were fitted; 0 if the fit is off or the run starts from another draft.
    """
    if not settings.draft.fit_tokens or settings.draft.init_from is not None:
        return 0

    def batches() -> Iterator[Eagle3FitBatch]:
        for micro in fit_samples(settings, corpus, limit, target.device):
            seen = micro.capture or target.capture(
                micro.id_T, micro.position_T, micro.cu, hidden=True, aux=draft.config.aux_layers, kv_layers=()
            )
            assert seen.hidden_TE is not None
            row_N = (micro.label_T != IGNORED).nonzero().flatten()
            yield Eagle3FitBatch(seen.aux_TA, micro.id_T, micro.position_T, micro.cu, row_N, seen.hidden_TE)

    rows = fit_eagle3(draft, batches) if group.rank == 0 else 0
    attn, mlp = draft.midlayer.self_attn, draft.midlayer.mlp
    fitted = draft.fc, attn.q_proj, attn.k_proj, attn.v_proj, attn.o_proj, mlp.down_proj
    norms = [] if draft.fc_norm is None else [*draft.fc_norm.parameters()]
    share_first(group, [*norms, *(module.weight for module in fitted)])
    return int(group.totals(rows)[0])


def check_trained_positions(config: Eagle3Config, settings: TrainSettings, stored: int | None = None) -> None:
    """Check that the draft's rotation covers what a run trains, before the run costs anything.

    A stretched rotation is made for a context and the tokens drafted behind it, so it must cover both; any other one is
    held to the trained positions alone, as a target's own limit may be the training length.

    Args:
        config: of the draft that the run would train.
        settings: of the run.
        stored: positions of the feature store, which were drawn when it was captured; None: the run draws its own.

    Raises:
        UserError: positions beyond ``eagle3.max_position`` or beyond ``original * factor``.
    """
    length, highest = trained_context(settings, config.target)
    if stored is not None:
        length, highest = "data.features' positions", stored
    reach = rope_reach(config.rope)
    behind = settings.ttt.steps + 1 if reach is not None and config.settings.rope is not None else 0
    need, covered = highest + behind, config.max_position
    if need <= covered:
        return
    remedy = f"lower {length} to {covered - behind}"
    if stored is not None:
        remedy = f"capture with data.max_length and positions.max_position of at most {covered - behind}"
    if reach is not None and reach < need:
        original = config.rope["original_max_position_embeddings"]
        remedy += f", or set eagle3.rope.factor to {-(-need // original)} (original {original})"
    else:
        remedy += f", or set eagle3.max_position={need} or a stretched eagle3.rope"
    drafted = f" and {behind} draft tokens" if behind else ""
    raise UserError(f"{length}={highest}{drafted} pass the {covered} positions that the draft covers: {remedy}")


def trained_context(settings: TrainSettings, spec: TargetSpec) -> tuple[str, int]:
    """The setting that decides the largest trained position, and that position plus one."""
    if settings.positions.offset_share == 0:
        return "data.max_length", settings.data.max_length
    return "positions.max_position", settings.positions.max_position or spec.max_position


def _warm_start(settings: TrainSettings, target: FrozenTarget) -> tuple[Eagle3Draft, str]:
    folder = settings.draft.init_from
    assert folder is not None
    loaded = load_draft(folder, target.spec, torch.float32)
    if not isinstance(loaded, Eagle3Draft):
        raise UserError(f"draft.init_from={folder!r} holds a LongSpec draft: give an EAGLE-3 draft, or set draft.arch")
    given = {name: getattr(settings.eagle3, name) for name in settings.eagle3.model_fields_set}
    was = loaded.config.settings
    changed = {name: value for name, value in given.items() if getattr(was, name) != value}
    if fixed := sorted(changed.keys() - ADAPTABLE):
        raise UserError(
            f"eagle3.{fixed[0]}={changed[fixed[0]]!r}, the draft in {folder!r} has {getattr(was, fixed[0])!r}: "
            "leave it out, or train without draft.init_from"
        )
    if not changed:
        return loaded, ""
    if "rope" in changed and "max_position" not in changed:
        changed["max_position"] = None  # an imported draft's own limit was its old rotation's
    adapted = Eagle3Settings.model_validate(was.model_dump() | {k: getattr(settings.eagle3, k) for k in changed})
    draft = Eagle3Draft(Eagle3Config(target.spec, adapted))
    draft.load_state_dict(loaded.state_dict())
    return draft, f"the draft of {folder} goes on with another {', '.join(sorted(changed))}"


def _choose_vocabulary(draft: Eagle3Draft, settings: TrainSettings, corpus: Documents, tokenizer: Any) -> str:
    """The most frequent supervised tokens; ranks agree, since nothing is random. Specials end turns and are always in."""
    size, whole = draft.config.vocab_size, draft.config.target.vocab_size
    if size == whole:
        return ""
    documents = (corpus[index] for index in range(min(len(corpus), DOCUMENTS)))
    counted = count_tokens(documents, whole, settings.objective.rows == "all")
    chosen_N = counted.top(size, tokenizer.all_special_ids)
    draft.choose_vocabulary(chosen_N)
    return f"a draft vocabulary of {size:,} tokens covers {counted.coverage(chosen_N):.1%} of the supervised text"


@torch.no_grad()
def _copy_head(draft: Eagle3Draft, target: FrozenTarget) -> None:
    """The target's own rows of the head, and the norm that they expect before them."""
    draft.lm_head.weight.copy_(target.head_VE[draft.target_ids.to(target.device)])
    draft.norm.weight.copy_(target.model.base_model.norm.weight)
