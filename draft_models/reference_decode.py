"""Plain and speculative greedy decoding with a transformers target, in pure torch: the oracle for servers and evaluation.

Legend: L prompt tokens, K drafted tokens a step, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import DynamicCache

from longdraft.draft_models.acceptance import AcceptStats, accepted_drafts
from longdraft.draft_models.chain import propose_chain
from longdraft.draft_models.draft_view import ViewReader
from longdraft.draft_models.longspec import LongSpecDraft
from longdraft.draft_models.window_state import WindowState
from longdraft.kernels.view_attention import View


@dataclass
class Decoded:
    """New tokens and how they were won; ``accepted_at[d]`` counts the verifications that kept more than d drafts."""

    tokens: list[int]
    stats: AcceptStats
    accepted_at: list[int]


@torch.no_grad()
def prefill(target: Any, ids: Sequence[int], chunk: int = 2048) -> tuple[DynamicCache, torch.Tensor]:
    """The target's cache of ``ids`` and its logits ``[V]`` behind the last one."""
    cache = DynamicCache()
    tokens = torch.tensor(ids, device=target.device)
    for part in tokens.split(chunk):
        logits = target(part[None], past_key_values=cache, logits_to_keep=1).logits
    return cache, logits[0, -1]


@torch.no_grad()
def greedy_decode(target: Any, ids: Sequence[int], new_tokens: int) -> list[int]:
    """The target's own greedy continuation, one token a step."""
    cache, logits = prefill(target, ids)
    out = [int(logits.argmax())]
    while len(out) < new_tokens:
        step = target(torch.tensor([[out[-1]]], device=target.device), past_key_values=cache)
        out.append(int(step.logits[0, -1].argmax()))
    return out


@torch.no_grad()
def speculative_decode(
    target: Any, draft: LongSpecDraft, ids: Sequence[int], new_tokens: int, steps: int, view: View | None = None
) -> Decoded:
    """Greedy speculative decoding with a chain; the tokens are the target's own, whatever the draft.

    Args:
        target: a transformers causal language model.
        draft: bound to the target's embedding and head.
        ids: the prompt.
        new_tokens: how many to return.
        steps: drafted tokens a verification.
        view: what the draft reads of the target's cache; None is all of it.
    """
    device = target.device
    cache, logits = prefill(target, ids)
    state = WindowState(draft, 1, steps)
    state.rebuild(0, list(ids), len(ids))
    row = torch.zeros(1, dtype=torch.long, device=device)
    out, stats, accepted_at = [int(logits.argmax())], AcceptStats(), [0] * steps
    reader = ViewReader(view, draft.config.target.head_dim**-0.5)
    while len(out) < new_tokens:
        length = cache.get_seq_length()
        last = cache.layers[-1]
        assert last.keys is not None and last.values is not None
        keys, values = (x[0].transpose(0, 1).to(draft.self_attn.q_proj.weight.dtype) for x in (last.keys, last.values))
        root = torch.tensor([out[-1]], device=device)
        at = torch.tensor([length], device=device)
        drafted = propose_chain(state, row, root, at, steps, reader.begin(keys, values))
        verify = torch.cat([root, drafted[0]])[None]
        choice = target(verify, past_key_values=cache).logits[0].argmax(-1)
        kept = int(accepted_drafts(drafted, choice[None], torch.tensor([steps], device=device))[0])
        stats.add(steps, kept)
        reader.committed(kept)
        for depth in range(kept):
            accepted_at[depth] += 1
        cache.crop(length + kept + 1)
        state.store(row.expand(kept + 1), verify[0, : kept + 1], torch.arange(length, length + kept + 1, device=device))
        out.extend(choice[: kept + 1].tolist())
    return Decoded(out[:new_tokens], stats, accepted_at)
