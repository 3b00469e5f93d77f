"""The target's own choice behind the newest token and behind every draft, exactly as plain decoding would choose there.

Legend: N rows of all requests, V vocabulary.
"""

from typing import Any

import torch

from longdraft.serve.sampling.grammar import apply_grammar
from longdraft.serve.sampling.penalties import apply_penalties, penalised
from longdraft.serve.sampling.rows import RowParams


def process_logits(
    logits_NV: torch.Tensor, reqs: list[Any], drafts: list[list[int]], parents: list[list[int]] | None = None
) -> torch.Tensor:
    """Penalties, grammar and logit bias, each as of its row's position.

    Args:
        logits_NV: target logits; request i owns ``len(drafts[i]) + 1`` consecutive rows. Changed in place where float32.
        reqs: SGLang's requests.
        drafts: drafted tokens of each.
        parents: for trees, the row of its request that each draft stands behind; None: chains.

    Returns:
        float32 logits with non-finite NaN rows made harmless (a NaN never wins).
    """
    logits_NV = torch.nan_to_num(
        logits_NV.float(), nan=float("-inf"), posinf=torch.finfo(torch.float32).max, neginf=float("-inf")
    )
    start = 0
    for i, (req, drafted) in enumerate(zip(reqs, drafts, strict=True)):
        above = None if parents is None else parents[i]
        rows_NV = logits_NV[start : start + len(drafted) + 1]
        start += len(drafted) + 1
        if penalised(req):
            apply_penalties(rows_NV, req, drafted, above)
        if req.grammar is not None:
            apply_grammar(rows_NV, req.grammar, drafted, above)
        if req.sampling_params.logit_bias is not None:
            for token, bias in req.sampling_params.logit_bias.items():
                rows_NV[:, int(token)] += bias
    return logits_NV


def target_choice(
    logits_NV: torch.Tensor,
    reqs: list[Any],
    drafts: list[list[int]],
    position_N: torch.Tensor,
    parents: list[list[int]] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``(choice_N, processed logits_NV)`` of the rows of :func:`process_logits`; positions are those of the input tokens."""
    processed_NV = process_logits(logits_NV, reqs, drafts, parents)
    params = RowParams.build(reqs, [len(d) + 1 for d in drafts], logits_NV.device)
    return params.choose(processed_NV, position_N), processed_NV
