"""The LongSpec draft in the server: a ring of self-attention state, the target's last layer read in place.

Legend: B requests, W page-list width, H query heads, K key/value heads, D head size.
"""

from typing import Any

import torch

from longdraft.draft_models.chain import propose_chain
from longdraft.draft_models.longspec import LongSpecDraft
from longdraft.draft_models.window_state import WindowState
from longdraft.kernels.plan import AttentionPlan
from longdraft.kernels.prefix_attention import prefix_attention
from longdraft.serve.drafters.base import Drafter, DraftRequest, Pick


class LongSpecDrafter(Drafter):
    """Chain drafts. Rings are rebuilt from the last ids whenever what they hold is not exactly the request's tokens."""

    def __init__(
        self, draft: LongSpecDraft, max_requests: int, steps: int, context: int, sinks: int, attention: str | None
    ) -> None:
        self.draft, self.steps = draft, steps
        self.context, self.sinks = context, min(sinks, context)
        self.attention = attention
        self.state = WindowState(draft, max_requests, steps)
        self.layer: tuple[torch.Tensor, torch.Tensor] | None = None
        self.rows: dict[str, int] = {}
        self.held: dict[str, int] = {}  # tokens that a request's ring holds

    def bind_cache(self, k_SKD: torch.Tensor, v_SKD: torch.Tensor) -> None:
        """The target's last-layer cache, read in place."""
        self.layer = (k_SKD, v_SKD)

    def bind_pool(self, pool: Any) -> None:
        last = self.draft.config.target.num_layers - 1
        self.bind_cache(pool.get_key_buffer(last), pool.get_value_buffer(last))

    def bind_target(self, embedding_VE: torch.Tensor, head_VE: torch.Tensor) -> None:
        self.draft.bind(embedding_VE, head_VE)

    def propose(self, requests: list[DraftRequest], pick: Pick) -> list[list[int]]:
        assert self.layer is not None, "bind_cache() first"
        keys, values = self.layer
        device = keys.device
        row_B = torch.tensor(self._rows_of(requests), device=device)
        root_B = torch.tensor([r.tokens.newest for r in requests], device=device)
        position_B = torch.tensor([r.tokens.cached for r in requests], device=device)
        plan = self._plan(requests)
        scale = self.draft.config.target.head_dim**-0.5

        def cross_attend(q_BHD: torch.Tensor) -> torch.Tensor:
            return prefix_attention(q_BHD.to(keys.dtype), keys, values, plan, scale, self.attention)[0].to(q_BHD.dtype)

        steps = max(r.limit for r in requests)
        drafted_BK = propose_chain(
            self.state, row_B, root_B, position_B, steps, cross_attend, lambda logits, at, step: pick(logits, at)
        )
        return [ids[: r.limit] for r, ids in zip(requests, drafted_BK.tolist(), strict=True)]

    def _rows_of(self, requests: list[DraftRequest]) -> list[int]:
        present = {r.rid for r in requests}
        for request in requests:
            if request.rid not in self.rows:
                self.rows[request.rid] = self._free_row(present)
            if self.held.get(request.rid) != request.tokens.cached:
                end = request.tokens.cached
                last = request.tokens.slice(max(0, end - self.state.window), end)
                self.state.rebuild(self.rows[request.rid], last, end)
                self.held[request.rid] = end
        return [self.rows[r.rid] for r in requests]

    def _free_row(self, present: set[str]) -> int:
        taken = set(self.rows.values())
        for row in range(self.state.k.shape[0]):
            if row not in taken:
                return row
        stale = next(rid for rid in self.rows if rid not in present)
        row = self.rows[stale]
        self.forget(stale)
        return row

    def _plan(self, requests: list[DraftRequest]) -> AttentionPlan:
        """Sinks and the most recent tokens of each request, at most ``context`` of them."""
        recent = self.context - self.sinks
        lists = [
            r.pages
            if len(r.pages) <= self.context
            else torch.cat([r.pages[: self.sinks], r.pages[len(r.pages) - recent :]])
            for r in requests
        ]
        return AttentionPlan.build(
            torch.nn.utils.rnn.pad_sequence(lists, batch_first=True), [len(x) for x in lists], [1] * len(lists)
        )

    def committed(self, request: DraftRequest, tokens: list[int]) -> None:
        if self.held.get(request.rid) != request.tokens.cached:
            return
        start = request.tokens.cached
        ids = [request.tokens.newest, *tokens[:-1]]
        position = torch.arange(start, start + len(ids), device=self.state.k.device)
        row = torch.full_like(position, self.rows[request.rid])
        self.state.store(row, torch.tensor(ids, device=position.device), position)
        self.held[request.rid] = start + len(ids)

    def forget(self, rid: str) -> None:
        self.rows.pop(rid, None)
        self.held.pop(rid, None)

    def clear(self) -> None:
        self.rows.clear()
        self.held.clear()
