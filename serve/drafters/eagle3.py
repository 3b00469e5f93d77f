"""The EAGLE-3 draft in the server: its state lies beside the target's cache, slot for slot.

**Where a row lives.** The draft's row t is made of the target's features of token t and the embedding of token t + 1, so its keys
and values depend on tokens 0 .. t + 1. They are kept in the cache slot of token *t + 1*, and the fused features of token t in
the slot of token t. Then everything in a slot depends on the tokens up to that slot's own and on nothing behind it, which is the
very condition under which SGLang shares slots between requests. So a prefix-cache hit brings the draft's rows with it; the first
row behind a shared prefix, whose token may differ from the one that followed there before, is made anew from the prefix's last
features; and no state belongs to a request: retraction, abort, chunked prefill and sessions need nothing. The slot of token 0
holds no row.

Every token that the target computes is written, also for requests that do not draft, since another one may share their prefix. Rows
of rejected drafts lie in slots that are written again before anything reads them.

Legend: B requests, T tokens, S cache slots, H query heads, K key/value heads, D head size, E hidden size, W page-list width.
"""

from typing import Any

import torch

from longdraft.draft_models.eagle3 import Eagle3Draft
from longdraft.draft_models.eagle3_chain import propose_eagle3_chain
from longdraft.kernels.plan import AttentionPlan
from longdraft.kernels.prefix_attention import prefix_attention
from longdraft.serve.drafters.base import Computed, Drafter, DraftRequest, Pick


class Eagle3Drafter(Drafter):
    """Chain drafts over the draft's own keys and values, read through the target's page lists.

    A chain's rows live in ``steps`` scratch slots a request behind the pool's, so that a step is one attention call over one
    list. A draft without a window reads at most ``context`` rows, the first ``sinks`` and the most recent.
    """

    def __init__(
        self, draft: Eagle3Draft, max_requests: int, steps: int, context: int, sinks: int, attention: str | None
    ) -> None:
        config, own = draft.config, draft.config.settings
        self.draft, self.max_requests, self.steps = draft, max_requests, steps
        self.attention = attention
        self.observed_layers = config.aux_layers
        self.sinks = min(sinks if own.window is None else own.sinks, context - 1)
        self.window = min(own.window or context, context - self.sinks)
        self.row_shape = (config.num_kv_heads, config.head_dim)
        per_slot = 2 * config.num_kv_heads * config.head_dim + config.target.hidden_size
        self.bytes_per_slot = per_slot * draft.dtype.itemsize
        self.bound = False

    def bind_pool(self, pool: Any) -> None:
        self.allocate(pool.get_key_buffer(0).shape[0], pool.get_key_buffer(0).device)

    def allocate(self, slots: int, device: torch.device | str) -> None:
        """Buffers for a pool of ``slots``; zeros attend to nothing and add nothing."""
        dtype, scratch = self.draft.dtype, self.max_requests * self.steps
        self.k_SKD = torch.zeros(slots + scratch, *self.row_shape, dtype=dtype, device=device)
        self.v_SKD = torch.zeros_like(self.k_SKD)
        self.hidden_SE = torch.zeros(slots, self.draft.config.target.hidden_size, dtype=dtype, device=device)
        self.scratch = torch.arange(slots, slots + scratch, device=device).view(self.max_requests, self.steps)
        self.bound = True

    @torch.no_grad()
    def observe(self, computed: Computed) -> None:
        self.hidden_SE[computed.slot_T] = self.draft.fuse(computed.aux_TA)
        x_TW = self.draft.attention_input(computed.id_T, self.hidden_SE[computed.before_T])
        self.k_SKD[computed.slot_T], self.v_SKD[computed.slot_T] = self.draft.key_value(x_TW, computed.position_T - 1)

    def unobserved(self, slot_T: torch.Tensor) -> None:
        for buffer in (self.hidden_SE, self.k_SKD, self.v_SKD):
            buffer[slot_T] = 0

    def propose(self, requests: list[DraftRequest], pick: Pick) -> list[list[int]]:
        assert self.bound, "bind_pool() first"
        able = [r for r in requests if len(r.pages)]  # nothing is known before the first token is computed
        drafted = iter(self._chains(able, pick) if able else [])
        return [next(drafted)[: r.limit] if len(r.pages) else [] for r in requests]

    def _chains(self, requests: list[DraftRequest], pick: Pick) -> list[list[int]]:
        device, steps = self.k_SKD.device, min(self.steps, max(r.limit for r in requests))
        scratch_BK = self.scratch[: len(requests)]
        rows = _Rows([r.pages for r in requests], scratch_BK, steps, self.window, self.sinks)
        scale = self.draft.config.head_dim**-0.5

        def attend(step: int, q_BHD: torch.Tensor, k_BKD: torch.Tensor, v_BKD: torch.Tensor) -> torch.Tensor:
            self.k_SKD[scratch_BK[:, step]], self.v_SKD[scratch_BK[:, step]] = k_BKD, v_BKD
            plan = rows.plan(step)
            return prefix_attention(q_BHD, self.k_SKD, self.v_SKD, plan, scale, self.attention)[0]

        last_B = torch.stack([r.pages[-1] for r in requests]).long()
        root_B = torch.tensor([r.tokens.newest for r in requests], device=device)
        position_B = torch.tensor([r.tokens.cached for r in requests], device=device)
        drafted_BK = propose_eagle3_chain(
            self.draft, self.hidden_SE[last_B], root_B, position_B, steps, attend, lambda x, at, step: pick(x, at)
        )
        found: list[list[int]] = drafted_BK.tolist()
        return found

    def bind_target(self, embedding_VE: torch.Tensor, head_VE: torch.Tensor) -> None:
        self.draft.bind(embedding_VE, head_VE)

    def committed(self, request: DraftRequest, tokens: list[int]) -> None:
        """Observed as the target computes them."""

    def forget(self, rid: str) -> None:
        """Nothing belongs to a request."""

    def clear(self) -> None:
        """Every slot is written before it is read again."""


class _Rows:
    """Slots of the rows that each step sees: rows 0 .. n - 2 of the text (in the slots of tokens 1 .. n - 1), then the chain's."""

    def __init__(
        self, pages: list[torch.Tensor], scratch_BK: torch.Tensor, steps: int, window: int, sinks: int
    ) -> None:
        self.window, self.sinks = window, sinks
        self.lists = [torch.cat([p[1:].long(), s[:steps]]) for p, s in zip(pages, scratch_BK, strict=True)]
        self.text = [len(p) - 1 for p in pages]
        whole = max(self.text) + steps <= window + sinks
        self.pages_BW = torch.nn.utils.rnn.pad_sequence(self.lists, batch_first=True) if whole else None

    def plan(self, step: int) -> AttentionPlan:
        """What the rows of a step read, each its own row included."""
        counts = [text + step + 1 for text in self.text]
        ones = [1] * len(counts)
        if self.pages_BW is not None:
            return AttentionPlan.build(self.pages_BW, counts, ones)
        seen = [self._visible(slots, count) for slots, count in zip(self.lists, counts, strict=True)]
        pages_BW = torch.nn.utils.rnn.pad_sequence(seen, batch_first=True)
        return AttentionPlan.build(pages_BW, [len(x) for x in seen], ones)

    def _visible(self, slots: torch.Tensor, count: int) -> torch.Tensor:
        if count <= self.window + self.sinks:
            return slots[:count]
        return torch.cat([slots[: self.sinks], slots[count - self.window : count]])
