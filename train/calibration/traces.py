"""What a search of layers needs to know of one text: attention of the target's rows and of a draft's chains along it, teacher forced.

Verification w has T committed tokens and C rows, the tokens T .. T + C - 1; the next one follows behind them. What chooses its set is
known before: the target's row at T - 1 or, at a lag, at T - lag, and the draft's C steps from token T on (Dustin, section 3).

Legend: G lags, S layers, W verifications, C rows of each, N tokens, R rows, H heads.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from longdraft.draft_models.repetition import ALLOWED, repeated_share
from longdraft.train.calibration.lookahead import Lookahead
from longdraft.train.calibration.reading import Reading


@dataclass(frozen=True)
class Windows:
    """Where verifications stand: ``count`` of ``rows`` rows, the first behind ``first`` tokens."""

    first: int
    count: int
    rows: int

    @property
    def starts(self) -> list[int]:
        """T of each."""
        return [self.first + i * self.rows for i in range(self.count)]

    @property
    def end(self) -> int:
        """Tokens of a text that are read."""
        return self.first + self.count * self.rows


@dataclass(frozen=True)
class Trace:
    """Attention along one text, on the CPU.

    Attributes:
        length_W: int64 committed tokens.
        attention_SWN: float32, mean over a layer's heads and a window's rows of attention over the committed tokens.
        history_GSWN: float32, sum over a layer's heads of the attention of the row at each lag.
        lookahead_SWN: float32, sum over a draft layer's heads and a chain's steps of attention over the committed tokens; no layers
            without a draft.
    """

    length_W: torch.Tensor
    attention_SWN: torch.Tensor
    history_GSWN: torch.Tensor
    lookahead_SWN: torch.Tensor

    def save(self, path: Path) -> None:
        """Write a safetensors file, in one move."""
        work = path.with_name(f".{path.name}")
        save_file({field.name: getattr(self, field.name).contiguous() for field in fields(self)}, work)
        work.replace(path)

    @staticmethod
    def load(path: Path) -> "Trace":
        """Read a file of :meth:`save`."""
        return Trace(**load_file(path))


class Tracer:
    """Traces texts with one pair of models and the heads that count.

    Args:
        model: the target.
        draft: None without one.
        target_heads: query heads of each of the target's layers.
        draft_heads: query heads of each of the draft's layers.
        lags: of the history; 1 is the last committed row.
    """

    def __init__(
        self,
        model: Any,
        draft: Lookahead | None,
        target_heads: Sequence[Sequence[int]],
        draft_heads: Sequence[Sequence[int]],
        lags: Sequence[int] = (1,),
    ) -> None:
        self.model, self.draft, self.lags = model, draft, list(lags)
        self.target_heads, self.draft_heads = dict(enumerate(target_heads)), draft_heads

    @torch.no_grad()
    def trace(self, ids: Sequence[int], windows: Windows) -> Trace:
        """Trace one text of ``windows.end`` tokens or more; at least the largest lag stands before the first verification."""
        starts, begin, keys = windows.starts, windows.first - max(self.lags), windows.starts[-1]
        assert begin >= 0 and len(ids) >= windows.end
        start_W = torch.tensor(starts, device=self.model.device)
        row_WC = start_W[:, None] + torch.arange(windows.rows, device=start_W.device) - begin
        hidden_WN = torch.arange(keys, device=start_W.device) >= start_W[:, None]
        attention: dict[int, torch.Tensor] = {}
        history: dict[int, torch.Tensor] = {}

        def see(layer: int, score_HRN: torch.Tensor) -> None:
            score_HRN = score_HRN[:, :, :keys]
            at_GW = torch.stack([start_W - lag - begin for lag in self.lags])
            history[layer] = score_HRN[:, at_GW].softmax(-1).sum(0).cpu()
            score_HWCN = score_HRN[:, row_WC].masked_fill(hidden_WN[:, None], float("-inf"))
            attention[layer] = score_HWCN.softmax(-1).mean((0, 2)).cpu()

        reading = Reading(self.model, self.draft.aux_layers if self.draft else ())
        reading.read(ids[:begin])
        reading.look(ids[begin : windows.end], see, self.target_heads)
        order = sorted(attention)
        return Trace(
            torch.tensor(starts),
            torch.stack([attention[layer] for layer in order]),
            torch.stack([history[layer] for layer in order], 1),
            self._lookahead(reading, starts, windows.rows),
        )

    def _lookahead(self, reading: Reading, starts: Sequence[int], steps: int) -> torch.Tensor:
        if self.draft is None:
            return torch.zeros(0, len(starts), starts[-1])
        found: dict[int, torch.Tensor] = {}

        def see(layer: int, score_HWCN: torch.Tensor) -> None:
            found[layer] = score_HWCN[self.draft_heads[layer]].softmax(-1).sum((0, 2)).cpu()

        self.draft.look(reading, starts, steps, see)
        return torch.stack([found[layer] for layer in sorted(found)])


def own_text(model: Any, ids: Sequence[int], new_tokens: int) -> list[int] | None:
    """A text's first tokens and the target's greedy continuation; None where that loops."""
    reading = Reading(model)
    logits, answer = reading.read(ids), []
    for _ in range(new_tokens):
        answer.append(int(logits.argmax()))
        logits = reading.read(answer[-1:])
    return None if repeated_share(answer) > ALLOWED else [*ids, *answer]
