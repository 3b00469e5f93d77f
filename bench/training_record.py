"""The record of the training measurement: each trial's steps become figures, and what must hold becomes checks."""

import math
import statistics
from typing import Any

from longdraft.bench.training_files import SHAPES, Job
from longdraft.bench.training_floor import floor_seconds

DECAY = 0.8  # weight of depth k is 0.8^k, on both sides
LOSS_TOLERANCE = 0.005  # relative; bf16 rows through other kernels in another order
LINEAR = 1.25  # memory a token from 8K to 32K may be so many times that from 2K to 8K


def summary(job: Job, events: list[dict[str, Any]]) -> dict[str, Any]:
    """What a trial came to: its numbers, how it ended, and its loss at every step.

    Args:
        events: lines of the trial's process, in order; a killed one stops anywhere.
    """
    steps = [e for e in events if e["event"] == "step"]
    steady = steps[job.warmup :]
    ends = [e for e in events if e["event"] in ("oom", "error", "end")]
    out: dict[str, Any] = {"name": job.name, "job": job.json(), "steps": len(steps)}
    out["losses"] = [e["loss"] for e in steps]
    if steps:
        out["first_step_s"] = round(steps[0]["seconds"], 3)
        out["depth_losses"] = steps[0].get("depth_losses", [])
    if steady:
        seconds = statistics.median(e["seconds"] for e in steady)
        out |= {
            "ms_step": round(1000 * seconds, 2),
            "wait_ms": round(1000 * statistics.median(e["wait_s"] for e in steady), 2),
            "tok_s": round(job.length / seconds, 1),
            "floor_ms": round(1000 * floor_seconds(job, SHAPES[job.shape]), 2),
        }
        if "copy_s" in steady[0]:
            out["copy_ms"] = round(1000 * statistics.median(e["copy_s"] for e in steady), 2)
    for key in ("peak_gib", "reserved_gib", "overall_peak_gib"):
        values = [e[key] for e in (steady or steps) + ends if key in e]
        if values:
            out[key] = round(max(values), 3)
    for e in ends:
        if e["event"] == "oom":
            out |= {"oom": True, "message": e["message"]}
        elif e["event"] == "error":
            out |= {"error": e["message"], "traceback": e["traceback"]}
    return out


def ran(trial: dict[str, Any]) -> bool:
    """Whether a trial has a speed."""
    return "tok_s" in trial


def figures(trials: list[dict[str, Any]]) -> dict[str, float]:
    """Flat numbers of all trials. A trial that ran out of memory has ``oom_at_gib`` in place of speed and peak."""
    out: dict[str, float] = {}
    by_name = {t["name"]: t for t in trials}
    for name, t in by_name.items():
        if t.get("oom") and not ran(t):
            out[f"{name}_oom_at_gib"] = t.get("overall_peak_gib", 0.0)
            continue
        for key in ("tok_s", "ms_step", "floor_ms", "wait_ms", "copy_ms", "peak_gib", "reserved_gib", "first_step_s"):
            if key in t:
                out[f"{name}_{key}"] = t[key]
    for name, t in by_name.items():
        other = counterpart(name, by_name)
        if other is not None and ran(t) and ran(other):
            case = name.removeprefix("ours_")
            out[f"speed_ratio_{case}"] = round(t["tok_s"] / other["tok_s"], 3)
            if "peak_gib" in t and "peak_gib" in other:
                out[f"memory_ratio_{case}"] = round(t["peak_gib"] / other["peak_gib"], 3)
    for case in {n.rsplit("_", 1)[0] for n in by_name}:
        growth = memory_growth(by_name, case)
        if growth is not None:
            out[f"{case}_memory_growth_ratio"] = round(growth, 3)
    return out


def counterpart(name: str, by_name: dict[str, dict[str, Any]]) -> dict[str, Any] | None:
    """SpecForge's trial of the same job: as asked for, or the fallback that ran in its place."""
    side, rows, *options, size = name.split("_")
    if side != "ours" or "online" in options:
        return None
    for kind in ("", "ddp_", "sdpa_ddp_"):
        trial = by_name.get(f"specforge_{rows}_{kind}{size}")
        if trial is not None and ran(trial):
            return trial
    return None


def memory_growth(by_name: dict[str, dict[str, Any]], case: str) -> float | None:
    """Memory a token from 8K to 32K over that from 2K to 8K: 1 is linear, 4 is quadratic. None where a peak is missing."""
    sizes = [by_name.get(f"{case}_{n}k", {}) for n in (2, 8, 32)]
    if not all(ran(t) and "peak_gib" in t for t in sizes):
        return None
    small, middle, large = (t["peak_gib"] for t in sizes)
    first, second = (middle - small) / 6, (large - middle) / 24
    return second / first if first > 0 else math.inf


def checks(trials: list[dict[str, Any]]) -> dict[str, bool]:
    """What must hold of the trials that there are."""
    out: dict[str, bool] = {}
    by_name = {t["name"]: t for t in trials}
    for name, t in by_name.items():
        out[f"{name}_ran"] = ran(t)
        if t["losses"]:
            out[f"{name}_losses_finite"] = all(math.isfinite(x) for x in t["losses"])
    for case in {n.rsplit("_", 1)[0] for n in by_name if n.startswith("ours_")}:
        growth = memory_growth(by_name, case)
        if growth is not None:
            out[f"{case}_memory_linear"] = growth <= LINEAR
    for name, t in by_name.items():
        theirs = counterpart(name, by_name)
        if "_compat_" in name and theirs is not None and t["losses"] and theirs.get("depth_losses"):
            wanted = sum(DECAY**k * loss for k, loss in enumerate(theirs["depth_losses"]))
            out[f"{name}_first_loss_equals_specforge"] = abs(t["losses"][0] - wanted) <= LOSS_TOLERANCE * abs(wanted)
    return out
