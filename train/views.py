"""Views: which training documents the draft reads under a budget, as a served draft does, and what evaluation lets it read."""

import torch

from longdraft.kernels.view_attention import View
from longdraft.train.config import TrainSettings, ViewSettings
from longdraft.train.positions import draw, seeded


def draw_view(settings: ViewSettings, *key: int | str) -> View | None:
    """The view of one document, or None for the whole cache; decided by ``key`` alone.

    Args:
        settings: how often, and which budgets.
        key: the run's seed, the epoch and the document's number: the same after a resume and for every split of a step.
    """
    if float(torch.rand((), generator=seeded("view", *key))) >= settings.share:
        return None
    budget = settings.budgets[draw(0, len(settings.budgets) - 1, "budget", *key)]
    recent = float(torch.rand((), generator=seeded("recent", *key))) < settings.recent
    window = budget - settings.sinks if recent else settings.window
    return View(budget, settings.sinks, window, settings.block, seeded("blocks", *key).initial_seed())


def served_view(settings: TrainSettings) -> View | None:
    """What the draft reads in evaluation, or None for the whole cache."""
    v, e = settings.views, settings.evaluation
    if e.context is None:
        return None
    window = v.window if e.view == "mass" else e.context - v.sinks
    return View(e.context, v.sinks, window, v.block)
