"""A tiny Llama in place of SGLang's second model runner: its cache is a pool of slots that starts as poison.

Legend: T tokens, H query heads, K key/value heads, D head size.
"""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from llama_on_pages import TABLE, PagePool, RadixAttention, llama_logits
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from longdraft.kernels.plan import AttentionPlan
from longdraft.serve.attention_backend import LongDraftAttention
from longdraft.serve.drafters.chain_tap import ChainTap
from longdraft.serve.spec_inputs import VerifyInput


class PagedLM:
    """What the drafter asks of :class:`longdraft.serve.draft_lm.DraftLM`; counts the forwards of chains."""

    def __init__(self, model: Any, device: str = "cpu", attention: str = "torch") -> None:
        self.model, self.pool, self.attention = model.to(device), PagePool(model.config), attention
        self.pool.k, self.pool.v = self.pool.k.to(device), self.pool.v.to(device)
        self.layers = [RadixAttention(i, model.config) for i in range(model.config.num_hidden_layers)]
        self.vocab, self.dtype, self.device = model.config.vocab_size, torch.float32, torch.device(device)
        self.bytes_per_slot, self.bytes_per_step = 1, 1
        self.rank, self.ranks = 0, 1
        self.scales: dict[int, tuple[float, float]] = {}
        self.tap, self.forwards, self.table = ChainTap(), 0, TABLE.to(device)

    def take_pools(self, memory: Any, rows: Any, allocator: Any) -> None:
        self.table = rows.req_to_token

    def attach(self) -> None:
        self.stock, self.backend = (LongDraftAttention(None, self.pool, self.attention) for _ in range(2))  # type: ignore[arg-type]
        self.backend.tap = self.tap

    def keys(self, layer: int) -> torch.Tensor:
        return self.pool.get_key_buffer(layer)

    def blank(self, slot_T: torch.Tensor) -> None:
        self.pool.k[:, slot_T] = self.pool.v[:, slot_T] = 0

    @torch.no_grad()
    def prefill(self, batch: Any) -> None:
        """As SGLang's: the batch's new tokens behind what is cached of each request."""
        at = 0
        for req, start, width in zip(batch.reqs, batch.prefix_lens, batch.extend_lens, strict=True):
            pages = self.table[req.req_pool_idx, : start + width].long()
            plan = AttentionPlan.build(pages[None], [start], [width])
            ids = batch.input_ids[at : at + width].clamp_max(self.vocab - 1).to(self.device)
            position = torch.arange(start, start + width, device=self.device)
            self._forward(self.stock, ids, position, pages[start:], plan)
            at += width

    @torch.no_grad()
    def logits(
        self, id_T: torch.Tensor, position_T: torch.Tensor, slot_T: torch.Tensor, plan: AttentionPlan
    ) -> torch.Tensor:
        self.forwards += 1
        return self._forward(self.backend, id_T, position_T, slot_T, plan)

    def _forward(
        self,
        backend: LongDraftAttention,
        id_T: torch.Tensor,
        position_T: torch.Tensor,
        slot_T: torch.Tensor,
        plan: AttentionPlan,
    ) -> torch.Tensor:
        forward = SimpleNamespace(
            forward_mode=ForwardMode.TARGET_VERIFY, out_cache_loc=slot_T, spec_info=VerifyInput(plan)
        )

        def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            return backend.forward_extend(q, k, v, self.layers[layer], forward)

        return llama_logits(self.model, id_T, position_T, attend)


def prefill_of(rows: dict[str, int], texts: Sequence[tuple[str, list[int], int, int]]) -> Any:
    """A batch of requests, each with its id, its tokens, and which of them are computed: ``start`` to ``end``."""
    return SimpleNamespace(
        reqs=[SimpleNamespace(rid=rid, req_pool_idx=rows[rid]) for rid, *_ in texts],
        seq_lens_cpu=torch.tensor([end for *_, end in texts]),
        prefix_lens=[start for *_, start, _ in texts],
        extend_lens=[end - start for *_, start, end in texts],
        input_ids=torch.tensor([t for _, ids, start, end in texts for t in ids[start:end]]),
    )
