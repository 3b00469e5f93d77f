"""SGLang's attention backend with our verification: everything but a verify forward goes to the stock backend.

Legend: T new tokens, H query heads, K key/value heads, D head size.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode

from longdraft.kernels.hybrid_attention import hybrid_tree_attention
from longdraft.serve.cache_format import UNSCALED, Scales
from longdraft.serve.spec_inputs import VerifyInput
from longdraft.serve.static_plan import StaticPlan
from longdraft.serve.views.query_tap import QueryTap


class LongDraftAttention(AttentionBackend):
    """Wraps the stock backend; a verification reads the page lists of its :class:`VerifyInput`."""

    needs_cpu_seq_lens = False  # how far a page table is read follows from what is reserved, which the host knows

    def __init__(
        self,
        stock: AttentionBackend,
        pool: Any,
        prefix_backend: str | None,
        table: torch.Tensor | None = None,
        scales: Mapping[int, Scales] = MappingProxyType({}),
    ) -> None:
        """Wrap.

        Args:
            stock: SGLang's backend.
            pool: the target's cache pool.
            prefix_backend: of :func:`hybrid_tree_attention`.
            table: SGLang's page table, for CUDA graphs.
            scales: of the layers whose cache has any.
        """
        super().__init__()
        self.table = table
        self.static: StaticPlan | None = None
        self.tree_widths: frozenset[int] = frozenset()  # new tokens of a request where graphs verify trees
        self.columns: int | None = None
        self.lists = 1
        self.tap = QueryTap((), 0)  # what chooses views wants queries
        self.captured_hidden = CaptureHiddenMode.NULL  # what graphs of verifications keep for a draft
        self.stock = stock
        self.pool = pool
        self.prefix_backend = prefix_backend
        self.scales = scales

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["stock"], name)

    def sibling(self, columns: int | None = None, lists: int = 1) -> "LongDraftAttention":
        """The same for graphs of another width, with static buffers of its own.

        Args:
            columns: of a page list; None: as many as a row of the page table has.
            lists: of each request.
        """
        made = LongDraftAttention(self.stock, self.pool, self.prefix_backend, self.table, self.scales)
        made.captured_hidden, made.tree_widths, made.tap = self.captured_hidden, self.tree_widths, self.tap
        made.columns, made.lists = columns, lists
        return made

    def init_forward_metadata(self, forward_batch: Any) -> None:
        if not forward_batch.forward_mode.is_target_verify():
            self.stock.init_forward_metadata(forward_batch)
        elif forward_batch.spec_info.plan is None:  # what a graph would have replayed
            self.init_forward_metadata_out_graph(forward_batch, in_capture=True)

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """SGLang's decode graphs are of verifications alone, so the stock backend needs no buffers for them."""
        assert self.table is not None and max_num_tokens % max_bs == 0
        width = max_num_tokens // max_bs
        columns, trees = self.columns or self.table.shape[1], width in self.tree_widths
        self.static = StaticPlan(max_bs, width, columns, self.table.device, trees, self.lists)

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        """Cached tokens of a batch's padding: one, of the page table's row 0."""
        return 1

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        """Fill the static buffers, before a capture and before every replay; the captured forward reads those of its size."""
        if not forward_batch.forward_mode.is_target_verify():
            self.stock.init_forward_metadata_out_graph(forward_batch, in_capture)
            return
        assert self.static is not None and self.table is not None
        given, size = forward_batch.spec_info, forward_batch.batch_size
        if given.view is not None:
            self.static.fill_view(given.view[0], given.view[1], size)
            if in_capture:
                given.plan = self.static.plan(size)
            return
        longest = int(forward_batch.seq_lens_cpu.max())
        rows, lens = forward_batch.req_pool_indices, forward_batch.seq_lens
        self.static.fill(self.table, rows, lens, longest, given.bits_TW)
        if in_capture:
            given.plan, given.bits_TW = self.static.plan(size), self.static.bits(size)

    def support_triton(self) -> bool:
        return self.stock.support_triton()

    def forward_decode(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return self.stock.forward_decode(*args, **kwargs)

    def forward_extend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        **kwargs: Any,
    ) -> torch.Tensor:
        if not forward_batch.forward_mode.is_target_verify():
            self.tap.extend(layer.layer_id, q.view(-1, layer.tp_q_head_num, layer.head_dim), forward_batch)
            return self.stock.forward_extend(q, k, v, layer, forward_batch, save_kv_cache, **kwargs)
        assert isinstance(forward_batch.spec_info, VerifyInput) and save_kv_cache
        q_THD = q.view(-1, layer.tp_q_head_num, layer.head_dim)
        k_TKD = k.view(-1, layer.tp_k_head_num, layer.head_dim)
        v_TKD = v.view(-1, layer.tp_v_head_num, layer.v_head_dim)
        self.tap.verification(layer.layer_id, q_THD)
        keys, values = self.pool.get_key_buffer(layer.layer_id), self.pool.get_value_buffer(layer.layer_id)
        slots, scales = KVWriteLoc(forward_batch.out_cache_loc), self.scales.get(layer.layer_id)
        if scales is None:
            self.pool.set_kv_buffer(layer, slots, k_TKD, v_TKD)
        else:  # the pool divides what it is given by the scales, in place
            self.pool.set_kv_buffer(layer, slots, k_TKD.clone(), v_TKD.clone(), *scales)
        plan = forward_batch.spec_info.plan_of(layer.layer_id)
        out_THD = hybrid_tree_attention(
            *(q_THD, k_TKD, v_TKD, keys, values, plan, layer.scaling),
            forward_batch.spec_info.bits_TW,
            self.prefix_backend,
            scales or UNSCALED,
        )
        return out_THD.reshape(out_THD.shape[0], -1)
