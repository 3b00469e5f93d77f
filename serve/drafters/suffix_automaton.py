"""Online suffix automaton: the longest suffix of a token sequence that occurred before, in linear total time."""


class SuffixAutomaton:
    """Grows token by token in amortised constant time (Blumer et al.); states know where they were last continued."""

    def __init__(self) -> None:
        self.next: list[dict[int, int]] = [{}]
        self.link: list[int] = [-1]
        self.length: list[int] = [0]
        self.end: list[int] = [-1]  # index of the last token of a known occurrence
        self.last = 0
        self.tokens: list[int] = []

    def __len__(self) -> int:
        return len(self.tokens)

    def _state(self, length: int, end: int, transitions: dict[int, int], link: int) -> int:
        self.next.append(transitions)
        self.link.append(link)
        self.length.append(length)
        self.end.append(end)
        return len(self.next) - 1

    def append(self, token: int) -> None:
        """Add a token at the end."""
        at = len(self.tokens)
        self.tokens.append(token)
        # The state that is about to stop being the longest repeated suffix was seen again here, one token earlier.
        repeated = self.link[self.last]
        new = self._state(self.length[self.last] + 1, at, {}, 0)
        node = self.last
        while node != -1 and token not in self.next[node]:
            self.next[node][token] = new
            node = self.link[node]
        if node != -1:
            target = self.next[node][token]
            if self.length[node] + 1 == self.length[target]:
                self.link[new] = target
            else:
                clone = self._state(self.length[node] + 1, self.end[target], dict(self.next[target]), self.link[target])
                while node != -1 and self.next[node].get(token) == target:
                    self.next[node][token] = clone
                    node = self.link[node]
                self.link[target] = self.link[new] = clone
        if repeated > 0:
            self.end[repeated] = at - 1
        self.last = new

    def match(self) -> tuple[int, int]:
        """``(length, end)``: the longest suffix seen before and the index of its earlier occurrence's last token."""
        state = self.link[self.last]
        return (self.length[state], self.end[state]) if state > 0 else (0, -1)

    def continuation(self, count: int, shortest: int) -> list[int]:
        """Up to ``count`` tokens that followed the earlier occurrence of the longest repeated suffix; [] below ``shortest``."""
        length, end = self.match()
        if length < shortest:
            return []
        out = self.tokens[end + 1 : end + 1 + count]
        while out and len(out) < count:  # an occurrence that runs into the end repeats itself
            out = out + out[: count - len(out)]
        return out
