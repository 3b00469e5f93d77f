"""What ``--plan`` prints: shapes, tokens, memory a rank and, from a former run, time. Loads no weights, starts nothing."""

import statistics
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
from longdraft.train.memory_plan import check_fit, device_of, engine_text, estimate_memory, memory_text, shares_of
from longdraft.train.sequence import check_sequence
from longdraft.train.target import plan_config
from longdraft.train.tracking import METRICS, clock, read_rows


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


def plan_text(settings: TrainSettings, world: int) -> str:
    """The lines that ``--plan`` prints.

    Raises:
        UserError: as the run itself would, where that shows without weights or data; or a plan that does not fit into
            ``plan.gpu_gib``, with what to change.
    """
    world = settings.plan.ranks or world
    if settings.engine.sequence:
        check_sequence(settings)
    config = plan_config(settings.target)
    spec, device = TargetSpec.from_config(config), device_of(settings)
    limit = position_limit(settings, spec.max_position)
    parameters = count_parameters(config, spec, settings)
    s = settings.schedule
    shares = shares_of(settings, world)
    a_step = s.micro_batch * s.accumulate * world // shares
    ranks = f"{world} ranks" if shares == 1 else f"{world} ranks together"
    documents = "samples packed to" if settings.data.packing else "documents of up to"
    share = f"offsets in {settings.positions.offset_share:.0%} of the documents up to position {limit}"
    anchors = f"{'0..' if settings.positions.random_anchors else ''}{settings.positions.anchors} anchors"
    offsets = f"{anchors}, {share}" if settings.positions.offset_share else "plain"
    views = settings.views
    budgets = f"{', '.join(map(str, views.budgets))} keys in {views.share:.0%} of the documents"
    memory = estimate_memory(spec, parameters, settings, device, world)
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
            f"tokens ({s.micro_batch} micro-batch x {s.accumulate} accumulate x {ranks})"
        ),
        "steps": f"{s.max_steps}, save every {s.save_every}, evaluate every {s.eval_every or 'end'}",
        "engine": engine_text(settings, world),
        "memory": memory_text(memory, device),
        "time": _time(settings),
    }
    check_fit(spec, parameters, settings, device, world, memory)
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
