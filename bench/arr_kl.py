"""Recovery and distortion: how far a sparse verification's next-token distributions are from the full one's (Dustin, appendix B).

The target continues a prompt greedily; the same tokens are then read again with the prompt's keys cut down to sampled sets that keep
more or less of the attention. What stands behind the prompt is always read, as the tokens of a verification are.

Legend: G rows, P prompt tokens, V vocabulary.
"""

from collections.abc import Sequence
from typing import Any

import torch

from longdraft.draft_models.attention_rows import run_looking
from longdraft.draft_models.sparse_recipe import PROTECTED
from longdraft.train.calibration.reading import Reading
from longdraft.train.calibration.recovery import SINKS
from longdraft.train.positions import seeded


def sampled_set(attention_P: torch.Tensor, budget: int, share: float, seed: int) -> torch.Tensor:
    """A set of the prompt's tokens, bool ``[P]``: sinks, the last tokens, for a share of the rest of the budget those with the most
    attention, and any others.

    Args:
        attention_P: by which tokens are ranked, on the CPU.
        budget: tokens in all; the whole prompt where it has no more.
        share: 0 to 1.
        seed: of the others.
    """
    count = len(attention_P)
    if count <= budget:
        return torch.ones(count, dtype=torch.bool)
    set_P = torch.zeros(count, dtype=torch.bool)
    set_P[:SINKS] = set_P[count - (PROTECTED - SINKS) :] = True
    room = budget - int(set_P.sum())
    best = attention_P.masked_fill(set_P, -1.0).argsort(descending=True, stable=True)[: round(share * room)]
    set_P[best] = True
    free = (~set_P).nonzero().flatten()
    order = torch.randperm(len(free), generator=seeded("kl", seed))
    set_P[free[order[: budget - int(set_P.sum())]]] = True
    return set_P


def sparse_mask(set_P: torch.Tensor, rows: int) -> torch.Tensor:
    """Which keys each row behind the prompt sees, bool ``[1, 1, G, P + G]``: the set, and causally what stands behind the prompt."""
    causal_GG = torch.ones(rows, rows, dtype=torch.bool, device=set_P.device).tril()
    return torch.cat([set_P.expand(rows, -1), causal_GG], 1)[None, None]


def kl_divergence(full_GV: torch.Tensor, sparse_GV: torch.Tensor) -> float:
    """Mean over rows of KL(full || sparse) in nats (equation 8), from logits."""
    full, sparse = full_GV.double().log_softmax(-1), sparse_GV.double().log_softmax(-1)
    return float((full.exp() * (full - sparse)).sum(-1).mean())


def kl_points(
    model: Any, prompt: Sequence[int], rows: int, budget: int, points: int, seed: int
) -> list[dict[str, float]]:
    """Recovery and divergence of sampled sets, each the mean over the rows; recovery over all heads of all layers.

    Args:
        model: the target.
        prompt: P tokens.
        rows: tokens of the greedy continuation, which are the rows.
        budget: tokens of a set.
        points: sets; the share of their tokens that is chosen by attention goes from 0 to 1.
        seed: of the sets.
    """
    reading, text = Reading(model), list[int]()
    logits = reading.read(prompt)
    while len(text) < rows:
        text.append(int(logits.argmax()))
        logits = reading.read(text[-1:])
    reading.back_to(len(prompt))
    total_P = torch.zeros(len(prompt), dtype=torch.float64)

    def see(layer: int, score_HGN: torch.Tensor) -> None:
        total_P.add_(score_HGN[:, :, : len(prompt)].softmax(-1).mean((0, 1)).double().cpu())

    full_GV = reading.look(text, see)
    attention_P = total_P / model.config.num_hidden_layers
    id_G, found = torch.tensor(text, device=model.device), []
    for point in range(points):
        share = point / max(1, points - 1)
        set_P = sampled_set(attention_P, budget, share, seed + point)
        reading.back_to(len(prompt))
        mask = sparse_mask(set_P.to(model.device), rows)
        sparse_GV = run_looking(model, id_G, reading.cache, None, attention_mask=mask)
        arr, kl = float(attention_P[set_P].sum()), kl_divergence(full_GV, sparse_GV)
        found.append({"share": round(share, 4), "arr": round(arr, 6), "kl": round(kl, 6)})
    return found


def pearson(points: Sequence[dict[str, float]]) -> float:
    """Correlation of recovery and divergence."""
    pairs = torch.tensor([[point["arr"], point["kl"]] for point in points], dtype=torch.float64)
    return float(torch.corrcoef(pairs.T)[0, 1])
