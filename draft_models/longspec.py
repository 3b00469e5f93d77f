"""The LongSpec draft: one decoder layer that reads its last tokens and the target's last-layer cache.

The one definition that training and serving share (LongSpec, section 3; GliDe's layer with a norm before each block).
Legend: T tokens, E hidden size, H query heads, K key/value heads, D head size, V vocabulary.
"""

from collections.abc import Callable, Sequence

import torch
from torch import nn
from torch.nn import functional as F
from transformers.activations import ACT2FN

from longdraft.draft_models.config import LongSpecConfig
from longdraft.draft_models.newest_row import NewestRow, lagged_rows, newest_features
from longdraft.draft_models.rope import Rotary
from longdraft.errors import UserError
from longdraft.kernels.linear_cross_entropy import IGNORED
from longdraft.kernels.packed_attention import packed_causal_attention
from longdraft.kernels.view_attention import View, view_attention

SelfAttend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]  # q_THD, k_TKD, v_TKD -> out_THD
CrossAttend = Callable[[torch.Tensor], torch.Tensor]  # q_THD -> out_THD


class SelfAttention(nn.Module):
    """Sliding-window self-attention; keys and values depend on token ids and positions alone."""

    def __init__(self, config: LongSpecConfig) -> None:
        super().__init__()
        t, bias = config.target, config.settings.qkv_bias
        self.head_dim = t.head_dim
        self.q_proj = nn.Linear(t.hidden_size, t.num_heads * t.head_dim, bias=bias)
        self.k_proj = nn.Linear(t.hidden_size, t.num_kv_heads * t.head_dim, bias=bias)
        self.v_proj = nn.Linear(t.hidden_size, t.num_kv_heads * t.head_dim, bias=bias)
        self.o_proj = nn.Linear(t.num_heads * t.head_dim, t.hidden_size, bias=False)

    @property
    def kv_heads(self) -> int:
        """Key/value heads: the target's, or one rank's of them."""
        return len(self.k_proj.weight) // self.head_dim

    def heads(self, x_TE: torch.Tensor, proj: nn.Linear) -> torch.Tensor:
        return proj(x_TE).unflatten(-1, (-1, self.head_dim))


class CrossAttention(nn.Module):
    """Attention over the target's keys and values as cached: only q and o projections of its own.

    Of several layers the key heads stand side by side, as if they were one layer's.
    """

    def __init__(self, config: LongSpecConfig) -> None:
        super().__init__()
        t = config.target
        self.head_dim = t.head_dim
        self.q_proj = nn.Linear(t.hidden_size, config.cross_heads * t.head_dim, bias=config.settings.qkv_bias)
        self.q_norm = nn.RMSNorm(t.head_dim, eps=t.rms_norm_eps) if config.cross_q_norm else None
        self.o_proj = nn.Linear(config.cross_heads * t.head_dim, t.hidden_size, bias=False)
        # What to look for follows from what the target thought of last, not from the newest tokens alone.
        newest, out = newest_features(config), config.cross_heads * t.head_dim
        self.newest_q_proj = nn.Linear(newest, out, bias=False) if newest else None

    @property
    def query_heads(self) -> int:
        """Query heads: all, or one rank's of them."""
        return len(self.q_proj.weight) // self.head_dim

    def query(self, x_TE: torch.Tensor, newest_TF: torch.Tensor | None = None) -> torch.Tensor:
        q_TC = self.q_proj(x_TE)
        if self.newest_q_proj is not None and newest_TF is not None:
            q_TC = q_TC + self.newest_q_proj(newest_TF)
        q_THD = q_TC.unflatten(-1, (-1, self.head_dim))
        return q_THD if self.q_norm is None else self.q_norm(q_THD)


class Mlp(nn.Module):
    """Gated MLP of the target's width and activation (SwiGLU)."""

    def __init__(self, config: LongSpecConfig) -> None:
        super().__init__()
        t = config.target
        self.gate_proj = nn.Linear(t.hidden_size, t.intermediate_size, bias=False)
        self.up_proj = nn.Linear(t.hidden_size, t.intermediate_size, bias=False)
        self.down_proj = nn.Linear(t.intermediate_size, t.hidden_size, bias=False)
        self.act = ACT2FN[t.hidden_act]

    def forward(self, x_TE: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.act(self.gate_proj(x_TE)) * self.up_proj(x_TE))


