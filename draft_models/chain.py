"""Chain drafting: one draft token a step, each from the one before. Shared by the server and the reference decoder.

Legend: B requests, H query heads, D head size, V vocabulary, K drafted tokens a request.
"""

from collections.abc import Callable

import torch

from longdraft.draft_models.longspec import CrossAttend
from longdraft.draft_models.window_state import WindowState

Choose = Callable[[torch.Tensor, torch.Tensor, int], torch.Tensor]  # logits_BV, position_B, step -> id_B


def argmax_choice(logits_BV: torch.Tensor, position_B: torch.Tensor, step: int) -> torch.Tensor:
    """Greedy drafting."""
    return logits_BV.argmax(-1)


@torch.no_grad()
def propose_chain(
    state: WindowState,
    row_B: torch.Tensor,
    root_B: torch.Tensor,
    position_B: torch.Tensor,
    steps: int,
    cross_attend: CrossAttend,
    choose: Choose = argmax_choice,
    logits: Callable[[torch.Tensor], torch.Tensor] | None = None,
    newest_BF: torch.Tensor | None = None,
) -> torch.Tensor:
    """Draft ``steps`` tokens for each request, ``[B, steps]`` int64.

    Args:
        state: rings that hold every token before the root.
        row_B: ring row of each request.
        root_B: the newest token of each request, which has no target cache yet.
        position_B: the root's position T; step d runs at T + d and reads the target's keys 0 .. T - 1, a lag of d + 1
            (LongSpec, section 3.2).
        cross_attend: attention of ``[B, H, D]`` queries over each request's target cache.
        choose: the draft's pick from its logits, given the position of the token that it read.
        logits: the head; None takes the draft's full head.
        newest_BF: of the draft's ``read_newest`` for the target's key T - 1 of each request.
    """
    draft = state.draft
    token_B, drafted = root_B, []
    for step in range(steps):
        at_B = position_B + step

        def self_attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, at_B: torch.Tensor = at_B) -> torch.Tensor:
            return state.attend(row_B, at_B, q, k, v)

        hidden_BE = draft(token_B, at_B, self_attend, cross_attend, newest_BF, step + 1)
        token_B = choose((logits or draft.logits)(hidden_BE), at_B, step)
        drafted.append(token_B)
    return torch.stack(drafted, 1)
