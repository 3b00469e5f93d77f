"""Penalties counted per position: a row sees the output so far and the drafts on its path.

Legend: N rows, V vocabulary.
"""

from typing import Any

import torch


def penalised(req: Any) -> bool:
    """True when the request's logits depend on what it has written."""
    p = req.sampling_params
    return bool(p.frequency_penalty or p.presence_penalty or p.repetition_penalty != 1.0 or p.min_new_tokens > 0)


def apply_penalties(logits_NV: torch.Tensor, req: Any, drafts: list[int], parents: list[int] | None = None) -> None:
    """Penalise the rows of one request in place.

    Args:
        logits_NV: one row behind the newest token and one behind each draft.
        req: SGLang's request; ``output_ids`` holds everything emitted.
        drafts: the drafted tokens, one fewer than rows; draft i is the token of row i + 1.
        parents: the row that each draft stands behind, an earlier one, less than 0 for one that is none of the tree's; None: a
            chain.
    """
    p, vocab, device = req.sampling_params, logits_NV.shape[1], logits_NV.device
    counts_NV = torch.bincount(torch.tensor(req.output_ids, dtype=torch.int64), minlength=vocab)[:vocab].repeat(
        len(drafts) + 1, 1
    )
    depths = [0]
    for row, (token, parent) in enumerate(zip(drafts, parents or range(len(drafts)), strict=True), start=1):
        counts_NV[row] = counts_NV[max(parent, 0)]
        counts_NV[row, token] += 1
        depths.append(depths[max(parent, 0)] + 1)
    counts_NV = counts_NV.to(device)
    seen_NV = counts_NV > 0
    if p.frequency_penalty or p.presence_penalty:
        logits_NV -= counts_NV * p.frequency_penalty + seen_NV * p.presence_penalty
    stops = sorted(token for token in _stop_tokens(req) if token is not None and 0 <= token < vocab)
    for row, depth in enumerate(depths):
        if len(req.output_ids) + depth < p.min_new_tokens:
            logits_NV[row, stops] = float("-inf")
    if p.repetition_penalty != 1.0:
        scaled_NV = torch.where(logits_NV < 0, logits_NV * p.repetition_penalty, logits_NV / p.repetition_penalty)
        logits_NV.copy_(torch.where(seen_NV, scaled_NV, logits_NV))


def _stop_tokens(req: Any) -> set[int]:
    """What ``min_new_tokens`` holds back: the request's stop tokens and the tokenizer's, as SGLang counts them."""
    return (
        set(req.sampling_params.stop_token_ids or ())
        | set(req.tokenizer.additional_stop_token_ids or ())
        | {req.tokenizer.eos_token_id}
    )
