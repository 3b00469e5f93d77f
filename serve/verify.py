"""One full verification of ragged chains by the target.

Legend: B requests, T new tokens of all requests, V vocabulary.
"""

from dataclasses import dataclass
from typing import Any

import torch
from sglang.srt.managers.schedule_batch import ScheduleBatch
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch, ForwardMode

from longdraft.kernels.plan import AttentionPlan
from longdraft.serve.spec_inputs import VerifyInput


@dataclass(frozen=True)
class Verification:
    """Target logits behind every new token, and the tokens' positions."""

    logits_TV: torch.Tensor
    position_T: torch.Tensor
    cu_rows: list[int]


def verify_chains(target_worker: Any, batch: ScheduleBatch, chains: list[list[int]], lengths: list[int]) -> Verification:
    """Run the target over each request's newest token and drafts; their keys and values go to the reserved slots.

    Args:
        target_worker: SGLang's target worker.
        batch: the running batch; its page table has slots for the new tokens.
        chains: newest token and drafts of each request, ragged.
        lengths: cached tokens of each request, all exact.
    """
    device = batch.seq_lens.device
    widths = [len(c) for c in chains]
    rows_B = batch.req_pool_indices
    table = batch.req_to_token_pool.req_to_token
    pages_BW = table[rows_B, : max(n + w for n, w in zip(lengths, widths, strict=True))]
    plan = AttentionPlan.build(pages_BW, lengths, widths)
    positions = [p for n, w in zip(lengths, widths, strict=True) for p in range(n, n + w)]
    owner_T = torch.repeat_interleave(torch.arange(len(chains), device=device), torch.tensor(widths, device=device))
    position_T = torch.tensor(positions, dtype=torch.int64, device=device)
    seq_lens = torch.tensor(lengths, dtype=torch.int64, device=device)
    forward = ForwardBatch(
        forward_mode=ForwardMode.TARGET_VERIFY,
        batch_size=len(chains),
        input_ids=torch.tensor([t for c in chains for t in c], dtype=torch.int64, device=device),
        req_pool_indices=rows_B,
        seq_lens=seq_lens,
        seq_lens_cpu=torch.tensor(lengths, dtype=torch.int64),
        seq_lens_sum=sum(lengths),
        orig_seq_lens=seq_lens,
        out_cache_loc=pages_BW[owner_T, position_T].to(torch.int64),
        positions=position_T,
        spec_algorithm=batch.spec_algorithm,
        spec_info=VerifyInput(plan),
        capture_hidden_mode=CaptureHiddenMode.NULL,
        sampling_info=batch.sampling_info,
        rids=[r.rid for r in batch.reqs],
        lora_ids=[None] * len(chains),
    )
    result = target_worker.forward_batch_generation(batch=None, forward_batch=forward, is_verify=True)
    return Verification(result.logits_output.next_token_logits, position_T, plan.cu_rows)
