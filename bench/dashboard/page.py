"""The panels as one HTML file that needs nothing else: no script, no font, no address."""

import json
from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

from longdraft.bench.dashboard.logs import RunLog
from longdraft.bench.dashboard.panels import sections
from longdraft.bench.dashboard.picture import present, run_colours, svg
from longdraft.draft_models.buckets import BUCKET_NAMES, TOTAL
from longdraft.train.tracking import redact
from longdraft.train.wandb_log import BUCKETS_THERE, best_taus, flat

STYLE = """
:root { color-scheme: light dark; --ink: #1b1f24; --faint: #dfe3e8; --paper: #ffffff; --mark: #fff3c4; }
@media (prefers-color-scheme: dark) { :root { --ink: #e4e7eb; --faint: #3a4048; --paper: #16191d; --mark: #4a3f12; } }
body { margin: 0 auto; padding: 1.5rem; max-width: 92rem; background: var(--paper); color: var(--ink);
       font: 15px/1.45 system-ui, sans-serif; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin-top: 2rem; border-bottom: 1px solid var(--faint); }
.panels { display: grid; grid-template-columns: repeat(auto-fill, minmax(20rem, 1fr)); gap: 1rem; }
figure { margin: 0; padding: .6rem; border: 1px solid var(--faint); border-radius: 6px; }
figcaption { font-weight: 600; }
svg { width: 100%; height: auto; } svg text { fill: var(--ink); }
.none { opacity: .7; }
.runs span { display: inline-block; margin-right: 1.2rem; }
.runs i { display: inline-block; width: 1.6rem; height: .3rem; vertical-align: middle; margin-right: .4rem; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: .87rem; }
th, td { border-bottom: 1px solid var(--faint); padding: .2rem .7rem; text-align: left; vertical-align: top; }
th.number, td.number { text-align: right; font-variant-numeric: tabular-nums; }
tr.differs { background: var(--mark); }
""".strip()


def page(runs: Sequence[RunLog]) -> str:
    """The report. Whatever comes from a run is escaped, and its secrets read ``***``."""
    named = run_colours(runs)
    legend = "".join(f'<span><i style="background:{colour}"></i>{escape(name)}</span>' for name, colour in named)
    title = escape("longdraft training: " + ", ".join(run.name for run in runs))
    return "\n".join(
        [
            "<!DOCTYPE html>",
            f'<html lang="en"><head><meta charset="utf-8"><title>{title}</title>',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            # Belt and braces beside the escaping: nothing that came in by a run's name could load or run.
            "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">",
            f"<style>{STYLE}</style></head><body>",
            f"<h1>{title}</h1>",
            f'<p class="runs">{legend}</p>' if named else "",
            *_evaluations(runs),
            *_served(runs),
            *_panels(runs),
            *_starts(runs),
            *_settings(runs),
            "</body></html>\n",
        ]
    )


def _panels(runs: Sequence[RunLog]) -> Iterable[str]:
    for name, panels in sections().items():
        yield f'<h2>{escape(name)}</h2><div class="panels">'
        for panel in panels:
            shown = svg(panel, runs) if present(panel, runs) else '<p class="none">no figures in these logs</p>'
            yield f"<figure><figcaption>{escape(panel.title)}</figcaption>{shown}</figure>"
        yield "</div>"


def _table(head: Sequence[str], rows: Iterable[tuple[Sequence[str], bool]], numbers: Sequence[int] = ()) -> str:
    """Cells are text; a row may be marked, and columns of numbers stand to the right."""

    def line(tag: str, cells: Sequence[str]) -> str:
        return "".join(
            f"<{tag}{' class=number' if i in numbers else ''}>{escape(cell)}</{tag}>" for i, cell in enumerate(cells)
        )

    lines = [f"<tr>{line('th', head)}</tr>"]
    lines += [f"<tr{' class=differs' if marked else ''}>{line('td', cells)}</tr>" for cells, marked in rows]
    return f'<div class="wide"><table>{"".join(lines)}</table></div>'


