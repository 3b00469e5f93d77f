"""What a KV view is chosen by: scores of blocks of the cache, from queries that some of the target's layers had just now.

All give one list for all heads, and one for all layers unless :meth:`Selector.score_layers` is asked for a list for each
observed layer. So a view is a page list and nothing is copied.

Legend: B requests, T query rows of all requests, S cache slots, H query heads, K key/value heads, D head size, N blocks of
columns.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import ClassVar

import torch

from longdraft.errors import UserError
from longdraft.kernels.block_bound import Rule, block_bound
from longdraft.kernels.block_lse import block_lse, block_mass
from longdraft.kernels.mass_sum import mass_sum
from longdraft.kernels.plan import AttentionPlan
from longdraft.schema import nearest
from longdraft.serve.views.budget import Budget

ROWS = 5  # the last tokens, about as many as one verification gives
PROMPT_ROWS = 8
POOL = 3  # blocks


def same_rows(plan: AttentionPlan) -> int:
    """Query rows of every request where all have as many, 0 where they have not; the host knows."""
    counts = {b - a for a, b in zip(plan.cu_rows, plan.cu_rows[1:], strict=False)}
    return counts.pop() if len(counts) == 1 else 0


def by_request(
    value_TX: torch.Tensor, plan: AttentionPlan, reduce: Callable[[torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    """``reduce`` over the first dimension of each request's rows, ``[B, ...]``; zeros for a request without rows.

    Row counts come from the host, so that nothing waits for the device.
    """
    if rows := same_rows(plan):
        return reduce(value_TX.unflatten(0, (len(plan), rows)).transpose(0, 1))
    none_X = value_TX.new_zeros(value_TX.shape[1:])
    parts = (value_TX[plan.rows_of(b)] for b in range(len(plan)))
    return torch.stack([reduce(own) if len(own) else none_X for own in parts])


REDUCTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "mean": lambda value_RX: value_RX.mean(0),
    "max": lambda value_RX: value_RX.amax(0),
    "last": lambda value_RX: value_RX[-1],
}


class Selector(ABC):
    """Scores blocks; the higher, the more a view should hold them.

    Attributes:
        name: what users write.
        reductions: over the query rows of a request, of which one may be chosen; empty where there is no choice.
        rows: query rows that it wants of each request, the newest ones; fewer are served too.
        once: whether it scores once, after the prompt, and the view then keeps its blocks.
        by_round: whether every round on a view has single tokens chosen for it behind its drafting
            (:mod:`longdraft.serve.views.set_chooser`), so that the blocks scored here serve behind a prompt alone.
        shares: whether scores are shares of attention, so that a budget may name a mass.
    """

    name: ClassVar[str]
    reductions: ClassVar[tuple[str, ...]] = ()
    rows: ClassVar[int] = ROWS
    once: ClassVar[bool] = False
    by_round: ClassVar[bool] = False
    shares: ClassVar[bool] = False

    def __init__(self, block: int = 16, reduction: str = "mean") -> None:
        self.block = block
        self.reduction = reduction

    def layers(self, num_layers: int) -> tuple[int, ...]:
        """The target's layers whose queries and keys it wants, ascending: one in the middle and the last but one."""
        return tuple(sorted({num_layers // 2, max(num_layers - 2, 0)}))

    def check(self, budget: Budget) -> None:
        """Refuse a budget that these scores cannot serve.

        Raises:
            UserError: a mass where scores are no shares of attention.
        """
        assert budget.block == self.block
        if budget.mass is not None and not self.shares:
            raise UserError(
                f"mass={budget.mass}: scores of {self.name!r} are no shares of attention: take 'mass', or none"
            )

    def check_missed_mass(self, share: float) -> None:
        """Refuse refreshes for what a view misses, where it cannot be measured or a refresh would not change it.

        Raises:
            UserError: a selector without queries, or one that chooses once.
        """
        if not self.rows or self.once:
            reason = (
                "chooses once, so that a refresh finds nothing new" if self.rows else "keeps no queries to measure with"
            )
            raise UserError(
                f"refresh_missed_mass={share} with selector {self.name!r}, which {reason}: take 'mass', or leave it out"
            )

    @abstractmethod
    def score_layer(
        self, q_THD: torch.Tensor, k_SKD: torch.Tensor, plan: AttentionPlan, scale: float, blocks: int
    ) -> torch.Tensor:
        """Float32 ``score_BN`` from the queries and the keys of one layer."""

    def score_layers(
        self,
        queries: Sequence[torch.Tensor],
        keys: Sequence[torch.Tensor],
        plan: AttentionPlan,
        scale: float,
        blocks: int,
        kv_scales: Sequence[float] | None = None,
    ) -> list[torch.Tensor]:
        """Scores from each observed layer alone.

        Args:
            queries: rotated ``q_THD`` of each layer of :meth:`layers`; rows in the order of tokens.
            keys: their caches ``k_SKD``.
            plan: what every row sees, and which rows are whose; nothing waits for the device.
            scale: factor of the attention's scores.
            blocks: N, of ``self.block`` columns.
            kv_scales: of each layer's keys, for float8; None for ones.

        Returns:
            Float32 ``score_BN`` of each layer; blocks beyond a length score lowest or zero.
        """
        scales = [scale * x for x in kv_scales or [1.0] * len(keys)]
        return [self.score_layer(q, k, plan, x, blocks) for q, k, x in zip(queries, keys, scales, strict=True)]

    def score(
        self,
        queries: Sequence[torch.Tensor],
        keys: Sequence[torch.Tensor],
        plan: AttentionPlan,
        scale: float,
        blocks: int,
        kv_scales: Sequence[float] | None = None,
    ) -> torch.Tensor:
        """Float32 ``score_BN`` from all observed layers: the sum of :meth:`score_layers`, whose arguments these are."""
        return torch.stack(self.score_layers(queries, keys, plan, scale, blocks, kv_scales)).sum(0)


class MassSelector(Selector):
    """``mass``: the attention mass of a block, summed over rows, heads and layers."""

    name = "mass"
    shares = True
    by_head: ClassVar[bool] = False  # whether heads are looked at apart before they are summed

    def score_layer(
        self, q_THD: torch.Tensor, k_SKD: torch.Tensor, plan: AttentionPlan, scale: float, blocks: int
    ) -> torch.Tensor:
        lse_THN = block_lse(q_THD, k_SKD, plan, scale, self.block, blocks)
        if same_rows(plan) and not self.by_head:
            return mass_sum(lse_THN, len(plan))
        return self.mass_score(by_request(block_mass(lse_THN), plan, lambda mass_RHN: mass_RHN.sum(0)))

    def mass_score(self, mass_BHN: torch.Tensor) -> torch.Tensor:
        """``score_BN`` of one layer, from heads' own."""
        return mass_BHN.sum(1).float()


class DustinSelector(MassSelector):
    """``dustin``: the tokens that the target's last row attended to, and those that the draft was looking for, anew in every round.

    Behind a prompt, before anything is drafted, the blocks of most mass by its last row in the last layer but one.
    """

    name = "dustin"
    rows = 1
    by_round = True

    def layers(self, num_layers: int) -> tuple[int, ...]:
        return (max(num_layers - 2, 0),)


class WorstSelector(MassSelector):
    """``worst``: the blocks that matter least. For tests: whatever is chosen, `exact` must give the target's tokens (P8)."""

    name = "worst"
    shares = False

    def score_layer(
        self, q_THD: torch.Tensor, k_SKD: torch.Tensor, plan: AttentionPlan, scale: float, blocks: int
    ) -> torch.Tensor:
        return -super().score_layer(q_THD, k_SKD, plan, scale, blocks)


class SnapKvSelector(MassSelector):
    """``snapkv``: mass from the prompt's last rows, pooled, chosen once.

    As in SnapKV, rows of the prompt's end vote, their votes are max-pooled along the context for each head, so that what
    stands beside an important place is kept too, and the choice stays. Other than there, the window is of 8 rows, the pool of 3
    blocks instead of 5 to 7 tokens, and the heads share one list.
    """

    name = "snapkv"
    rows = PROMPT_ROWS
    once = True
    shares = False
    by_head = True

    def mass_score(self, mass_BHN: torch.Tensor) -> torch.Tensor:
        pooled_BHN = torch.nn.functional.max_pool1d(mass_BHN, POOL, stride=1, padding=POOL // 2)
        return super().mass_score(pooled_BHN)


class BoundSelector(Selector):
    """``quest``: Quest's bound of a block's scores, over a request's rows their mean or largest; the mean over heads."""

    name = "quest"
    reductions: ClassVar[tuple[str, ...]] = ("mean", "max")
    rule: ClassVar[Rule] = "quest"

    def score_layer(
        self, q_THD: torch.Tensor, k_SKD: torch.Tensor, plan: AttentionPlan, scale: float, blocks: int
    ) -> torch.Tensor:
        bound_THN = block_bound(q_THD, k_SKD, plan, self.block, blocks, scale=scale, rule=self.rule)
        return by_request(bound_THN, plan, REDUCTIONS[self.reduction]).mean(1).float()


class SpecPvSelector(BoundSelector):
    """``specpv``: ``max(q . high, q . low)`` of a block's largest and smallest numbers, as SpecPV's code scores (section 2.3 there).

    Over query rows their mean, largest or last, then the mean over heads. Other than there, the heads of a layer (and the
    layers) share one list, where SpecPV has one for each layer and key/value head and copies the cache for it; the rows are
    accepted tokens, where it takes those of the whole tree; and blocks are counted from the first column and read from the keys.
    """

    name = "specpv"
    reductions = ("mean", "max", "last")
    rule = "specpv"


class RecentSelector(Selector):
    """``streaming``: sinks and the last tokens, as in StreamingLLM. It needs no queries."""

    name = "streaming"
    rows = 0

    def layers(self, num_layers: int) -> tuple[int, ...]:
        return ()

    def score_layer(
        self, q_THD: torch.Tensor, k_SKD: torch.Tensor, plan: AttentionPlan, scale: float, blocks: int
    ) -> torch.Tensor:
        return self.score((), (), plan, scale, blocks)

    def score(
        self,
        queries: Sequence[torch.Tensor],
        keys: Sequence[torch.Tensor],
        plan: AttentionPlan,
        scale: float,
        blocks: int,
        kv_scales: Sequence[float] | None = None,
    ) -> torch.Tensor:
        block_N = torch.arange(blocks, dtype=torch.float32, device=plan.lens_B.device)
        return block_N.expand(len(plan), blocks)


SELECTORS: dict[str, type[Selector]] = {
    kind.name: kind
    for kind in (
        MassSelector,
        BoundSelector,
        SpecPvSelector,
        RecentSelector,
        SnapKvSelector,
        DustinSelector,
        WorstSelector,
    )
}


def make_selector(name: str, reduction: str = "mean", block: int = 16) -> Selector:
    """A selector by its name, for blocks of ``block`` columns.

    Raises:
        UserError: an unknown name, or a reduction over query rows that it does not have.
    """
    if name not in SELECTORS:
        raise UserError(
            f"selector={name!r} is unknown{nearest(name, list(SELECTORS))}: write one of {', '.join(SELECTORS)}"
        )
    kind = SELECTORS[name]
    if reduction not in (kind.reductions or ("mean",)):
        words = (
            f"write one of {', '.join(kind.reductions)}" if kind.reductions else "it has no choice of one, leave it out"
        )
        raise UserError(f"reduction={reduction!r} does not fit selector={name!r}: {words}")
    return kind(block, reduction)
