"""What SGLang carries between and into our forwards. All state lives with the requests and the worker, so these are thin.

Legend: B requests, T new tokens of all requests, W words of bits.
"""

from typing import Any

import torch
from sglang.srt.managers.schedule_batch import ScheduleBatch
from sglang.srt.mem_cache.common import (
    alloc_paged_token_slots_extend,
    alloc_token_slots,
    get_alloc_reserve_per_decode,
)
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode
from sglang.srt.speculative.spec_info import SpecInput, SpecInputType

from longdraft.kernels.plan import AttentionPlan
from longdraft.kernels.transfer import to_device


class DraftInput(SpecInput):
    """Between two decode steps: the rows at which SGLang's overlap schedule keeps the requests' lengths, None without it."""

    def __init__(self) -> None:
        super().__init__(SpecInputType.EAGLE_DRAFT)
        self.future_indices: torch.Tensor | None = None

    def get_spec_adjust_token_coefficient(self) -> tuple[int, int]:
        return 1, 1

    def filter_batch(self, new_indices: torch.Tensor, has_been_filtered: bool = True) -> None:
        if self.future_indices is not None:
            self.future_indices = self.future_indices[new_indices]

    def merge_batch(self, other: Any) -> None:
        if self.future_indices is not None:
            self.future_indices = torch.cat([self.future_indices, other.future_indices])

    def prepare_for_decode(self, batch: ScheduleBatch) -> None:
        """Reserve cache slots for one decode step of every request, never past the request's row of the page table.

        SGLang asks for two strides beyond the committed tokens; near the context limit the row is narrower than that.
        """
        table = batch.req_to_token_pool.req_to_token
        reserve, width = get_alloc_reserve_per_decode(), table.shape[1]
        spans = []
        for req in batch.reqs:
            start = req.kv_allocated_len
            end = max(start, min(req.kv_committed_len + reserve, width))
            spans.append((start, end))
            req.kv_allocated_len = end
            req.decode_batch_idx += 1
            req.kv_committed_len += 1  # the bonus token's slot; SGLang adds the rest when it resolves the run
        needed = sum(end - start for start, end in spans)
        if not needed:
            return
        slots = _allocated(batch, spans, needed)
        places = [(r.req_pool_idx, at) for r, span in zip(batch.reqs, spans, strict=True) for at in range(*span)]
        row_N, column_N = to_device(places, torch.int64, table.device).t()
        table[row_N, column_N] = slots.to(table.dtype)


def _allocated(batch: ScheduleBatch, spans: list[tuple[int, int]], needed: int) -> torch.Tensor:
    """Slots for the positions ``start .. end`` of every request, one request behind the other.

    Where the pool has pages, a request goes on in its last page, which is its own, and takes whole pages behind it; SGLang
    gives back whole pages too, of what is reserved and not used and of a tail that does not fill one.
    """
    if batch.tree_cache.page_size == 1:
        single: torch.Tensor = alloc_token_slots(batch.tree_cache, needed)
        return single
    start_B, end_B = torch.tensor(spans, dtype=torch.int64).t().contiguous()
    start, end = to_device(spans, torch.int64, batch.req_pool_indices.device).t().contiguous()
    last_B = batch.req_to_token_pool.req_to_token[batch.req_pool_indices, start - 1].to(torch.int64)
    paged: torch.Tensor = alloc_paged_token_slots_extend(batch.tree_cache, start, start_B, end, end_B, last_B, needed)
    return paged


class VerifyInput(SpecInput):
    """Into one verification: what each request's new tokens read, and what the forward keeps of the hidden layers.

    Bits say which of its request's new tokens each one of a tree reads; None for chains. No plan where SGLang captures a graph or
    replays one: the attention backend's static plan takes its place. There a view (page list and lengths) takes the place of the
    page table. Views may have a list, and so a plan, for each layer.
    """

    def __init__(
        self,
        plan: AttentionPlan | list[AttentionPlan] | None,
        capture_hidden_mode: CaptureHiddenMode = CaptureHiddenMode.NULL,
        bits_TW: torch.Tensor | None = None,
        view: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> None:
        super().__init__(SpecInputType.EAGLE_VERIFY)
        self.plan = plan
        self.view = view
        self.bits_TW = bits_TW
        self.capture_hidden_mode = capture_hidden_mode

    def plan_of(self, layer: int) -> AttentionPlan:
        """What a layer's new tokens read."""
        plan = self.plan[layer] if isinstance(self.plan, list) else self.plan
        assert plan is not None, "a captured forward has its plan from the static buffers"
        return plan

    def get_spec_adjust_token_coefficient(self) -> tuple[int, int]:
        return 1, 1
