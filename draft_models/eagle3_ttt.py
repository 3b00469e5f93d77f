"""EAGLE-3's training-time test: K drafting steps from every supervised row at once, and the loop that defines them.

Row t of a document drafts as a server would that stands behind token t + 1: step 0 reads the target's features of token t and
token t + 1, step k reads the row's own hidden output of step k - 1 and token t + 1 + k of the text (teacher forced), at position
t + k. It sees the features of rows 0 .. t and its own chain, no other row's. Step k predicts token t + 2 + k, so its teacher is
the target's row t + 1 + k. A row whose document ends before token t + 1 + k has no step k.

Query-sparse: the shared step-0 keys and values need all rows and are plain projections of features and tokens; queries, MLP
and head run for the given rows alone, and that changes nothing for them.

Legend: T packed rows, N supervised rows, L rows of one document, A features, E hidden size, K key/value heads, D head size.
Document i is rows ``cu[i] .. cu[i + 1]``.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from longdraft.draft_models.eagle3 import Eagle3Draft
from longdraft.kernels.chain_attention import ChainRows, chain_attention
from longdraft.kernels.dense_attention import dense_attention


@dataclass(frozen=True)
class TttStep:
    """One step of all rows.

    Attributes:
        step: k.
        normed_NE: rows before the head, with gradients.
        valid_N: bool, rows that have this step; the others hold numbers without meaning.
        teacher_N: int64 packed row whose target logits are the teacher of each row; its own last row where invalid.
    """

    step: int
    normed_NE: torch.Tensor
    valid_N: torch.Tensor
    teacher_N: torch.Tensor


def forward_ttt(
    draft: Eagle3Draft,
    aux_TA: torch.Tensor,
    id_T: torch.Tensor,
    position_T: torch.Tensor,
    cu: Sequence[int],
    row_N: torch.Tensor,
    steps: int,
    recompute: bool = True,
) -> Iterator[TttStep]:
    """Run the training-time test over packed documents, step by step, so that each step's loss is taken as it comes.

    Memory is linear in T and in ``steps * N``.

    Args:
        draft: bound to its target; called through its own modules, so hooks of an engine see them.
        aux_TA: the target's features, any float dtype.
        id_T: int64 token ids, *not* shifted.
        position_T: int64 positions; step k rotates at ``position + k``.
        cu: document offsets from 0 to T.
        row_N: int64 rows to draft from, ascending, at least one.
        steps: K, at least 1.
        recompute: keep only what enters each step's projections and MLP, and compute them again in the backward pass
            (the attention is never computed twice).

    Yields:
        K steps in order.
    """
    settings, scale = draft.config.settings, draft.config.head_dim**-0.5

    def run(function: Callable[..., Any], *tensors: torch.Tensor) -> Any:
        if recompute and torch.is_grad_enabled():
            return checkpoint(function, *tensors, use_reentrant=False, preserve_rng_state=False)
        return function(*tensors)

    def shared(hidden: torch.Tensor, ids: torch.Tensor, positions: torch.Tensor) -> Any:
        return draft.key_value(draft.attention_input(ids, hidden), positions)

    def first_query(hidden: torch.Tensor, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return draft.query(draft.attention_input(ids, hidden), positions)

    def later(hidden: torch.Tensor, ids: torch.Tensor, positions: torch.Tensor) -> Any:
        x = draft.attention_input(ids, hidden)
        return draft.query(x, positions), *draft.key_value(x, positions)

    rows = ChainRows.build(row_N, cu)
    last_N = rows.last_N
    hidden_TE = run(draft.fuse, aux_TA)
    # The last row of a document has no next token; no other row sees what it makes of the one that stands there.
    k_TKD, v_TKD = run(shared, hidden_TE, id_T.roll(-1), position_T)
    hidden_NE, own_k, own_v = hidden_TE.index_select(0, row_N), list[torch.Tensor](), list[torch.Tensor]()
    for step in range(steps):
        token_N, at_N = row_N + 1 + step, position_T[row_N] + step
        ids = id_T[token_N.minimum(last_N)]
        if step == 0:
            q_NHD = run(first_query, hidden_NE, ids, at_N)
        else:
            q_NHD, k_NKD, v_NKD = run(later, hidden_NE, ids, at_N)
            own_k.append(k_NKD)
            own_v.append(v_NKD)
        seen = chain_attention(q_NHD, k_TKD, v_TKD, own_k, own_v, rows, scale, settings.window, settings.sinks)
        normed_NE, hidden_NE = run(draft.finish, hidden_NE, seen)
        yield TttStep(step, normed_NE, token_N <= last_N, token_N.minimum(last_N))


def reference_ttt(
    draft: Eagle3Draft, aux_LA: torch.Tensor, id_L: torch.Tensor, position_L: torch.Tensor, steps: int
) -> torch.Tensor:
    """The definition: one explicit decode loop for each row of one document. Slow, for tests.

    Args:
        draft, aux_LA, id_L, position_L, steps: as in :func:`forward_ttt`, for one document.

    Returns:
        ``[steps, L, E]`` rows before the head, differentiable; NaN where a row has no such step.
    """
    settings, scale, length = draft.config.settings, draft.config.head_dim**-0.5, len(id_L)
    feature_LE = draft.fuse(aux_LA)
    nothing = feature_LE.new_full((draft.config.target.hidden_size,), float("nan"))
    outs = [[nothing] * length for _ in range(steps)]
    for t in range(length - 1):
        prefix = draft.attention_input(id_L[1 : t + 2], feature_LE[: t + 1])
        keys, values = draft.key_value(prefix, position_L[: t + 1])
        hidden = feature_LE[t : t + 1]
        for step in range(min(steps, length - 1 - t)):
            at = position_L[t : t + 1] + step
            x = draft.attention_input(id_L[t + 1 + step : t + 2 + step], hidden)
            if step:
                key, value = draft.key_value(x, at)
                keys, values = torch.cat([keys, key]), torch.cat([values, value])
            place = torch.arange(len(keys), device=keys.device)
            seen = place < settings.sinks
            seen |= len(keys) - 1 - place < (settings.window or len(keys))
            attended, _ = dense_attention(draft.query(x, at), keys, values, scale, seen[None])
            normed, hidden = draft.finish(hidden, attended)
            outs[step][t] = normed[0]
    return torch.stack([torch.stack(rows) for rows in outs])
