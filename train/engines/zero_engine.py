"""DeepSpeed's ZeRO stages 1 to 3, with or without offload to the host.

The resume state is ours, in the form that every engine shares (whole tensors, safetensors), not DeepSpeed's: that one is a
pickle, which a foreign checkpoint could use to run code, and it is bound to the number of ranks.
"""

import copy
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from longdraft.train.config import TrainSettings
from longdraft.train.engines.base import Engine, Tensors, saved_master, saved_moments
from longdraft.train.engines.group import TIMEOUT, Group
from longdraft.train.engines.optimizers import build_optimizers
from longdraft.train.engines.zero_config import zero_config
from longdraft.train.methods.base import Method, StepLoss
from longdraft.train.samples import Packed

MOMENTS = ("exp_avg", "exp_avg_sq")


def start_library(group: Group) -> Any:
    """Import DeepSpeed for the group's device and let it use the group's processes; returns the module."""
    if group.device.type == "cpu":
        os.environ["DS_ACCELERATOR"] = "cpu"
    os.environ.setdefault("LOCAL_RANK", "0")
    import deepspeed

    deepspeed.utils.logger.setLevel(logging.WARNING)
    if not dist.is_initialized():  # one process, started without torchrun
        backend = "gloo" if group.device.type == "cpu" else "nccl"
        dist.init_process_group(
            backend, store=torch._C._distributed_c10d.HashStore(), rank=0, world_size=1, timeout=TIMEOUT
        )
    # On CPUs DeepSpeed would compile its own shared-memory collectives; gloo's are at hand.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(dist_backend=dist.get_backend(), verbose=False)
    return deepspeed


class _Trained(nn.Module):
    """The method as DeepSpeed wants it: nothing but the loss goes through its hooks, and every weight has a gradient.

    ZeRO-3 looks for tensors in what goes in and out, and waits for the gradient of each that comes out: counts have none.
    Ranks reduce gradients weight by weight, so a rank whose micro-batch leaves a weight unused would hang the others.
    """

    def __init__(self, method: Method) -> None:
        super().__init__()
        self.method = method
        self.given: tuple[Packed, int] | None = None
        self.out: StepLoss | None = None

    def forward(self) -> torch.Tensor:
        assert self.given is not None
        self.out = self.method.forward(*self.given)
        used = sum(p.flatten()[0] for p in self.method.draft.parameters() if p.requires_grad)
        loss: torch.Tensor = self.out.loss + 0.0 * used
        return loss


def hollow_copy(draft: Any) -> Any:
    """A draft of its own modules without hooks and without weights yet; what it was lent and its buffers are shared."""
    memo: dict[int, Any] = {}
    for module in draft.modules():
        for value in vars(module).values():
            shared = value if isinstance(value, tuple | list) else [value]
            memo |= {id(t): t for t in shared if isinstance(t, torch.Tensor)}
        memo |= {id(t): t for t in module.buffers(recurse=False)}
    twin = copy.deepcopy(draft, memo)
    empty(twin)
    return twin


def empty(draft: nn.Module) -> None:
    for p in draft.parameters():
        p.data = p.data.new_empty(0)


