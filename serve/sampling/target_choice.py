"""The target's own choice behind the newest token and behind every draft, exactly as plain decoding would choose there.

Legend: N rows of all requests, V vocabulary.
"""

from typing import Any

import torch

from longdraft.kernels.tree import Tree
from longdraft.serve.sampling.grammar import apply_grammar
from longdraft.serve.sampling.penalties import apply_penalties, penalise_tree, penalised
from longdraft.serve.sampling.rows import RowParams


def process_logits(
    logits_NV: torch.Tensor, reqs: list[Any], drafts: list[list[int]], tree: Tree | None = None
) -> torch.Tensor:
    """Penalties, grammar and logit bias, each as of its row's position.

    Args:
        logits_NV: target logits; request i owns ``len(drafts[i]) + 1`` consecutive rows. Changed in place where float32.
        reqs: SGLang's requests.
        drafts: drafted tokens of each.
        tree: of each request, whose places are the rows; of its drafts the number counts alone. A grammar reads its tokens on
            the host. None: chains.

    Returns:
        float32 logits with non-finite NaN rows made harmless (a NaN never wins).
    """
    logits_NV = torch.nan_to_num(
        logits_NV.float(), nan=float("-inf"), posinf=torch.finfo(torch.float32).max, neginf=float("-inf")
    )
    start = 0
    for i, (req, drafted) in enumerate(zip(reqs, drafts, strict=True)):
        rows_NV = logits_NV[start : start + len(drafted) + 1]
        start += len(drafted) + 1
        if penalised(req):
            if tree is None:
                apply_penalties(rows_NV, req, drafted)
            else:
                penalise_tree(rows_NV, req, tree.token_BT[i], tree.bits_BTW[i], tree.depth_BT[i])
        if req.grammar is not None:
            if tree is None:
                apply_grammar(rows_NV, req.grammar, drafted)
            else:
                apply_grammar(rows_NV, req.grammar, tree.token_BT[i, 1:].tolist(), tree.parent_BT[i, 1:].tolist())
        if req.sampling_params.logit_bias is not None:
            for token, bias in req.sampling_params.logit_bias.items():
                rows_NV[:, int(token)] += bias
    return logits_NV


def target_choice(
    logits_NV: torch.Tensor,
    reqs: list[Any],
    drafts: list[list[int]],
    position_N: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``(choice_N, processed logits_NV)`` of the rows of :func:`process_logits`; positions are those of the input tokens."""
    processed_NV = process_logits(logits_NV, reqs, drafts)
    params = RowParams.build(reqs, [len(d) + 1 for d in drafts], logits_NV.device)
    return params.choose(processed_NV, position_N), processed_NV
