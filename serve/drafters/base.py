"""What every drafter offers to the worker."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import torch

from longdraft.serve.tokens import Tokens

Pick = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]  # draft logits_BV, position_B -> id_B


@dataclass(frozen=True)
class DraftRequest:
    """One request of a drafting round.

    ``pages`` are the cache slots of its ``tokens.cached`` tokens in order; ``limit`` is how many drafts it can use.
    """

    rid: str
    tokens: Tokens
    pages: torch.Tensor
    limit: int


class Drafter(ABC):
    """Proposes continuations. Its state per request is derived from the request's tokens and may be dropped at any time."""

    @abstractmethod
    def propose(self, requests: list[DraftRequest], pick: Pick) -> list[list[int]]:
        """At most ``limit`` draft tokens behind each request's newest token.

        Args:
            requests: those that want drafts.
            pick: chooses from draft logits the way the target will (greedy, or by the request's noise).
        """

    @abstractmethod
    def committed(self, request: DraftRequest, tokens: list[int]) -> None:
        """The request gained ``tokens`` (behind its newest one at the time of :meth:`propose`)."""

    @abstractmethod
    def forget(self, rid: str) -> None:
        """The request ended."""

    @abstractmethod
    def clear(self) -> None:
        """Forget everything: the cache was flushed or weights changed."""
