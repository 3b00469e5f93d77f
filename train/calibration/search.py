"""Dustin's Algorithm 1: whose attention chooses a set, by what the sets would have recovered of known attention.

What is maximised is the attention recovery rate of the target's retrieval heads, the mean over its layers (the paper: all; here: those
that count), verifications and texts. Ties go to the first.

Legend: S layers, W verifications, N tokens.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from longdraft.train.calibration.recovery import Split, choose_sets, recovery
from longdraft.train.calibration.traces import Trace

Once = Callable[
    [str, Callable[[], float]], float
]  # a name and what finds the value: found once, also over several processes
Say = Callable[[str], None]


@dataclass(frozen=True)
class Plan:
    """What is searched: a budget and shares of it, draft layers at most and what one must add, values of the lookahead's share."""

    budget: int
    splits: Sequence[int]
    draft_layers: int
    gain: float
    trials: int
    step: int
    seed: int


@dataclass(frozen=True)
class Choice:
    """What was found: a layer of the target, layers of the draft by their places, the lookahead's share, and the recovery."""

    target_layer: int
    draft_layers: list[int]
    lookahead: int
    recovery: float


class Objective:
    """Mean recovery of policies over traces; the mean over the target's layers is taken once."""

    def __init__(self, traces: Sequence[Trace], budget: int, first: int = 0) -> None:
        """Take what is recovered.

        Args:
            traces: of texts.
            budget: tokens of a set.
            first: layer of the target from which on attention counts. Any layer's history and lookahead may still choose.
        """
        self.traces, self.budget = traces, budget
        self.attention = [trace.attention_SWN[first:].mean(0) for trace in traces]

    def __call__(self, target_layer: int, draft_layers: Sequence[int] = (), lookahead: int = 0) -> float:
        """Recovery of one layer's history with some draft layers' lookahead."""
        found = []
        for trace, attention_WN in zip(self.traces, self.attention, strict=True):
            look_WN = trace.lookahead_SWN[list(draft_layers)].sum(0) if draft_layers else None
            split = Split(self.budget, lookahead if draft_layers else 0)
            sets_WN = choose_sets(trace.history_GSWN[0, target_layer], look_WN, trace.length_W, split)
            found.append(recovery(attention_WN, sets_WN))
        return float(torch.cat(found).double().mean())


def search(objective: Objective, plan: Plan, once: Once, say: Say) -> Choice:
    """Run the three phases."""
    layers = range(objective.traces[0].history_GSWN.shape[1])
    history = [once(f"target {layer}", lambda layer=layer: objective(layer)) for layer in layers]  # type: ignore[misc]
    target = history.index(max(history))
    say(
        f"target layer {target}: recovery {history[target]:.4f} by its history alone (of all layers {min(history):.4f} to {max(history):.4f})"
    )
    chosen = search_draft_layers(objective, plan, target, history[target], once, say)
    if not chosen:
        return Choice(target, [], 0, history[target])
    lookahead, best = search_lookahead(objective, plan, target, chosen, once)
    say(f"lookahead {lookahead} of {plan.budget}: recovery {best:.4f}")
    return Choice(target, chosen, lookahead, best)


def search_draft_layers(
    objective: Objective, plan: Plan, target: int, before: float, once: Once, say: Say
) -> list[int]:
    """Phase 2: add the layer whose hybrid recovers most at fixed splits, until there is none or it adds too little.

    The first is taken whatever it adds: the last phase may still give the lookahead nothing.
    """
    chosen: list[int] = []
    rest = list(range(len(objective.traces[0].lookahead_SWN)))
    while rest and len(chosen) < plan.draft_layers:
        values = []
        for layer in rest:
            tried = [*chosen, layer]
            name = f"draft {' '.join(map(str, tried))}"
            values.append(once(name, lambda tried=tried: _mean_of_splits(objective, plan, target, tried)))  # type: ignore[misc]
        best = max(values)
        layer = rest[values.index(best)]
        if chosen and best - before < plan.gain:
            say(f"draft layer {layer} would add {best - before:+.4f}: left out")
            break
        say(f"draft layer {layer}: recovery {best:.4f}, {best - before:+.4f}")
        chosen.append(layer)
        rest.remove(layer)
        before = best
    return chosen


def _mean_of_splits(objective: Objective, plan: Plan, target: int, layers: Sequence[int]) -> float:
    return sum(objective(target, layers, split) for split in plan.splits) / len(plan.splits)


def lookahead_values(budget: int, step: int) -> list[int]:
    """Values of m that are tried: every ``step`` from 0 on, and all that a set has room for."""
    most = Split(budget).most
    return sorted({*range(0, most + 1, step), most})


def search_lookahead(
    objective: Objective, plan: Plan, target: int, layers: Sequence[int], once: Once
) -> tuple[int, float]:
    """Phase 3: Optuna's TPE over the lookahead's share. Both ends are tried first; of equal values the smallest wins.

    A sampler is made anew for every trial from the seed and the trial's number: a search that goes on in another process
    takes the same steps.
    """
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    values = lookahead_values(plan.budget, plan.step)
    study = optuna.create_study(direction="maximize")
    study.enqueue_trial({"place": 0})
    study.enqueue_trial({"place": len(values) - 1})
    best = (-1.0, 0)  # recovery, and the lookahead below zero: the smaller one is the larger of a tie
    for number in range(plan.trials):
        study.sampler = optuna.samplers.TPESampler(seed=(plan.seed + number) % (1 << 32))
        trial = study.ask()
        lookahead = values[trial.suggest_int("place", 0, len(values) - 1)]
        value = once(f"lookahead {lookahead}", lambda m=lookahead: objective(target, layers, m))  # type: ignore[misc]
        study.tell(trial, value)
        best = max(best, (value, -lookahead))
    return -best[1], best[0]
