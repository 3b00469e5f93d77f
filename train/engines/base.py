"""What the training loop asks of an engine: who holds the weights, reduces gradients and steps the optimizer."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from longdraft.errors import UserError
from longdraft.train.methods.base import Method, StepLoss
from longdraft.train.samples import Packed

Tensors = dict[str, torch.Tensor]


class Engine(ABC):
    """Trains one draft. All methods are collective: every rank calls them in the same order."""

    method: Method

    @abstractmethod
    def loss(self, batch: Packed, step: int) -> StepLoss:
        """The method's summed loss of one micro-batch of this rank."""

    @abstractmethod
    def backward(self, loss: torch.Tensor) -> None:
        """Add the gradient of this rank's share of the loss, which is already divided by the global token count."""

    @abstractmethod
    def step(self, lr: float) -> float:
        """Sum gradients over ranks, clip, update, clear. Returns the norm before clipping; a norm that is not finite
        leaves the weights as they are."""

    @abstractmethod
    def weights(self) -> Tensors:
        """The draft's whole trained weights in its own dtype, as a checkpoint holds them. Only rank 0's are whole: other
        ranks may get none."""

    @abstractmethod
    def state(self) -> Tensors:
        """What a bitwise resume needs beside counters: ``master.<weight>`` in float32, ``optimizer.<weight>.<moment>``.

        Whole tensors, the same names from every engine at every number of ranks, so each resumes what another saved. As
        with :meth:`weights`, only rank 0's are whole.
        """

    @abstractmethod
    def load_state(self, state: Tensors) -> None:
        """Continue from rank 0's :meth:`state`, which every rank has read.

        Raises:
            UserError: a state of another draft.
        """

    def whole(self) -> AbstractContextManager[Any]:
        """The draft with whole weights, for evaluation: inside, each rank runs it on its own, as often as it likes."""
        return nullcontext(self.method.draft)


def saved_master(state: Tensors, name: str, shape: torch.Size) -> torch.Tensor:
    """A weight's float32 master from :meth:`Engine.state`.

    Raises:
        UserError: none, or one of another shape.
    """
    saved = state.get(f"master.{name}")
    if saved is None or saved.shape != shape:
        found = "missing" if saved is None else tuple(saved.shape)
        raise UserError(
            f"resume state has master.{name} {found}, the draft needs {tuple(shape)}: start another run.name"
        )
    return saved


def saved_moments(state: Tensors, name: str, shape: torch.Size, keys: Sequence[str]) -> Tensors:
    """A weight's optimizer tensors from :meth:`Engine.state`, by the optimizer's own names.

    Raises:
        UserError: one is missing (the run would go on as if it began) or is of another shape.
    """
    found = {}
    for key in keys:
        saved, want = state.get(f"optimizer.{name}.{key}"), torch.Size() if key == "step" else shape
        if saved is None or saved.shape != want:
            is_there = "missing" if saved is None else tuple(saved.shape)
            raise UserError(
                f"resume state has optimizer.{name}.{key} {is_there}, the draft needs {tuple(want)}: start another run.name"
            )
        found[key] = saved
    return found
