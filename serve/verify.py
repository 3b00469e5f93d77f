"""One full verification of ragged chains by the target.

Legend: B requests, T new tokens of all requests, V vocabulary.
"""

from dataclasses import dataclass
from typing import Any

import torch
from sglang.srt.managers.schedule_batch import ScheduleBatch
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode

from longdraft.kernels.plan import AttentionPlan
from longdraft.serve.observer import Observer
from longdraft.serve.sampling.target_choice import target_choice
from longdraft.serve.spec_inputs import VerifyInput
from longdraft.serve.tokens import Tokens


@dataclass(frozen=True)
class Verified:
    """The target's choice and processed float32 logits behind every new token; request i owns rows ``cu[i] .. cu[i + 1]``."""

    choice_T: torch.Tensor
    logits_TV: torch.Tensor
    cu: list[int]

    def choices(self) -> list[list[int]]:
        """Choices of each request, on the host."""
        chosen = self.choice_T.tolist()
        return [chosen[a:b] for a, b in zip(self.cu, self.cu[1:], strict=False)]

    @staticmethod
    def join(parts: list["Verified"]) -> "Verified":
        """Verifications of consecutive requests as one."""
        cu = [0]
        for part in parts:
            cu += [cu[-1] + end for end in part.cu[1:]]
        return Verified(torch.cat([p.choice_T for p in parts]), torch.cat([p.logits_TV for p in parts]), cu)


def verify(
    target_worker: Any, batch: ScheduleBatch, members: list[int], drafts: list[list[int]], observer: Observer
) -> Verified:
    """Run the target over the newest token and the drafts of some requests; keys and values go to their reserved slots.

    Args:
        target_worker: SGLang's target worker.
        batch: the running batch; its page table has slots for the new tokens.
        members: indices of the requests to verify.
        drafts: their drafted tokens, ragged; everything cached before them is exact.
        observer: is shown what the target computes.
    """
    device = batch.seq_lens.device
    reqs = [batch.reqs[i] for i in members]
    lengths = [Tokens(r).cached for r in reqs]
    chains = [[Tokens(r).newest, *d] for r, d in zip(reqs, drafts, strict=True)]
    widths = [len(c) for c in chains]
    rows_B = batch.req_pool_indices[torch.tensor(members, device=device)]
    table = batch.req_to_token_pool.req_to_token
    pages_BW = table[rows_B, : max(n + w for n, w in zip(lengths, widths, strict=True))]
    plan = AttentionPlan.build(pages_BW, lengths, widths)
    positions = [p for n, w in zip(lengths, widths, strict=True) for p in range(n, n + w)]
    owner_T = torch.tensor([b for b, w in enumerate(widths) for _ in range(w)], device=device)
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
        capture_hidden_mode=observer.capture,
        sampling_info=batch.sampling_info,
        rids=[r.rid for r in reqs],
        lora_ids=[None] * len(chains),
    )
    result = target_worker.forward_batch_generation(batch=None, forward_batch=forward, is_verify=True)
    observer.verified(forward, table, owner_T, result.logits_output)
    choice_T, logits_TV = target_choice(result.logits_output.next_token_logits, reqs, drafts, position_T)
    return Verified(choice_T, logits_TV, plan.cu_rows)
