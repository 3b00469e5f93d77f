"""python -m longdraft.ops.pages docs/*.md

Writes the tables of the pages between ``<!-- table NAME -->`` and ``<!-- end -->``: of series, alerts and panels from the code that
exports them, of figures from the records in bench/results/.
"""

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from longdraft.bench.readme_tables import CASES, RESULTS, TABLES, fill, read
from longdraft.draft_models.buckets import BUCKET_NAMES
from longdraft.ops.alerts import ALERTS
from longdraft.ops.panels import SGLANG, sections
from longdraft.serve.metrics import SERIES

# Mode, what it gives, what a verification reads, record and system of its speed beside SGLang's EAGLE-3.
MODES: tuple[tuple[str, str, str, tuple[str, str] | None], ...] = (
    ("off", "the target's own", "the whole cache, for each token", None),
    ("full", "the target's own", "the whole cache, once for τ tokens", ("full_mode_speed_h200", "longdraft")),
    ("exact", "the target's own", "views, then the whole cache once", ("modes_speed_h200", "longdraft_exact_steady")),
    ("partial", "approximate, repaired", "views; the whole cache every 20 tokens or so", ("modes_speed_h200", "longdraft_partial")),
    ("sparse", "approximate", "one set of tokens, new every round", ("sparse_mode_speed_h200", "longdraft_sparse_recipe")),
)  # fmt: skip


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def metrics_table() -> str:
    """Our series: name, type, labels, unit, what they count and how to read them."""
    rows = []
    for series in SERIES:
        labels = ", ".join(f"`{label}`" for label in series.labels)
        text = f"{series.text} {series.read[0].upper()}{series.read[1:]}."
        rows.append([f"`{series.exported}`", "counter", labels, series.unit, text])
    return table(("series", "type", "labels", "unit", "what it counts, and how to read it"), rows)


def label_table() -> str:
    """Values of our labels."""
    modes = ", ".join(f"`{name}`" for name, *_ in MODES)
    kinds = ", ".join(f"`{kind}`" for kind in dict.fromkeys(kind for series in SERIES for kind in series.kinds))
    buckets = ", ".join(f"`{name}`" for name in BUCKET_NAMES)
    return table(
        ("label", "values"),
        [
            ["`model_name`", "the server's `--served-model-name`"],
            ["`mode`", f"the request's: {modes}"],
            ["`context`", f"tokens of prompt and answer when they were counted: {buckets}"],
            ["`kind`", f"of a verification: {kinds}"],
        ],
    )


def sglang_table() -> str:
    """SGLang's series that the dashboard and the alerts read."""
    return table(("series", "what it is"), [[f"`{name}`", text] for name, text in SGLANG.items()])


def alert_table() -> str:
    """The alerts: when, how bad, what to do."""
    rows = [[f"`{a.name}`", f"{a.minutes} minutes", a.severity, a.remedy] for a in ALERTS]
    return table(("alert", "after", "severity", "what to do"), rows)


def panel_table() -> str:
    """The dashboard's panels and how to read them."""
    return table(
        ("row", "panel", "how to read it"),
        [[name, panel.title, panel.read] for name, panels in sections().items() for panel in panels],
    )


def ratio(source: tuple[str, str] | None, case: str) -> str:
    """Tokens a second beside SGLang's EAGLE-3 of the same run."""
    if source is None:
        return "–"
    record, system = source
    figures = read(record)["figures"]
    return f"{figures[f'{system}_tok_s_{case}'] / figures[f'eagle3_tok_s_{case}']:.2f} ×"


def choose_table() -> str:
    """The modes by what they give, read and bring."""
    head = ("mode", "output", "reads", *CASES.values())
    return table(head, [[f"`{m}`", gives, reads, *(ratio(s, c) for c in CASES)] for m, gives, reads, s in MODES])


def grid_table(name: str = "h200_speed") -> str:
    """Tokens a second of every system by batch and context, of a record of ``longdraft bench speed``."""
    if not (RESULTS / f"{name}.json").exists():
        return f"Not on record yet: `longdraft bench speed recipes/bench/{name}.yaml` measures them."
    return grid(read(name)["rows"])


def grid(rows: Sequence[Mapping[str, Any]]) -> str:
    """A row a system, a column a batch and a context: tokens a second with their spread, and beside plain decoding; why not, where not."""
    cases = sorted({(row["batch"], row["context"]) for row in rows if "batch" in row})
    cells = {(row["label"], row["batch"], row["context"]): cell(row) for row in rows if "batch" in row}
    names = list(dict.fromkeys(label for label, _, _ in cells))
    head = ("system", *(f"{batch} × {context / 1000:g}K" for batch, context in cases))
    return table(head, [[name, *(cells.get((name, *case), "–") for case in cases)] for name in names])


def cell(row: Mapping[str, Any]) -> str:
    """One measurement."""
    if not row["ok"]:
        return "not counted"
    beside = f", {row['speedup']:.2f} ×" if "speedup" in row else ""
    return f"{row['tok_s']:,.0f} ± {row['tok_s_spread']:,.0f} ({row['n']}){beside}"


PAGE_TABLES: dict[str, Callable[[], str]] = {
    **TABLES,
    "metrics": metrics_table,
    "labels": label_table,
    "sglang": sglang_table,
    "alerts": alert_table,
    "panels": panel_table,
    "choose": choose_table,
    "grid": grid_table,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Fill the files that are named on the command line."""
    parser = argparse.ArgumentParser(prog="python -m longdraft.ops.pages", description=(__doc__ or "").split("\n")[2])
    parser.add_argument("file", nargs="+", type=Path)
    for path in parser.parse_args(argv).file:
        if not path.is_file():
            parser.error(f"{path} is no file: give one with tables to fill")
        path.write_text(fill(path.read_text(), PAGE_TABLES))
    return 0


if __name__ == "__main__":
    sys.exit(main())
