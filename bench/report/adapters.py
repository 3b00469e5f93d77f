"""Older records, whose figures are flat, as rows: one function for each name that a record may have."""

import re
import statistics
from collections import defaultdict
from collections.abc import Callable
from typing import Any

from longdraft.bench.lengths import tokens_word
from longdraft.bench.report.rows import Acceptance, Excluded, Quality, Row, Speed, Steps

Adapted = tuple[list[Row], list[Excluded]]
FULL_SPEED = re.compile(r"(?P<system>.+?)_(?P<what>tok_s|ms_step|tokens_a_step|prefill_s)_b(?P<batch>\d+)_c(?P<k>\d+)k")
PHASES = ("draft", "partial", "verify", "sampling", "select", "keep", "host_gaps")
WORDS = {"sampling": "sample", "host_gaps": "gap"}  # the step clock's words as rows have them
STEP = re.compile(rf"(?P<label>.+)_(?P<context>\d+K)_batch_(?P<batch>\d+)_(?P<part>{'|'.join(PHASES)}|step)")
# Words in the names of bench gpu_full_speed's systems of ours: drafts beside LongSpec, modes beside full, and what else was set
WITH = {"eagle3": "EAGLE-3", "lm": "language model"}
MODES = ("exact", "partial", "sparse")
MORE = {"sets": "on sets", "recipe": "recipe", "sync": "no overlap", "eager": "no graphs", "whole": "whole cache"}
STOCK = {
    "plain": ("plain", "plain"),
    "eagle3": ("eagle3", "SGLang EAGLE-3"),
    "eagle3_window": ("eagle3", "SGLang EAGLE-3, window 4K"),
}
SETS = 512  # tokens of its sparse sets, which its records do not name
DRAFTS = {"longspec": "LongSpec", "eagle3": "EAGLE-3"}
HALVES = {"h": "sparse", "t": "sparse, history", "d": "sparse, lookahead"}


def full_speed(record: dict[str, Any], source: str) -> Adapted:
    """``bench gpu_full_speed``: figures to the end of the slowest answer; steady ones are of the same run and left out."""
    settings, found = record["settings"], defaultdict[tuple[str, int, int], dict[str, float]](dict)
    for name, value in record["figures"].items():
        if (match := FULL_SPEED.fullmatch(name)) and not match["system"].endswith("_steady"):
            found[match["system"], int(match["batch"]), int(match["k"])][match["what"]] = value
    rows: list[Row] = []
    excluded = []
    for (name, batch, thousands), figures in found.items():
        system, label, budget = _full_speed_system(name, settings["view_tokens"])
        forced = None if system == "plain" else settings["accept_length"]
        if record["checks"].get(f"{name}_ran") is False:
            where = f"batch {batch}, context {thousands}K"
            excluded.append(Excluded(source=source, name=label, where=where, why="its run failed a check"))
            continue
        rows.append(
            Speed(
                system=system, label=label, settings={} if budget is None else {"budget": budget}, n=batch, source=source, batch=batch, context=1000 * thousands,
                forced_accept=forced, **figures,
            )
        )  # fmt: skip
    return rows, excluded


def _full_speed_system(name: str, view_tokens: int) -> tuple[str, str, int | None]:
    """The harness's word for a system, a label, and its budget."""
    if name in STOCK:
        return *STOCK[name], None
    _, *words = name.split("_")
    mode = next((word for word in words if word in MODES), "full")
    draft = next((WITH[word] for word in words if word in WITH), "LongSpec" if mode == "full" else None)
    budget = None if mode == "full" else SETS if mode == "sparse" else view_tokens
    parts = [mode if budget is None else f"{mode} {tokens_word(budget)}", draft, *(MORE[w] for w in words if w in MORE)]
    return mode, ", ".join(part for part in parts if part), budget


def step_times(record: dict[str, Any], source: str) -> Adapted:
    """``bench step_times``: medians of a step's parts, in ms."""
    found = defaultdict[tuple[str, str, int], dict[str, float]](dict)
    for name, value in record["figures"].items():
        if match := STEP.fullmatch(name):
            label = match["label"].replace("_", " ")
            found[label, match["context"], int(match["batch"])][WORDS.get(match["part"], match["part"])] = value
    return [
        Steps(
            system=label.split(",")[0].split(" ")[0], label=label, source=source, batch=batch, context=context,
            step=parts.pop("step"), phases=parts,
        )
        for (label, context, batch), parts in found.items()
    ], []  # fmt: skip


