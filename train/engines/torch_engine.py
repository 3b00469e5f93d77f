"""The engine without a library: every rank holds the whole draft, gradients are summed over ranks."""

import math

import torch

from longdraft.train.config import OptimSettings
from longdraft.train.engines.base import Engine, Tensors, saved_master, saved_moments
from longdraft.train.engines.group import Group
from longdraft.train.engines.optimizers import build_optimizers
from longdraft.train.methods.base import Method, StepLoss
from longdraft.train.samples import Packed

MOMENTS = {torch.optim.AdamW: ("step", "exp_avg", "exp_avg_sq"), torch.optim.Muon: ("momentum_buffer",)}


class TorchEngine(Engine):
    """Steps float32 master weights; the draft computes in its own dtype (the masters themselves in float32)."""

    def __init__(self, method: Method, settings: OptimSettings, group: Group) -> None:
        self.method, self.group, self.clip = method, group, settings.clip
        self.live = {name: p for name, p in method.draft.named_parameters() if p.requires_grad}
        self.master = {
            name: p if p.dtype == torch.float32 else torch.nn.Parameter(p.detach().float())
            for name, p in self.live.items()
        }
        self.optimizers = build_optimizers(self.master, settings)

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
            p.copy_(saved_master(state, name, p.shape))
            # AdamW counts steps on the CPU and keeps its moments beside the weights.
            owner = self._owner(p)
            moments = saved_moments(state, name, p.shape, MOMENTS[type(owner)])
            owner.state[p] = {k: v if k == "step" else v.to(p.device) for k, v in moments.items()}
        self._copy_to_live()
