"""A LongSpec draft's step for serving: what :meth:`LongSpecDraft.forward` computes, in a quarter of the launches.

Queries, keys and values are one product, so are gate and up; rotation writes keys and values where they belong; a sum and the norm
behind it are one pass. A window is read in place through a page list. On a card all that is Triton, FlashAttention and cuBLAS; on a
CPU it is the same code over the kernels' torch twins, which tests hold to the module.

Legend: B requests, S steps of a chain, T tokens, C columns of the packed projection, H query heads, K key/value heads, D head size,
A = D / 2 angles, E hidden size, F features of a cached row.
"""

from collections.abc import Callable

import torch
from torch.nn.functional import linear

from longdraft.draft_models.longspec import CrossAttend, LongSpecDraft, SelfAttend
from longdraft.draft_models.packed_weights import packed
from longdraft.draft_models.shares import Summed
from longdraft.draft_models.window_state import WindowState
from longdraft.kernels.prefix_attention import prefix_output
from longdraft.kernels.prefix_fit import triton_runs
from longdraft.kernels.rotate import Into, rotate_heads
from longdraft.kernels.row_ops import add_norm, embed_norm, gated_silu

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
Turn = tuple[torch.Tensor, torch.Tensor]  # cosine and sine, [T, A]
Newest = tuple[torch.Tensor, torch.Tensor]  # projections of the newest row, [T, E] and [T, C]


