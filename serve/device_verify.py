"""One verification of chains that the host never sees: drafted ids, lengths and limits stay on the device.

Legend: B requests, K drafted tokens, T = K + 1 new tokens of a request, V vocabulary.
"""

from typing import Any

import torch
from sglang.srt.managers.schedule_batch import ScheduleBatch
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode

from longdraft.kernels.chain_inputs import chain_inputs
from longdraft.kernels.row_ops import best_place
from longdraft.serve.drafters.running import Running
from longdraft.serve.observer import Observer
from longdraft.serve.sampling.rows import RowParams
from longdraft.serve.sampling.target_choice import process_logits
from longdraft.serve.spec_inputs import VerifyInput
from longdraft.serve.step_clock import OFF, StepClock
from longdraft.serve.verify import Verified

# int32 page list [B, W + T], the new tokens' slots behind what is read, and the length of that [B]; of every layer [L, ...]
View = tuple[torch.Tensor, torch.Tensor]


def verify_running(
    target_worker: Any,
    batch: ScheduleBatch,
    reqs: list[Any],
    running: Running,
    draft_BK: torch.Tensor,
    limit_B: torch.Tensor,
    params: RowParams,
    observer: Observer,
    in_graph: bool,
    clock: StepClock = OFF,
    view: View | None = None,
) -> Verified:
    """The twin of :func:`longdraft.serve.verify.verify` with every chain padded to T, whose host work waits for nothing.

    Padding repeats a chain's last token at its place, writes to slot 0 and is read by nothing that counts.

    Args:
        target_worker: SGLang's target worker.
        batch: the running batch.
        reqs: its requests to verify; none whose choice depends on more of its text than its newest token.
        running: the same requests, on the device.
        draft_BK: drafted ids.
        limit_B: drafts of each that count.
        params: how each chooses, one row a request.
        observer: is shown what the target computes.
        in_graph: whether SGLang replays a graph of T tokens a request, which brings its own plan.
        clock: times the phases.
        view: what each request reads of its cache; None: all of it.

    Returns:
        The choice and the logits behind every place of every chain, padding included.
    """
    with clock.phase("verify"):
        count, width = draft_BK.shape[0], draft_BK.shape[1] + 1
        given = running.newest_B, draft_BK, limit_B, running.length_B, running.row_B, running.table_RW
        new = chain_inputs(*given)
        forward = forward_of(batch, reqs, running, new, observer, in_graph, view=view)
        result = target_worker.forward_batch_generation(batch=None, forward_batch=forward, is_verify=True)
        owner_T = torch.arange(count, device=draft_BK.device).repeat_interleave(width, output_size=count * width)
        observer.verified(forward, running.table_RW, owner_T, result.logits_output)
    with clock.phase("sampling"):
        seen_TV = result.logits_output.next_token_logits
        choice_T, logits_TV = choose_running(seen_TV, reqs, params, new.position_BT, batch.return_logprob)
    return Verified(choice_T, logits_TV, list(range(0, (count + 1) * width, width)))


def forward_of(
    batch: ScheduleBatch,
    reqs: list[Any],
    running: Running,
    new: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    observer: Observer,
    in_graph: bool,
    bits_TW: torch.Tensor | None = None,
    view: View | None = None,
) -> ForwardBatch:
    """SGLang's forward of a verification.

    Args:
        batch, reqs, running, observer, in_graph: as in :func:`verify_running`.
        new: int64 ids, positions and cache slots of the new tokens, ``[B, T]`` each.
        bits_TW: which of them each one of a tree reads; None for chains.
        view: as in :func:`verify_running`.
    """
    id_BT, position_BT, slot_BT = new
    count, width = id_BT.shape
    reserved = [min(r.kv_allocated_len, running.table_RW.shape[1]) for r in reqs]  # no less than what is cached
    plan = None if in_graph else running.plan(max(reserved), width) if view is None else running.view_plan(view, width)
    return ForwardBatch(
        forward_mode=ForwardMode.TARGET_VERIFY,
        batch_size=count,
        input_ids=id_BT.flatten(),
        req_pool_indices=running.row_B,
        seq_lens=running.length_B,
        seq_lens_cpu=torch.tensor(reserved, dtype=torch.int64),  # says how much of the page table is read
        seq_lens_sum=sum(reserved),
        orig_seq_lens=running.length_B,
        out_cache_loc=slot_BT.flatten(),
        positions=position_BT.flatten(),
        spec_algorithm=batch.spec_algorithm,
        spec_info=VerifyInput(plan, observer.capture, bits_TW, view),
        capture_hidden_mode=observer.capture,
        sampling_info=batch.sampling_info,
        rids=[r.rid for r in reqs],
        lora_ids=[None] * count,
    )


def choose_running(
    logits_TV: torch.Tensor, reqs: list[Any], params: RowParams, position_BT: torch.Tensor, kept: bool = True
) -> tuple[torch.Tensor, torch.Tensor]:
    """``(choice_T, logits_TV)`` of requests whose choice depends on no text; positions are those of the input tokens.

    The logits are processed where somebody samples, or where they are ``kept`` for log-probabilities; greedy choices alone
    need no copy of them.
    """
    width = position_BT.shape[1]
    if params.greedy and not kept and all(r.sampling_params.logit_bias is None for r in reqs):
        return best_place(logits_TV), logits_TV
    logits_TV = process_logits(logits_TV, reqs, [[0] * (width - 1)] * len(reqs))
    return params.repeat(width).choose(logits_TV, position_BT.flatten()), logits_TV
