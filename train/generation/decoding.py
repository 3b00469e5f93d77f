"""Batched decoding with a transformers target: one cache for a batch, which rows leave once many of them are done.

Prompts of a batch differ in length. The shortest one's length is read at once; the others' remaining tokens are then read one a
step, in the place of what the target would have said, so no row is ever padded or masked and each stands at its own positions.

Legend: B rows of a batch, L tokens that all rows have, W width of the cache, V vocabulary.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from longdraft.train.generation.row_cache import ATTENTION, RowsCache, Step

LOOK = 32  # steps between two looks at which rows are done; each waits for the GPU
SPARSE = 0.7  # share of a batch's rows that still go on, below which the others leave it: a new size costs a capture

Choose = Callable[[torch.Tensor, torch.Tensor, int], torch.Tensor]  # logits_BV, row_B, position -> id_B
Ended = Callable[[Sequence[int]], bool]  # of an unfinished answer


@dataclass
class Row:
    """A prompt, and its answer once it is there."""

    prompt: Sequence[int]
    answer: list[int]


@torch.no_grad()
def decode_rows(
    model: Any, rows: Sequence[Row], new_tokens: int, stop_ids: Sequence[int], choose: Choose, ended: Ended
) -> None:
    """Fill in the answers, the stop token included.

    Args:
        model: a transformers causal language model of dense decoder layers.
        rows: of similar prompt lengths; the longest waits for none, the shortest reads at once.
        new_tokens: most tokens of an answer.
        stop_ids: end an answer.
        choose: the pick from the logits behind the token at a position; rows are numbered as given.
        ended: asked every few steps whether an unfinished answer can end as it is.
    """
    implementation = model.config._attn_implementation
    model.set_attn_implementation(ATTENTION)
    try:
        _decode(model, rows, new_tokens, stop_ids, choose, ended)
    finally:
        model.set_attn_implementation(implementation)


def _decode(
    model: Any, rows: Sequence[Row], new_tokens: int, stop_ids: Sequence[int], choose: Choose, ended: Ended
) -> None:
    device = model.device
    lengths = [len(row.prompt) for row in rows]
    longest, start = max(lengths), min(lengths)
    id_BW = torch.zeros(len(rows), longest + new_tokens, dtype=torch.int64, device=device)
    for i, row in enumerate(rows):
        id_BW[i, : lengths[i]] = torch.tensor(row.prompt, device=device)
    length_B, alive = torch.tensor(lengths, device=device), torch.arange(len(rows), device=device)
    cache = RowsCache(model.config.num_hidden_layers, longest + new_tokens, device)
    step, at = Step(model, cache, len(rows)), start
    logits_BV = _first(model, id_BW[:, :start], cache)
    while True:
        said_B = choose(logits_BV, alive, at - 1)
        id_BW[:, at] = torch.where(length_B > at, id_BW[:, at], said_B)
        at += 1
        if at == id_BW.shape[1] or (at - start) % LOOK == 0:
            going = _collect(rows, id_BW, alive.tolist(), at, new_tokens, stop_ids, ended)
            if not going:
                return
            if len(going) < SPARSE * len(alive):
                kept = torch.tensor(going, device=device)
                id_BW, length_B, alive = id_BW[kept], length_B[kept], alive[kept]
                cache.keep(kept)
                step = Step(model, cache, len(going))
        logits_BV = step(id_BW[:, at - 1 : at], at - 1)


def _first(model: Any, id_BL: torch.Tensor, cache: RowsCache) -> torch.Tensor:
    """Read what all rows have; logits ``[B, V]`` behind it."""
    position_BL = torch.arange(id_BL.shape[1], device=id_BL.device).expand_as(id_BL)
    read = {"position_ids": position_BL, "past_key_values": cache, "use_cache": True, "logits_to_keep": 1}
    logits: torch.Tensor = model(input_ids=id_BL, **read).logits
    return logits[:, -1]


def _collect(
    rows: Sequence[Row],
    id_BW: torch.Tensor,
    alive: list[int],
    at: int,
    new_tokens: int,
    stop_ids: Sequence[int],
    ended: Ended,
) -> list[int]:
    """Store the answers of rows that are done; returns which rows of the batch go on."""
    going = []
    for i, ids in enumerate(id_BW[:, :at].tolist()):
        row = rows[alive[i]]
        answer = ids[len(row.prompt) : len(row.prompt) + new_tokens]
        stop = next((j + 1 for j, token in enumerate(answer) if token in stop_ids), None)
        row.answer = answer[:stop]
        if stop is None and len(answer) < new_tokens and not ended(answer):
            going.append(i)
    return going
