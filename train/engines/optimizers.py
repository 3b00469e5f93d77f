"""The optimizers that ``optim.name`` stands for; every engine steps these."""

from typing import Any

import torch

from longdraft.train.config import OptimSettings


def build_optimizers(parameters: list[torch.nn.Parameter], settings: OptimSettings) -> list[torch.optim.Optimizer]:
    """What ``optim.name`` asks for: vectors are never decayed, and never Muon's (it orthogonalises matrices)."""
    matrices = [p for p in parameters if p.dim() > 1]
    vectors = [p for p in parameters if p.dim() <= 1]
    if settings.name == "adamw":
        groups: list[dict[str, Any]] = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
        return [_adamw([g for g in groups if g["params"]], settings)]
    # Steps scaled to AdamW's root mean square, so that one learning rate suits matrices and vectors.
    muon = torch.optim.Muon(
        matrices, lr=settings.lr, weight_decay=settings.weight_decay, adjust_lr_fn="match_rms_adamw"
    )
    return [muon, _adamw([{"params": vectors, "weight_decay": 0.0}], settings)] if vectors else [muon]


def _adamw(groups: list[dict[str, Any]], settings: OptimSettings) -> torch.optim.Optimizer:
    return torch.optim.AdamW(
        groups, lr=settings.lr, betas=settings.betas, eps=settings.eps, weight_decay=settings.weight_decay
    )
