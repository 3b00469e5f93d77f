"""The panels of a training: one list, from which the W&B workspace, the HTML report and the picture are all made."""

from dataclasses import dataclass
from typing import Literal

from longdraft.draft_models.buckets import BUCKET_NAMES, TOTAL
from longdraft.train.wandb_log import BUCKETS_THERE

Log = Literal["metrics", "evaluations"]
EACH_DEPTH = "*"
LEARNING, ACCEPTANCE, SPEED, OPTIMIZER = "Learning", "Accept length on evaluation documents", "Speed", "Optimizer"


@dataclass(frozen=True)
class Series:
    """One line of a panel, or one for each draft depth.

    Attributes:
        log: the file it is in.
        path: keys from a row to the figure; a last ``"*"`` is a list with one figure for each depth.
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
        if self.log == "metrics":
            return "/".join(("train", *keys))
        _, bucket, *rest = keys
        return "/".join(("eval", BUCKETS_THERE.get(bucket, bucket), *rest))


@dataclass(frozen=True)
class Panel:
    """Lines over the training steps.

    Attributes:
        section: its heading.
        title: what is shown.
        unit: of the values; ``%`` for shares from 0 to 1.
        series: the lines.
        log_scale: for figures that span decades and are never 0.
        floor: the least that the figure can be; a linear axis begins there.
    """

    section: str
    title: str
    unit: str
    series: tuple[Series, ...]
    log_scale: bool = False
    floor: float = 0.0


def _step(section: str, title: str, unit: str, *path: str, log_scale: bool = False) -> Panel:
    return Panel(section, title, unit, (Series("metrics", path, "depth" if path[-1] == EACH_DEPTH else ""),), log_scale)


def _bucketed(title: str, unit: str, figure: str, floor: float = 0.0) -> Panel:
    names = (*BUCKET_NAMES, TOTAL)
    series = tuple(Series("evaluations", ("buckets", name, figure), name) for name in names)
    return Panel(ACCEPTANCE, title, unit, series, floor=floor)


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
)


def sections() -> dict[str, list[Panel]]:
    """Panels by section, both in order."""
    grouped: dict[str, list[Panel]] = {}
    for panel in PANELS:
        grouped.setdefault(panel.section, []).append(panel)
    return grouped
