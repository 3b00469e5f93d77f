"""python -m longdraft.bench.readme_tables README.md

Writes the tables between ``<!-- table NAME -->`` and ``<!-- end -->`` from the records in bench/results/, so that no figure is typed.
"""

import argparse
import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from longdraft.draft_models.buckets import bucket_of

RESULTS = Path(__file__).resolve().parent / "results"
SYSTEMS = {
    "eagle3": "SGLang, EAGLE-3",
    "eagle3_window": "SGLang, EAGLE-3 that reads a window of 4,096",
    "longdraft": "longdraft `full`, LongSpec",
    "longdraft_eagle3": "longdraft `full`, EAGLE-3",
    "longdraft_eager": "longdraft `full`, LongSpec, without graphs and overlap",
}
MODES = {
    "eagle3": "SGLang, EAGLE-3",
    "longdraft_exact": "longdraft `exact`, LongSpec, views of 4,096",
    "longdraft_partial": "longdraft `partial`, LongSpec, views of 4,096",
}
SPARSE = {
    "eagle3": "SGLang, EAGLE-3",
    "longdraft_sparse_recipe": "longdraft `sparse`, LongSpec, 4 heads look (a recipe's)",
    "longdraft_sparse": "longdraft `sparse`, LongSpec, all heads look (no recipe)",
    "longdraft_lm_sparse": "longdraft `sparse`, 1B-shaped language model, chain of 4",
    "longdraft_exact": "longdraft `exact`, views of 4,096 by blocks",
    "longdraft_exact_sets": "longdraft `exact`, views of 4,096 by tokens (`dustin`)",
}
STEADY = (
    "longdraft_exact",
    "longdraft_exact_sets",
)  # requests that draw their own accept lengths: what the full batch does
DRAFTS = {"longspec": "LongSpec", "eagle3": "EAGLE-3"}
CASES = {"b1_c32k": "1 × 32K", "b16_c32k": "16 × 32K", "b1_c125k": "1 × 125K"}
LENGTHS = (2, 8, 32)
ROWS = {"answers": "last 1,024 tokens", "all": "all tokens"}
SIDES = {"ours": "longdraft", "specforge": "SpecForge 0.2.0"}
READS = (  # label, record, name of the draft there
    ("the last layer (shipped before)", "longspec_variants_h200", "pilot_shipped"),
    ("the last layer, and its newest row as it is", "longspec_variants_h200", "last"),
    ("layers 14 and 29, and their newest rows", "longspec_variants_h200", "mid"),
    ("layers 18 and 20, and their newest rows; queries copied at the start", "longspec_copying_h200", "L1"),
    ("**layers 18 and 20, and their newest rows (shipped)**", "longspec_copying_h200", "L2"),
)
ABLATIONS = (
    ("trained at 1K with offsets and lags", "longspec_ablation_h200", "base"),
    ("the same, no offsets", "longspec_ablation_h200", "no_offsets"),
    ("the same, no lags", "longspec_ablation_h200", "no_lags"),
    ("trained at 4K without views, reads the whole cache", "views_ablation_h200", "base4k"),
    ("the same, reads a view of 1K", "views_ablation_1k_h200", "base4k"),
    ("trained at 4K with views, reads the whole cache", "views_ablation_h200", "views4k"),
    ("the same, reads a view of 1K", "views_ablation_1k_h200", "views4k"),
)


def read(name: str) -> dict[str, Any]:
    """A record by its file's name."""
    record: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text())
    return record


