"""Selectors and budgets of which ``choosing_launch.py`` takes every pair; a test may import them, which patches nothing."""

import itertools

from longdraft.serve.views.budget import Budget
from longdraft.serve.views.selectors import SELECTORS

BUDGETS = (Budget(64, 16, 32), Budget(128, 16, 32), Budget(512), Budget(1024))
PAIRS = list(itertools.product(SELECTORS, BUDGETS))
