"""Drafts copied from the request's own tokens: no model, no training."""

from longdraft.serve.drafters.base import Drafter, DraftRequest, Pick
from longdraft.serve.drafters.suffix_automaton import SuffixAutomaton


class LookupDrafter(Drafter):
    """Continues the longest suffix that occurred before in the prompt or the output (prompt lookup decoding)."""

    def __init__(self, shortest: int) -> None:
        self.shortest = shortest
        self.indexes: dict[str, SuffixAutomaton] = {}

    def _index(self, request: DraftRequest) -> SuffixAutomaton:
        index = self.indexes.setdefault(request.rid, SuffixAutomaton())
        if len(index) > len(request.tokens):  # the same id with fewer tokens is another request
            index = self.indexes[request.rid] = SuffixAutomaton()
        for token in request.tokens.slice(len(index), len(request.tokens)):
            index.append(token)
        return index

    def propose(self, requests: list[DraftRequest], pick: Pick) -> list[list[int]]:
        return [self._index(r).continuation(r.limit, self.shortest) for r in requests]

    def committed(self, request: DraftRequest, tokens: list[int]) -> None:
        """Indexed at the next proposal."""

    def forget(self, rid: str) -> None:
        self.indexes.pop(rid, None)

    def clear(self) -> None:
        self.indexes.clear()
