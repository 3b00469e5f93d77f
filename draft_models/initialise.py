"""First weights of a draft from its target: copies of the target's first layer, and a least-squares fit behind them.

The first layer knows what to make of token embeddings. What its MLP finds there, fitted in one step to the target's last hidden
rows, is a draft at once: on SmolLM2-135M, 20K tokens for the fit gave the agreement on held-out text (19 %) that took 100K
tokens of training from random weights.

Legend: N rows, E hidden size, I intermediate size.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch

from longdraft.draft_models.eagle3 import Eagle3Draft
from longdraft.draft_models.longspec import LongSpecDraft
from longdraft.draft_models.regression import Regression


@torch.no_grad()
def initialise_from_target(draft: LongSpecDraft, model: Any) -> list[str]:
    """Copy the target's first layer into the draft's self-attention and MLP, and its final norm.

    The cross-attention's output starts at zero: a random one would only add noise to what the first layer makes. A block whose
    shape or kind differs (a mixture of experts, attention with query and key norms) keeps its random weights.

    Args:
        draft: changed in place.
        model: a transformers causal language model of the draft's target.

    Returns:
        Names of the weights that were copied.
    """
    layer = model.get_decoder().layers[0]
    attention, mlp = layer.self_attn, layer.mlp
    pairs: list[tuple[str, Any]] = []
    if not draft.config.target.qk_norm:
        pairs += [(f"self_attn.{name}", getattr(attention, name)) for name in ("q_proj", "k_proj", "v_proj", "o_proj")]
        pairs.append(("self_norm", layer.input_layernorm))
    if all(hasattr(mlp, name) for name in ("gate_proj", "up_proj", "down_proj")):
        pairs += [(f"mlp.{name}", getattr(mlp, name)) for name in ("gate_proj", "up_proj", "down_proj")]
        pairs.append(("mlp_norm", layer.post_attention_layernorm))
    if draft.final_norm is not None:
        pairs.append(("final_norm", model.get_decoder().norm))
    copied = [name for to, source in pairs for name in _copy(draft, to, source)]
    draft.cross_attn.o_proj.weight.zero_()
    return copied


@torch.no_grad()
def initialise_eagle3_from_target(draft: Eagle3Draft, model: Any) -> list[str]:
    """Copy the target's final norm, and its head at the draft's tokens, into a draft whose vocabulary is chosen.

    Args:
        draft: changed in place.
        model: a transformers causal language model of the draft's target.

    Returns:
        Names of the weights that were copied.
    """
    draft.norm.weight.copy_(model.get_decoder().norm.weight)
    head_VE = model.get_output_embeddings().weight
    draft.lm_head.weight.copy_(head_VE[draft.target_ids.to(head_VE.device)])
    return ["norm.weight", "lm_head.weight"]


def _copy(draft: LongSpecDraft, to: str, source: Any) -> list[str]:
    module = draft.get_submodule(to)
    own = dict(module.named_parameters())
    given = dict(source.named_parameters())
    given = {name: torch.zeros_like(own[name]) for name in own.keys() & {"bias"}} | given  # no bias is one of zeros
    if any(name not in given or given[name].shape != weight.shape for name, weight in own.items()):
        return []
    for name, weight in own.items():
        weight.copy_(given[name])
    return [f"{to}.{name}" for name in own]


FitBatch = tuple[Callable[[], torch.Tensor], torch.Tensor, torch.Tensor]
RIDGE = 1e-2  # share of the features' mean square that is added to the diagonal


@torch.no_grad()
def fit_to_hidden(draft: LongSpecDraft, batches: Iterable[FitBatch]) -> int:
    """Set the MLP's output projection to the ridge regression of the target's last hidden rows on the MLP's features.

    Args:
        draft: changed in place; bound to its target, other weights set.
        batches: a call that runs the draft over some tokens (its result is not used), the target's rows ``[T, E]`` before
            the head of the same tokens, and the rows ``[N]`` of them to fit.

    Returns:
        Rows fitted; with none the draft stays as it is.
    """
    inner, hidden = draft.config.target.intermediate_size, draft.config.target.hidden_size
    device = draft.mlp.down_proj.weight.device
    gram_II = torch.zeros(inner, inner, device=device)
    moment_IE = torch.zeros(inner, hidden, device=device)
    rows, seen = 0, dict[str, torch.Tensor]()
    hooks = [
        draft.mlp_norm.register_forward_pre_hook(lambda _, args: seen.update(residual=args[0])),
        draft.mlp.down_proj.register_forward_pre_hook(lambda _, args: seen.update(features=args[0])),
    ]
    try:
        for run, target_TE, row_N in batches:
            run()
            want_NE = _wanted(draft, target_TE[row_N])
            feature_NI = seen["features"][row_N].float()
            gram_II += feature_NI.t() @ feature_NI
            moment_IE += feature_NI.t() @ (want_NE - seen["residual"][row_N].float())
            rows += len(row_N)
    finally:
        for hook in hooks:
            hook.remove()
    if rows:
        gram_II.diagonal().add_(RIDGE * gram_II.diagonal().mean())
        draft.mlp.down_proj.weight.copy_(torch.linalg.solve(gram_II, moment_IE).t())
    return rows


@torch.no_grad()
def fit_newest_row(draft: LongSpecDraft, batches: Iterable[FitBatch]) -> None:
    """Set the projection of the newest cached row to the ridge regression on it of what the rest leaves of the target's rows.

    Its norm's weights bring each feature to a mean square of 1: keys have some a hundred times as large as most, for which one size
    of a step would be too large.

    Args:
        draft: that reads the newest row, changed in place; bound to its target, its MLP not fitted yet.
        batches: as :func:`fit_to_hidden` takes them.
    """
    newest = draft.newest
    assert newest is not None
    regression, rows = _rest_of(draft, newest.proj, batches)
    if rows:
        size_F = regression.scale() / rows**0.5
        newest.norm.weight.div_(size_F)
        newest.proj.weight.copy_(regression.solve() * size_F)


@torch.no_grad()
def fit_cross_output(draft: LongSpecDraft, batches: Iterable[FitBatch]) -> None:
    """Set the cross-attention's output projection likewise, behind queries that look somewhere already."""
    output = draft.cross_attn.o_proj
    regression, rows = _rest_of(draft, output, batches)
    if rows:
        output.weight.copy_(regression.solve())


def _rest_of(draft: LongSpecDraft, module: torch.nn.Linear, batches: Iterable[FitBatch]) -> tuple[Regression, int]:
    """Sums for a projection whose output is added before the MLP: of what the rest, without it, leaves of the target's rows."""
    module.weight.zero_()
    regression = Regression(module.in_features, module.out_features, module.weight.device)
    rows, seen = 0, dict[str, torch.Tensor]()
    hooks = [
        module.register_forward_pre_hook(lambda _, args: seen.update(features=args[0])),
        draft.mlp_norm.register_forward_pre_hook(lambda _, args: seen.update(residual=args[0])),
    ]
    try:
        for run, target_TE, row_N in batches:
            run()
            rest_NE = _wanted(draft, target_TE[row_N]) - seen["residual"][row_N].float()
            regression.add(seen["features"][row_N], rest_NE)
            rows += len(row_N)
    finally:
        for hook in hooks:
            hook.remove()
    return regression, rows


def _wanted(draft: LongSpecDraft, target_NE: torch.Tensor) -> torch.Tensor:
    """``[N, E]``, float32, what the draft's last norm, where it has one, is to turn into the target's rows."""
    return target_NE.float() if draft.final_norm is None else target_NE.float() / draft.final_norm.weight.float()
