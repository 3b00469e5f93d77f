"""The panels as a saved view of a W&B project."""

import netrc
import os
from importlib import import_module
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

from longdraft.bench.dashboard.panels import STEP, Panel, Series, sections
from longdraft.errors import UserError

COLUMNS = 4


def has_key() -> bool:
    """Whether W&B would find a key: in the environment, or where ``wandb login`` put it."""
    if os.environ.get("WANDB_API_KEY"):
        return True
    wandb: Any = import_module("wandb")
    host = urlparse(os.environ.get("WANDB_BASE_URL") or wandb.Settings().base_url).hostname
    try:
        return host in netrc.netrc(os.environ.get("NETRC") or Path.home() / ".netrc").hosts
    except (OSError, netrc.NetrcParseError):
        return False


def build(entity: str, project: str) -> Any:
    """The view, with the sections and panels in their order; nothing is sent."""
    ws: Any = import_module("wandb_workspaces.workspaces")
    shown = [
        ws.Section(
            name=name,
            panels=[plot(panel) for panel in panels],
            is_open=True,
            layout_settings=ws.SectionLayoutSettings(columns=COLUMNS, rows=-(-len(panels) // COLUMNS)),
        )
        for name, panels in sections().items()
    ]
    return ws.Workspace(entity=entity, project=project, name="longdraft training", sections=shown)


def plot(panel: Panel) -> Any:
    """A line plot over the training step, which is W&B's step too, or over what a figure of serving goes by."""
    wr: Any = import_module("wandb_workspaces.reports.v2")
    unit = "share" if panel.unit == "%" else panel.unit
    over = {"title_x": "step"} if panel.x == STEP else {"title_x": panel.x_title, "x": panel.x}
    return wr.LinePlot(title=panel.title, title_y=unit, log_y=panel.log_scale, **over, **_lines(panel.series))


def _lines(series: tuple[Series, ...]) -> dict[str, Any]:
    if any(s.deep for s in series):  # how many depths or systems there are depends on the run
        return {"metric_regex": "|".join(f"^{s.metric}/[0-9A-Za-z_]+$" for s in series)}
    return {"y": [s.metric for s in series]}


def save(workspace: Any) -> str:
    """Send it as a new saved view.

    Returns:
        Its address.

    Raises:
        UserError: W&B refuses it or cannot be reached, with its reason.
    """
    try:
        return str(workspace.save().url)
    except Exception as error:  # W&B's own, the network's and GraphQL's
        reason = " ".join(str(error).split())[:200]
        raise UserError(
            f"--entity {workspace.entity!r} --project {workspace.project!r}: W&B did not take the dashboard "
            f"({type(error).__name__}: {reason}): check both names and the key's rights"
        ) from None
