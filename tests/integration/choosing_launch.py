"""python choosing_launch.py [SGLang arguments]: a server every view of which is chosen by the next pair of selector and budget.

One server so shows all of them; the budgets' largest is the server's own. The scheduler process imports this file again, so the
patches below are in force there; each pair that chose is logged.
"""

import itertools
import logging
import sys
from collections.abc import Sequence
from typing import Any

import torch
from choosing_pairs import PAIRS

from longdraft.serve.views import setup
from longdraft.serve.views.choose import Chosen
from longdraft.serve.views.chooser import ViewChooser
from longdraft.serve.views.selectors import PROMPT_ROWS, MassSelector, make_selector

logger = logging.getLogger(__name__)


class EveryChooser(ViewChooser):
    """Takes the next pair for every choice."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.columns, self.pairs = self.budget.columns, itertools.cycle(PAIRS)

    def choose(self, queries: Sequence[torch.Tensor], *where: Any) -> Chosen:
        name, self.budget = next(self.pairs)
        self.selector = make_selector(name)
        chosen = super().choose(queries, *where)
        self.selector = make_selector(MassSelector.name)  # one that chooses again and again
        logger.warning("view chosen by %s of %d tokens", name, self.budget.tokens)
        more = self.columns - chosen.column_BV.shape[1]
        return chosen._replace(column_BV=torch.nn.functional.pad(chosen.column_BV, (0, more)))


setup.ViewChooser = EveryChooser  # type: ignore[misc]
MassSelector.rows = PROMPT_ROWS  # as many query rows as any of them wants

if __name__ == "__main__":
    from sglang.launch_server import run_server
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args

    load_plugins()
    run_server(prepare_server_args(sys.argv[1:]))