class LongSpecDraft(nn.Module):
    """Draft layer over the target's frozen embedding and head, which :meth:`bind` lends and no checkpoint holds."""

    def __init__(self, config: LongSpecConfig) -> None:
        super().__init__()
        t = config.target
        self.config = config
        self.self_norm = nn.RMSNorm(t.hidden_size, eps=t.rms_norm_eps)
        self.self_attn = SelfAttention(config)
        self.newest = NewestRow(config) if config.settings.newest_lags else None
        self.cross_norm = nn.RMSNorm(t.hidden_size, eps=t.rms_norm_eps)
        self.cross_attn = CrossAttention(config)
        self.mlp_norm = nn.RMSNorm(t.hidden_size, eps=t.rms_norm_eps)
        self.mlp = Mlp(config)
        self.final_norm = nn.RMSNorm(t.hidden_size, eps=t.rms_norm_eps) if config.settings.final_norm else None
        self.rotary = Rotary(t)
        self._lent: tuple[torch.Tensor, torch.Tensor] | None = None
        self._ranked_NE: torch.Tensor | None = None
        self._joined: Callable[[torch.Tensor], torch.Tensor] | None = None
        self.head_ids: torch.Tensor | None
        ranked = config.settings.head_tokens
        if ranked is not None and ranked > t.vocab_size:
            raise UserError(
                f"draft.head_tokens={ranked}, the target's vocabulary has {t.vocab_size}: give that or less"
            )
        # Part of the checkpoint: which vocabulary entry each row of the ranked head is, ascending.
        self.register_buffer("head_ids", None if ranked is None else torch.arange(ranked))
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=0.02)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)

    def bind(self, embedding_VE: torch.Tensor, head_VE: torch.Tensor) -> "LongSpecDraft":
        """Lend the target's embedding and head. A tuple, so that no optimizer, state dict or DDP ever sees them.

        Raises:
            ValueError: sizes that are not the target's.
        """
        t = self.config.target
        for name, weight in (("embedding", embedding_VE), ("head", head_VE)):
            if weight.shape[0] < t.vocab_size or weight.shape[1] != t.hidden_size:
                raise ValueError(
                    f"{name} is {tuple(weight.shape)}, the draft's target has ({t.vocab_size}, {t.hidden_size})"
                )
        self._lent = (embedding_VE.detach(), head_VE.detach())
        self._gather_head()
        return self

    def bind_rows(
        self, embedding_VE: torch.Tensor, row_NE: torch.Tensor, joined: Callable[[torch.Tensor], torch.Tensor]
    ) -> "LongSpecDraft":
        """As :meth:`bind`, for one of several ranks that have the head's rows together.

        Args:
            embedding_VE: the target's, whole.
            row_NE: this rank's of the rows that the draft uses.
            joined: makes of the logits of these rows ``[..., N]`` those of all that the draft uses, in the order of their ids.
        """
        self._lent, self._ranked_NE, self._joined = (embedding_VE.detach(), row_NE.detach()), row_NE.detach(), joined
        return self

    def rank_head(self, id_N: torch.Tensor) -> None:
        """Choose the ranked head's tokens.

        Raises:
            ValueError: not as many different ids as the settings say.
        """
        assert self.head_ids is not None, "settings.head_tokens is not set"
        chosen = torch.unique(id_N).to(self.head_ids.device)
        if chosen.shape != self.head_ids.shape:
            raise ValueError(f"{len(chosen)} different ids for a ranked head of {len(self.head_ids)} tokens")
        self.head_ids.copy_(chosen)
        self._gather_head()

    def narrow_head(self, id_N: torch.Tensor) -> None:
        """Serve with some rows of the target's head, without any training: the draft can propose these tokens alone.

        Not part of the checkpoint. Every draft must still be verified, so only accept length can suffer.

        Raises:
            UserError: the draft was trained with a ranked head.
        """
        if self.head_ids is not None:
            raise UserError(
                f"draft_head_tokens={len(id_N)}: the draft has a ranked head of {len(self.head_ids)} tokens of its own: leave it out"
            )
        self.head_ids = torch.unique(id_N).to(self.self_attn.q_proj.weight.device)
        self._gather_head()

    def _gather_head(self) -> None:
        if self._lent is not None and self.head_ids is not None:
            self._ranked_NE = self.head_VE[self.head_ids.to(self.head_VE.device)]

    @property
    def head_VE(self) -> torch.Tensor:
        assert self._lent is not None, "bind() the target's embedding and head first"
        return self._lent[1][: self.config.target.vocab_size]

    @property
    def drafting_head_NE(self) -> torch.Tensor:
        """Rows of the head that the draft uses: the ranked ones in the order of ``head_ids``, else all; of several ranks this one's."""
        return self.head_VE if self._ranked_NE is None else self._ranked_NE

    @property
    def embedding_VE(self) -> torch.Tensor:
        assert self._lent is not None, "bind() the target's embedding and head first"
        return self._lent[0]

    def embed(self, id_T: torch.Tensor) -> torch.Tensor:
        return F.embedding(id_T, self.embedding_VE).to(self.self_attn.k_proj.weight.dtype)

    def self_kv(self, id_T: torch.Tensor, position_T: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Rotated keys and values of the self-attention for tokens at positions: all the state that the draft has."""
        x_TE = self.self_norm(self.embed(id_T))
        attn = self.self_attn
        return self.rotary(attn.heads(x_TE, attn.k_proj), position_T), attn.heads(x_TE, attn.v_proj)

    def forward(
        self,
        id_T: torch.Tensor,
        position_T: torch.Tensor,
        self_attend: SelfAttend,
        cross_attend: CrossAttend,
        newest_TF: torch.Tensor | None = None,
        lag: int = 1,
    ) -> torch.Tensor:
        """Hidden rows before the head, ``[T, E]``.

        Args:
            id_T: int64 token ids.
            position_T: their positions; queries and keys are rotated there.
            self_attend: attention of rotated ``q, k, v`` of these tokens over whatever the window holds.
            cross_attend: attention of rotated queries over the target's cache.
            newest_TF: of :meth:`read_newest`, of the cached row that stands ``lag`` tokens before each.
            lag: 1 or more.
        """
        h_TE = self.embed(id_T)
        x_TE = self.self_norm(h_TE)
        attn = self.self_attn
        q = self.rotary(attn.heads(x_TE, attn.q_proj), position_T)
        k = self.rotary(attn.heads(x_TE, attn.k_proj), position_T)
        v = attn.heads(x_TE, attn.v_proj)
        h_TE = h_TE + attn.o_proj(self_attend(q, k, v).flatten(-2))
        if self.newest is not None and newest_TF is not None:
            h_TE = h_TE + self.newest(newest_TF, lag)
        q = self.rotary(self.cross_attn.query(self.cross_norm(h_TE), newest_TF), position_T)
        h_TE = h_TE + self.cross_attn.o_proj(cross_attend(q).flatten(-2))
        h_TE = h_TE + self.mlp(self.mlp_norm(h_TE))
        return h_TE if self.final_norm is None else self.final_norm(h_TE)

    def read_newest(self, k_TKD: torch.Tensor, v_TKD: torch.Tensor, position_T: torch.Tensor) -> torch.Tensor | None:
        """Features ``[T, F]`` of cached rows; None for a draft that does not read the newest one directly.

        Args:
            k_TKD, v_TKD: cached rows of ``config.cross_layers``, their key heads side by side.
            position_T: where the keys were rotated.
        """
        if self.newest is None:
            return None
        return self.newest.features(k_TKD, v_TKD, position_T, self.rotary)

    def forward_packed(
        self,
        id_T: torch.Tensor,
        position_T: torch.Tensor,
        target_k_TKD: torch.Tensor,
        target_v_TKD: torch.Tensor,
        cu: list[int],
        lag: int,
        views: Sequence[View | None] = (),
    ) -> torch.Tensor:
        """Training forward over packed documents with one Flash Noisy lag (LongSpec, section 3.2).

        Args:
            id_T, position_T: packed tokens and their positions (offsets may jump inside a document).
            target_k_TKD, target_v_TKD: the cache of the target's ``config.cross_layers`` of the same tokens, their key heads side by
                side; detached here.
            cu: document offsets from 0 to T.
            lag: query t of a document sees the target's keys 0 .. t - lag.
            views: what it reads of them, one a document; None, or an empty sequence, is all.

        Returns:
            ``[T, E]`` hidden rows before the head.
        """
        views = views or [None] * (len(cu) - 1)
        keys, values = target_k_TKD.detach(), target_v_TKD.detach()
        newest_TF = self.read_newest(keys, values, position_T)
        if newest_TF is not None:
            newest_TF = lagged_rows(newest_TF, cu, lag)
        return self(
            id_T,
            position_T,
            lambda q, k, v: packed_causal_attention(q, k, v, cu, self.config.settings.window),
            lambda q: view_attention(q, keys.to(q.dtype), values.to(q.dtype), cu, lag, views),
            newest_TF,
            lag,
        )

    @property
    def target_ids(self) -> torch.Tensor | None:
        """``[N]`` target id of each row of :meth:`draft_logits`, ascending; None where the draft's head is the target's."""
        return self.head_ids

    def draft_logits(self, hidden_TE: torch.Tensor) -> torch.Tensor:
        """``[T, N]`` logits of the rows of :attr:`drafting_head_NE`."""
        logits_TN = hidden_TE @ self.drafting_head_NE.to(hidden_TE.dtype).t()
        return logits_TN if self._joined is None else self._joined(logits_TN)

    def logits(self, hidden_TE: torch.Tensor) -> torch.Tensor:
        """``[T, V]`` logits of the target's head; -inf for tokens that a ranked head leaves out."""
        logits_TN = self.draft_logits(hidden_TE)
        if self.head_ids is None:
            return logits_TN
        everything = logits_TN.new_full((len(logits_TN), self.config.target.vocab_size), float("-inf"))
        return everything.index_copy(1, self.head_ids, logits_TN)

    def ranked_label(self, label_T: torch.Tensor) -> torch.Tensor:
        """Vocabulary ids as rows of :attr:`drafting_head_NE`; -100 stays, and is what a ranked head leaves out."""
        if self.head_ids is None:
            return label_T
        row_T = torch.searchsorted(self.head_ids, label_T).clamp_max(len(self.head_ids) - 1)
        return torch.where(self.head_ids[row_T] == label_T, row_T, IGNORED)
