"""One verification of a batch's trees, and what makes the kept path the request's own text.

Legend: B requests, T places of a tree, D1 nodes of the deepest path, P nodes of all kept paths, V vocabulary, A features of the
observed layers.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from sglang.srt.managers.schedule_batch import ScheduleBatch
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode

from longdraft.kernels.plan import AttentionPlan
from longdraft.kernels.tree import Tree
from longdraft.serve.drafters.base import Computed
from longdraft.serve.observer import Observer
from longdraft.serve.sampling.rows import RowParams
from longdraft.serve.sampling.target_choice import process_logits
from longdraft.serve.spec_inputs import VerifyInput
from longdraft.serve.step_clock import OFF, StepClock
from longdraft.serve.tokens import Tokens

Move = Callable[[torch.Tensor, torch.Tensor], None]  # to_P, from_P: cache slots, int64


@dataclass(frozen=True)
class VerifiedTree:
    """The target's choice and processed float32 logits behind every place, request by request, and the observed layers there."""

    choice_BT: torch.Tensor
    logits_NV: torch.Tensor
    aux_NA: torch.Tensor | None
    slot_BT: torch.Tensor


def verify_tree(
    target_worker: Any,
    batch: ScheduleBatch,
    tree: Tree,
    params: RowParams,
    observer: Observer,
    chain: bool = False,
    captured: bool = False,
    clock: StepClock = OFF,
) -> VerifiedTree:
    """Run the target over every request's tree; the node at place t writes to the request's t-th reserved slot.

    Args:
        target_worker: SGLang's target worker.
        batch: the running batch. A tree has nodes besides its root only where there is a slot for every place.
        tree: of each request of the batch; places without a node write to slot 0, which nobody owns.
        params: how each request chooses, one row a request.
        observer: says what the forward must keep.
        chain: whether each place of the trees stands behind the one before it, so that no bits are needed.
        captured: whether a CUDA graph of as many rows runs it: the attention backend's static buffers are its plan then.
        clock: times the phases.
    """
    with clock.phase("verify"):
        reqs, device, table = batch.reqs, batch.seq_lens.device, batch.req_to_token_pool.req_to_token
        count = tree.token_BT.shape[1]
        lengths = [Tokens(r).cached for r in reqs]
        cached_B = torch.tensor(lengths, dtype=torch.int64, device=device)
        row_B = batch.req_pool_indices
        place_BT = (cached_B[:, None] + torch.arange(count, device=device)).clamp_max(table.shape[1] - 1)
        slot_BT = table[row_B[:, None], place_BT].long() * tree.valid_BT
        plan = None
        if not captured:  # a chain's new tokens may be read from their slots; near a row's end its padding has none
            pages_BW = torch.nn.functional.pad(table[row_B, : max(lengths) + count].int(), (0, count))
            plan = AttentionPlan.build(pages_BW, lengths, [count] * len(reqs))
        # A place without a node reads nothing; it stands where its root does, within the context.
        position_BT = torch.where(tree.valid_BT, tree.position_BT(cached_B), cached_B[:, None])
        forward = ForwardBatch(
            forward_mode=ForwardMode.TARGET_VERIFY,
            batch_size=len(reqs),
            input_ids=tree.token_BT.flatten(),
            req_pool_indices=row_B,
            seq_lens=cached_B,
            seq_lens_cpu=torch.tensor(lengths, dtype=torch.int64),
            seq_lens_sum=sum(lengths),
            orig_seq_lens=cached_B,
            out_cache_loc=slot_BT.flatten(),
            positions=position_BT.flatten(),
            spec_algorithm=batch.spec_algorithm,
            spec_info=VerifyInput(plan, observer.capture, None if chain else tree.bits_BTW.flatten(0, 1)),
            capture_hidden_mode=observer.capture,
            sampling_info=batch.sampling_info,
            rids=[r.rid for r in reqs],
            lora_ids=[None] * len(reqs),
        )
        output = target_worker.forward_batch_generation(batch=None, forward_batch=forward, is_verify=True).logits_output
        aux_NA = observer.take(output)
    with clock.phase("sampling"):
        unread = [[0] * (count - 1)] * len(reqs)
        logits_NV = process_logits(output.next_token_logits, reqs, unread, tree)
        choice_N = params.repeat(count).choose(logits_NV, position_BT.flatten())
    return VerifiedTree(choice_N.view(-1, count), logits_NV, aux_NA, slot_BT)


def keep_paths(
    batch: ScheduleBatch, tree: Tree, seen: VerifiedTree, paths: list[list[int]], move: Move, observer: Observer
) -> None:
    """Move the kept nodes' keys and values to where a chain would have written them, and show them to the drafter.

    Args:
        batch: the batch that was verified.
        tree: what was verified.
        seen: its verification.
        paths: places of the kept nodes of each request, from the root on.
        move: of cache slots.
        observer: is shown the kept tokens.
    """
    device, table = batch.seq_lens.device, batch.req_to_token_pool.req_to_token
    starts = [Tokens(r).cached for r in batch.reqs]
    nodes = [
        (b, place, start + j)
        for b, (start, path) in enumerate(zip(starts, paths, strict=True))
        for j, place in enumerate(path)
    ]
    owner_P, place_P, position_P = torch.tensor(nodes, device=device).t()
    row_P = batch.req_pool_indices[owner_P]
    slot_P = table[row_P, position_P].long()
    if any(place != j for path in paths for j, place in enumerate(path)):
        move(slot_P, seen.slot_BT[owner_P, place_P])
    if seen.aux_NA is not None:
        before_P = table[row_P, (position_P - 1).clamp(min=0)]
        aux_PA = seen.aux_NA[owner_P * tree.token_BT.shape[1] + place_P]
        observer.tell(Computed(tree.token_BT[owner_P, place_P], position_P, slot_P, before_P.long(), aux_PA))
