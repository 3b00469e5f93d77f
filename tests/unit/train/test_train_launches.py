"""A training step's operations do not grow with its documents, and none waits for a figure of the device on the way.

Counted on a CPU, where the packed attention's kernel is torch's twin, whose own operations do not count.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from flash_stand_in import RecordingTwin, flash_in_torch
from tiny import tiny_draft, tiny_target
from torch.utils._python_dispatch import TorchDispatchMode

from longdraft.kernels.linear_cross_entropy import IGNORED
from longdraft.train.config import DataSettings, TargetSettings, TrainSettings
from longdraft.train.methods.longspec import LongSpecMethod
from longdraft.train.samples import Packed

TOKENS = 240


class Operations(TorchDispatchMode):
    """Names of what is dispatched, outside of :meth:`paused` functions."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self.counting = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[str(func)] += self.counting
        return func(*args, **(kwargs or {}))

    @contextmanager
    def _paused(self) -> Iterator[None]:
        self.counting = False
        try:
            yield
        finally:
            self.counting = True

    def paused(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            with self._paused():
                return function(*args)

        return call


def batch_of(documents: int) -> Packed:
    length = TOKENS // documents
    cu = list(range(0, TOKENS + 1, length))
    ids = torch.randint(0, 256, (TOKENS,), generator=torch.Generator().manual_seed(0))
    label = ids.roll(-1)
    label[[end - 1 for end in cu[1:]]] = IGNORED
    return Packed(ids, torch.arange(length).repeat(documents), label, cu, ["x"] * documents)


def operations(documents: int, objective: str, patch: pytest.MonkeyPatch) -> Counter[str]:
    """Of one micro-batch: the target's pass, the draft's, the loss and the backward pass."""
    target = tiny_target("llama", num_hidden_layers=3)
    settings = TrainSettings(
        target=TargetSettings(path="none"), data=DataSettings(train="none"), objective={"name": objective}
    )
    method = LongSpecMethod(settings, target, tiny_draft(target, window=4))
    seen = Operations()
    twin = flash_in_torch(patch)
    for name in ("forward", "backward"):
        patch.setattr(f"longdraft.kernels.span_flash.flash_varlen_{name}", seen.paused(getattr(twin, name)))
    patch.setattr(method, "lag", lambda step: 1)  # drawn on the CPU
    batch = batch_of(documents)
    with seen:
        method(batch, 1).loss.backward()
    assert isinstance(twin, RecordingTwin)
    assert (len(twin.given), twin.launches) == (3 + 2, 2), "three layers, the window and the lag"
    return seen.counts


@pytest.mark.parametrize("objective", ["ce", "kl"])
def test_forty_documents_take_the_operations_of_two(objective: str, monkeypatch: pytest.MonkeyPatch) -> None:
    few, many = (operations(documents, objective, monkeypatch) for documents in (2, 40))
    assert few == many
    assert few["aten.mm.default"] > 10, "the count sees the step"
    assert few["aten._local_scalar_dense.default"] == 0
    assert few["aten.nonzero.default"] == 1, "which rows are supervised: the one wait of a micro-batch"
