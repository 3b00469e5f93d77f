"""Chain drafting: one draft token a step, each from the one before. Shared by the server and the reference decoder.

Legend: B requests, S steps, H query heads, D head size, V vocabulary, K drafted tokens a request.
"""

from collections.abc import Callable, Sequence

import torch

from longdraft.draft_models.fused_step import FusedChain, FusedStep
from longdraft.draft_models.longspec import CrossAttend
from longdraft.draft_models.window_state import WindowState
from longdraft.kernels.plan import AttentionPlan

Choose = Callable[[torch.Tensor, torch.Tensor, int], torch.Tensor]  # logits_BV, position_B, step -> id_B
Advance = Callable[[torch.Tensor, int], torch.Tensor]  # id_B, step -> hidden_BE


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
    fused: FusedStep | None = None,
    backend: str | None = None,
    keep_last: bool = False,
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
        fused: the draft's step for serving; None runs the module.
        backend: of the attention over the rings, as :func:`longdraft.kernels.prefix_attention.prefix_attention` takes it.
        keep_last: store the last drafted token too, which no step has read.
    """
    count = steps + keep_last
    windows: Sequence[AttentionPlan | None]
    advance: Advance
    if fused is not None:
        at_SB, plans = state.windows(row_B, position_B, count)
        advance = chain = FusedChain(fused, state, row_B, at_SB, plans, cross_attend, newest_BF, backend)
    else:
        if position_B.is_cuda:
            at_SB, windows = state.windows(row_B, position_B, count)
        else:
            at_SB = position_B + torch.arange(count, device=position_B.device)[:, None]
            windows = [None] * count
        advance = _module_steps(state, row_B, at_SB, windows, cross_attend, newest_BF, backend)
    token_B, drafted = root_B, []
    for step in range(steps):
        hidden_BE = advance(token_B, step)
        token_B = choose((logits or state.draft.logits)(hidden_BE), at_SB[step], step)
        drafted.append(token_B)
    if keep_last and fused is None:
        state.store(row_B, token_B, at_SB[steps])
    elif keep_last:
        chain.keep(token_B, steps)
    return torch.stack(drafted, 1)


def _module_steps(
    state: WindowState,
    row_B: torch.Tensor,
    at_SB: torch.Tensor,
    windows: Sequence[AttentionPlan | None],
    cross_attend: CrossAttend,
    newest_BF: torch.Tensor | None,
    backend: str | None,
) -> Advance:
    """The draft's own forward."""

    def advance(id_B: torch.Tensor, step: int) -> torch.Tensor:
        def self_attend(q_BHD: torch.Tensor, k_BKD: torch.Tensor, v_BKD: torch.Tensor) -> torch.Tensor:
            return state.attend(row_B, at_SB[step], q_BHD, k_BKD, v_BKD, windows[step], backend)

        return state.draft(id_B, at_SB[step], self_attend, cross_attend, newest_BF, step + 1)

    return advance
