"""What ``--plan`` prints: shapes, tokens, memory a rank and, from a former run, time. Loads no weights, starts nothing."""

import statistics
from dataclasses import dataclass
from typing import Any

import torch

from longdraft.draft_models.config import LongSpecConfig
from longdraft.draft_models.eagle3 import Eagle3Draft
from longdraft.draft_models.eagle3_config import Eagle3Config
from longdraft.draft_models.longspec import LongSpecDraft
from longdraft.draft_models.target import TargetSpec
from longdraft.train.checkpoints import Checkpoints, check_trajectory
from longdraft.train.config import TrainSettings, as_list
from longdraft.train.eagle3_weights import check_trained_positions
from longdraft.train.loop import position_limit
from longdraft.train.target import plan_config, resolve_dtype
from longdraft.train.tracking import METRICS, clock, read_rows


@dataclass(frozen=True)
class Memory:
    """Bytes a rank. Activations are an upper estimate for a full micro-batch; allocators and libraries add about 1 GiB."""

    target: int
    draft: int
    activations: int

    @property
    def total(self) -> int:
        return self.target + self.draft + self.activations


def device_of(settings: TrainSettings) -> torch.device:
    """Where the run would compute."""
    cuda = settings.engine.device != "cpu" and torch.cuda.is_available()
    return torch.device("cuda" if cuda else "cpu")


