"""Chain drafting with an EAGLE-3 draft: the first step reads the target's features, each later one the step before it.

Shared by the server and the reference decoder, which keep the rows' keys and values each in their own way.

Legend: B requests, H query heads, K key/value heads, D head size, E hidden size, V the target's vocabulary.
"""

from collections.abc import Callable

import torch

from longdraft.draft_models.chain import Choose, argmax_choice
from longdraft.draft_models.eagle3 import Eagle3Draft

StepAttend = Callable[
    [int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor
]  # step, q_BHD, k_BKD, v_BKD -> out_BHD


@torch.no_grad()
def propose_eagle3_chain(
    draft: Eagle3Draft,
    hidden_BE: torch.Tensor,
    root_B: torch.Tensor,
    position_B: torch.Tensor,
    steps: int,
    attend: StepAttend,
    choose: Choose = argmax_choice,
) -> torch.Tensor:
    """Draft ``steps`` tokens for each request, ``[B, steps]`` int64 ids of the target.

    Args:
        draft: bound to the target's embedding.
        hidden_BE: fused features of the token before the root, the last one that the target has computed.
        root_B: the newest token of each request.
        position_B: the root's position n; step d reads the token at n + d and stands at row n - 1 + d.
        attend: attention of one row a request over what it sees: rows 0 .. n - 2 of the text, and the chain's own rows up
            to this step, whose keys and values it is given one step at a time.
        choose: the draft's pick from its logits, given the position of the token that it read.
    """
    token_B, drafted = root_B, []
    for step in range(steps):

        def attend_now(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, step: int = step) -> torch.Tensor:
            return attend(step, q, k, v)

        normed_BE, hidden_BE = draft(token_B, hidden_BE, position_B - 1 + step, attend_now)
        token_B = choose(draft.logits(normed_BE), position_B + step, step)
        drafted.append(token_B)
    return torch.stack(drafted, 1)
