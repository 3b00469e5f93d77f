"""The panels of a training and of its draft in serving: one list, from which the W&B workspace, the HTML report and the picture are all made."""

from dataclasses import dataclass
from typing import Literal

from longdraft.bench.dashboard.figures import BUDGET, CONTEXT, FIGURES
from longdraft.draft_models.buckets import BUCKET_NAMES, TOTAL
from longdraft.train.wandb_log import BUCKETS_THERE

Log = Literal["metrics", "evaluations", "serving"]
EACH_DEPTH = "*"
LEARNING, ACCEPTANCE, SPEED, OPTIMIZER = "Learning", "Accept length on evaluation documents", "Speed", "Optimizer"
SERVED = "The draft in serving (longdraft bench)"
STEP = "step"


X_TITLES = {STEP: "training step", CONTEXT: "tokens of context", BUDGET: "tokens that a verification reads"}


@dataclass(frozen=True)
class Series:
    """One line of a panel, or one for each draft depth, or of serving one for each system that was measured.

    Attributes:
        log: the file it is in.
        path: keys from a row to the figure; a last ``"*"`` is a list with one figure for each depth, of serving a system each.
        label: for the legend; depths are numbered behind it.
    """

    log: Log
    path: tuple[str, ...]
    label: str = ""

    @property
    def deep(self) -> bool:
        return self.path[-1] == EACH_DEPTH

    @property
    def metric(self) -> str:
        """Its name at W&B, as ``train/wandb_log.py`` sends it; without a depth where it has one for each."""
        keys = self.path[:-1] if self.deep else self.path
        if self.log == "serving":
            return "/".join(("serving", *keys))
        if self.log == "metrics":
            return "/".join(("train", *keys))
        _, bucket, *rest = keys
        return "/".join(("eval", BUCKETS_THERE.get(bucket, bucket), *rest))


@dataclass(frozen=True)
class Panel:
    """Lines over the training steps, or over what ``x`` names.

    Attributes:
        section: its heading.
        title: what is shown.
        unit: of the values; ``%`` for shares from 0 to 1.
        series: the lines.
        log_scale: for figures that span decades and are never 0.
        floor: the least that the figure can be; a linear axis begins there.
        x: what they go over: a training's step, or of serving a name at W&B.
    """

    section: str
    title: str
    unit: str
    series: tuple[Series, ...]
    log_scale: bool = False
    floor: float = 0.0
    x: str = STEP

    @property
    def x_title(self) -> str:
        return X_TITLES[self.x]


def _step(section: str, title: str, unit: str, *path: str, log_scale: bool = False) -> Panel:
    return Panel(section, title, unit, (Series("metrics", path, "depth" if path[-1] == EACH_DEPTH else ""),), log_scale)


def _bucketed(title: str, unit: str, figure: str, floor: float = 0.0) -> Panel:
    names = (*BUCKET_NAMES, TOTAL)
    series = tuple(Series("evaluations", ("buckets", name, figure), name) for name in names)
    return Panel(ACCEPTANCE, title, unit, series, floor=floor)


def _served(title: str, unit: str, figure: str, floor: float = 0.0) -> Panel:
    return Panel(SERVED, title, unit, (Series("serving", (figure, EACH_DEPTH)),), floor=floor, x=FIGURES[figure][0])


PANELS: tuple[Panel, ...] = (
    _step(LEARNING, "Loss", "nats a supervised token", "loss", log_scale=True),
    _step(LEARNING, "Accuracy", "%", "accuracy"),
    _step(LEARNING, "Accuracy by draft depth", "%", "accuracy_by_depth", EACH_DEPTH),
    _bucketed("τ with the bonus token, by context", "tokens a verification", "tau", floor=1.0),
    _bucketed("τ without the bonus token, by context", "tokens a verification", "tau_without_bonus"),
    _bucketed("Looping outputs (not in τ), by context", "%", "looping_share"),
    Panel(
        ACCEPTANCE,
        "Verifications that reached a depth",
        "%",
        (Series("evaluations", ("buckets", TOTAL, "reached_depth", EACH_DEPTH), "depth"),),
    ),
    _step(SPEED, "Tokens a second", "tokens/s", "tokens_per_s"),
    _step(SPEED, "Model FLOPs utilisation (MFU)", "%", "mfu"),
    _step(SPEED, "Waiting for data", "%", "data_wait_share"),
    _step(SPEED, "Peak memory", "GiB", "memory_gib"),
    _step(OPTIMIZER, "Learning rate", "", "lr"),
    _step(OPTIMIZER, "Gradient norm", "", "grad_norm", log_scale=True),
    _served("Served: τ with the bonus token", "tokens a verification", "tau", floor=1.0),
    _served("Served: τ without the bonus token", "tokens a verification", "tau_without_bonus"),
    _served("Served: tokens a second of all requests", "tokens/s", "tok_s"),
    _served("Served: quality beside full-cache output", "%", "quality_own"),
    _served("Served: quality beside references", "%", "quality_reference"),
)


def sections() -> dict[str, list[Panel]]:
    """Panels by section, both in order."""
    grouped: dict[str, list[Panel]] = {}
    for panel in PANELS:
        grouped.setdefault(panel.section, []).append(panel)
    return grouped
