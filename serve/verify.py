"""One full verification of ragged chains by the target.

Legend: B requests, T new tokens of all requests, V vocabulary.
"""

from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from sglang.srt.managers.schedule_batch import ScheduleBatch
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode

from longdraft.kernels.plan import AttentionPlan
from longdraft.serve.observer import Observer
from longdraft.serve.sampling.target_choice import target_choice
from longdraft.serve.spec_inputs import VerifyInput
from longdraft.serve.step_clock import OFF, StepClock
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
    target_worker: Any,
    batch: ScheduleBatch,
    members: list[int],
    drafts: list[list[int]],
    observer: Observer,
    width: int | None = None,
    clock: StepClock = OFF,
) -> Verified:
    """Run the target over the newest token and the drafts of some requests; keys and values go to their reserved slots.

    Args:
        target_worker: SGLang's target worker.
        batch: the running batch; its page table has slots for the new tokens.
        members: indices of the requests to verify.
        drafts: their drafted tokens, ragged; everything cached before them is exact.
        observer: is shown what the target computes.
        width: new tokens of every request in the forward, for a CUDA graph; chains are padded with tokens that write to slot 0
            and that nothing reads. None runs the chains as they are.
        clock: times the phases.
    """
    with clock.phase("verify"):
        device = batch.seq_lens.device
        reqs = [batch.reqs[i] for i in members]
        lengths = [Tokens(r).cached for r in reqs]
        chains = [[Tokens(r).newest, *d] for r, d in zip(reqs, drafts, strict=True)]
        widths = [len(c) for c in chains]
        rows_B = batch.req_pool_indices[torch.tensor(members, device=device)]
        table = batch.req_to_token_pool.req_to_token
        pages_BW = table[rows_B, : max(n + w for n, w in zip(lengths, widths, strict=True))]
        plan = AttentionPlan.build(pages_BW, lengths, widths) if width is None else None
        rows = Rows.build(lengths, chains, width, device)
        slot_T = pages_BW[rows.owner_T, rows.position_T].to(torch.int64)
        seq_lens = torch.tensor(lengths, dtype=torch.int64, device=device)
        forward = ForwardBatch(
            forward_mode=ForwardMode.TARGET_VERIFY,
            batch_size=len(chains),
            input_ids=rows.id_T,
            req_pool_indices=rows_B,
            seq_lens=seq_lens,
            seq_lens_cpu=torch.tensor(lengths, dtype=torch.int64),
            seq_lens_sum=sum(lengths),
            orig_seq_lens=seq_lens,
            out_cache_loc=slot_T if width is None else slot_T * rows.real_T,
            positions=rows.position_T,
            spec_algorithm=batch.spec_algorithm,
            spec_info=VerifyInput(plan, observer.capture),
            capture_hidden_mode=observer.capture,
            sampling_info=batch.sampling_info,
            rids=[r.rid for r in reqs],
            lora_ids=[None] * len(chains),
        )
        result = target_worker.forward_batch_generation(batch=None, forward_batch=forward, is_verify=True)
        observer.verified(forward, table, rows.owner_T, result.logits_output)
    with clock.phase("sampling"):
        logits_TV, position_T = result.logits_output.next_token_logits, rows.position_T
        if rows.kept is not None:
            logits_TV, position_T = logits_TV[rows.kept], position_T[rows.kept]
        choice_T, logits_TV = target_choice(logits_TV, reqs, drafts, position_T)
    return Verified(choice_T, logits_TV, list(accumulate(widths, initial=0)))


@dataclass(frozen=True)
class Rows:
    """The new tokens of a forward; ``kept`` numbers those that are no padding, None where none is."""

    id_T: torch.Tensor
    position_T: torch.Tensor
    owner_T: torch.Tensor
    real_T: torch.Tensor
    kept: torch.Tensor | None

    @staticmethod
    def build(lengths: list[int], chains: list[list[int]], width: int | None, device: torch.device) -> "Rows":
        """Chains at their positions, padded to ``width`` by their last token, which stays within the context."""
        rows = []
        for b, (start, chain) in enumerate(zip(lengths, chains, strict=True)):
            for j in range(width or len(chain)):
                at = min(j, len(chain) - 1)
                rows.append((chain[at], start + at, b, int(at == j)))
        id_T, position_T, owner_T, real_T = torch.tensor(rows, dtype=torch.int64).t().contiguous().to(device)
        kept = [t for t, row in enumerate(rows) if row[3]]
        return Rows(
            id_T, position_T, owner_T, real_T, None if len(kept) == len(rows) else torch.tensor(kept, device=device)
        )