def speed_table(name: str = "full_mode_speed_h200", systems: dict[str, str] = SYSTEMS) -> str:
    """Step time and tokens a second beside SGLang's EAGLE-3 in one run."""
    figures = read(name)["figures"]
    head = "| H200, Llama-8B shape, FA3, chain of 5, forced acceptance 4.0 | " + " | ".join(
        f"{c}: ms a step, tokens/s, to SGLang's" for c in CASES.values()
    )
    lines = [head + " |", "|---|" + "---|" * len(CASES)]
    for key, label in systems.items():
        own = f"{key}_steady" if key in STEADY else key
        speed = {c: figures[f"{own}_tok_s_{c}"] for c in CASES}
        cells = [
            f"{figures[f'{own}_ms_step_{c}']:.1f}, {speed[c]:,.0f}, {speed[c] / figures[f'eagle3_tok_s_{c}']:.2f} ×"
            for c in CASES
        ]
        lines.append(f"| {label} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def attention_table() -> str:
    """Self-attention of a verification over 32 layers: on the whole cache, on sets of tokens, and what choosing them takes."""
    figures = read("sparse_attention_h200")["figures"]
    shapes = [(batch, context) for batch in (8, 16) for context in (16384, 32768)]
    head = " | ".join(f"{batch} × {context // 1024}K" for batch, context in shapes)
    lines = [f"| H200, 5 rows a request, 32 layers | {head} |", "|---|" + "---|" * len(shapes)]
    whole = [f"{figures[f'full_b{b}_c{c}_r5_ms']:.2f} ms" for b, c in shapes]
    lines.append(f"| whole cache | {' | '.join(whole)} |")
    for tokens in (128, 256, 512):
        cells = []
        for b, c in shapes:
            key = f"{tokens}_b{b}_c{c}_r5"
            choice = 100 * figures[f"choice_share_of_full_{key}"]
            cells.append(
                f"{figures[f'sparse_{key}_ms']:.2f} ms, {figures[f'ratio_{key}']:.1f} × ({figures[f'ratio_with_choice_{key}']:.1f} × with the choice, {choice:.1f} %)"
            )
        lines.append(f"| sets of {tokens} | {' | '.join(cells)} |")
    return "\n".join(lines)


def trees_table() -> str:
    """Shapes of LongSpec's drafts on SmolLM2: accept length and speed in bfloat16, and whose tokens are plain decoding's in float32."""
    speed, whole, seeded = (
        read(f"{name}_longspec_h200") for name in ("tree_speed", "tree_identity", "seeded_identity")
    )
    figures, prompts = speed["figures"], whole["figures"]["prompts"]
    lines = [
        "| H200, SmolLM2-135M, LongSpec, 2K prompts | batch 1: τ, tokens/s | batch 16: τ, tokens/s | float32: plain's tokens, greedy | with seeds |",
        "|---|---|---|---|---|",
        f"| no draft | 1, {figures['plain_tok_s_b1']:,.0f} | 1, {figures['plain_tok_s_b16']:,.0f} | – | – |",
    ]
    for key, label in (("chain5", "chain of 5"), ("beam_4_16_16_16_16", "beam tree 4,16,16,16,16")):
        cells = [f"{figures[f'{key}_tau_b{b}']:.2f}, {figures[f'{key}_tok_s_b{b}']:,.0f}" for b in (1, 16)]
        cells.append(f"{whole['figures'][f'{key}_b16_identical']} of {prompts}")
        cells.append(f"{seeded['figures']['prompts'] - seeded['figures'][f'{key}_mismatches']} of {prompts}")
        lines.append(f"| {label} | {' | '.join(cells)} |")
    return "\n".join(lines)


def recovery_table() -> str:
    """Attention recovery of sets by what chooses them, with two recipes."""
    records = [read("arr_longspec_all_layers_cpu"), read("arr_longspec_h200")]
    kinds = {
        "oracle": "oracle, one set for all layers",
        "recent": "the most recent tokens",
        "history_lag1": "history (T)",
        "lookahead": "lookahead (D)",
        "hybrid": "both (H)",
    }
    sizes = (128, 256, 512)
    named = [
        f"layer {r['settings']['target_layer']}, {r['figures']['texts']} of {r['settings']['count']} reports"
        for r in records
    ]
    heads = [f"{name}: {k} tokens" for name in named for k in sizes]
    lines = [
        "| attention recovery rate, mean of all layers | " + " | ".join(heads) + " |",
        "|---|" + "---|" * len(heads),
    ]
    for key, label in kinds.items():
        cells = [f"{record['figures'][f'arr_{key}_k{k}']:.3f}" for record in records for k in sizes]
        lines.append(f"| {label} | {' | '.join(cells)} |")
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


def tau_rows(record: dict[str, Any]) -> str:
    """Accept length by context of a record of ``bench score_drafts``: a row a prompt length, a column a draft.

    Groups of one kind of document are left out; those of all kinds hold their answers too.
    """
    s, rows = record["settings"], record["rows"]
    drafts = list(dict.fromkeys(row["draft"] for row in rows))
    found = {(row["draft"], row["group"]): f"{row['tau']:.2f} ({row['tau_without_bonus']:.2f})" for row in rows}
    answers = {row["group"]: row["answers"] for row in rows if row["group"].isdecimal()}
    names = " | ".join(f"{DRAFTS.get(draft, draft)}: τ (without bonus)" for draft in drafts)
    lines = [
        f"| greedy, chains of {s['steps']}, {s['new_tokens']} tokens | prompt | answers, looping ones left out | {names} |"
    ]
    lines.append("|---|---|---|" + "---|" * len(drafts))
    for group in sorted(answers, key=int):
        count = f"{answers[group]}, {record['figures'].get(f'{group}_looping', 0):.0f}"
        cells = [bucket_of(int(group)), f"{int(group):,} tokens", count, *(found.get((d, group), "-") for d in drafts)]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def tau_table() -> str:
    """Accept length of the shipped drafts on held-out documents by context."""
    return tau_rows(read("shipped_score_h200"))


def training_table() -> str:
    """EAGLE-3 training beside SpecForge's trainer by length of the document; what was not run has a dash."""
    figures = read("eagle3_training_h200")["figures"]
    lines = [
        "| H200, EAGLE-3 for an 8B shape | " + " | ".join(f"{n}K" for n in LENGTHS) + " |",
        "|---|" + "---|" * len(LENGTHS),
    ]
    for rows, said in ROWS.items():
        for side, label in SIDES.items():
            cells = [training_cell(figures, f"{side}_{rows}_{n}k") for n in LENGTHS]
            lines.append(f"| {label}, {said} | " + " | ".join(cells) + " |")
        if any(f"speed_ratio_{rows}_{n}k" in figures for n in LENGTHS):
            cells = [
                f"{figures[f'speed_ratio_{rows}_{n}k']:.1f} × speed, {figures[f'memory_ratio_{rows}_{n}k']:.2f} × memory"
                for n in LENGTHS
            ]
            lines.append(f"| longdraft / SpecForge, {said} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def training_cell(figures: dict[str, float], trial: str) -> str:
    """Tokens a second, peak memory, and the step beside the least that it could take."""
    if f"{trial}_tok_s" not in figures:
        return "–"
    speed, peak, step, floor = (figures[f"{trial}_{key}"] for key in ("tok_s", "peak_gib", "ms_step", "floor_ms"))
    return f"{speed:,.0f} tokens/s, {peak:.1f} GiB, {step:,.0f} ms ({floor:.0f})"


def ablation_table() -> str:
    """τ of LongSpec drafts that differ in one thing."""
    return both_lengths("LongSpec draft, 150 steps, chain of 4", ABLATIONS, 3)


def reads_table() -> str:
    """τ of LongSpec drafts by the part of the target's cache that they read."""
    return both_lengths("what the draft reads, chains of 4", READS, 2)


def served_table() -> str:
    """τ of a shipped draft on both sides, of one record."""
    record = read("served_drafts_tau_h200")
    figures, rows = record["figures"], record["rows"]
    lines = [
        "| served, greedy, chains of 4 | answers, looping ones left out | server: τ | reference decoder: τ |",
        "|---|---|---|---|",
    ]
    for draft, length in sorted({(row["draft"], row["length"]) for row in rows}):
        key = f"{draft}_{length}"
        looping = sum(row["looping"] for row in rows if (row["draft"], row["length"]) == (draft, length))
        cells = f"{figures[f'{key}_answers']}, {looping} | {figures[f'{key}_tau_served']:.3f} | {figures[f'{key}_tau_reference']:.3f}"
        lines.append(f"| {DRAFTS[draft]}, {length:,} tokens | {cells} |")
    return "\n".join(lines)


def both_lengths(head: str, entries: Sequence[tuple[str, str, str]], digits: int) -> str:
    """τ at 2K and at 7.9K, a draft a row; entries as in ``ABLATIONS``."""
    lines = [f"| {head} | τ at 2K | τ at 7.9K |", "|---|---|---|"]
    for label, record, draft in entries:
        figures = read(record)["figures"]
        cells = [f"{figures[f'{draft}_{length}_tau']:.{digits}f}" for length in (2048, 7900)]
        lines.append(f"| {label} | {' | '.join(cells)} |")
    return "\n".join(lines)


TABLES: dict[str, Callable[[], str]] = {
    "speed": speed_table,
    "speed_modes": lambda: speed_table("modes_speed_h200", MODES),
    "speed_sparse": lambda: speed_table("sparse_mode_speed_h200", SPARSE),
    "sparse_attention": attention_table,
    "trees": trees_table,
    "recovery": recovery_table,
    "identity": identity_table,
    "tau": tau_table,
    "training": training_table,
    "ablation": ablation_table,
    "reads": reads_table,
    "served": served_table,
}


def fill(text: str, tables: Mapping[str, Callable[[], str]] = TABLES) -> str:
    """The text with every table made anew.

    Raises:
        KeyError: a marker that names no table.
    """
    return re.sub(
        r"<!-- table (\w+) -->\n.*?<!-- end -->",
        lambda found: f"<!-- table {found[1]} -->\n{tables[found[1]]()}\n<!-- end -->",
        text,
        flags=re.DOTALL,
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Fill the file that is named on the command line."""
    parser = argparse.ArgumentParser(prog="longdraft bench readme_tables", description=(__doc__ or "").split("\n")[2])
    parser.add_argument("file", nargs="?", type=Path, default=Path("README.md"))
    path = parser.parse_args(argv).file
    if not path.is_file():
        parser.error(f"{path} is no file: give one with tables to fill")
    path.write_text(fill(path.read_text()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