def count_parameters(config: Any, spec: TargetSpec, settings: TrainSettings) -> tuple[int, int]:
    """Parameters of the target and of the draft, counted on the meta device."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        target = AutoModelForCausalLM.from_config(config, trust_remote_code=settings.target.trust_remote_code)
        draft = draft_of(spec, settings)
    return sum(p.numel() for p in target.parameters()), sum(p.numel() for p in draft.parameters())


def draft_of(spec: TargetSpec, settings: TrainSettings) -> LongSpecDraft | Eagle3Draft:
    """The draft that the settings describe, untrained."""
    if settings.draft.arch == "eagle3":
        config = Eagle3Config(spec, settings.eagle3)
        check_trained_positions(config, settings)
        return Eagle3Draft(config)
    return LongSpecDraft(LongSpecConfig(spec, settings.draft.architecture))


def estimate_memory(
    spec: TargetSpec, parameters: tuple[int, int], settings: TrainSettings, device: torch.device
) -> Memory:
    """Bytes a rank, from shapes alone.

    Args:
        spec: the target's shapes.
        parameters: of the target and of the draft.
        settings: lengths, batch, dtypes.
        device: decides ``auto`` dtypes.
    """
    item_target = resolve_dtype(settings.target.dtype, device).itemsize
    item_draft = resolve_dtype(settings.engine.dtype, device).itemsize
    tokens = settings.schedule.micro_batch * settings.data.max_length
    # Weights, float32 gradients and the moments (AdamW has two, Muon one); 16-bit drafts add float32 masters and their
    # own gradients.
    stepped = {"adamw": 16, "muon": 12}[settings.optim.name]
    a_parameter = stepped if item_draft == 4 else 2 * item_draft + stepped
    wide, narrow = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    hidden, inner = spec.hidden_size, spec.intermediate_size
    kept = item_draft * (12 * hidden + 4 * inner + 8 * wide + 6 * narrow) + 4 * 3 * (2 * wide + narrow)
    eagle3 = settings.draft.arch == "eagle3"
    scored = (settings.eagle3.draft_vocab_size if eagle3 else settings.draft.head_tokens) or spec.vocab_size
    if eagle3:
        # Every step keeps what enters its projections and MLP and its own keys; the features are three hidden rows.
        kept = item_draft * (12 * hidden + settings.ttt.steps * (5 * hidden + 3 * wide + 2 * narrow))
    logits = min(tokens, settings.objective.chunk) * scored * (24 if settings.objective.name == "kl" else 12)
    cache = 2 * narrow * item_target
    at_once = min(tokens, max(settings.target.max_batch_tokens, settings.data.max_length))
    passing = at_once * item_target * (4 * hidden + 3 * inner + 3 * wide)
    return Memory(
        parameters[0] * item_target,
        parameters[1] * a_parameter,
        tokens * cache + max(passing, tokens * kept + logits),
    )


def plan_text(settings: TrainSettings, world: int) -> str:
    """The lines that ``--plan`` prints.

    Raises:
        UserError: as the run itself would, where that shows without weights or data.
    """
    config = plan_config(settings.target)
    spec, device = TargetSpec.from_config(config), device_of(settings)
    limit = position_limit(settings, spec.max_position)
    parameters = count_parameters(config, spec, settings)
    s = settings.schedule
    a_step = s.micro_batch * s.accumulate * world
    documents = "samples packed to" if settings.data.packing else "documents of up to"
    share = f"offsets in {settings.positions.offset_share:.0%} of the documents up to position {limit}"
    anchors = f"{'0..' if settings.positions.random_anchors else ''}{settings.positions.anchors} anchors"
    offsets = f"{anchors}, {share}" if settings.positions.offset_share else "plain"
    views = settings.views
    budgets = f"{', '.join(map(str, views.budgets))} keys in {views.share:.0%} of the documents"
    memory = estimate_memory(spec, parameters, settings, device)
    lines = {
        "recipe": _recipe(settings),
        "run": f"{settings.run.name} in {settings.folder} ({_state(settings)})",
        "target": f"{settings.target.path}: {_shapes(spec)}, {parameters[0]:,} parameters",
        "draft": f"{_draft(settings)}, {parameters[1]:,} parameters",
        "data": f"{', '.join(as_list(settings.data.train))}; truncation {settings.data.truncation}",
        "positions": offsets,
        "views": f"{budgets}, {views.recent:.0%} of them without random blocks" if views.share else "none",
        "step": (
            f"{a_step} {documents} {settings.data.max_length} tokens = at most {a_step * settings.data.max_length:,} "
            f"tokens ({s.micro_batch} micro-batch x {s.accumulate} accumulate x {world} ranks)"
        ),
        "steps": f"{s.max_steps}, save every {s.save_every}, evaluate every {s.eval_every or 'end'}",
        "memory": (
            f"about {_gib(memory.total)} a rank on {device.type}: target {_gib(memory.target)}, draft, optimizer and "
            f"gradients {_gib(memory.draft)}, activations {_gib(memory.activations)}"
        ),
        "time": _time(settings),
    }
    return "\n".join(f"{name:<10} {text}" for name, text in lines.items())


def _draft(settings: TrainSettings) -> str:
    if settings.draft.arch == "eagle3":
        own, ttt = settings.eagle3, settings.ttt
        vocabulary = own.draft_vocab_size or "the target's"
        return (
            f"eagle3: vocabulary {vocabulary}, window {own.window or 'none'}, {ttt.steps} steps of training-time test"
        )
    lags = f"lags {settings.lag.min}..{settings.lag.max}"
    return f"longspec: window {settings.draft.window}, {lags}, objective {settings.objective.name}"


def _shapes(spec: TargetSpec) -> str:
    return (
        f"{spec.model_type}, {spec.num_layers} layers, hidden {spec.hidden_size}, {spec.num_heads} heads over "
        f"{spec.num_kv_heads} key/value heads of {spec.head_dim}, vocabulary {spec.vocab_size}"
    )


def _recipe(settings: TrainSettings) -> str:
    r = settings.recipe
    if r.label is None:
        return "of your own"
    where = f"for {r.gpus} GPU{'s' if r.gpus > 1 else ''}" if r.gpus else "for a CPU"
    cost = "" if r.gpu_hours is None else f", about {r.gpu_hours:g} GPU hours"
    return f"{r.label}, {where}{cost}; expects {r.expects}"


def _state(settings: TrainSettings) -> str:
    latest = Checkpoints(settings.folder, 1).latest()
    if latest is None:
        return "new"
    check_trajectory(Checkpoints.progress(latest).trajectory, settings.trajectory(), settings.run.name)
    return f"resumes from {latest.name}"


def _time(settings: TrainSettings) -> str:
    rows = read_rows(settings.folder / METRICS)
    if not rows:
        return "unknown: no former run of this name"
    a_step = statistics.median(row["seconds_per_step"] for row in rows[-20:])
    left = max(settings.schedule.max_steps - rows[-1]["step"], 0)
    return f"{a_step:.3f} s a step in the former run of this name; {left} steps left, {clock(a_step * left)}"


def _gib(count: int) -> str:
    return f"{count / 2**30:.2f} GiB" if count >= 2**27 else f"{count / 2**20:.1f} MiB"
