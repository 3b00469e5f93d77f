"""What a cycle of mode ``exact`` or ``partial`` hands from its rounds to its last verification, and that one's outcome.

Legend: B requests, K tokens behind the first of each request.
"""

from dataclasses import dataclass

import torch
from sglang.srt.managers.utils import GenerationBatchResult

from longdraft.serve.device_step import Drafts
from longdraft.serve.device_verify import View
from longdraft.serve.drafters.running import Running
from longdraft.serve.verify import Verified


@dataclass(frozen=True)
class Ready:
    """What a cycle has for its last verification.

    Attributes:
        running: the batch behind everything that was gained on views.
        gained_B: tokens that each request gained on its view in this cycle.
        first_B: those of the first partial round, of requests that could gain a whole chain in it; 0 of others.
        lead_B: tokens pending from earlier cycles that the last verification computes anew.
        drafts: behind what was gained.
    """

    running: Running
    gained_B: torch.Tensor
    first_B: torch.Tensor
    lead_B: torch.Tensor
    drafts: Drafts


@dataclass(frozen=True)
class Last:
    """A cycle's last verification.

    Attributes:
        seen: what the target chose, of as many tokens of every request.
        id_BK, limit_B: the tokens behind the first of each request's, and how many count.
        lead_B: how many of them had been returned before.
        kept_B: how many of the others the target chose itself.
        view: what it read; None: whole caches.
    """

    seen: Verified
    id_BK: torch.Tensor
    limit_B: torch.Tensor
    lead_B: torch.Tensor
    kept_B: torch.Tensor
    view: View | None = None


@dataclass(frozen=True)
class Returned:
    """A cycle that is done.

    Attributes:
        result: for SGLang.
        width: tokens of each request in its last verification.
        last_B: place of each request's newest token among them that is cached now.
        exact_B: cached tokens of each, exact where its last verification was a full one.
    """

    result: GenerationBatchResult
    width: int
    last_B: torch.Tensor
    exact_B: torch.Tensor
