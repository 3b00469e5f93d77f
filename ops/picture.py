"""python -m longdraft.ops.picture --prometheus prometheus --minutes 3 --png docs/grafana.png

Serves SmolLM2 on the CPU, asks it for a few minutes in all modes while a real Prometheus scrapes it, and draws the dashboard: which
panels there are, and what they show, is read from Grafana's file, and Prometheus evaluates it. The drawing itself is ours, not Grafana's.
"""

import argparse
import json
import math
import re
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from itertools import cycle
from pathlib import Path
from typing import Any, get_args

from longdraft.bench.dashboard.picture import COLOURS, DASHES, canvas
from longdraft.bench.demo_text import Prompt, module_text, topic_text
from longdraft.bench.server import Server
from longdraft.ops.grafana import text
from longdraft.ops.prometheus import SCRAPE_SECONDS, Line, Prometheus
from longdraft.serve.settings import Mode

WINDOW = f"{10 * SCRAPE_SECONDS}s"  # of rates; Grafana takes four scrapes or more
COLUMNS = 4
MODES = get_args(Mode)
UNITS = {
    "none": (1.0, ""), "percentunit": (100.0, "%"), "s": (1.0, "s"), "bytes": (2.0**-20, "MiB"), "binBps": (2.0**-20, "MiB/s")
}  # fmt: skip
ASKED = (  # mode, tokens of the prompt
    ("exact", 3000), ("full", 700), ("off", 300), ("exact", 1500), ("partial", 3000), ("sparse", 1500), ("full", 3000)
)  # fmt: skip


def filled(expr: str) -> str:
    """A panel's expression with what Grafana puts in for its variables."""
    return expr.replace("$__rate_interval", WINDOW).replace("$model", ".*")


def legend(form: str, labels: dict[str, str]) -> str:
    """A line's name as Grafana makes it of ``{{label}}``."""
    return re.sub(r"{{\s*(\w+)\s*}}", lambda found: labels.get(found[1], ""), form)


def evaluate(prometheus: Prometheus, panel: dict[str, Any], start: float, end: float) -> dict[str, Line]:
    """A panel's lines by their names."""
    return {
        legend(target["legendFormat"], line.labels): line
        for target in panel["targets"]
        for line in prometheus.range(filled(target["expr"]), start, end, SCRAPE_SECONDS)
    }


def plots(dashboard: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """The panels of a Grafana file, each with the title of its row, in order."""
    row, found = "", []
    for panel in dashboard["panels"]:
        if panel["type"] == "row":
            row = panel["title"]
        else:
            found.append((row, panel))
    return found


def style(name: str, place: int) -> dict[str, Any]:
    """A mode has one colour in all panels, and dashes of its own or of the kind that follows it; other lines go by their place."""
    first, _, kind = name.partition(", ")
    colour = MODES.index(first) if first in MODES else place
    dash = ("full", "partial").index(kind) if kind else colour
    return {"color": COLOURS[colour % len(COLOURS)], "linestyle": DASHES[dash % len(DASHES)]}


def with_gaps(line: Line) -> tuple[list[float], list[float]]:
    """Times and values, NaN where Prometheus has none for a while: nothing is drawn across, as in Grafana."""
    times, values = line.times[:1], line.values[:1]
    for before, now, value in zip(line.times, line.times[1:], line.values[1:], strict=False):
        if now - before > 1.5 * SCRAPE_SECONDS:
            times.append(before + SCRAPE_SECONDS)
            values.append(math.nan)
        times.append(now)
        values.append(value)
    return times, values


def draw(axes: Any, panel: dict[str, Any], lines: dict[str, Line], start: float) -> None:
    """One panel over seconds."""
    defaults = panel["fieldConfig"]["defaults"]
    scale, unit = UNITS[defaults["unit"]]
    for i, (name, line) in enumerate(sorted(lines.items())):
        at, values = with_gaps(line)
        axes.plot([t - start for t in at], [scale * v for v in values], label=name, **style(name, i))
    axes.set_title(panel["title"], loc="left")
    axes.set_xlabel("seconds")
    axes.set_ylabel(unit)
    axes.grid(True)
    seen = [v for line in lines.values() for v in line.values if math.isfinite(v)]
    if not seen:
        axes.text(0.5, 0.5, "no data", transform=axes.transAxes, ha="center", va="center")
        return
    least, most = defaults.get("min", 0.0), defaults.get("max")
    axes.set_ylim(scale * least, scale * (1.03 * most if most else max(1.1 * max(seen), least + 1.0 * (not any(seen)))))
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.2), ncols=3, frameon=False)


