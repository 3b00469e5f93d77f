"""What SGLang's overlap schedule carries from one round to the next for us: how many tokens each request has, and no more."""

from typing import Any

import torch
from sglang.srt.managers.overlap_utils import FutureMap


class LengthRelay(FutureMap):
    """SGLang's relay without the drafts' part: newest tokens stay with the worker, which runs on one stream.

    Its lengths are not pulled to the host, where nothing needs them before the round's result is processed.
    """

    def stash(self, future_indices: torch.Tensor, payload: Any) -> None:
        """Nothing to keep; SGLang's reads an EAGLE draft's fields."""

    def _resolve_spec_extras(self, batch: Any) -> None:
        """Nothing to give back."""
