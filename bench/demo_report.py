"""The demo's report: a table on the terminal, ``report.json`` and ``report.png``, all from one record."""

import json
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from longdraft.bench.demo_modes import mode_line
from longdraft.bench.demo_record import NAMES


def table(record: dict[str, Any]) -> Table:
    """One row a prompt."""
    chains = ", ".join(f"{NAMES[kind]}'s {draft['steps']}" for kind, draft in record["drafts"].items())
    shown = Table(
        title=f"{record['settings']['model']}, float32 on a CPU, drafts a verification: {chains}",
        box=SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        caption="plain: tokens a second; τ: tokens a verification (without the bonus token), and speed against plain; "
        "!: repeats itself",
    )
    shown.add_column("prompt", no_wrap=True)
    for name in ("context", "equal", "plain", *(f"{NAMES[k]} τ" for k in record["drafts"])):
        shown.add_column(name, justify="right", no_wrap=True)
    for p in record["prompts"]:
        shown.add_row(
            p["name"] + (" !" if p["repetitive"] else ""),
            f"{p['context_tokens']:,}",
            "yes" if p["identical"] else "NO",
            f"{p['plain_tok_s']:.1f}",
            *(draft_cell(draft, p["plain_tok_s"]) for draft in p["drafts"].values()),
        )
    return shown


def draft_cell(draft: dict[str, Any], plain_tok_s: float) -> str:
    """One draft on one prompt: τ with and without the bonus token, and the speed against plain decoding."""
    ratio = f" {draft['tok_s'] / plain_tok_s:.2f}×" if plain_tok_s else ""
    return f"{draft['tau']:.2f} ({draft['tau_without_bonus']:.2f}){ratio}"


def training_line(training: dict[str, Any]) -> str:
    """What the short run did to the loss."""
    return (
        f"training: {training['steps']} steps, {training['tokens']:,} tokens, {training['seconds']} s; loss on held-out text "
        f"{training['loss_before']:.3f} (the shipped draft) -> {training['loss_after']:.3f}, checkpoint {training['checkpoint']}"
    )


def summary(record: dict[str, Any]) -> list[str]:
    """What the table comes to, in sentences."""
    speed, figures = record["speed"], record["figures"]
    lines = [f"tokens equal on all prompts, with both drafts: {'yes' if record['identical'] else 'NO'}"]
    lines += [
        f"{NAMES[kind]}: drafted {d['drafted']}, kept {d['accepted']}, τ {d['tau']:.2f} with the bonus token, "
        f"{d['tau_without_bonus']:.2f} without"
        for kind, d in record["drafts"].items()
    ]
    lines.append(
        f"{NAMES[speed['draft']]} at {speed['context_tokens']:,} tokens of context, median of {len(speed['ratios'])} alternated "
        f"pairs: {figures['plain_tok_s']:.1f} -> {figures['longdraft_tok_s']:.1f} tokens/s, ratio {speed['median_ratio']:.2f} "
        f"(pairs: {', '.join(f'{r:.2f}' for r in speed['ratios'])})"
    )
    lines.append(mode_line(record["modes"], NAMES[record["modes"]["draft"]]))
    if record["training"]:
        lines.append(training_line(record["training"]))
    if any(p["repetitive"] for p in record["prompts"]):
        without = ", ".join(f"{NAMES[k]} {d['tau_not_repetitive']:.2f}" for k, d in record["drafts"].items())
        lines.append(
            f"! more than 30 % of the 4-grams repeat, which flatters any draft; τ without these prompts: {without}"
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


STYLES: dict[str, dict[str, Any]] = {
    "plain": {"color": "white", "edgecolor": "black", "label": "SGLang"},
    "longspec": {"color": "0.25", "edgecolor": "black", "label": "with longdraft, LongSpec"},
    "eagle3": {"color": "0.75", "edgecolor": "black", "hatch": "///", "label": "with longdraft, EAGLE-3"},
}


def draw(record: dict[str, Any], path: Path) -> None:
    """Two panels, readable without colour: tokens a second by prompt, and tokens gained a verification."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    prompts, kinds, speed, modes = record["prompts"], list(record["drafts"]), record["speed"], record["modes"]
    at, high = range(len(prompts)), 0.27
    labels = [f"{p['name']}\n{p['context_tokens']:,} tokens{' (loops)' if p['repetitive'] else ''}" for p in prompts]
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 5), sharey=True, width_ratios=(3, 2))
    left.barh([i - high for i in at], [p["plain_tok_s"] for p in prompts], high, **STYLES["plain"])
    for offset, kind in enumerate(kinds):
        rows, place = [p["drafts"][kind] for p in prompts], [i + offset * high for i in at]
        left.barh(place, [row["tok_s"] for row in rows], high, **STYLES[kind])
        shift = [i + (offset - 0.5) * 1.4 * high for i in at]
        right.barh(shift, [row["tau"] for row in rows], 1.3 * high, **STYLES[kind])
        for p, row, y, y_tau in zip(prompts, rows, place, shift, strict=True):
            if p["plain_tok_s"]:
                left.text(row["tok_s"], y, f" {row['tok_s'] / p['plain_tok_s']:.2f}×", va="center", fontsize=8)
            right.text(row["tau"], y_tau, f" {row['tau']:.2f}", va="center", fontsize=8)
    left.set_yticks(list(at), labels, fontsize=8)
    left.invert_yaxis()
    left.set_xlabel("tokens a second, decoding one request")
    left.margins(x=0.12)
    right.axvline(1, color="black", linewidth=1)
    right.set_xlim(0, max(draft["steps"] for draft in record["drafts"].values()) + 1.2)
    right.set_xlabel("tokens gained a verification (plain: 1)")
    equal = "the same tokens on all prompts" if record["identical"] else "TOKENS DIFFER"
    figure.suptitle(
        f"{record['settings']['model']} on {record['device']}: {equal};\n{NAMES[speed['draft']]} {speed['median_ratio']:.2f}× at "
        f"{speed['context_tokens']:,} tokens (median of {len(speed['ratios'])} pairs); at {modes['context_tokens']:,} full "
        f"{modes['rows']['full']['ratio']:.2f}×, exact {modes['rows']['exact']['ratio']:.2f}×, partial {modes['rows']['partial']['ratio']:.2f}×",
        fontsize=10,
    )
    figure.tight_layout(rect=(0, 0.05, 1, 1))
    figure.legend(*left.get_legend_handles_labels(), fontsize=8, loc="lower center", ncols=3, frameon=False)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
