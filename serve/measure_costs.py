"""What a round costs in each shape, measured at start by the code that serves, over requests that nobody sent.

Legend: B requests.
"""

import time
from array import array
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.sampling.sampling_params import SamplingParams

from longdraft.kernels.tree_accept import tree_accept
from longdraft.serve.sampling.rows import RowParams
from longdraft.serve.shape_costs import CostTable
from longdraft.serve.tree_shape import TreeShape
from longdraft.serve.tree_step import TreeStep

CARD_BATCHES, CARD_REPEATS, CARD_CONTEXT = (1, 4, 16, 64), 5, 4096
CPU_BATCHES, CPU_REPEATS, CPU_CONTEXT = (1,), 2, 256


def measured_costs(step: TreeStep, runner: Any, most: int) -> CostTable:
    """Time a few rounds of every shape of the step's choice: drafting, verification, acceptance, and what they cost the host.

    Args:
        step: of the server, before it has any request.
        runner: the target's model runner with its pools; their free slots are read, slot 0, which nobody owns, is written.
        most: largest batch that was asked for; SGLang allows a smaller one where the cache is small.
    """
    table, pool, device = runner.req_to_token_pool.req_to_token, runner.token_to_kv_pool, torch.device(runner.device)
    on_card, most = device.type == "cuda", min(most, len(table) - 1)
    sizes, repeats = (CARD_BATCHES, CARD_REPEATS) if on_card else (CPU_BATCHES, CPU_REPEATS)
    slots, room = pool.get_key_buffer(0).shape[0], table.shape[1] - 2 * step.stride
    context = max(1, min(CARD_CONTEXT if on_card else CPU_CONTEXT, room))
    batches = sorted({size for size in sizes if size < most} | {most})
    found: dict[str, list[float]] = {name: [] for name in step.choice.shapes}
    try:
        for size in batches:
            slot_BW = 1 + torch.arange(size * context, device=device).view(size, context) % (slots - 1)
            table[1 : size + 1, :context] = slot_BW.to(table.dtype)
            batch = _batch(size, context, step.stride, runner)
            for name, shape in step.choice.shapes.items():
                found[name].append(_milliseconds(_round(step, batch, shape), repeats, on_card))
    finally:
        table[1 : most + 1] = 0
        step.drafter.clear()
    return CostTable(tuple(batches), {name: tuple(ms) for name, ms in found.items()})


def _batch(size: int, context: int, stride: int, runner: Any) -> Any:
    """Greedy requests of ``context`` cached tokens each, as far as a round reads them."""
    params = SamplingParams(temperature=0.0, max_new_tokens=1 << 20)
    params.normalize(None)
    reqs = [
        SimpleNamespace(
            rid=f"longdraft-probe-{b}", sampling_params=params, origin_input_ids=array("q", [0]) * context,
            output_ids=array("q", [0]), grammar=None, customized_info=None, tokenizer=None, req_pool_idx=b + 1,
            kv_allocated_len=context + stride,
        )
        for b in range(size)
    ]  # fmt: skip
    device = runner.req_to_token_pool.req_to_token.device
    return SimpleNamespace(
        reqs=reqs, seq_lens=torch.full((size,), context, device=device), spec_algorithm=runner.spec_algorithm,
        req_pool_indices=torch.arange(1, size + 1, device=device), req_to_token_pool=runner.req_to_token_pool,
        sampling_info=None,
    )  # fmt: skip


def _round(step: TreeStep, batch: Any, shape: TreeShape) -> Callable[[], None]:
    """One round, up to what the host reads of it."""

    def plain() -> None:
        step.undrafted(batch).choices()

    def drafted() -> None:
        params = RowParams.build(batch.reqs, [1] * len(batch.reqs), batch.seq_lens.device)
        tree = step.grown(batch, shape, [shape.depth] * len(batch.reqs), params)
        tree_accept(tree, step.verified(batch, tree, shape, params).choice_BT).count_B.tolist()

    return drafted if shape.depth else plain


def _milliseconds(work: Callable[[], None], repeats: int, on_card: bool) -> float:
    """The fastest of some runs; on a card after one that builds kernels. Work ends by a read of its result."""
    if on_card:
        work()
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        work()
        times.append(time.perf_counter() - begin)
    return 1000 * min(times)