def scored(record: dict[str, Any], source: str) -> Adapted:
    """``bench score_drafts`` of shipped drafts: τ along known greedy answers, which is mode ``full``'s."""
    rows = [
        Acceptance(
            system="full", label=f"{DRAFTS.get(row['draft'], row['draft'])}, reference decoder", n=row["answers"], source=source,
            task="held-out documents", bucket=tokens_word(int(row["group"])), tau_micro=row["tau"],
            tau_micro_no_bonus=row["tau_without_bonus"], accept_by_position=row["reached_depth"],
            verifications=row["verifications"], tokens=row["tau"] * row["verifications"],
        )
        for row in record["rows"]
        if row["group"].isdecimal()
    ]  # fmt: skip
    return list(rows), []


def served(record: dict[str, Any], source: str) -> Adapted:
    """``bench served_tau`` and ``bench shipped_tau``: an answer a row, of the real server."""
    groups = defaultdict[tuple[str, int], list[dict[str, Any]]](list)
    for row in record["rows"]:
        groups[row["draft"], row["length"]].append(row)
    rows: list[Row] = []
    excluded = []
    for (draft, length), answers in groups.items():
        label = f"{DRAFTS.get(draft, draft)}, served"
        kept = [row for row in answers if not row["looping"]]
        if looping := len(answers) - len(kept):
            why = f"{looping} of {len(answers)} answers have more than 30 % repeated 4-grams"
            excluded.append(Excluded(source=source, name=label, where=f"{length:,} tokens", why=why))
        if not kept:
            continue
        each = [row["gained"] / row["served_verifications"] for row in kept]
        tokens, verifications = (sum(row[key] for row in kept) for key in ("gained", "served_verifications"))
        rows.append(
            Acceptance(
                system="full", label=label, n=len(kept), source=source, task="held-out documents", bucket=tokens_word(length),
                tau_micro=tokens / verifications, tau_micro_no_bonus=tokens / verifications - 1,
                tau_macro=statistics.mean(each), tau_macro_no_bonus=statistics.mean(each) - 1,
                tau_spread=statistics.stdev(each) if len(each) > 1 else None, tokens=tokens, verifications=verifications,
            )
        )  # fmt: skip
    return rows, excluded


def quality(record: dict[str, Any], source: str) -> Adapted:
    """``bench view_quality`` and ``bench sparse_quality``: ROUGE-L by selector and budget."""
    figures, rows = record["figures"], list[Row]()
    task = "summaries" if record["settings"].get("asked_for_a_summary", True) else "continuations"
    for name in (key.removesuffix("_rouge_l_to_target") for key in figures if key.endswith("_rouge_l_to_target")):
        if match := re.fullmatch(r"sparse_(\w)_(\d+)(?:_refresh_(\d+))?", name):
            label = HALVES[match[1]] + (f", refresh {match[3]}" if match[3] else "")
            system, budget = "sparse", int(match[2])
        elif match := re.fullmatch(r"([a-z_]+)_(\d+)", name):
            own_view = match[1] == "mass"
            system, label, budget = (
                ("partial", "partial", int(match[2])) if own_view else (match[1], match[1], int(match[2]))
            )
        else:
            system, label, budget = name, name, None
        reference = figures.get(f"{name}_rouge_l_to_reference")
        rows.append(
            Quality(
                system=system, label=label, n=int(figures.get(f"{name}_answers", 0)), source=source, task=task,
                metric="rouge_l", budget=budget, score_own=figures[f"{name}_rouge_l_to_target"] / 100,
                score_reference=None if reference is None else reference / 100,
                exact_match_own=figures.get(f"{name}_exact_match"),
            )
        )  # fmt: skip
    return rows, []


ADAPTERS: dict[str, Callable[[dict[str, Any], str], Adapted]] = {
    "full_mode_speed": full_speed,
    "step_times": step_times,
    "shipped_score": scored,
    "served_drafts_tau": served,
    "shipped_drafts_tau": served,
    "view_quality": quality,
    "sparse_quality": quality,
}
