"""The optimizers that ``optim.name`` stands for; every engine steps these."""

from collections.abc import Mapping
from typing import Any

import torch

from longdraft.train.config import OptimSettings

HEADS = {"lm_head.weight", "newest.lag_offset.weight"}  # a draft's weights whose rows are tokens, or lags


def build_optimizers(
    parameters: Mapping[str, torch.nn.Parameter], settings: OptimSettings
) -> list[torch.optim.Optimizer]:
    """What ``optim.name`` asks for, of a draft's weights by name: vectors are never decayed.

    Muon orthogonalises: it takes matrices between hidden rows, and leaves vectors to AdamW, and heads too, whose rows are
    tokens that deserve steps of their own size (a token that no row asked for would be moved as far as any other).
    """
    vectors = [p for p in parameters.values() if p.dim() <= 1]
    heads = [p for name, p in parameters.items() if name in HEADS and p.dim() > 1]
    hidden = [p for name, p in parameters.items() if name not in HEADS and p.dim() > 1]
    if settings.name == "adamw":
        return [_adamw([p for p in parameters.values() if p.dim() > 1], vectors, settings)]
    # Steps scaled to AdamW's root mean square, so that one learning rate suits all.
    muon = torch.optim.Muon(hidden, lr=settings.lr, weight_decay=settings.weight_decay, adjust_lr_fn="match_rms_adamw")
    return [muon, _adamw(heads, vectors, settings)] if heads or vectors else [muon]


def _adamw(
    matrices: list[torch.nn.Parameter], vectors: list[torch.nn.Parameter], settings: OptimSettings
) -> torch.optim.Optimizer:
    groups: list[dict[str, Any]] = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=settings.lr,
        betas=settings.betas,
        eps=settings.eps,
        weight_decay=settings.weight_decay,
    )
