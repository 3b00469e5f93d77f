"""Engines: who holds the weights, reduces gradients and steps the optimizer. torch here; others implement :class:`Engine`."""

import ctypes
import math
import os
import signal
import sys
from abc import ABC, abstractmethod
from datetime import timedelta
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from longdraft.errors import UserError
from longdraft.train.config import EngineSettings, OptimSettings, TrainSettings
from longdraft.train.methods.base import Method, StepLoss
from longdraft.train.samples import Packed

Tensors = dict[str, torch.Tensor]
TIMEOUT = timedelta(hours=1)  # ranks wait for each other while one saves or evaluates a long prompt


class Group:
    """The processes of a run: one, or what torchrun started (gloo on CPUs, NCCL on GPUs)."""

    def __init__(self, settings: EngineSettings) -> None:
        self.rank, self.world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
        if settings.device == "cuda" and not torch.cuda.is_available():
            raise UserError("engine.device='cuda' but torch sees no GPU: use engine.device=cpu")
        cuda = settings.device != "cpu" and torch.cuda.is_available()
        self.device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if cuda else torch.device("cpu")
        if cuda:
            torch.cuda.set_device(self.device)
        if self.world > 1:
            die_with_parent()
            dist.init_process_group(
                "nccl" if cuda else "gloo", timeout=TIMEOUT, device_id=self.device if cuda else None
            )

    def sum(self, value: torch.Tensor) -> torch.Tensor:
        """The elementwise sum over all ranks, in place."""
        if self.world > 1:
            dist.all_reduce(value)
        return value

    def totals(self, *values: float) -> list[float]:
        """Sums over all ranks of a few numbers, in float64."""
        packed = torch.tensor(values, dtype=torch.float64, device=self.device)
        return [float(x) for x in self.sum(packed).tolist()]

    def gather(self, value: int) -> list[int]:
        """One integer from every rank, in rank order."""
        mine = torch.zeros(self.world, dtype=torch.int64, device=self.device)
        mine[self.rank] = value
        return [int(x) for x in self.sum(mine).tolist()]

    def gather_names(self, names: list[str]) -> list[str]:
        """All ranks' names, in rank order."""
        if self.world == 1:
            return names
        every: list[list[str]] = [[] for _ in range(self.world)]
        dist.all_gather_object(every, names)
        return [name for part in every for name in part]

    def barrier(self) -> None:
        self.gather(0)

    def close(self) -> None:
        if self.world > 1 and dist.is_initialized():
            dist.destroy_process_group()


def die_with_parent() -> None:
    """Have Linux end this rank when torchrun dies: killed hard, it would leave ranks that train on beside a resumed run."""
    if sys.platform == "linux":
        set_parent_death_signal = 1
        ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)


class StopSignal:
    """Turns SIGTERM and the first Ctrl-C into a flag that the loop reads between steps."""

    def __init__(self) -> None:
        self.name: str | None = None
        self._former = {s: signal.signal(s, self._receive) for s in (signal.SIGTERM, signal.SIGINT)}

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self.name = signal.Signals(number).name
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a second Ctrl-C ends at once

    def restore(self) -> None:
        for number, handler in self._former.items():
            signal.signal(number, handler)


class Engine(ABC):
    """Trains one draft. All methods are collective: every rank calls them in the same order."""

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
        """The draft's whole weights in its own dtype, as a checkpoint holds them."""

    @abstractmethod
    def state(self) -> Tensors:
        """What a bitwise resume needs beside counters: master weights and optimizer moments, flat names."""

    @abstractmethod
    def load_state(self, state: Tensors) -> None:
        """Continue from :meth:`state`.

        Raises:
            UserError: a state of another draft.
        """


