"""Requests at steady arrivals on one card: ``longdraft bench steady_arrivals --systems plain,longdraft,longdraft-exact --out R``.

The systems of :mod:`longdraft.bench.gpu_full_speed` (8B shape, random weights, forced acceptance) get the same requests one after the
other: one every ``1 / rate`` seconds, prompts of random tokens whose lengths are log-uniform, answers streamed. Says by system the
tokens a second, the time to the first token and between tokens (p50, p99), and for ``exact`` and ``partial`` the share of
verifications that were partial. Tokens that come in one chunk share the wait for it evenly, as in SGLang's own benchmark; chunks are
counted by themselves too. What is kept of every request is enough to count otherwise.
"""

import argparse
import json
import math
import random
import sys
import threading
import time
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from longdraft.bench.gpu_full_speed import check_systems, launch_command, write_models
from longdraft.bench.record import make_record, write_record
from longdraft.bench.server import Server, server_sent

SHORTEST, LONGEST = 2000, 32000


@dataclass
class Served:
    """One request as its client saw it; seconds on one clock."""

    sent: float
    times: list[float] = field(default_factory=list)  # of every token
    counters: dict[str, Any] = field(default_factory=dict)
    error: str | None = None

    chunks: list[float] = field(default_factory=list)  # times at which some came

    def chunk(self, now: float, tokens: int) -> None:
        """So many tokens were there at that time, all in all."""
        new, before = tokens - len(self.times), self.times[-1] if self.times else now
        self.times += [before + (now - before) * (n + 1) / new for n in range(new)]
        self.chunks.append(now)

    def row(self) -> dict[str, Any]:
        """Milliseconds from its sending to each chunk, in one line of text, and what else the record keeps."""
        waits = " ".join(f"{1e3 * (at - self.sent):.1f}" for at in self.chunks)
        return {"tokens": len(self.times), "chunks_ms": waits, "counters": self.counters, "error": self.error}


def lengths(count: int, seed: int = 0) -> list[int]:
    """Prompt lengths, log-uniform."""
    draw = random.Random(seed)
    low, high = math.log(SHORTEST), math.log(LONGEST)
    return [round(math.exp(draw.uniform(low, high))) for _ in range(count)]


def percentile(values: Sequence[float], share: float) -> float:
    """The nearest value that at least this share of them does not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, max(0, math.ceil(share * len(ordered)) - 1))] if ordered else 0.0


def between(times: Sequence[float]) -> list[float]:
    """Intervals."""
    return [b - a for a, b in pairwise(times)]


def figures_of(served: Sequence[Served]) -> dict[str, float]:
    """Throughput, latencies and the share of partial verifications."""
    good = [s for s in served if s.times and s.error is None]
    gaps = [1e3 * gap for s in good for gap in between(s.times)]
    waits = [1e3 * gap for s in good for gap in between(s.chunks)]
    firsts = [s.times[0] - s.sent for s in good]
    span = max((s.times[-1] for s in good), default=0.0) - min((s.sent for s in good), default=0.0)
    found = {
        "answered": float(len(good)),
        "failed": float(len(served) - len(good)),
        "tok_s": sum(len(s.times) for s in good) / span if span else 0.0,
        "first_token_p50_s": percentile(firsts, 0.5),
        "first_token_p99_s": percentile(firsts, 0.99),
        "between_tokens_p50_ms": percentile(gaps, 0.5),
        "between_tokens_p99_ms": percentile(gaps, 0.99),
        "between_tokens_mean_ms": sum(gaps) / len(gaps) if gaps else 0.0,
        "between_chunks_p50_ms": percentile(waits, 0.5),
        "between_chunks_p99_ms": percentile(waits, 0.99),
    }
    partial, full = (sum(s.counters.get(f"{kind}_verifications", 0) for s in good) for kind in ("partial", "full"))
    if partial + full:
        found["partial_share"] = partial / (partial + full)
    return {key: round(value, 4) for key, value in found.items()}


def request(server: Server, ids: list[int], new_tokens: int, served: Served) -> None:
    """Stream one answer."""
    body = {
        "input_ids": ids,
        "sampling_params": {"temperature": 0, "max_new_tokens": new_tokens, "ignore_eos": True},
        "stream": True,
    }
    post = urllib.request.Request(
        f"{server.address}/generate", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    try:
        with urllib.request.urlopen(post, timeout=600) as reply:
            for data in server_sent(reply):
                served.chunk(time.perf_counter(), int(data["meta_info"]["completion_tokens"]))
                served.counters = (data["meta_info"].get("longdraft") or [{}])[-1]
    except OSError as error:
        served.error = str(error)


def run(server: Server, rate: float, seconds: float, new_tokens: int) -> list[Served]:
    """Send all requests on time, whatever the server does, and wait for the last answer."""
    draw, found, threads = random.Random(1), [], []
    start = time.perf_counter()
    for number, length in enumerate(lengths(round(rate * seconds))):
        time.sleep(max(0.0, start + number / rate - time.perf_counter()))
        ids = [draw.randrange(1000, 120_000) for _ in range(length)]
        served = Served(time.perf_counter())
        found.append(served)
        threads.append(threading.Thread(target=request, args=(server, ids, new_tokens, served)))
        threads[-1].start()
    for thread in threads:
        thread.join()
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Measure the systems one after the other; a record after each."""
    parser = argparse.ArgumentParser(prog="longdraft bench steady_arrivals", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--systems", default="plain,eagle3,longdraft,longdraft-exact,longdraft-partial")
    parser.add_argument("--rate", type=float, default=0.5, help="requests a second")
    parser.add_argument("--seconds", type=float, default=180, help="of arrivals")
    parser.add_argument("--new-tokens", type=int, default=256)
    parser.add_argument("--models", type=Path, default=Path("/tmp/longdraft-models"))
    parser.add_argument("--logs", type=Path, default=Path("/tmp/longdraft-logs"))
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args(argv)
    models = write_models(args.models)
    figures: dict[str, float] = {}
    checks: dict[str, bool] = {}
    rows: dict[str, Any] = {}
    if args.out.is_file():  # systems measured by an earlier call stay in the record
        before = json.loads(args.out.read_text())
        figures, checks, rows = before["figures"], before["checks"], before.get("rows", {})
    settings = {"rate": args.rate, "seconds": args.seconds, "new_tokens": args.new_tokens}
    settings |= {"shortest": SHORTEST, "longest": LONGEST, "shape": "Llama-8B, random weights, bf16, acceptance 4.0"}
    check_systems(args.systems.split(","), models)
    for system in args.systems.split(","):
        command, environment = launch_command(system, models, LONGEST + args.new_tokens + 100)
        with Server(system, command, args.logs / f"arrivals-{system}.log", environment) as server:
            served = run(server, args.rate, args.seconds, args.new_tokens)
            found, rows[system] = figures_of(served), [each.row() for each in served]
            figures |= {f"{system.replace('-', '_')}_{key}": value for key, value in found.items()}
            checks[f"{system.replace('-', '_')}_all_answered"] = not found["failed"]
            write_record(make_record("steady_arrivals", settings, figures, checks, rows=rows), args.out)
            print(json.dumps({"system": system, **found}), flush=True)
    return 0 if all(checks.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