class ZeroEngine(Engine):
    """Steps float32 masters that are spread over the ranks; the draft computes in its own dtype."""

    def __init__(self, method: Method, settings: TrainSettings, group: Group) -> None:
        self.method, self.group = method, group
        self.held = dict(method.draft.named_parameters())
        self.live = {name: p for name, p in self.held.items() if p.requires_grad}
        self.shapes = {name: p.shape for name, p in self.live.items()}
        self.library = start_library(group)
        config = zero_config(settings, next(iter(self.live.values())).dtype)
        self.stage: int = config["zero_optimization"]["stage"]
        self.trained = _Trained(method)
        self.twin = hollow_copy(method.draft) if self.stage == 3 else method.draft
        [optimizer] = build_optimizers(self.live, settings.optim)
        self.engine, self.zero, *_ = self.library.initialize(
            model=self.trained, optimizer=optimizer, config=config, dist_init_required=False
        )
        if self.stage == 3:
            # The draft is gathered as one: a method may use a weight outside its own module, as a chunked loss does.
            for p in self.live.values():
                self.library.zero.register_external_parameter(self.trained, p)
        self._create_moments()

    def loss(self, batch: Packed, step: int) -> StepLoss:
        self.trained.given = (batch, step)
        loss = self.engine()
        assert self.trained.out is not None
        return replace(self.trained.out, loss=loss)

    def backward(self, loss: torch.Tensor) -> None:
        # DeepSpeed averages over ranks; our loss is divided by the tokens of all ranks already.
        self.engine.backward(loss * self.group.world, scale_wrt_gas=False)
        if not self.engine.is_gradient_accumulation_boundary():
            self.engine.step()  # only counts the micro-batch

    def step(self, lr: float) -> float:
        assert self.engine.is_gradient_accumulation_boundary(), "fewer micro-batches than schedule.accumulate"
        for group in self.zero.param_groups:
            group["lr"] = lr
        self.engine.step()  # a norm that is not finite skips the update and reads inf
        return float(self.engine.get_global_grad_norm())

    def weights(self) -> Tensors:
        out: Tensors = {}
        for name, p in self.held.items():
            with self._gathered([p]):
                if self.group.rank == 0:
                    out[name] = p.detach().to("cpu", copy=True)
        return out

    def state(self) -> Tensors:
        """As :meth:`Engine.state`; one weight at a time is whole on the device, all of them in rank 0's host memory."""
        utils = self.library.utils
        out: Tensors = {}
        steps = self._step_count()
        for name, p in self.live.items():
            parts = {f"master.{name}": utils.safe_get_full_fp32_param(p)}
            for key in MOMENTS:
                parts[f"optimizer.{name}.{key}"] = utils.safe_get_full_optimizer_state(p, key)
            if self.group.rank == 0:
                out |= {k: v.detach().to("cpu", copy=True) for k, v in parts.items()}
                out[f"optimizer.{name}.step"] = steps.clone()
        return out

    @torch.no_grad()
    def load_state(self, state: Tensors) -> None:
        masters = {name: saved_master(state, name, shape) for name, shape in self.shapes.items()}
        moments = {name: saved_moments(state, name, self.shapes[name], ("step", *MOMENTS)) for name in masters}
        steps = moments[next(iter(masters))]["step"]
        for flat in self._flat_masters():
            self.zero.optimizer.state[flat]["step"].copy_(steps)
        for name, p in self.live.items():
            self._set(p, masters[name], None)
            for key in MOMENTS:
                self._set(p, moments[name][key], key)
            with self._gathered([p], modifier_rank=0):
                p.data.copy_(masters[name])

    @contextmanager
    def whole(self) -> Iterator[Any]:
        """A copy under ZeRO-3: the draft's own modules gather weights whenever they run, which ranks cannot do alone."""
        if self.stage < 3:
            yield self.method.draft
            return
        copies = dict(self.twin.named_parameters())
        for name, p in self.held.items():
            with self._gathered([p]):
                copies[name].data = p.detach().clone()
        yield self.twin
        empty(self.twin)

    def _gathered(self, parameters: list[nn.Parameter], modifier_rank: int | None = None) -> Any:
        return self.library.zero.GatheredParameters(parameters, modifier_rank=modifier_rank, enabled=self.stage == 3)

    def _flat_masters(self) -> list[torch.Tensor]:
        """This rank's stretches of the float32 masters, which the optimizer steps; each stage names them differently."""
        for name in ("fp32_partitioned_groups_flat", "single_partition_of_fp32_groups", "fp32_groups_flat_partition"):
            found: list[torch.Tensor] | None = getattr(self.zero, name, None)
            if found is not None:
                return found
        raise AssertionError(f"{type(self.zero).__name__} has no flat masters: another DeepSpeed than was tested")

    def _step_count(self) -> torch.Tensor:
        step: torch.Tensor = self.zero.optimizer.state[self._flat_masters()[0]]["step"]
        return step.detach().to("cpu", torch.float32)

    def _create_moments(self) -> None:
        """What the first step would create: a resumed run fills it, and DeepSpeed links each weight to it once.

        Left to itself it links after the first parameter group's first step, when the others have nothing yet.
        """
        for flat in self._flat_masters():
            self.zero.optimizer.state[flat] = {
                "step": torch.tensor(0.0),
                **{key: torch.zeros_like(flat) for key in MOMENTS},
            }
        if self.stage < 3:
            self.zero._lazy_init_hp_params_optimizer_state()

    def _set(self, p: Any, value: torch.Tensor, moment: str | None) -> None:
        utils = self.library.utils
        value = value.to(p.device, torch.float32)
        if self.stage == 3:  # its setter of whole tensors fails where ranks do not divide a weight
            count = p.partition_numel()
            padded = nn.functional.pad(value.flatten(), (0, count * self.group.world - value.numel()))
            mine = padded.narrow(0, count * self.group.rank, count)
            if moment is None:
                utils.safe_set_local_fp32_param(p, mine)
            else:
                utils.safe_set_local_optimizer_state(p, mine, moment)
        elif moment is None:
            utils.safe_set_full_fp32_param(p, value)
        else:
            utils.safe_set_full_optimizer_state(p, value, moment)