def build_optimizers(parameters: list[torch.nn.Parameter], settings: OptimSettings) -> list[torch.optim.Optimizer]:
    """What ``optim.name`` asks for: vectors are never decayed, and never Muon's (it orthogonalises matrices)."""
    matrices = [p for p in parameters if p.dim() > 1]
    vectors = [p for p in parameters if p.dim() <= 1]
    if settings.name == "adamw":
        groups: list[dict[str, Any]] = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
        return [_adamw([g for g in groups if g["params"]], settings)]
    # Steps scaled to AdamW's root mean square, so that one learning rate suits matrices and vectors.
    muon = torch.optim.Muon(
        matrices, lr=settings.lr, weight_decay=settings.weight_decay, adjust_lr_fn="match_rms_adamw"
    )
    return [muon, _adamw([{"params": vectors, "weight_decay": 0.0}], settings)] if vectors else [muon]


def _adamw(groups: list[dict[str, Any]], settings: OptimSettings) -> torch.optim.Optimizer:
    return torch.optim.AdamW(
        groups, lr=settings.lr, betas=settings.betas, eps=settings.eps, weight_decay=settings.weight_decay
    )


class TorchEngine(Engine):
    """Steps float32 master weights; the draft computes in its own dtype (the masters themselves in float32)."""

    def __init__(self, method: Method, settings: OptimSettings, group: Group) -> None:
        self.method, self.group, self.clip = method, group, settings.clip
        self.live = {name: p for name, p in method.draft.named_parameters() if p.requires_grad}
        self.master = {
            name: p if p.dtype == torch.float32 else torch.nn.Parameter(p.detach().float())
            for name, p in self.live.items()
        }
        self.optimizers = build_optimizers(list(self.master.values()), settings)

    def loss(self, batch: Packed, step: int) -> StepLoss:
        out: StepLoss = self.method(batch, step)
        return out

    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()
        for name, p in self.live.items():
            master = self.master[name]
            if master is not p and p.grad is not None:  # micro-batches add up in float32
                master.grad = p.grad.float() if master.grad is None else master.grad.add_(p.grad)
                p.grad = None

    def step(self, lr: float) -> float:
        masters = list(self.master.values())
        for p in masters:
            if p.grad is None:  # a rank without a supervised row still takes part
                p.grad = torch.zeros_like(p)
            self.group.sum(p.grad)
        norm = float(torch.nn.utils.clip_grad_norm_(masters, self.clip))
        if math.isfinite(norm):
            for optimizer in self.optimizers:
                for group in optimizer.param_groups:
                    group["lr"] = lr
                optimizer.step()
            self._copy_to_live()
        for p in masters:
            p.grad = None
        return norm

    def _owner(self, parameter: torch.nn.Parameter) -> torch.optim.Optimizer:
        """The optimizer that steps a weight."""
        owns = (o for o in self.optimizers for g in o.param_groups if any(p is parameter for p in g["params"]))
        return next(owns)

    @torch.no_grad()
    def _copy_to_live(self) -> None:
        for name, p in self.live.items():
            if self.master[name] is not p:
                p.copy_(self.master[name])

    def weights(self) -> Tensors:
        return {name: p.detach() for name, p in self.live.items()}

    def state(self) -> Tensors:
        out: Tensors = {}
        for name, p in self.master.items():
            out[f"master.{name}"] = p.detach()
            for key, value in self._owner(p).state.get(p, {}).items():
                out[f"optimizer.{name}.{key}"] = value
        return out

    @torch.no_grad()
    def load_state(self, state: Tensors) -> None:
        for name, p in self.master.items():
            saved = state.get(f"master.{name}")
            if saved is None or saved.shape != p.shape:
                found = "missing" if saved is None else tuple(saved.shape)
                raise UserError(
                    f"resume state has master.{name} {found}, the draft needs {tuple(p.shape)}: start another run.name"
                )
            p.copy_(saved)
            prefix = f"optimizer.{name}."
            moments = {k.removeprefix(prefix): v for k, v in state.items() if k.startswith(prefix)}
            # AdamW counts steps on the CPU and keeps its moments beside the weights.
            self._owner(p).state[p] = {k: v if k == "step" else v.to(p.device) for k, v in moments.items()}
        self._copy_to_live()


def build_engine(method: Method, settings: TrainSettings, group: Group) -> Engine:
    """The engine that ``engine.name`` asks for."""
    return TorchEngine(method, settings.optim, group)
