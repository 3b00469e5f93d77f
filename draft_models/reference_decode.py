"""Plain and speculative greedy decoding with a transformers target, in pure torch: the oracle for servers and evaluation.

Legend: L prompt tokens, K drafted tokens a step, V vocabulary.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import DynamicCache

from longdraft.draft_models.acceptance import AcceptStats, accepted_drafts
from longdraft.draft_models.drafting import drafting
from longdraft.draft_models.kinds import AnyDraft
from longdraft.kernels.view_attention import View


@dataclass
class Decoded:
    """New tokens and how they were won; ``accepted_at[d]`` counts the verifications that kept more than d drafts."""

    tokens: list[int]
    stats: AcceptStats
    accepted_at: list[int]


@torch.no_grad()
def prefill(
    target: Any, ids: Sequence[int], chunk: int = 2048, after: Callable[[torch.Tensor], None] = lambda id_M: None
) -> tuple[DynamicCache, torch.Tensor]:
    """The target's cache of ``ids`` and its logits ``[V]`` behind the last one; ``after`` is told each part's ids."""
    cache = DynamicCache()
    tokens = torch.tensor(ids, device=target.device)
    for part in tokens.split(chunk):
        logits = target(part[None], past_key_values=cache, logits_to_keep=1).logits
        after(part)
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
    target: Any, draft: AnyDraft, ids: Sequence[int], new_tokens: int, steps: int, view: View | None = None
) -> Decoded:
    """Greedy speculative decoding with a chain; the tokens are the target's own, whatever the draft.

    Args:
        target: a transformers causal language model.
        draft: of any kind, bound to the target.
        ids: the prompt.
        new_tokens: how many to return.
        steps: drafted tokens a verification.
        view: what a LongSpec draft reads of the target's cache; None is all of it.

    Raises:
        UserError: a view for another kind of draft.
    """
    device = target.device
    with drafting(target, draft, len(ids) + new_tokens + steps, steps, view) as request:
        cache, logits = prefill(target, ids, after=request.commit)
        out, stats, accepted_at = [int(logits.argmax())], AcceptStats(), [0] * steps
        while len(out) < new_tokens:
            length = cache.get_seq_length()
            root = torch.tensor([out[-1]], device=device)
            drafted = request.propose(root, cache, steps)
            verify = torch.cat([root, drafted])
            choice = target(verify[None], past_key_values=cache).logits[0].argmax(-1)
            kept = int(accepted_drafts(drafted[None], choice[None], torch.tensor([steps], device=device))[0])
            stats.add(steps, kept)
            for depth in range(kept):
                accepted_at[depth] += 1
            cache.crop(length + kept + 1)
            request.commit(verify[: kept + 1])
            out.extend(choice[: kept + 1].tolist())
    return Decoded(out[:new_tokens], stats, accepted_at)
