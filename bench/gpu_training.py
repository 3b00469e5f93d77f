"""python -m longdraft.bench.gpu_training --out bench/results/eagle3_training_h200.json --seconds 570

EAGLE-3 training on one GPU at 2K, 8K and 32K: ours beside SpecForge 0.2.0's own trainer (training_specforge.py says how it is
driven), a Llama-3.1-8B shape with dummy weights, K = 7, batch 1, bf16 with float32 masters, draft vocabulary 32,000. Both sides read
the same feature files and start from the same draft weights. Two jobs a length: ``answers`` supervises the last 1,024 tokens,
``all`` every row. A step lasts from a batch in host memory to updated weights, the device idle before and after; the first three
steps are left out. Each trial is a process of its own; what one did stays in ``WORK/results.jsonl`` whatever happens to
the next, and a second call on the same machine goes on with the trials that are left.

Floors (training_floor.py; 989 TFLOP/s, 4.3 TB/s), dense rows: 37 ms at 2K, 0.16 s at 8K, 0.79 s at 32K, of which 28 % is
attention. Query-sparse rows, 1,024 of 32K: 40 TFLOP, 44 ms, and 768 MiB of features to copy, 15 ms pinned or 100 ms and more
pageable. With the target inside the step another 0.75 s at 32K.

Predicted before the run: SpecForge (flex attention, compact teacher) 13K tokens/s and 13 GiB at 2K, 17K and 30 GiB at 8K, 12K
and 95 to 125 GiB at 32K, where it may run out of memory: two float32 [32K, 32,000] teachers and their padded copies are 16 GiB,
seven steps keep 2 GiB of logits and about 8 GiB of activations each. Ours, answers: 100K tokens/s at 32K and 15 GiB, of which 10
are weights and optimizer. Ours, all rows: 18K tokens/s at 32K (projections and MLP are computed twice) and 32 GiB.

Measured (bench/results/eagle3_training_h200.json): SpecForge 11.2K tokens/s and 13.3 GiB at 2K, 18.9K and 26.3 GiB at 8K, 15.2K
and 82.2 GiB at 32K, which fits: faster and smaller than predicted where it is long, not where it is short. Ours, answers, at 32K: 124K
and 11.7 GiB; of its 264 ms 126 copy features (the copy is pageable, as feared) and 44 are its floor. At 2K and 8K 19K and 60K tokens/s
in steps of 107 and 137 ms, four to five times their floors: cost that does not depend on the length fills them. Ours, all rows: 13.5K
and 23.3 GiB, a third of the card's peak; slower than predicted, and than SpecForge's 15.2K, which also computes every row.
Not run yet: all rows at 8K, ours at 2K and SpecForge's at 32K, a running target, and the variants at the end of the list.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from longdraft.bench.record import make_record, write_record
from longdraft.bench.training_files import Job
from longdraft.bench.training_record import checks, figures, ran, summary

MODULES = {"ours": "longdraft.bench.training_ours", "specforge": "longdraft.bench.training_specforge"}
LENGTHS = {"llama-8b": (2048, 8192, 32768), "tiny": (96, 128, 160)}
TAIL = 15


def trials(shape: str, device: str) -> list[Job]:
    """All trials, the most wanted first. On a CPU SpecForge trains with what works there."""
    small, middle, large = LENGTHS[shape]
    sized = (large, middle, small)

    def ours(length: int, rows: Any = "answers", **more: Any) -> Job:
        return Job("ours", length, rows, shape, device, **more)

    def theirs(length: int, rows: Any = "answers", **more: Any) -> Job:
        job = Job("specforge", length, rows, shape, device, **more)
        return replace(job, attention="sdpa", sharding="NO_SHARD") if device == "cpu" else job

    jobs = [make(length) for length in sized for make in (ours, theirs)]
    jobs += [ours(large, "all"), ours(small, compat=True), theirs(small, "all")]
    jobs += [
        ours(large, online=True),
        ours(middle, "all"),
        ours(small, "all"),
        theirs(large, "all"),
        theirs(middle, "all"),
    ]
    jobs += [ours(large, "all", recompute=False), ours(middle, online=True), ours(small, online=True)]
    jobs += [theirs(middle, compact=False), theirs(small, compact=False), theirs(large, sharding="NO_SHARD")]
    return list({job.name: job for job in jobs}.values())


def fallback(job: Job, trial: dict[str, Any]) -> Job | None:
    """What to try where SpecForge failed otherwise than by memory or time: DDP, then attention that is no compiled kernel.

    A trial that ran out of time is tried again by the next call, with the kernels that this one compiled.
    """
    if job.side != "specforge" or "error" not in trial or "timeout_s" in trial or job.device == "cpu":
        return None
    if job.sharding != "NO_SHARD":
        return replace(job, sharding="NO_SHARD")
    return replace(job, attention="sdpa") if job.attention != "sdpa" else None


def environment(work: Path) -> dict[str, str]:
    """Of every trial: one allocator setting for both sides, and compiled kernels kept from trial to trial."""
    return os.environ | {
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
        "TORCHINDUCTOR_CACHE_DIR": str(work / "inductor"),
        "TOKENIZERS_PARALLELISM": "false",
        "WANDB_MODE": "disabled",
        "HF_HUB_OFFLINE": "1",
    }


def run_process(command: list[str], log: Path, work: Path, timeout: float) -> int | None:
    """Exit status; None if it had to be ended, with all its children."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w") as file:
        process = subprocess.Popen(
            command, stdout=file, stderr=subprocess.STDOUT, env=environment(work), start_new_session=True
        )
        try:
            return process.wait(timeout)
        except subprocess.TimeoutExpired:
            return None
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def run_trial(job: Job, work: Path, timeout: float) -> dict[str, Any]:
    """One trial in a process of its own, summed up from what it wrote."""
    events, log = work / "events" / f"{job.name}.jsonl", work / "logs" / f"{job.name}.log"
    events.parent.mkdir(parents=True, exist_ok=True)
    events.unlink(missing_ok=True)
    start = time.perf_counter()
    status = run_process(
        [sys.executable, "-m", MODULES[job.side], str(work), str(events), job.json()], log, work, timeout
    )
    trial = summary(job, read_lines(events)) | {"process_s": round(time.perf_counter() - start, 1), "status": status}
    if status is None:
        trial["timeout_s"] = timeout
    if not ran(trial) and "oom" not in trial and "error" not in trial:
        trial["error"] = "ended by its time limit" if status is None else f"exit status {status} without a steady step"
        trial["traceback"] = log.read_text(errors="replace").splitlines()[-TAIL:]
    return trial


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The whole lines of a JSONL file that may have been cut off."""
    out = []
    for line in path.read_text().splitlines() if path.is_file() else []:
        try:
            out.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return out


def write(out: Path, done: list[dict[str, Any]], shape: str) -> None:
    """The record of what is known so far."""
    settings = {
        "shape": "Llama-3.1-8B, dummy weights" if shape == "llama-8b" else shape,
        "ttt_steps": 7,
        "batch": 1,
        "draft_vocabulary": 32000 if shape == "llama-8b" else 64,
        "answers": "the last 1,024 tokens are supervised",
        "specforge": "0.2.0, offline features, flex_attention, compact_teacher, SHARD_GRAD_OP, unless a name says otherwise",
        "step": "batch in host memory to updated weights; median after 3 steps",
        "allocator": "expandable_segments:True on both sides",
        "peak_gib": "torch.cuda.max_memory_allocated after the first 3 steps",
    }
    record = make_record("eagle3_training", settings, figures(done), checks(done), trials=done)
    write_record(record, out)


def main(argv: list[str] | None = None) -> int:
    """Measure until the trials or the seconds run out; the record is rewritten after every trial."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--work", type=Path, default=Path("/tmp/longdraft-training"))
    parser.add_argument("--seconds", type=float, default=570, help="of this call; the rest is left to the next")
    parser.add_argument("--timeout", type=float, default=90, help="seconds of a trial")
    parser.add_argument("--timeout-specforge", type=float, default=180, help="SpecForge compiles at its first steps")
    parser.add_argument("--shape", default="llama-8b", choices=list(LENGTHS))
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--only", default="", help="names of trials that contain one of these words, comma-separated")
    parser.add_argument("--list", action="store_true", help="print the trials' names and stop")
    args = parser.parse_args(argv)
    begin = time.perf_counter()
    words = args.only.split(",")
    queue = [job for job in trials(args.shape, args.device) if any(word in job.name for word in words)]
    if args.list:
        print("\n".join(job.name for job in queue))
        return 0
    results = args.work / "results.jsonl"
    latest = {trial["name"]: trial for trial in read_lines(results)}
    queue = [job for job in queue if job.name not in latest or "error" in latest[job.name]]
    prepare(queue, args.work, args.shape, args.device)
    while queue:
        job = queue.pop(0)
        limit = args.timeout_specforge if job.side == "specforge" else args.timeout
        left = args.seconds - (time.perf_counter() - begin)
        if left < min(limit, 30):
            print(f"no time left for {job.name} and {len(queue)} more: call again", flush=True)
            break
        trial = run_trial(job, args.work, min(limit, left))
        with results.open("a") as file:
            file.write(json.dumps(trial) + "\n")
        latest[job.name] = trial
        shown = ("tok_s", "ms_step", "floor_ms", "peak_gib", "reserved_gib", "oom", "error", "process_s")
        print(job.name, {key: trial[key] for key in shown if key in trial}, flush=True)
        write(args.out, list(latest.values()), args.shape)
        other = fallback(job, trial)
        if other is not None and other.name not in latest:
            queue = [other, *(j for j in queue if j.name != other.name)]
    return 0


def prepare(queue: list[Job], work: Path, shape: str, device: str) -> None:
    """Write the files that the trials read."""
    if not queue:
        return
    work.mkdir(parents=True, exist_ok=True)
    copies = max(job.warmup + job.steps for job in queue)
    wanted = sorted({f"{job.length}:{job.rows}" for job in queue})
    command = [sys.executable, "-m", "longdraft.bench.training_files", str(work), shape, device, str(copies), *wanted]
    log = work / "logs" / "files.log"
    if run_process(command, log, work, 300) != 0:
        raise SystemExit("the trials' files could not be written:\n" + log.read_text(errors="replace")[-3000:])


if __name__ == "__main__":
    sys.exit(main())