def picture(dashboard: dict[str, Any], lines: Sequence[dict[str, Line]], start: float, said: str, path: Path) -> None:
    """All panels in Grafana's order, a new line of them for each row."""
    shown = list(zip(plots(dashboard), lines, strict=True))
    groups = [[entry for entry in shown if entry[0][0] == row] for row in dict.fromkeys(row for (row, _), _ in shown)]
    high = sum(-(-len(group) // COLUMNS) for group in groups)
    with canvas(COLUMNS, high, "black", "0.88") as (figure, axes):
        free = iter(axes)
        for group in groups:
            for i, ((row, panel), found) in enumerate(group):
                ax = next(free)
                draw(ax, panel, found, start)
                if i == 0:
                    ax.annotate(row, (0, 1), (0, 24), "axes fraction", "offset points", fontsize=12, weight="bold")
            for _ in range(-len(group) % COLUMNS):
                next(free).set_visible(False)
        figure.suptitle(f"{dashboard['title']}: {said}", fontsize=12)
        figure.savefig(path, dpi=80, format="png")


def ask(server: Server, prompts: Sequence[tuple[str, list[int]]], until: float) -> None:
    """One client's requests, one after another, until the time is up."""
    for mode, ids in cycle(prompts):
        if time.time() > until:
            return
        server.generate(ids, 60, mode=mode)


def prompts(model: Path) -> list[tuple[str, list[int]]]:
    """Code and prose of several lengths, each for a mode."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    texts = cycle(
        (module_text("argparse.py"), topic_text("naming"), module_text("textwrap.py"), topic_text("specialnames"))
    )
    return [(mode, Prompt(mode, next(texts), tokens).ids(tokenizer)) for mode, tokens in ASKED]


def serve(folder: Path, model: Path) -> Server:
    """SmolLM2 with its LongSpec draft, views and metrics."""
    from longdraft.models import shipped_draft

    words = ["serve", "--model-path", str(model), "--draft", str(shipped_draft("smollm2-135m", "longspec"))]
    words += ["--mode", "exact", "--allow-lossy", "--view-tokens", "1024", "--enable-metrics"]
    return Server("metrics", [sys.executable, "-m", "longdraft.cli", *words], folder / "server.log")


def main(argv: Sequence[str] | None = None) -> int:
    """Serve, ask, scrape and draw.

    Raises:
        UserError: no such Prometheus, or no server.
    """
    from longdraft.models import demo_model_folder

    parser = argparse.ArgumentParser(prog="python -m longdraft.ops.picture", description=(__doc__ or "").split("\n")[2])
    parser.add_argument("--prometheus", default="prometheus", help="the program (default: prometheus)")
    parser.add_argument("--minutes", type=float, default=3.0, help="how long requests run (default: 3)")
    parser.add_argument("--png", type=Path, default=Path("docs/grafana.png"), help="file to write")
    args = parser.parse_args(argv)
    model, dashboard = demo_model_folder(say=print), json.loads(text())
    asked = prompts(model)
    with tempfile.TemporaryDirectory() as folder, serve(Path(folder), model) as server:
        with Prometheus(args.prometheus, f"127.0.0.1:{server.port}", Path(folder) / "prometheus") as prometheus:
            for mode, ids in asked:  # what a first round of each mode sets up is not shown
                server.generate(ids, 8, mode=mode)
            start = time.time()
            until = start + 60 * args.minutes
            clients = [
                threading.Thread(target=ask, args=(server, [*asked[i:], *asked[:i]], until))
                for i in (0, len(asked) // 2)
            ]
            for client in clients:
                client.start()
            for client in clients:
                client.join()
            lines = [evaluate(prometheus, panel, start, until) for _, panel in plots(dashboard)]
            said = f"SmolLM2 on a CPU, two clients, evaluated by Prometheus {prometheus.version()}, drawn by longdraft"
        picture(dashboard, lines, start, said, args.png)
    return 0


if __name__ == "__main__":
    sys.exit(main())
