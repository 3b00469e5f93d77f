"""Both kinds of drafts as :data:`longdraft.draft_models.draft_tree.DraftStep`: all nodes of a depth in one call, in fixed shapes.

What a node's self-attention reads is in two parts, merged by log-sum-exp: the text before the root, and the node's ancestors among
the nodes that the draft has run on, by their bits. So the steps of a round fit into one CUDA graph.

Legend: B requests, M nodes of one depth, R nodes that the draft runs on in a round, T = B * M query rows, W width of a page list,
H query heads, K key/value heads, D head size, E hidden size, N draft vocabulary.
"""

from collections.abc import Callable

import torch

from longdraft.draft_models.draft_tree import Frontier
from longdraft.draft_models.eagle3 import Eagle3Draft
from longdraft.draft_models.fused_step import FusedStep
from longdraft.draft_models.window_state import WindowState
from longdraft.kernels.plan import AttentionPlan
from longdraft.kernels.prefix_attention import prefix_attention
from longdraft.kernels.tree_attention import MAX_TREE, tree_attention

# depth, q_BMHD -> output [T, H, D] and log-sum-exp [T, H] of attention over what stands before the root, request by request
Prefix = Callable[[int, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


class TreeKeys:
    """Keys and values ``[B, R, K, D]`` of the nodes that the draft has run on in a round."""

    def __init__(self, shape: tuple[int, int, int, int], dtype: torch.dtype, device: torch.device) -> None:
        batch, runs = shape[:2]
        if runs > MAX_TREE:
            raise ValueError(f"a draft runs on {runs} nodes of a tree, at most {MAX_TREE} are read: draft fewer")
        self.k_BRKD = torch.zeros(shape, dtype=dtype, device=device)
        self.v_BRKD = torch.zeros_like(self.k_BRKD)
        self.cu_keys_B1 = torch.arange(batch + 1, dtype=torch.int32, device=device) * runs

    def attend(
        self,
        nodes: Frontier,
        q_BMHD: torch.Tensor,
        k_BMKD: torch.Tensor,
        v_BMKD: torch.Tensor,
        onto: tuple[torch.Tensor, torch.Tensor],
        scale: float,
    ) -> torch.Tensor:
        """Keep the nodes' keys and values and attend from them over their ancestors, themselves and ``onto``; ``[B, M, H, D]``."""
        batch, count = q_BMHD.shape[:2]
        mine = slice(nodes.first, nodes.first + count)
        self.k_BRKD[:, mine], self.v_BRKD[:, mine] = k_BMKD, v_BMKD
        keys, values = self.k_BRKD.flatten(0, 1), self.v_BRKD.flatten(0, 1)
        plan = rows_plan(batch, count, q_BMHD.device)
        bits_TW = nodes.bits_BMW.flatten(0, 1)
        out_THD, _ = tree_attention(q_BMHD.flatten(0, 1), keys, values, plan, scale, bits_TW, self.cu_keys_B1, onto)
        return out_THD.view_as(q_BMHD)


def rows_plan(
    batch: int,
    count: int,
    device: torch.device,
    pages_BW: torch.Tensor | None = None,
    lens_B: torch.Tensor | None = None,
) -> AttentionPlan:
    """Plan of ``count`` rows a request over page lists, int32, that the device alone knows; without them, over nothing."""
    if pages_BW is None or lens_B is None:
        pages_BW = torch.zeros(batch, 1, dtype=torch.int32, device=device)
        lens_B = torch.zeros(batch, dtype=torch.int32, device=device)
    cu_B1 = torch.arange(batch + 1, dtype=torch.int32, device=device) * count
    return AttentionPlan.on_device(pages_BW, lens_B, cu_B1, [b * count for b in range(batch + 1)])


class LongSpecTreeStep:
    """A LongSpec draft on the nodes of a depth. Every node reads the target's keys before the root (a lag of its depth + 1).

    Its window counts positions, so a node of depth d reads ``window - 1 - d`` tokens before the root whatever its place in the
    tree is.

    Args:
        state: rings that hold every token before the root.
        row_B: ring row of each request.
        position_B: int64 position of each root.
        cross_attend: attention of rotated ``[B, M, H, D]`` queries over each request's target cache.
        runs: nodes that the draft runs on in this round, the root among them.
        backend: of the attention over the ring, as :func:`prefix_attention` takes it.
        newest_BF: of the draft's ``read_newest`` for the newest cached token of each request.
        fused: the draft's step for serving; None runs the module.
    """

    def __init__(
        self,
        state: WindowState,
        row_B: torch.Tensor,
        position_B: torch.Tensor,
        cross_attend: Callable[[torch.Tensor], torch.Tensor],
        runs: int,
        backend: str | None = None,
        newest_BF: torch.Tensor | None = None,
        fused: FusedStep | None = None,
    ) -> None:
        self.newest_BF, self.forward = newest_BF, fused or state.draft
        self.state, self.row_B, self.position_B = state, row_B, position_B
        self.cross_attend, self.backend = cross_attend, backend
        self.scale = state.k.shape[3] ** -0.5
        self.keys = TreeKeys((len(row_B), runs, *state.k.shape[2:]), state.k.dtype, state.k.device)

    def __call__(self, nodes: Frontier) -> torch.Tensor:
        """``[B, M, N]`` logits of the draft's own rows of the head."""
        draft, shape = self.state.draft, nodes.token_BM.shape
        position_T = (self.position_B + nodes.depth).repeat_interleave(shape[1])

        def self_attend(q_THD: torch.Tensor, k_TKD: torch.Tensor, v_TKD: torch.Tensor) -> torch.Tensor:
            onto = self._ring(nodes, q_THD)
            q, k, v = (x.unflatten(0, shape) for x in (q_THD, k_TKD, v_TKD))
            return self.keys.attend(nodes, q, k, v, onto, self.scale).flatten(0, 1)

        def cross(q_THD: torch.Tensor) -> torch.Tensor:
            return self.cross_attend(q_THD.unflatten(0, shape)).flatten(0, 1)

        newest_TF = None if self.newest_BF is None else self.newest_BF.repeat_interleave(shape[1], 0)
        hidden_TE = self.forward(nodes.token_BM.flatten(), position_T, self_attend, cross, newest_TF, nodes.depth + 1)
        return draft.draft_logits(hidden_TE).unflatten(0, shape)

    def _ring(self, nodes: Frontier, q_THD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Attention over the window's tokens before the root."""
        state, width = self.state, self.state.window - 1 - nodes.depth
        if width < 0:
            raise ValueError(f"a tree deeper than the draft's window of {state.window}: draft less deep")
        before_W = torch.arange(max(width, 1), device=q_THD.device)
        slot_BW = (self.position_B[:, None] - 1 - before_W) % state.ring
        pages_BW = (self.row_B[:, None] * state.ring + slot_BW).int()
        batch, count = nodes.token_BM.shape
        plan = rows_plan(batch, count, q_THD.device, pages_BW, state.held(self.row_B, self.position_B, width))
        return prefix_attention(q_THD, *state.slots, plan, self.scale, self.backend)


class Eagle3TreeStep:
    """An EAGLE-3 draft on the nodes of a depth: each goes on from its parent's hidden row.

    Args:
        draft: bound to the target's embedding.
        hidden_BE: fused features of the token before the root.
        position_B: int64 position of each root.
        prefix: attention over the draft's rows before the root's own, as far as nodes of that depth see them.
        runs: nodes that the draft runs on in this round, the root among them.
    """

    def __init__(
        self, draft: Eagle3Draft, hidden_BE: torch.Tensor, position_B: torch.Tensor, prefix: Prefix, runs: int
    ) -> None:
        c = draft.config
        self.draft, self.position_B, self.prefix = draft, position_B, prefix
        self.hidden_BME = hidden_BE[:, None]
        self.keys = TreeKeys((len(position_B), runs, c.num_kv_heads, c.head_dim), hidden_BE.dtype, hidden_BE.device)

    def __call__(self, nodes: Frontier) -> torch.Tensor:
        """``[B, M, N]`` logits over the draft's vocabulary."""
        shape, size = nodes.token_BM.shape, self.hidden_BME.shape[-1]
        hidden_BME = self.hidden_BME.gather(1, nodes.parent_BM[..., None].expand(-1, -1, size))
        position_T = (self.position_B - 1 + nodes.depth).repeat_interleave(shape[1])

        def attend(q_THD: torch.Tensor, k_TKD: torch.Tensor, v_TKD: torch.Tensor) -> torch.Tensor:
            q, k, v = (x.unflatten(0, shape) for x in (q_THD, k_TKD, v_TKD))
            onto = self.prefix(nodes.depth, q)
            return self.keys.attend(nodes, q, k, v, onto, q.shape[-1] ** -0.5).flatten(0, 1)

        normed_TE, next_TE = self.draft(nodes.token_BM.flatten(), hidden_BME.flatten(0, 1), position_T, attend)
        self.hidden_BME = next_TE.unflatten(0, shape)
        return self.draft.draft_logits(normed_TE).unflatten(0, shape)
