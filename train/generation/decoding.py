"""Batched decoding with a transformers target: one cache for a batch, and rows leave it as soon as they are done.

Prompts of a batch differ in length. The shortest one's length is read at once; the others' remaining tokens are then read one a
step, in the place of what the target would have said, so no row is ever padded or masked and each stands at its own positions.

Legend: B rows of a batch, W width of the cache, K key/value heads, D head size, V vocabulary.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import Cache
from transformers.cache_utils import CacheLayerMixin

LOOK = 32  # steps between two looks at which rows are done; each waits for the GPU

Choose = Callable[[torch.Tensor, torch.Tensor, int], torch.Tensor]  # logits_BV, row_B, position -> id_B
Ended = Callable[[Sequence[int]], bool]  # of an unfinished answer


@dataclass
class Row:
    """A prompt, and its answer once it is there."""

    prompt: Sequence[int]
    answer: list[int]


class _RowsLayer(CacheLayerMixin):
    """Keys and values in one buffer ``[B, K, W, D]``, written in place."""

    is_sliding = False

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width, self.length = width, 0

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.keys, self.values = (
            x.new_empty(x.shape[0], x.shape[1], self.width, x.shape[3]) for x in (key_states, value_states)
        )
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        assert self.keys is not None and self.values is not None
        end = self.length + key_states.shape[2]
        self.keys[:, :, self.length : end], self.values[:, :, self.length : end] = key_states, value_states
        self.length = end
        return self.keys[:, :, :end], self.values[:, :, :end]

    def keep(self, row_B: torch.Tensor) -> None:
        """Leave only some rows."""
        assert self.keys is not None and self.values is not None
        self.keys, self.values = self.keys[row_B], self.values[row_B]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.length + query_length, 0

    def get_seq_length(self) -> int:
        return self.length

    def get_max_cache_shape(self) -> int:
        return self.width


class RowsCache(Cache):
    """The cache of a batch whose rows all have the same length."""

    def __init__(self, num_layers: int, width: int) -> None:
        super().__init__(layers=[_RowsLayer(width) for _ in range(num_layers)])

    def keep(self, row_B: torch.Tensor) -> None:
        for layer in self.layers:
            assert isinstance(layer, _RowsLayer)
            layer.keep(row_B)


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
    device = model.device
    lengths = [len(row.prompt) for row in rows]
    longest, start = max(lengths), min(lengths)
    id_BW = torch.zeros(len(rows), longest + new_tokens, dtype=torch.int64, device=device)
    for i, row in enumerate(rows):
        id_BW[i, : lengths[i]] = torch.tensor(row.prompt, device=device)
    length_B, alive = torch.tensor(lengths, device=device), torch.arange(len(rows), device=device)
    cache = RowsCache(model.config.num_hidden_layers, longest + new_tokens)
    reads, at = id_BW[:, :start], start
    while True:
        logits_BV = model(input_ids=reads, past_key_values=cache, use_cache=True, logits_to_keep=1).logits[:, -1]
        said_B = choose(logits_BV, alive, at - 1)
        id_BW[:, at] = torch.where(length_B > at, id_BW[:, at], said_B)
        at += 1
        if at == id_BW.shape[1] or (at - start) % LOOK == 0:
            going = _collect(rows, id_BW, alive.tolist(), at, new_tokens, stop_ids, ended)
            if not going:
                return
            if len(going) < len(alive):
                kept = torch.tensor(going, device=device)
                id_BW, length_B, alive = id_BW[kept], length_B[kept], alive[kept]
                cache.keep(kept)
        reads = id_BW[:, at - 1 : at]


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
