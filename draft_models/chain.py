"""Chain drafting: one draft token a step, each from the one before. Shared by the server and the reference decoder.

Legend: B requests, S positions, H query heads, D head size, E hidden size, V vocabulary, K drafted tokens a request.
"""

from collections.abc import Callable

import torch

from longdraft.draft_models.fused_step import FusedChain, FusedStep
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
    given = row_B, position_B, steps + keep_last, cross_attend, newest_BF, backend
    chain = ModuleChain(state, *given) if fused is None else FusedChain(fused, state, *given)
    token_B, drafted = root_B, []
    for step in range(steps):
        hidden_BE = chain(token_B, step)
        token_B = choose((logits or state.draft.logits)(hidden_BE), chain.at_SB[step], step)
        drafted.append(token_B)
    if keep_last:
        chain.keep(token_B, steps)
    return torch.stack(drafted, 1)


class ModuleChain:
    """The draft's own forward in place of :class:`FusedChain`; on a CPU, windows are read through a mask."""

    def __init__(
        self,
        state: WindowState,
        row_B: torch.Tensor,
        position_B: torch.Tensor,
        tokens: int,
        cross_attend: CrossAttend,
        newest_BF: torch.Tensor | None,
        backend: str | None,
    ) -> None:
        self.state, self.row_B, self.cross_attend, self.newest_BF = state, row_B, cross_attend, newest_BF
        self.backend, self.in_place = backend, row_B.is_cuda
        self.at_SB, self.windows = state.windows(row_B, position_B, tokens)

    def __call__(self, id_B: torch.Tensor, step: int) -> torch.Tensor:
        at_B, window = self.at_SB[step], self.windows[step] if self.in_place else None

        def self_attend(q_BHD: torch.Tensor, k_BKD: torch.Tensor, v_BKD: torch.Tensor) -> torch.Tensor:
            return self.state.attend(self.row_B, at_B, q_BHD, k_BKD, v_BKD, window, self.backend)

        return self.state.draft(id_B, at_B, self_attend, self.cross_attend, self.newest_BF, step + 1)

    def keep(self, id_B: torch.Tensor, step: int) -> None:
        self.state.store(self.row_B, id_B, self.at_SB[step])
