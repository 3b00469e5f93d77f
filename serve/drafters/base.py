"""What every drafter offers to the worker.

Legend: T tokens, B requests, V vocabulary, A features of the observed target layers (their number times the hidden size);
of a lookahead N query rows (the steps of a chain, of one request behind the other), S cache slots, H query heads, K key/value
heads, D head size, R rows and W columns of a page table.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from longdraft.draft_models.sparse_recipe import LayerHeads
from longdraft.kernels.tree import Tree
from longdraft.serve.cache_format import Scales
from longdraft.serve.drafters.running import Running
from longdraft.serve.sampling.rows import RowParams
from longdraft.serve.target_weights import TargetWeights
from longdraft.serve.tokens import Tokens
from longdraft.serve.tree_shape import TreeShape

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


@dataclass(frozen=True)
class Computed:
    """Tokens that the target has just computed, with what :attr:`Drafter.observed_layers` asked of it.

    Attributes:
        id_T, position_T: int64 tokens and their positions.
        slot_T: int64 cache slots of the tokens.
        before_T: int64 cache slots of the tokens before them; a first token's own.
        aux_TA: outputs of the observed layers, low to high, in the target's dtype.
    """

    id_T: torch.Tensor
    position_T: torch.Tensor
    slot_T: torch.Tensor
    before_T: torch.Tensor
    aux_TA: torch.Tensor


@dataclass(frozen=True)
class Lookahead:
    """What the chains that were drafted last looked for in one layer, for scoring a whole context with it.

    Attributes:
        q_NHD: rotated queries of all steps, those of the first request first; the number of rows is a multiple of the batch's.
        k_SKD: rotated keys that they look among, in cache slots.
        scale: factor of the scores.
        heads: query heads that count; None for all.
        kv_scale: what keys are to be multiplied by, of a float8 cache.
        first: leading tokens of every context that have no key: 1 where a token's key stands for it and the one before it.
        table_RW: page table of these slots, with the rows of SGLang's; None: a token's key lies in the target's own slot for it.
    """

    q_NHD: torch.Tensor
    k_SKD: torch.Tensor
    scale: float
    heads: tuple[int, ...] | None = None
    kv_scale: float = 1.0
    first: int = 0
    table_RW: torch.Tensor | None = None


class Drafter(ABC):
    """Proposes continuations. Its state per request is derived from the request's tokens and may be dropped at any time."""

    # Target layers whose outputs :meth:`observe` wants, by the numbers of draft_models.eagle3_config; None for none.
    observed_layers: tuple[int, ...] | None = None
    # Bytes that the drafter keeps beside every cache slot.
    bytes_per_slot: int = 0
    # Bytes that one step of a chain reads, apart from caches.
    bytes_per_step: int = 0
    # Whether it can draft for a batch that the device alone knows: :meth:`follow`, :meth:`follows`, :meth:`propose_running`.
    on_device: bool = False

    @abstractmethod
    def propose(self, requests: list[DraftRequest], pick: Pick) -> list[list[int]]:
        """At most ``limit`` draft tokens behind each request's newest token.

        Args:
            requests: those that want drafts.
            pick: chooses from draft logits the way the target will (greedy, or by the request's noise): the server's is a
                RowParams of one row a request, whose numbers a CUDA graph can read anew.
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

    # What follows is for those that need it; the others leave it.

    def follow(self, rid: str, tokens: Tokens, end: int) -> None:  # noqa: B027
        """The request's first ``end`` tokens are all that the target has computed; from here on it keeps up by itself."""

    def follows(self, rid: str) -> bool:
        """Whether the drafter knows the request as it is, however far the host is behind."""
        return True

    def settle(self, rid: str, end: int) -> None:  # noqa: B027
        """The host knows the request again, whose first ``end`` tokens are all that the target has computed, and the next round
        may be its own: the request is followed no longer.
        """

    def propose_running(self, running: Running, pick: Pick) -> torch.Tensor:
        """Draft as :meth:`propose` does, from and to the device: int64 ids ``[B, steps]``, every one of them drafted.

        Args:
            running: the batch; a request that is not followed gets some tokens.
            pick: as in :meth:`propose`.
        """
        raise NotImplementedError(f"{type(self).__name__} reads tokens on the host")

    def look_ahead(self, wanted: Sequence[LayerHeads] | None) -> int:
        """Keep the queries of chains from now on, for :meth:`lookahead`; called once, before the target's pool is made.

        Buffers have fixed addresses, since drafting may run in CUDA graphs, and are taken now.

        Args:
            wanted: layers and heads of a calibration; None takes what the drafter has.

        Returns:
            How many layers :meth:`lookahead` will give: 0 for a drafter without attention over the context.

        Raises:
            UserError: a layer or a head that it has not.
        """
        return 0

    def lookahead(self, running: Running) -> list[Lookahead]:
        """How the chains of the latest :meth:`propose_running` looked at their contexts; views, which the next chains overwrite.

        Args:
            running: the batch that was drafted for.
        """
        return []

    def propose_trees_running(
        self, running: Running, limit_B: torch.Tensor, params: RowParams, shape: TreeShape
    ) -> Tree:
        """Grow trees as :meth:`propose_tree` does, from and to the device; views, which the next batch overwrites.

        Args:
            running: as in :meth:`propose_running`.
            limit_B: int64 depth of each tree at most, 0 for the root alone.
            params, shape: as in :meth:`propose_tree`.
        """
        raise NotImplementedError(f"{type(self).__name__} reads tokens on the host")

    def keep(self, running: Running, id_BN: torch.Tensor, count_B: torch.Tensor) -> None:  # noqa: B027
        """After a round with trees or without drafts the target has computed these tokens, from the newest on.

        Args:
            running: the batch as it was before the round.
            id_BN: int64 tokens.
            count_B: int64 how many of each count; what stands behind them are any tokens.
        """

    def propose_tree(self, requests: list[DraftRequest], params: RowParams, shape: TreeShape) -> Tree:
        """A tree behind each request's newest token, never deeper than its ``limit``; the root alone where that is 0.

        Args:
            requests: all of a batch.
            params: one row a request: how the target will choose.
            shape: of the trees.
        """
        raise NotImplementedError(f"{type(self).__name__} drafts chains")

    def use_graphs(self, sizes: Sequence[int], shapes: Sequence[TreeShape] = ()) -> None:  # noqa: B027
        """Pad batches to these sizes from now on and, on a card, replay graphs; called once everything is bound.

        Args:
            sizes: of batches.
            shapes: of the trees that will be asked for; none means chains.
        """

    def take_pools(self, memory: Any, rows: Any, allocator: Any) -> None:  # noqa: B027
        """SGLang has sized its pools: a cache of the drafter's own in the same slots is made now; called once, first of all.

        Args:
            memory: SGLang's sizes of the target's pools.
            rows: the page table's pool.
            allocator: of slots.
        """

    def bind_pool(self, pool: Any, scales: Mapping[int, Scales]) -> None:  # noqa: B027
        """The target's cache pool exists now, with the scales of its layers; called once."""

    def bind_target(self, weights: TargetWeights) -> None:  # noqa: B027
        """The target's embedding and head may be other tensors now."""

    def prefilled(self, batch: Any) -> None:  # noqa: B027
        """The target has computed a prefill, or a chunk of one, of SGLang's batch."""

    def handed_back(self, rid: str, count: int) -> int:
        """Of an ended request's ``count`` cached tokens, how many another request may find: those that the drafter has whole."""
        return count

    def observe(self, computed: Computed) -> None:  # noqa: B027
        """The target computed these tokens: all of a prefill's, or a verification's, drafts included, kept or not."""

    def unobserved(self, slot_T: torch.Tensor) -> None:  # noqa: B027
        """These slots hold new tokens that :meth:`observe` or :meth:`prefilled` failed on."""