def _evaluations(runs: Sequence[RunLog]) -> Iterable[str]:
    head = (
        "run",
        "step",
        "context",
        "prompts",
        "looping",
        "τ",
        "τ without bonus",
        "reached depth 1, 2, …",
        "best τ (step)",
    )
    rows = []
    for run in runs:
        if not run.evaluations:
            continue
        last = run.evaluations[-1]
        for name in (*BUCKET_NAMES, TOTAL):
            if (figures := last["buckets"].get(name)) is not None:
                rows.append(([run.name, f"{last['step']:,}", name, *_figures(figures), _best(run, name)], False))
    yield "<h2>Last evaluation</h2>"
    yield _table(head, rows, numbers=range(3, 7)) if rows else '<p class="none">no evaluations in these logs</p>'


def _served(runs: Sequence[RunLog]) -> Iterable[str]:
    """Records of ``longdraft bench`` that runs keep of their draft, where any does."""
    rows = [
        [run.name, *(str(record.get(key) or "-") for key in ("name", "date", "commit", "device", "rows", "excluded"))]
        for run in runs
        for record in run.serving
    ]
    if rows:
        yield "<h2>Records of the draft in serving</h2>"
        head = ("run", "record", "date", "commit", "device", "rows", "excluded by their checks")
        yield _table(head, [(row, False) for row in rows], numbers=(5, 6))


def _figures(figures: dict[str, Any]) -> list[str]:
    def shown(value: Any) -> str:
        return "none: all loop" if value is None else f"{value:.3f}"

    depths = "  ".join(f"{share:.1%}" for share in figures.get("reached_depth", []))
    counts = [f"{figures['prompts']}", f"{figures.get('looping', 0)}"]
    return [*counts, shown(figures["tau"]), shown(figures["tau_without_bonus"]), depths]


def _best(run: RunLog, bucket: str) -> str:
    best, key = best_taus(run.evaluations), f"best/{BUCKETS_THERE.get(bucket, bucket)}"
    return f"{best[f'{key}/tau']:.3f} ({best[f'{key}/step']:,})" if f"{key}/tau" in best else "-"


def _starts(runs: Sequence[RunLog]) -> Iterable[str]:
    """What made the runs: a column for each start of each, resumptions included."""
    columns = [
        (run.name if i == 0 else f"{run.name}, resumed", flat(redact(_provenance(start))))
        for run in runs
        for i, start in enumerate(run.starts)
    ]
    yield "<h2>Provenance</h2>"
    yield _compare(columns)


def _provenance(start: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in start.items() if key != "settings"}


def _settings(runs: Sequence[RunLog]) -> Iterable[str]:
    """The settings of each run's last start; those that differ come first and are marked."""
    columns = [(run.name, _plain(run.starts[-1].get("settings", {}))) for run in runs if run.starts]
    yield "<h2>Settings</h2>"
    yield _compare(columns, mark=True)


def _plain(settings: Any) -> dict[str, Any]:
    values = redact(settings) if isinstance(settings, dict) else {}
    return {
        f"{section}.{key}": value
        for section, keys in values.items()
        for key, value in (keys.items() if isinstance(keys, dict) else [("", keys)])
    }


def _compare(columns: Sequence[tuple[str, dict[str, Any]]], mark: bool = False) -> str:
    if not columns:
        return '<p class="none">no run.yaml beside these logs</p>'
    keys = list(dict.fromkeys(key for _, values in columns for key in values))
    rows = []
    for key in keys:
        cells = [_text(values.get(key, "-")) for _, values in columns]
        rows.append(([key, *cells], mark and len(set(cells)) > 1))
    return _table(["", *(name for name, _ in columns)], sorted(rows, key=lambda row: not row[1]))


def _text(value: Any) -> str:
    if value is None or isinstance(value, str):
        return value or "none"
    return json.dumps(value, ensure_ascii=False)
