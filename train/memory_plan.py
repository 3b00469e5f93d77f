"""Memory a rank from shapes alone, by engine, and what to change in a plan that does not fit.

In bytes, with P draft parameters, R ranks and i bytes of the draft's type:

=========  ==================  =============================  ==========================  =====================
engine     weights             gradients                      masters and moments         on the host
=========  ==================  =============================  ==========================  =====================
torch      iP                  4P (+ iP of a 16-bit draft)    8P (+ 4P of a 16-bit one)
ZeRO-1     iP                  iP + 4P                        12P / R
ZeRO-2     iP                  iP + 4P / R                    12P / R                     16P / R if offloaded
ZeRO-3     iP (1 + 1 / R)      iP + 4P / R                    12P / R                     16P / R if offloaded
=========  ==================  =============================  ==========================  =====================

With the optimizer on the host, iP of gradients stay. ZeRO-3 gathers the draft as one while a step runs. A sharded target takes its share, two whole layers and prefetching, and whole
copies of the embedding and the head, which the draft borrows. Where ranks divide samples (``engine.sequence``), activations are of a
rank's rows, keys and values of all.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from longdraft.draft_models.target import TargetSpec
from longdraft.errors import UserError
from longdraft.schema import validate
from longdraft.train.config import TrainSettings
from longdraft.train.engines.zero_config import offloads, read_zero_file
from longdraft.train.target import resolve_dtype

RESERVE = 3 << 30  # the CUDA context, NCCL's buffers, and what an allocator cannot use
ZERO2, ZERO3 = "recipes/deepspeed/zero2.yaml", "recipes/deepspeed/zero3.yaml"


@dataclass(frozen=True)
class Memory:
    """Bytes a rank. Activations are an upper estimate for a full micro-batch; allocators and libraries add 1 to 3 GiB."""

    target: int
    draft: int
    activations: int
    host: int = 0

    @property
    def total(self) -> int:
        return self.target + self.draft + self.activations


def device_of(settings: TrainSettings) -> torch.device:
    """Where the run would compute; a plan for GPUs of a given size is for GPUs, wherever it is made."""
    cuda = settings.engine.device != "cpu" and (torch.cuda.is_available() or settings.plan.gpu_gib is not None)
    return torch.device("cuda" if cuda else "cpu")


def estimate_memory(
    spec: TargetSpec, parameters: tuple[int, int], settings: TrainSettings, device: torch.device, world: int = 1
) -> Memory:
    """Bytes a rank, from shapes alone.

    Args:
        spec: the target's shapes.
        parameters: of the target and of the draft.
        settings: engine, lengths, batch, dtypes.
        device: decides ``auto`` dtypes.
        world: R.
    """
    item = resolve_dtype(settings.engine.dtype, device).itemsize
    draft, host = _draft_bytes(parameters[1], item, settings, world)
    target = _target_bytes(spec, parameters[0], settings, device, world)
    return Memory(target, draft, _activations(spec, settings, device, shares_of(settings, world)), host)


def shares_of(settings: TrainSettings, world: int) -> int:
    """How many ranks divide a sample."""
    return world if settings.engine.sequence else 1


def _draft_bytes(count: int, item: int, settings: TrainSettings, world: int) -> tuple[int, int]:
    """Of the device and the host: weights, gradients, masters and moments."""
    if settings.engine.name == "torch":
        # Weights, float32 gradients and the moments (AdamW has two, Muon one); 16-bit drafts add float32 masters and their
        # own gradients.
        stepped = {"adamw": 16, "muon": 12}[settings.optim.name]
        return count * (stepped if item == 4 else 2 * item + stepped), 0
    file = read_zero_file(settings)
    stage = file["zero_optimization"]["stage"]
    weights = item * count + (item * count // world if stage == 3 else 0)
    gradients = item * count + (4 * count if stage == 1 else 4 * count // world)
    stepped = 12 * count // world
    if not offloads(file, "offload_optimizer"):
        return weights + gradients + stepped, 0
    return weights + item * count, 16 * count // world


def _target_bytes(spec: TargetSpec, count: int, settings: TrainSettings, device: torch.device, world: int) -> int:
    item = resolve_dtype(settings.target.dtype, device).itemsize
    if not settings.target.shard:
        return count * item
    table = spec.vocab_size * spec.hidden_size
    layer = max(count - 2 * table, 0) // spec.num_layers
    return item * (count // world + 2 * table + 2 * max(layer, table))


def _activations(spec: TargetSpec, settings: TrainSettings, device: torch.device, shares: int) -> int:
    item_target = resolve_dtype(settings.target.dtype, device).itemsize
    item = resolve_dtype(settings.engine.dtype, device).itemsize
    whole = settings.schedule.micro_batch * settings.data.max_length
    tokens = -(-whole // shares)
    wide, narrow = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    hidden, inner = spec.hidden_size, spec.intermediate_size
    kept = item * (12 * hidden + 4 * inner + 8 * wide + 6 * narrow) + 4 * 3 * (2 * wide + narrow)
    eagle3 = settings.draft.arch == "eagle3"
    scored = (settings.eagle3.draft_vocab_size if eagle3 else settings.draft.head_tokens) or spec.vocab_size
    if eagle3:
        # Every step keeps what enters its projections and MLP and its own keys; the features are three hidden rows.
        kept = item * (12 * hidden + settings.ttt.steps * (5 * hidden + 3 * wide + 2 * narrow))
    logits = min(tokens, settings.objective.chunk) * scored * (24 if settings.objective.name == "kl" else 12)
    cache = 2 * narrow * item_target * (1 if eagle3 else len(settings.draft.cross_layers) or 1)
    at_once = min(tokens, max(settings.target.max_batch_tokens, settings.data.max_length))
    passing = at_once * item_target * (4 * hidden + 3 * inner + 3 * wide)
    if (
        shares > 1
    ):  # keys and values of all rows: of the target's running layer, and their gradients, which nobody needs
        passing, logits = passing + whole * 2 * narrow * item_target, logits + whole * 2 * narrow * 4
    return whole * cache + max(passing, tokens * kept + logits)


def engine_text(settings: TrainSettings, world: int) -> str:
    """One line for ``--plan``."""
    rows = ", samples divided by rows" if shares_of(settings, world) > 1 else ""
    if settings.engine.name == "torch":
        return f"torch: every rank holds the draft, its optimizer and the target{rows}"
    file = read_zero_file(settings)
    stage = file["zero_optimization"]["stage"]
    spread = {1: "optimizer", 2: "optimizer and gradients", 3: "optimizer, gradients and draft"}[stage]
    host = ", optimizer on the host" if offloads(file, "offload_optimizer") else ""
    target = f"target over {world} ranks" if settings.target.shard else "target whole on every rank"
    return f"DeepSpeed ZeRO-{stage} ({settings.engine.config}): {spread} over {world} ranks{host}, {target}{rows}"


def memory_text(memory: Memory, device: torch.device) -> str:
    """One line for ``--plan``."""
    host = f"; {gib(memory.host)} on the host" if memory.host else ""
    return (
        f"about {gib(memory.total)} a rank on {device.type}: target {gib(memory.target)}, draft, optimizer and "
        f"gradients {gib(memory.draft)}, activations {gib(memory.activations)}{host}"
    )


def check_fit(
    spec: TargetSpec,
    parameters: tuple[int, int],
    settings: TrainSettings,
    device: torch.device,
    world: int,
    memory: Memory,
) -> None:
    """Refuse a plan that does not fit.

    Raises:
        UserError: more than ``plan.gpu_gib`` a rank, with the parts, and changes after which it fits.
    """
    if settings.plan.gpu_gib is None:
        return
    room = int(settings.plan.gpu_gib * 2**30) - RESERVE
    if memory.total <= room:
        return
    fitting, nearest = [], ""
    least = memory.total
    for words, other in _changes(settings, world):
        total = estimate_memory(spec, parameters, other, device, world).total
        if total <= room:
            fitting.append(f"{words} ({gib(total)})")
        elif total < least:
            least, nearest = (
                total,
                f"; nearest comes {words} with {gib(total)}: use more or larger GPUs, or a shorter data.max_length",
            )
    advice = f"change {' or '.join(fitting[:3])}" if fitting else f"no single change is enough{nearest}"
    raise UserError(
        f"the plan needs {memory_text(memory, device)}; plan.gpu_gib={settings.plan.gpu_gib:g} less {gib(RESERVE)} for "
        f"libraries is {gib(max(room, 0))}: {advice}"
    )


def _changes(settings: TrainSettings, world: int) -> Iterator[tuple[str, TrainSettings]]:
    """Other settings to try, the mildest first."""
    zero3 = {"engine.name": "deepspeed", "engine.config": ZERO3}
    offload = {"engine.name": "deepspeed", "engine.config": "recipes/deepspeed/zero3_offload.yaml"}
    tries: list[dict[str, Any]] = []
    if settings.schedule.micro_batch > 1:
        more = settings.schedule.accumulate * settings.schedule.micro_batch
        tries.append({"schedule.micro_batch": 1, "schedule.accumulate": more})
    if settings.objective.chunk > 256:
        tries.append({"objective.chunk": 256})
    if world > 1:
        tries += [{"engine.name": "deepspeed", "engine.config": ZERO2}, zero3 | {"target.shard": True}]
        tries += [offload | {"target.shard": True}]
    length = settings.data.max_length // 2
    while length >= 1024:
        tries.append({"data.max_length": length})
        if world > 1:
            tries.append(zero3 | {"target.shard": True, "data.max_length": length})
        length //= 2
    for change in tries:
        try:
            other = _changed(settings, change)
        except UserError:  # as draft.init=target beside a sharded target
            continue
        if other != settings:
            yield " ".join(f"{k}={str(v).lower() if isinstance(v, bool) else v}" for k, v in change.items()), other


def _changed(settings: TrainSettings, change: dict[str, Any]) -> TrainSettings:
    plain = settings.model_dump(exclude_unset=True)
    for dotted, value in change.items():
        section, key = dotted.split(".")
        plain.setdefault(section, {})[key] = value
    return validate(TrainSettings, plain)


def gib(count: int) -> str:
    return f"{count / 2**30:.2f} GiB" if count >= 2**27 else f"{count / 2**20:.1f} MiB"
