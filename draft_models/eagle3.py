"""The EAGLE-3 draft: one decoder layer over three hidden layers of the target, then over its own hidden rows.

The one definition that training and serving share. Row t of a text holds the target's features of token t and the embedding
of token t + 1, stands at position t, and predicts token t + 2. Drafting goes on from the row's own hidden output, one position
further each step. Weight names are those of published checkpoints, which SGLang reads.

Legend: T rows, A features of three layers (3 E), E hidden size, H query heads, K key/value heads, D head size, V the target's
vocabulary, N the draft's.
"""

import torch
from torch import nn
from torch.nn import functional as F
from transformers.activations import ACT2FN

from longdraft.draft_models.eagle3_config import AUX_LAYERS, Eagle3Config
from longdraft.draft_models.longspec import SelfAttend
from longdraft.draft_models.rope import Rotary


class Attention(nn.Module):
    """Projections of the layer's attention; its input is two hidden sizes wide."""

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        wide, c = 2 * config.target.hidden_size, config
        self.head_dim = c.head_dim
        self.q_proj = nn.Linear(wide, c.num_heads * c.head_dim, bias=False)
        self.k_proj = nn.Linear(wide, c.num_kv_heads * c.head_dim, bias=False)
        self.v_proj = nn.Linear(wide, c.num_kv_heads * c.head_dim, bias=False)
        self.o_proj = nn.Linear(c.num_heads * c.head_dim, config.target.hidden_size, bias=False)

    def heads(self, x: torch.Tensor, proj: nn.Linear) -> torch.Tensor:
        return proj(x).unflatten(-1, (-1, self.head_dim))


