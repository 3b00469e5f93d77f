"""True accept length from one pass: what speculative decoding would keep on a continuation that is already known.

Greedy output does not depend on the draft. A chain that was kept so far has read the continuation's own tokens, so its next
guess is the teacher-forced one, and all chains of a text can be guessed at once: depth d of a LongSpec chain is the packed
forward pass with lag d + 1, depth d of an EAGLE-3 chain is step d of training-time test. The walk over the guesses gives the
verifications that :func:`longdraft.draft_models.reference_decode.speculative_decode` would run, at a hundredth of its time.

Legend: L tokens of prompt and continuation, K drafted tokens a verification.
"""

from collections.abc import Sequence

import torch

from longdraft.draft_models.acceptance import AcceptStats
from longdraft.draft_models.eagle3 import Eagle3Draft
from longdraft.draft_models.eagle3_ttt import forward_ttt
from longdraft.draft_models.longspec import LongSpecDraft
from longdraft.draft_models.reference_decode import Decoded
from longdraft.kernels.view_attention import View
from longdraft.train.target import FrozenTarget


@torch.no_grad()
def score(
    target: FrozenTarget,
    draft: LongSpecDraft | Eagle3Draft,
    ids: Sequence[int],
    prompt: int,
    new_tokens: int,
    steps: int,
    view: View | None = None,
) -> Decoded:
    """What a chain of ``steps`` drafts keeps.

    Args:
        target, draft: bound to each other.
        ids: a prompt and the target's greedy continuation, at least ``new_tokens + steps`` long for the whole answer.
        prompt: tokens of the prompt.
        new_tokens: length of the answer.
        steps: K.
        view: what a LongSpec draft reads of the target's cache: sinks and the most recent keys; None is all of it.

    Returns:
        As the reference decoder's; the last verification looks beyond the answer as there.
    """
    assert view is None or view.blocks == 0, "which blocks a round reads is known only round by round"
    id_L = torch.tensor(ids, device=target.device)
    row_N = torch.arange(prompt, len(ids) - 1, device=target.device)  # each as the root of a chain
    guess = _longspec_guesses if isinstance(draft, LongSpecDraft) else _eagle3_guesses
    guess_KL = guess(target, draft, id_L, row_N, steps, view)  # type: ignore[arg-type]
    hit_KL = guess_KL == id_L
    stats, accepted_at, root, end = AcceptStats(), [0] * steps, prompt, prompt + new_tokens
    hits = hit_KL.tolist()
    while root + 1 < end:
        kept = 0
        while kept < steps and root + kept + 1 < len(ids) and hits[kept][root + kept + 1]:
            accepted_at[kept] += 1
            kept += 1
        stats.add(steps, kept)
        root += kept + 1
    return Decoded(list(ids[prompt:end]), stats, accepted_at)


def _longspec_guesses(
    target: FrozenTarget, draft: LongSpecDraft, id_L: torch.Tensor, row_N: torch.Tensor, steps: int, view: View | None
) -> torch.Tensor:
    """``[K, L]`` the token that depth d of some chain puts at each place; -1 where there is none."""
    position_L, cu = torch.arange(len(id_L), device=id_L.device), [0, len(id_L)]
    seen = target.capture(id_L, position_L, cu, kv_layers=draft.config.cross_layers)
    assert seen.k_TKD is not None and seen.v_TKD is not None
    guess_KL = torch.full((steps, len(id_L)), -1, device=id_L.device)
    for depth in range(steps):
        rows = row_N[depth:]  # row p + d of the chain with root p
        hidden = draft.forward_packed(id_L, position_L, seen.k_TKD, seen.v_TKD, cu, depth + 1, [view])
        guess_KL[depth, rows + 1] = draft.logits(hidden[rows]).argmax(-1)
    return guess_KL


def _eagle3_guesses(
    target: FrozenTarget, draft: Eagle3Draft, id_L: torch.Tensor, row_N: torch.Tensor, steps: int, view: View | None
) -> torch.Tensor:
    assert view is None, "an EAGLE-3 draft reads its own cache"
    position_L, cu = torch.arange(len(id_L), device=id_L.device), [0, len(id_L)]
    seen = target.capture(id_L, position_L, cu, aux=draft.config.aux_layers, kv_layers=())
    assert seen.aux_TA is not None
    guess_KL = torch.full((steps, len(id_L)), -1, device=id_L.device)
    # The chain with root p begins at the row of token p - 1, and its step k guesses token p + 1 + k.
    for out in forward_ttt(draft, seen.aux_TA, id_L, position_L, cu, row_N - 1, steps):
        at_N = row_N[out.valid_N] + 1 + out.step
        inside_N = at_N < len(id_L)
        guess_KL[out.step, at_N[inside_N]] = draft.logits(out.normed_NE[out.valid_N][inside_N]).argmax(-1)
    return guess_KL
