"""Penalties counted per position: a row sees the output so far and the drafts on its path.

Legend: N rows, V vocabulary.
"""

from typing import Any

import torch

from longdraft.kernels.tree_bits import unpack_bits


def penalised(req: Any) -> bool:
    """True when the request's logits depend on what it has written."""
    p = req.sampling_params
    return bool(p.frequency_penalty or p.presence_penalty or p.repetition_penalty != 1.0 or p.min_new_tokens > 0)


def apply_penalties(logits_NV: torch.Tensor, req: Any, drafts: list[int]) -> None:
    """Penalise the rows of one request's chain in place.

    Args:
        logits_NV: one row behind the newest token and one behind each draft.
        req: SGLang's request; ``output_ids`` holds everything emitted.
        drafts: the drafted tokens, one fewer than rows; draft i is the token of row i + 1.
    """
    counts_NV = _written(req, logits_NV.shape[1]).repeat(len(drafts) + 1, 1)
    for row, token in enumerate(drafts):
        counts_NV[row + 1 :, token] += 1
    device = logits_NV.device
    _penalise(logits_NV, req, counts_NV.to(device), torch.arange(len(drafts) + 1, device=device))


def penalise_tree(
    logits_NV: torch.Tensor, req: Any, token_N: torch.Tensor, bits_NW: torch.Tensor, depth_N: torch.Tensor
) -> None:
    """The same for the rows of one request's tree, whose tokens the host need not know.

    Args:
        logits_NV: one row behind each place.
        req: as above.
        token_N, bits_NW, depth_N: of the places, as :class:`longdraft.kernels.tree.Tree` has them; the first is the root.
    """
    count = len(token_N)
    path_NN = unpack_bits(bits_NW, count).long()
    path_NN[:, 0] = 0  # the root is written already
    counts_NV = _written(req, logits_NV.shape[1]).to(logits_NV.device).repeat(count, 1)
    counts_NV.scatter_add_(1, token_N.expand(count, -1), path_NN)
    _penalise(logits_NV, req, counts_NV, depth_N)


def _written(req: Any, vocab: int) -> torch.Tensor:
    """How often each token stands in the output, ``[V]``."""
    return torch.bincount(torch.tensor(req.output_ids, dtype=torch.int64), minlength=vocab)[:vocab]


def _penalise(logits_NV: torch.Tensor, req: Any, counts_NV: torch.Tensor, depth_N: torch.Tensor) -> None:
    """By how often each token was written before each row, and by how many drafts stand before it."""
    p, vocab = req.sampling_params, logits_NV.shape[1]
    seen_NV = counts_NV > 0
    if p.frequency_penalty or p.presence_penalty:
        logits_NV -= counts_NV * p.frequency_penalty + seen_NV * p.presence_penalty
    stops = sorted(token for token in _stop_tokens(req) if token is not None and 0 <= token < vocab)
    if stops and p.min_new_tokens > len(req.output_ids):
        early_N1 = (len(req.output_ids) + depth_N < p.min_new_tokens)[:, None]
        logits_NV[:, stops] = torch.where(early_N1, float("-inf"), logits_NV[:, stops])
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
