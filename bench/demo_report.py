"""The demo's report: a table on the terminal, ``report.json`` and ``report.png``, all from one record."""

import json
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table


def table(record: dict[str, Any]) -> Table:
    """One row a prompt."""
    shown = Table(
        title=f"{record['settings']['model']}, a chain of {record['settings']['steps']} drafts, float32 on a CPU",
        box=SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        caption="plain, drafts: tokens a second; τ: tokens a verification; repeats: 4-grams seen before",
    )
    shown.add_column("prompt", no_wrap=True)
    for name in ("context", "equal", "τ", "τ - 1", "plain", "drafts", "ratio", "repeats"):
        shown.add_column(name, justify="right", no_wrap=True)
    for p in record["prompts"]:
        shown.add_row(
            p["name"],
            f"{p['context_tokens']:,}",
            "yes" if p["identical"] else "NO",
            f"{p['tau']:.2f}",
            f"{p['tau_without_bonus']:.2f}",
            f"{p['plain_tok_s']:.1f}",
            f"{p['longdraft_tok_s']:.1f}",
            f"{p['longdraft_tok_s'] / p['plain_tok_s']:.2f}" if p["plain_tok_s"] else "-",
            f"{p['repeated_4grams']:.0%}{' !' if p['repetitive'] else ''}",
        )
    return shown


def summary(record: dict[str, Any]) -> list[str]:
    """What the table comes to, in sentences."""
    speed, figures = record["speed"], record["figures"]
    lines = [
        f"tokens equal on all prompts: {'yes' if record['identical'] else 'NO'};  drafted {record['drafted']}, kept {record['accepted']}, "
        f"τ {record['tau']:.2f} with the bonus token, {record['tau_without_bonus']:.2f} without",
        f"speed at {speed['context_tokens']:,} tokens of context, median of {len(speed['ratios'])} alternated pairs: "
        f"{figures['plain_tok_s']:.1f} -> {figures['longdraft_tok_s']:.1f} tokens/s, ratio {speed['median_ratio']:.2f} "
        f"(pairs: {', '.join(f'{r:.2f}' for r in speed['ratios'])})",
    ]
    if any(p["repetitive"] for p in record["prompts"]):
        without = record["tau_not_repetitive"]
        lines.append(
            f"! more than 30 % of the 4-grams repeat, which flatters any draft; τ without these prompts: {without:.2f}"
        )
    failed = [name for name, passed in record["checks"].items() if not passed]
    lines.append(f"checks not passed: {', '.join(failed)}" if failed else "all checks passed")
    return lines


def show(record: dict[str, Any], console: Console) -> None:
    """Print the table and what it comes to."""
    console.print(table(record))
    for line in summary(record):
        console.print(line, highlight=False)


def write(record: dict[str, Any], folder: Path) -> None:
    """Write ``report.json`` and ``report.png``."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "report.json").write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n")
    draw(record, folder / "report.png")


def draw(record: dict[str, Any], path: Path) -> None:
    """Two panels, readable without colour: tokens a second by prompt, and tokens gained a verification."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    prompts = record["prompts"]
    at = range(len(prompts))
    labels = [f"{p['name']}\n{p['context_tokens']:,} tokens{' (loops)' if p['repetitive'] else ''}" for p in prompts]
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 4.2), sharey=True, width_ratios=(3, 2))
    high = 0.38
    left.barh(
        [i - high / 2 for i in at],
        [p["plain_tok_s"] for p in prompts],
        high,
        color="white",
        edgecolor="black",
        label="SGLang",
    )
    left.barh(
        [i + high / 2 for i in at],
        [p["longdraft_tok_s"] for p in prompts],
        high,
        color="0.25",
        edgecolor="black",
        label="SGLang with longdraft",
    )
    for i, p in enumerate(prompts):
        if p["plain_tok_s"]:
            ratio = p["longdraft_tok_s"] / p["plain_tok_s"]
            left.text(p["longdraft_tok_s"], i + high / 2, f" {ratio:.2f}×", va="center", fontsize=8)
    left.set_yticks(list(at), labels, fontsize=8)
    left.invert_yaxis()
    left.set_xlabel("tokens a second, decoding one request")
    left.margins(x=0.12)
    left.legend(fontsize=8, loc="lower right", framealpha=1)
    right.barh(list(at), [p["tau"] for p in prompts], 0.55, color="0.7", edgecolor="black", hatch="///")
    right.axvline(1, color="black", linewidth=1)
    for i, p in enumerate(prompts):
        right.text(p["tau"], i, f" {p['tau']:.2f}", va="center", fontsize=8)
    right.set_xlim(0, record["settings"]["steps"] + 1.2)
    right.set_xlabel("tokens gained a verification (plain: 1)")
    equal = "the same tokens on all prompts" if record["identical"] else "TOKENS DIFFER"
    speed = record["speed"]
    figure.suptitle(
        f"{record['settings']['model']} on {record['device']}: {equal}; "
        f"{speed['median_ratio']:.2f}× at {speed['context_tokens']:,} tokens (median of {len(speed['ratios'])} pairs)",
        fontsize=10,
    )
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
