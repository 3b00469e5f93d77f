"""A text that a model has read: its cache, features for a draft where one wants them, and attention scores of rows on demand.

Legend: L tokens, R rows, V vocabulary, A features.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from transformers import DynamicCache

from longdraft.draft_models.attention_rows import Look, run_looking
from longdraft.draft_models.aux_features import aux_features

CHUNK = 2048  # tokens of a pass over a prompt
See = Callable[[int, torch.Tensor], None]


class Reading:
    """One text, read from the front.

    Args:
        model: a transformers causal language model whose attention we know.
        aux_layers: layers whose outputs are kept, as an EAGLE-3 draft reads them; none if empty.
    """

    def __init__(self, model: Any, aux_layers: Sequence[int] = ()) -> None:
        self.model, self.aux_layers = model, tuple(aux_layers)
        self.cache, self.ids = DynamicCache(), list[int]()
        self._aux: list[torch.Tensor] = []

    def __len__(self) -> int:
        return len(self.ids)

    def read(self, ids: Sequence[int]) -> torch.Tensor:
        """Go on; logits ``[V]`` behind the last token."""
        logits = torch.empty(0)
        for start in range(0, len(ids), CHUNK):
            logits = self._run(ids[start : start + CHUNK], None, logits_to_keep=1)[-1]
        return logits

    def look(self, ids: Sequence[int], see: See, heads: Mapping[int, Sequence[int]] | None = None) -> torch.Tensor:
        """Go on in one pass and show the scores of all its rows; logits ``[len(ids), V]``."""
        row_R = torch.arange(len(ids), device=self.model.device)
        return self._run(ids, Look(row_R, see, heads))

    def back_to(self, length: int) -> None:
        """Forget what stands behind the first ``length`` tokens."""
        self.cache.crop(length)
        del self.ids[length:]
        if self._aux:
            self._aux = [torch.cat(self._aux)[:length]]

    @property
    def aux_LA(self) -> torch.Tensor:
        """Features of all tokens, low layer first."""
        self._aux = [torch.cat(self._aux)]
        return self._aux[0]

    def _run(self, ids: Sequence[int], look: Look | None, **more: Any) -> torch.Tensor:
        id_L = torch.tensor(ids, device=self.model.device)
        with aux_features(self.model, self.aux_layers) if self.aux_layers else nullcontext() as seen:
            logits = run_looking(self.model, id_L, self.cache, look, **more)
            if seen is not None:
                self._aux.append(seen.take()[0])
        self.ids += ids
        return logits