class FusedStep:
    """The same function as the draft's ``forward``, without gradients. Packs the draft's weights, in place."""

    def __init__(self, draft: LongSpecDraft) -> None:
        attn, mlp, target = draft.self_attn, draft.mlp, draft.config.target
        self.draft, self.eps = draft, target.rms_norm_eps
        self.head_dim, self.kv_heads = target.head_dim, attn.kv_heads
        self.q_columns = len(attn.q_proj.weight)
        self.qkv_CE, self.qkv_bias_C = packed(attn.q_proj, attn.k_proj, attn.v_proj)
        self.gate_up, _ = packed(mlp.gate_proj, mlp.up_proj)
        self.silu = target.hidden_act in ("silu", "swish")

    @staticmethod
    def of(draft: LongSpecDraft) -> "FusedStep | None":
        """The step where it pays, on a card; None elsewhere."""
        weight = draft.self_attn.q_proj.weight
        return FusedStep(draft) if weight.is_cuda and weight.dtype in DTYPES and triton_runs() else None

    @torch.no_grad()
    def __call__(
        self,
        id_T: torch.Tensor,
        position_T: torch.Tensor,
        self_attend: SelfAttend,
        cross_attend: CrossAttend,
        newest_TF: torch.Tensor | None = None,
        lag: int = 1,
    ) -> torch.Tensor:
        """:meth:`LongSpecDraft.forward`."""
        turn = self.draft.rotary.angles(position_T)

        def attend(qkv_TC: torch.Tensor) -> torch.Tensor:
            k_TKD, v_TKD = qkv_TC.new_empty(2, len(id_T), self.kv_heads, self.head_dim)
            into = Into(k_TKD, v_TKD, torch.arange(len(id_T), device=id_T.device))
            return self_attend(rotate_heads(qkv_TC, *turn, into), k_TKD, v_TKD)

        return self.layer(id_T, turn, attend, cross_attend, self.newest(newest_TF), lag)

    def newest(self, newest_TF: torch.Tensor | None) -> Newest | None:
        """What a draft that reads the newest row adds to its stream and to its queries, whatever the lag is."""
        draft = self.draft
        if draft.newest is None or draft.cross_attn.newest_q_proj is None or newest_TF is None:
            return None
        return draft.newest.proj(newest_TF), draft.cross_attn.newest_q_proj(newest_TF)

    def layer(
        self,
        id_T: torch.Tensor,
        turn: Turn,
        attend: Callable[[torch.Tensor], torch.Tensor],
        cross_attend: CrossAttend,
        newest: Newest | None,
        lag: int,
    ) -> torch.Tensor:
        """Hidden rows ``[T, E]`` before the head.

        Args:
            id_T: int64 token ids.
            turn: of their positions.
            attend: self-attention's output ``[T, H, D]`` from the packed projection ``[T, C]``, not yet rotated.
            cross_attend, lag: as :meth:`LongSpecDraft.forward` takes them.
            newest: of :meth:`newest`.
        """
        draft = self.draft
        h_TE, x_TE = self.embedded(id_T)
        more_TE = draft.self_attn.o_proj(attend(linear(x_TE, self.qkv_CE, self.qkv_bias_C)).flatten(1))
        if draft.newest is not None and newest is not None:
            more_TE = more_TE + newest[0] + draft.newest.offset(lag)
        x_TE = add_norm(more_TE, h_TE, draft.cross_norm.weight, self.eps)
        q_TC = draft.cross_attn.q_proj(x_TE)
        q_THD = rotate_heads(self._normed(q_TC if newest is None else q_TC + newest[1]), *turn)
        more_TE = draft.cross_attn.o_proj(cross_attend(q_THD).flatten(1))
        x_TE = add_norm(more_TE, h_TE, draft.mlp_norm.weight, self.eps)
        both_T2F = linear(x_TE, self.gate_up)
        out_TF = gated_silu(both_T2F) if self.silu else self._gated(both_T2F)
        down = draft.mlp.down_proj
        if draft.final_norm is not None:
            return add_norm(down(out_TF), h_TE, draft.final_norm.weight, self.eps)
        if isinstance(down, Summed):
            return h_TE.add_(down(out_TF))
        return h_TE.addmm_(out_TF, down.weight.detach().t())

    def embedded(self, id_T: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Embeddings of tokens, new, and their norm, both ``[T, E]``."""
        return embed_norm(id_T, self.draft.embedding_VE, self.draft.self_norm.weight, self.eps)

    def store(self, id_T: torch.Tensor, turn: Turn, into: Into) -> None:
        """:meth:`WindowState.store` for slots of all rings."""
        _, x_TE = self.embedded(id_T)
        kv_bias = None if self.qkv_bias_C is None else self.qkv_bias_C[self.q_columns :]
        rotate_heads(linear(x_TE, self.qkv_CE[self.q_columns :], kv_bias), *turn, into)

    def _normed(self, q_TC: torch.Tensor) -> torch.Tensor:
        norm = self.draft.cross_attn.q_norm
        return q_TC if norm is None else norm(q_TC.unflatten(-1, (-1, self.head_dim))).flatten(1)

    def _gated(self, both_T2F: torch.Tensor) -> torch.Tensor:
        gate, up = both_T2F.chunk(2, -1)
        return self.draft.mlp.act(gate) * up


class FusedChain:
    """The steps of one chain a request over rings; what depends on positions alone is computed once for all of them.

    Args:
        fused: the draft's step.
        state: rings that hold every token before the chains' roots.
        row_B: ring row of each request.
        position_B: int64 position of each root.
        tokens: how many the rings will be given: one a step, and one more where the last drafted one is kept.
        cross_attend: attention of rotated ``[B, H, D]`` queries over each request's target cache.
        newest_BF: of the draft's ``read_newest`` for the newest cached token of each request.
        backend: of the attention over the rings, as :func:`prefix_attention` takes it.
    """

    @torch.no_grad()
    def __init__(
        self,
        fused: FusedStep,
        state: WindowState,
        row_B: torch.Tensor,
        position_B: torch.Tensor,
        tokens: int,
        cross_attend: CrossAttend,
        newest_BF: torch.Tensor | None,
        backend: str | None,
    ) -> None:
        self.fused, self.cross_attend, self.backend = fused, cross_attend, backend
        self.newest = fused.newest(newest_BF)
        self.at_SB, self.windows = state.windows(row_B, position_B, tokens)
        self.slots = state.slots
        self.cos_SBA, self.sin_SBA = fused.draft.rotary.angles(self.at_SB)
        state.mark(row_B, self.at_SB)

    def _into(self, step: int) -> Into:
        return Into(*self.slots, self.windows[step].pages_BW[:, 0])

    @torch.no_grad()
    def __call__(self, id_B: torch.Tensor, step: int) -> torch.Tensor:
        """Store the tokens that a step reads; hidden rows ``[B, E]`` behind them."""
        turn, window = (self.cos_SBA[step], self.sin_SBA[step]), self.windows[step]

        def attend(qkv_BC: torch.Tensor) -> torch.Tensor:
            q_BHD = rotate_heads(qkv_BC, *turn, self._into(step))
            return prefix_output(q_BHD, *self.slots, window, q_BHD.shape[-1] ** -0.5, self.backend)

        return self.fused.layer(id_B, turn, attend, self.cross_attend, self.newest, step + 1)

    @torch.no_grad()
    def keep(self, id_B: torch.Tensor, step: int) -> None:
        """Store tokens where a step would read them, without running it."""
        self.fused.store(id_B, (self.cos_SBA[step], self.sin_SBA[step]), self._into(step))
