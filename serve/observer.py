"""Hands what the target computes to a drafter that reads its hidden layers, whatever forward computed it.

Legend: B requests, T tokens of a forward, A features of the observed layers.
"""

from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.managers.schedule_batch import ScheduleBatch
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch

from longdraft.errors import UserError
from longdraft.kernels.transfer import to_device
from longdraft.serve.drafters.base import Computed, Drafter
from longdraft.serve.ranks import ALONE, Ranks


class Observer:
    """Between the target's forwards and the drafter; only prefills mean anything to a drafter that observes nothing.

    A drafter that fails to observe costs the tokens' requests the quality of their drafts, nothing else.
    """

    def __init__(self, drafter: Drafter, ranks: Ranks = ALONE) -> None:
        self.drafter, self.ranks = drafter, ranks
        self.active = drafter.observed_layers is not None

    def ask(self, model: Any) -> None:
        """Have the target's forwards keep the observed layers.

        Raises:
            UserError: a model of SGLang that cannot.
        """
        if not self.active:
            return
        if not hasattr(model, "set_eagle3_layers_to_capture"):
            raise UserError(
                f"the target's {type(model).__name__} does not hand out hidden layers, which an EAGLE-3 draft reads: use a "
                "LongSpec draft, or none"
            )
        model.set_eagle3_layers_to_capture(list(self.drafter.observed_layers or ()))

    @property
    def capture(self) -> CaptureHiddenMode:
        """What a forward must keep: the rows of every token, not only of those that are sampled from."""
        return CaptureHiddenMode.FULL if self.active else CaptureHiddenMode.NULL

    def prefilled(self, batch: ScheduleBatch, output: Any) -> None:
        """A prefill, or a chunk of one, is done; tokens from the prefix cache are not among its rows."""
        self._guarded(batch.out_cache_loc.long(), lambda: self.drafter.prefilled(batch))
        aux_TA = self.take(output)
        if aux_TA is None:
            return
        device = batch.out_cache_loc.device
        width_B, prefix_B = (to_device(x, torch.int64, device) for x in (batch.extend_lens, batch.prefix_lens))
        total = len(batch.input_ids)
        owner_T = torch.arange(len(width_B), device=device).repeat_interleave(width_B, output_size=total)
        start_B = width_B.cumsum(0) - width_B
        position_T = torch.arange(len(owner_T), device=device) - (start_B - prefix_B)[owner_T]
        row_T = batch.req_pool_indices[owner_T]
        before_T = batch.req_to_token_pool.req_to_token[row_T, (position_T - 1).clamp(min=0)]
        self.tell(Computed(batch.input_ids.long(), position_T, batch.out_cache_loc.long(), before_T.long(), aux_TA))

    def verified(self, forward: ForwardBatch, table: torch.Tensor, owner_T: torch.Tensor, output: Any) -> None:
        """A verification is done.

        Args:
            forward: of chains of each request.
            table: SGLang's page table.
            owner_T: which of the forward's requests each token belongs to.
            output: the forward's logits output.
        """
        aux_TA = self.take(output)
        if aux_TA is None:
            return
        before_T = table[forward.req_pool_indices[owner_T], (forward.positions - 1).clamp(min=0)]
        slot_T = forward.out_cache_loc.long()
        self.tell(Computed(forward.input_ids.long(), forward.positions.long(), slot_T, before_T.long(), aux_TA))

    def take(self, output: Any) -> torch.Tensor | None:
        """The rows, which SGLang would otherwise copy to the host."""
        if not self.active or output is None:
            return None
        aux_TA: torch.Tensor | None = output.hidden_states
        output.hidden_states = None
        return aux_TA

    def tell(self, computed: Computed) -> None:
        """Show the drafter tokens of a prefill or a verification."""
        self._guarded(computed.slot_T, lambda: self.drafter.observe(computed))

    def _guarded(self, slot_T: torch.Tensor, show: Callable[[], None]) -> None:
        try:
            show()
        except Exception:
            self.ranks.failed(
                "longdraft: the drafter could not follow %d tokens, drafts behind them are worse", len(slot_T)
            )
            self.drafter.unobserved(slot_T)
