"""What rounds with sets of tokens need beside those on views: who has one, its choice behind every draft, and its history (Dustin).

Requests of mode ``sparse`` have one; with the selector ``dustin`` those of the other modes with views too.

Legend: B requests, T tokens of a verification.
"""

from collections.abc import Sequence

import torch

from longdraft.kernels.transfer import to_device
from longdraft.serve.drafters.running import Running
from longdraft.serve.roster import Roster
from longdraft.serve.views.set_chooser import Group, SetChooser
from longdraft.serve.views.token_set import SparseBudget


class SparseRounds:
    """Chooses the sets of a batch's requests, and goes without a new one where that fails."""

    def __init__(self, sets: SetChooser, budget: SparseBudget, viewed: SparseBudget | None) -> None:
        """Take what chooses.

        Args:
            sets: of the server.
            budget: of mode ``sparse``, the largest.
            viewed: of the other modes with views; None: those choose blocks.
        """
        self.sets, self.budget, self.viewed = sets, budget, viewed
        self.grouped: tuple[Roster, list[Group]] | None = None

    def budget_of(self, mode: str, own: int) -> SparseBudget | None:
        """The budget of a request; None of one that has no sets.

        Args:
            mode: of the request.
            own: tokens that it asks for, 0 for the server's.
        """
        if mode == "sparse":
            return scaled(self.budget, min(own or self.budget.tokens, self.budget.tokens))
        return self.viewed if mode in ("exact", "partial") else None

    def use_graphs(self, sizes: Sequence[int], mode: str) -> None:
        """Choose from graphs at these batch sizes, on a card; those for the server's own mode are made now."""
        first = [self.budget] if mode == "sparse" or self.viewed is None else [self.viewed]
        others = [b for b in (self.budget, self.viewed) if b is not None and b not in first]
        self.sets.use_graphs(sizes, first + others)

    def prefilled(self, row_B: torch.Tensor) -> None:
        """A prefill has ended in these rows."""
        try:
            self.sets.prefilled(row_B)
        except Exception:
            self._failed("a prefill's queries could not be kept")

    def verified(self, row_B: torch.Tensor, width: int, last_B: torch.Tensor) -> None:
        """A verification of ``width`` tokens a request has ended, of which ``last_B`` is the last that was accepted.

        Of requests of different widths, ``width`` is 0 and ``last_B`` counts the rows of all.
        """
        try:
            self.sets.verified(row_B, width, last_B)
        except Exception:
            self._failed("a verification's queries could not be kept")

    def choose(
        self, roster: Roster, budgets: Sequence[int], running: Running, longest: int, drafted: bool
    ) -> tuple[bool, torch.Tensor | None]:
        """New sets for everybody that has them.

        Args:
            roster: of the batch.
            budgets: tokens that each request asks for, 0 for the server's.
            running: the batch.
            longest: nobody has more cached tokens.
            drafted: whether the drafter has just drafted for it.

        Returns:
            Whether they were chosen; and the share of attention that each request's former set lacked, None where that is not
            measured.
        """
        groups = self._groups(roster, budgets)
        if not groups:
            return True, None
        try:
            return True, self.sets.choose(running, groups, drafted, longest)
        except Exception:
            self._failed("no set of tokens could be chosen, its requests keep theirs")
            return False, None

    def _groups(self, roster: Roster, budgets: Sequence[int]) -> list[Group]:
        if self.grouped is None or self.grouped[0] is not roster:
            each = [self.budget_of(mode, own) for mode, own in zip(roster.modes, budgets, strict=True)]
            groups = []
            for budget in dict.fromkeys(b for b in each if b is not None):
                where = [b == budget for b in each]
                groups.append(Group(budget, None if all(where) else to_device(where, torch.bool, roster.end_B.device)))
            self.grouped = roster, groups
        return self.grouped[1]

    def _failed(self, what: str) -> None:
        self.sets.ranks.failed("longdraft: %s", what)


def scaled(budget: SparseBudget, tokens: int) -> SparseBudget:
    """The same division between lookahead and history of other budgets."""
    free = tokens - budget.sinks - budget.window
    return SparseBudget(tokens, budget.sinks, budget.window, round(budget.lookahead * free / budget.most_lookahead))
