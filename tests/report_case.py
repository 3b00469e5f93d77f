"""Records as the harness writes them, for tests of the report: every kind of row, with figures that are made up but plausible."""

import json
from pathlib import Path
from typing import Any

SPEEDS = {  # system, label, budget: tokens/s by (batch, context)
    ("plain", "plain", None): {(1, 8192): 210, (1, 32768): 163, (16, 8192): 1900, (16, 32768): 759},
    ("eagle3", "EAGLE-3", None): {(1, 8192): 450, (1, 32768): 411, (16, 8192): 4300, (16, 32768): 2335},
    ("ngram", "n-gram", None): {(1, 8192): 260, (1, 32768): 215, (16, 8192): 2100, (16, 32768): 980},
    ("full", "full", None): {(1, 8192): 520, (1, 32768): 500, (16, 8192): 4700, (16, 32768): 2700},
    ("exact", "exact 4K", 4096): {(1, 8192): 470, (1, 32768): 490, (16, 8192): 4800, (16, 32768): 3300},
    ("partial", "partial 2K", 2048): {(1, 8192): 515, (1, 32768): 530, (16, 8192): 5900, (16, 32768): 5200},
    ("partial", "partial 4K", 4096): {(1, 8192): 510, (1, 32768): 514, (16, 8192): 5500, (16, 32768): 4800},
    ("sparse", "sparse 512", 512): {(1, 8192): 540, (1, 32768): 560, (16, 8192): 7100, (16, 32768): 6900},
}
SCORES = {  # against the target's own output, by budget
    ("partial", "partial"): {1024: 0.71, 2048: 0.82, 4096: 0.93},
    ("sparse", "sparse"): {256: 0.45, 512: 0.63, 1024: 0.7},
    ("streaming", "StreamingLLM"): {512: 0.2, 1024: 0.24, 4096: 0.41},
}
PHASES = {"draft": 1.8, "verify": 7.7, "select": 0.4, "sample": 0.1, "gap": 0.2}


def row(system: str, label: str, budget: int | None = None, **more: Any) -> dict[str, Any]:
    """One row that counts."""
    settings = {} if budget is None else {"budget": budget}
    return {"system": system, "label": label, "settings": settings, "ok": True, "why": "", "n": 20, "seed": 0, **more}


def record(name: str, rows: list[dict[str, Any]], **settings: Any) -> dict[str, Any]:
    """One record."""
    return {
        "name": name, "command": f"longdraft bench {name} {name}.yaml", "commit": "c0ffee", "date": "2026-11-30T12:00:00Z",
        "device": "a card", "versions": {"sglang": "0.5.14", "torch": "2.11.0"}, "settings": {"model": "a model", **settings},
        "figures": {}, "checks": {}, "rows": rows,
    }  # fmt: skip


def speed_rows() -> list[dict[str, Any]]:
    rows = []
    for (system, label, budget), speeds in SPEEDS.items():
        for (batch, context), tok_s in speeds.items():
            more = {"ms_step": 10.0, "tokens_a_step": 4.0, "prefill_s": 1.2, "forced_accept": None, "repeats": 3}
            if system in ("partial", "sparse"):
                more["phases"] = PHASES
            rows.append(
                row(
                    system, label, budget, batch=batch, context=context, tok_s=float(tok_s), tok_s_spread=0.02 * tok_s,
                    alpha=1.01 * tok_s, **more,
                )
            )  # fmt: skip
    rows.append(row("self", "self", 512, batch=16, context=32768) | {"ok": False, "why": "41 % repeated 4-grams"})
    return rows


def load_rows() -> list[dict[str, Any]]:
    rows = []
    for factor, (system, label) in enumerate((("plain", "plain"), ("full", "full")), 1):
        for rate in (1.0, 2.0, 4.0):
            latencies = {
                "ttft_p50_ms": 80 * rate,
                "ttft_p99_ms": 300 * rate / factor,
                "itl_p50_ms": 9,
                "itl_p99_ms": 30 * rate,
            }
            rows.append(
                row(system, label, rate=rate, requests=100, tok_s=700 * rate * factor, partial_share=0.0, **latencies)
            )
    return rows


def acceptance_rows() -> list[dict[str, Any]]:
    rows = []
    for task, first in (("govreport", 3.2), ("pg19", 2.6), ("lcc", 3.6), ("qmsum", 2.9)):
        for system, less in (("full", 0.0), ("exact", 0.1), ("ngram", 1.2)):
            for at, bucket in enumerate(("2K", "8K", "16K")):
                tau = first - less - 0.15 * at
                rows.append(
                    row(
                        system, system, task=task, bucket=bucket, tau_micro=tau, tau_macro=tau - 0.05, tau_micro_no_bonus=tau - 1,
                        tau_macro_no_bonus=tau - 1.05, accept_by_position=[0.8, 0.6, 0.4, 0.3], tokens=5000.0, verifications=5000 / tau,
                    )
                )  # fmt: skip
    return rows


def quality_rows() -> list[dict[str, Any]]:
    rows = [
        row(
            "full", "full", task=task, bucket="8K", metric=metric, budget=None, score_own=1.0, score_reference=best,
            exact_match_own=1.0, mean_new_tokens=250.0, spread=0.04,
        )
        for task, metric, best in (("govreport", "rouge_l", 0.24), ("triviaqa", "f1", 0.8))
    ]  # fmt: skip
    for (system, label), scores in SCORES.items():
        for budget, score in scores.items():
            for task, metric, best in (("govreport", "rouge_l", 0.24), ("triviaqa", "f1", 0.8)):
                rows.append(
                    row(
                        system, f"{label} {budget // 1024}K" if budget >= 1024 else f"{label} {budget}", budget, task=task, bucket="8K",
                        metric=metric, score_own=score, score_reference=best * score, exact_match_own=score / 2,
                        mean_new_tokens=240.0, spread=0.05,
                    ) | {"budget": budget}
                )  # fmt: skip
    return rows


def write_records(folder: Path) -> Path:
    """All kinds of records in a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    kinds = {"speed": speed_rows(), "load": load_rows(), "acceptance": acceptance_rows(), "quality": quality_rows()}
    for name, rows in kinds.items():
        (folder / f"{name}.json").write_text(json.dumps(record(name, rows)))
    return folder
