"""python -m longdraft.bench.readme_tables README.md

Writes the tables between ``<!-- table NAME -->`` and ``<!-- end -->`` from the records in bench/results/, so that no figure is typed.
"""

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parent / "results"
SYSTEMS = {
    "eagle3": "SGLang, EAGLE-3 on FA3, graphs",
    "eagle3_window": "the same, draft window 4,096",
    "longdraft": "longdraft `full`, LongSpec, FA3, eager",
}
CASES = {"b1_c32k": "1 × 32K", "b16_c32k": "16 × 32K"}


def read(name: str) -> dict[str, Any]:
    """A record by its file's name."""
    record: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text())
    return record


def speed_table() -> str:
    """Step time and tokens a second of mode ``full`` beside EAGLE-3."""
    figures = read("full_mode_speed_h200")["figures"]
    head = "| H200, Llama-8B shape, forced acceptance 4.0 | " + " | ".join(
        f"{c}: ms a step, tokens/s" for c in CASES.values()
    )
    lines = [head + " |", "|---|" + "---|" * len(CASES)]
    for key, label in SYSTEMS.items():
        cells = [f"{figures[f'{key}_ms_step_{c}']:.1f}, {figures[f'{key}_tok_s_{c}']:,.0f}" for c in CASES]
        lines.append(f"| {label} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def identity_table() -> str:
    """Unforced decoding of SmolLM2 on a card in bfloat16: equal outputs and accept lengths."""
    lines = ["| prompt | context | lookup: same tokens, τ | LongSpec: same tokens, τ |", "|---|---|---|---|"]
    lookup, longspec = (read(f"full_mode_identity_{d}_h200")["rows"] for d in ("lookup", "longspec"))
    for kind, rows in (("lookup", lookup), ("longspec", longspec)):
        for row in rows:
            cell = f"{'yes' if row['identical'] else 'tie'}, {row['tau']:.2f}"
            cells = (cell, "-") if kind == "lookup" else ("-", cell)
            flag = " (repeats)" if row["repeated_4grams"] > 0.3 else ""
            lines.append(f"| {row['prompt']}{flag} | {row['context_tokens']:,} | {cells[0]} | {cells[1]} |")
    return "\n".join(lines)


TABLES: dict[str, Callable[[], str]] = {"speed": speed_table, "identity": identity_table}


def fill(text: str) -> str:
    """The text with every table made anew.

    Raises:
        KeyError: a marker that names no table.
    """
    return re.sub(
        r"<!-- table (\w+) -->\n.*?<!-- end -->",
        lambda found: f"<!-- table {found[1]} -->\n{TABLES[found[1]]()}\n<!-- end -->",
        text,
        flags=re.DOTALL,
    )


def main() -> int:
    """Fill the file that is named on the command line."""
    path = Path(sys.argv[1] if len(sys.argv) > 1 else "README.md")
    path.write_text(fill(path.read_text()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