class Mlp(nn.Module):
    """Gated MLP (SwiGLU)."""

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        hidden = config.target.hidden_size
        self.gate_proj = nn.Linear(hidden, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(hidden, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, hidden, bias=False)
        self.act = ACT2FN[config.target.hidden_act]

    def forward(self, x_TE: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.act(self.gate_proj(x_TE)) * self.up_proj(x_TE))


class Layer(nn.Module):
    """The decoder layer's weights; :class:`Eagle3Draft` runs them."""

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        hidden, eps = config.target.hidden_size, config.rms_norm_eps
        self.input_layernorm = nn.RMSNorm(hidden, eps=eps)
        self.hidden_norm = nn.RMSNorm(hidden, eps=eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = nn.RMSNorm(hidden, eps=eps)
        self.mlp = Mlp(config)


class Eagle3Draft(nn.Module):
    """Draft over the target's frozen embedding, which :meth:`bind` lends and no checkpoint holds, with a head of its own.

    ``d2t`` (int64 ``[N]``) holds target id minus draft id, ``t2d`` (bool ``[V]``) says which target ids the draft has; draft
    ids are in the order of the target's.
    """

    d2t: torch.Tensor
    t2d: torch.Tensor

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        t, eps = config.target, config.rms_norm_eps
        self.config = config
        self.fc = nn.Linear(AUX_LAYERS * t.hidden_size, t.hidden_size, bias=False)
        norms = [nn.RMSNorm(t.hidden_size, eps=eps) for _ in range(AUX_LAYERS)]
        self.fc_norm = nn.ModuleList(norms) if config.settings.fc_norm else None
        self.midlayer = Layer(config)
        self.norm = nn.RMSNorm(t.hidden_size, eps=eps)
        self.lm_head = nn.Linear(t.hidden_size, config.vocab_size, bias=False)
        self.rotary = Rotary(config.rotary_spec)
        self.register_buffer("d2t", torch.zeros(config.vocab_size, dtype=torch.int64))
        self.register_buffer("t2d", torch.arange(t.vocab_size) < config.vocab_size)
        self._lent: tuple[torch.Tensor] | None = None
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=0.02)

    @property
    def dtype(self) -> torch.dtype:
        return self.fc.weight.dtype

    def bind(self, embedding_VE: torch.Tensor, head_VE: torch.Tensor | None = None) -> "Eagle3Draft":
        """Lend the target's embedding. A tuple, so that no optimizer, state dict or DDP ever sees it.

        Args:
            embedding_VE: the target's, at least its vocabulary long.
            head_VE: the target's head; the draft has its own and leaves it. All drafts are bound alike.

        Raises:
            ValueError: sizes that are not the target's.
        """
        t = self.config.target
        if embedding_VE.shape[0] < t.vocab_size or embedding_VE.shape[1] != t.hidden_size:
            raise ValueError(
                f"embedding is {tuple(embedding_VE.shape)}, the draft's target has ({t.vocab_size}, {t.hidden_size})"
            )
        self._lent = (embedding_VE.detach(),)
        return self

    @torch.no_grad()
    def choose_vocabulary(self, id_N: torch.Tensor) -> None:
        """Choose the tokens that the draft can propose.

        Raises:
            ValueError: not as many different ids as the draft's head has rows, or ids beyond the target's vocabulary.
        """
        chosen = torch.unique(id_N).to(self.d2t.device)
        rows, size = self.config.vocab_size, self.config.target.vocab_size
        if len(chosen) != rows or int(chosen[0]) < 0 or int(chosen[-1]) >= size:
            raise ValueError(f"{len(chosen)} different ids for a draft vocabulary of {rows} out of {size} tokens")
        self.d2t.copy_(chosen - torch.arange(rows, device=chosen.device))
        self.t2d.zero_()
        self.t2d[chosen] = True

    @property
    def target_ids(self) -> torch.Tensor:
        """``[N]`` target id of each draft id, ascending."""
        return self.d2t + torch.arange(len(self.d2t), device=self.d2t.device)

    def embed(self, id_T: torch.Tensor) -> torch.Tensor:
        """``[T, E]`` embeddings in the draft's dtype."""
        assert self._lent is not None, "bind() the target's embedding first"
        return F.embedding(id_T, self._lent[0]).to(self.dtype)

    def features(self, aux_TA: torch.Tensor) -> torch.Tensor:
        """``[T, A]`` what ``fc`` reads: the features in the draft's dtype, each layer's normed where the draft has such norms."""
        aux_TA = aux_TA.to(self.dtype)
        if self.fc_norm is None:
            return aux_TA
        parts = aux_TA.chunk(AUX_LAYERS, -1)
        return torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], -1)

    def fuse(self, aux_TA: torch.Tensor) -> torch.Tensor:
        """``[T, E]`` first hidden rows from the concatenated features of the three layers, low to high."""
        return self.fc(self.features(aux_TA))

    def attention_input(self, id_T: torch.Tensor, hidden_TE: torch.Tensor) -> torch.Tensor:
        """``[T, 2 E]`` what queries, keys and values are projected from.

        Args:
            id_T: the token *behind* each row's feature.
            hidden_TE: fused features, or the hidden rows of the step before.
        """
        layer = self.midlayer
        return torch.cat([layer.input_layernorm(self.embed(id_T)), layer.hidden_norm(hidden_TE)], -1)

    def query(self, x_TW: torch.Tensor, position_T: torch.Tensor) -> torch.Tensor:
        """``[T, H, D]`` rotated queries of attention inputs."""
        attn = self.midlayer.self_attn
        return self.rotary(attn.heads(x_TW, attn.q_proj), position_T)

    def key_value(self, x_TW: torch.Tensor, position_T: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """``[T, K, D]`` rotated keys, and values, of attention inputs: all the state that a row leaves behind."""
        attn = self.midlayer.self_attn
        return self.rotary(attn.heads(x_TW, attn.k_proj), position_T), attn.heads(x_TW, attn.v_proj)

    def finish(self, hidden_TE: torch.Tensor, attended_THD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The layer behind its attention.

        Args:
            hidden_TE: what entered the layer.
            attended_THD: output of the attention.

        Returns:
            ``(normed_TE, next_TE)``: rows before the head, and rows that the next step reads in place of features.
        """
        layer = self.midlayer
        h_TE = hidden_TE + layer.self_attn.o_proj(attended_THD.flatten(-2))
        h_TE = h_TE + layer.mlp(layer.post_attention_layernorm(h_TE))
        normed_TE = self.norm(h_TE)
        return normed_TE, normed_TE if self.config.settings.norm_output else h_TE

    def forward(
        self, id_T: torch.Tensor, hidden_TE: torch.Tensor, position_T: torch.Tensor, attend: SelfAttend
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """One step: ``(normed_TE, next_TE)`` as :meth:`finish`.

        Args:
            id_T: int64 token behind each row's feature.
            hidden_TE: fused features (:meth:`fuse`), or the rows of the step before.
            position_T: the rows' positions; queries and keys are rotated there.
            attend: attention of rotated ``q, k, v`` of these rows over whatever each of them sees, itself included.
        """
        x_TW = self.attention_input(id_T, hidden_TE)
        return self.finish(hidden_TE, attend(self.query(x_TW, position_T), *self.key_value(x_TW, position_T)))

    def draft_logits(self, normed_TE: torch.Tensor) -> torch.Tensor:
        """``[T, N]`` logits over the draft's vocabulary."""
        return self.lm_head(normed_TE)

    def logits(self, normed_TE: torch.Tensor) -> torch.Tensor:
        """``[T, V]`` logits at the target's ids; -inf for tokens that the draft does not have."""
        logits_TN = self.draft_logits(normed_TE)
        if self.config.vocab_size == self.config.target.vocab_size:
            return logits_TN
        everything = logits_TN.new_full((len(logits_TN), self.config.target.vocab_size), float("-inf"))
        return everything.index_copy(1, self.target_ids, logits_TN)
