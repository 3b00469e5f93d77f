"""python -m longdraft.bench.kernel_times --systems longdraft-exact --cases b16_c32k --out kernel_times.json

Where the card's time goes: the kernels of some scheduler steps of a system of :mod:`longdraft.bench.gpu_full_speed`, as SGLang's
own profiler sees them, by name: calls and microseconds a step, and how long the card had nothing to do. Profiling slows the host,
so gaps are larger than without; the kernels' own times are right.
"""

import argparse
import gzip
import json
import random
import re
import sys
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from longdraft.bench.gpu_full_speed import CASES, CONTEXT, launch_command, write_models
from longdraft.bench.record import make_record, write_record
from longdraft.bench.server import Server, generate

STEPS = 6  # that are profiled
NEW_TOKENS = 256
KERNELS = ("kernel", "gpu_memcpy", "gpu_memset")
TEMPLATE = re.compile(r"<.*|\(.*")


def short(name: str) -> str:
    """A kernel's name without its template's arguments; CUTLASS calls all of its kernels alike, so there these say what it is."""
    plain = TEMPLATE.sub("", name.removeprefix("void ")).split("::")[-1].strip() or name
    hint = next((word for word in ("flash", "gemm") if word in name.lower()), "")
    return f"{plain} ({hint})" if hint and hint not in plain.lower() else plain


def by_kernel(events: Iterable[dict[str, Any]], steps: int) -> tuple[list[tuple[str, float, float]], float, float]:
    """Calls and microseconds a step of each kernel, the longest first; the card's busy and idle microseconds a step.

    Args:
        events: of a trace in Chrome's format.
        steps: that it holds.
    """
    found = sorted((e["ts"], e["ts"] + e["dur"], e["name"]) for e in events if e.get("cat") in KERNELS)
    calls, spent = Counter[str](), Counter[str]()
    busy, end = 0.0, found[0][0] if found else 0.0
    for first, last, name in found:
        calls[short(name)] += 1
        spent[short(name)] += last - first
        busy += max(0.0, last - max(first, end))
        end = max(end, last)
    idle = end - found[0][0] - busy if found else 0.0
    rows = [(name, calls[name] / steps, us / steps) for name, us in spent.most_common()]
    return rows, busy / steps, idle / steps


def profile(server: Server, batch: int, context: int, folder: Path) -> Path:
    """A trace of some steps of a batch that decodes.

    Raises:
        TimeoutError: no trace was written within a minute.
    """
    draw = random.Random(0)
    ids = [[draw.randrange(1000, 120_000) for _ in range(context)] for _ in range(batch)]
    generate(server, ids, 2)
    before = set(folder.rglob("*.trace.json.gz"))
    run = threading.Thread(target=generate, args=(server, ids, NEW_TOKENS))
    run.start()
    time.sleep(1.0)
    body = json.dumps({"output_dir": str(folder), "num_steps": STEPS, "activities": ["GPU"]}).encode()
    post = urllib.request.Request(f"{server.address}/start_profile", body, {"content-type": "application/json"})
    urllib.request.urlopen(post, timeout=120).read()
    run.join()
    end = time.monotonic() + 60
    while time.monotonic() < end:
        if new := sorted(set(folder.rglob("*.trace.json.gz")) - before):
            return new[0]
        time.sleep(0.5)
    raise TimeoutError(f"{server.name} wrote no trace into {folder}")


def main(argv: list[str] | None = None) -> int:
    """Profile and write one record."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[2])
    parser.add_argument("--systems", default="longdraft-exact")
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--models", type=Path, default=Path("/tmp/longdraft-models"))
    parser.add_argument("--logs", type=Path, default=Path("/tmp/longdraft-logs"))
    parser.add_argument("--top", type=int, default=30, help="kernels that are kept of each case")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args(argv)
    models, figures, rows = write_models(args.models), dict[str, float](), list[dict[str, Any]]()
    for system in args.systems.split(","):
        command, environment = launch_command(system, models, CONTEXT)
        with Server(system, command, args.logs / f"kernels-{system}.log", environment) as server:
            for case in args.cases:
                trace = profile(server, *CASES[case], args.logs / "traces")
                events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
                kernels, busy, idle = by_kernel(events, STEPS)
                name = f"{system.replace('-', '_')}_{case}"
                figures |= {f"{name}_busy_us": round(busy, 1), f"{name}_idle_us": round(idle, 1)}
                print(f"{name}: busy {busy:.0f} us a step, idle {idle:.0f}", flush=True)
                for kernel, calls, us in kernels[: args.top]:
                    rows.append({"case": name, "kernel": kernel, "calls": round(calls, 2), "us": round(us, 1)})
                    print(f"  {us:9.1f} us {calls:8.1f} x {kernel}", flush=True)
                write_record(make_record("kernel_times", {"steps": STEPS}, figures, {}, rows=rows), args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
