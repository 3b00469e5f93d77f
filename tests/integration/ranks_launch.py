"""python ranks_launch.py FAULT [SGLang arguments]: the server with a draft of which the ranks share everything, however small, and a fault.

``together``: drafting fails now and then, on all ranks at once. ``alone``: it fails on rank 1 alone. ``unsummed``: views are chosen by each
rank's own heads. ``none``: no fault. The scheduler processes import this file again, so the patches below are in force there.
"""

import os
import sys
from datetime import timedelta
from functools import partial
from typing import Any

from longdraft.draft_models.shares import Share
from longdraft.serve import build_drafter, ranks
from longdraft.serve.drafters.longspec import LongSpecDrafter
from longdraft.serve.views.chooser import ViewChooser

FAULT = "LONGDRAFT_TEST_FAULT"
calls = {"draft": 0}


def failing(drafted: Any) -> Any:
    def planted(self: LongSpecDrafter, *given: Any) -> Any:
        calls["draft"] += 1
        if calls["draft"] % 4 == 0 and (fault == "together" or self.ranks.rank == 1):
            raise RuntimeError("planted: the drafter fails")
        return drafted(self, *given)

    return planted


if __name__ == "__main__":
    os.environ[FAULT] = sys.argv.pop(1)
fault = os.environ[FAULT]
build_drafter.Share = partial(Share, least=0)  # type: ignore[assignment,misc]
ranks.ServerRanks.__init__.__defaults__ = (timedelta(seconds=5),)  # type: ignore[attr-defined]
if fault in ("together", "alone"):
    for name in ("propose_running", "propose_trees_running"):
        setattr(LongSpecDrafter, name, failing(getattr(LongSpecDrafter, name)))
if fault == "unsummed":
    ViewChooser._total = lambda self, score_BN: score_BN  # type: ignore[method-assign]

if __name__ == "__main__":
    from sglang.launch_server import run_server
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args

    load_plugins()
    run_server(prepare_server_args(sys.argv[1:]))
