"""Requests at a rate by SGLang's own client, and what it reports as a row's figures."""

import json
import os
import re
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

from longdraft.bench.harness.place import Place
from longdraft.bench.harness.run import Cell
from longdraft.bench.harness.settings import LoadSettings
from longdraft.bench.server import Server
from longdraft.errors import UserError

FIGURES = {  # a row's figure -> the client's
    "requests": "completed",
    "tok_s": "output_throughput",
    "ttft_p50_ms": "median_ttft_ms",
    "ttft_p99_ms": "p99_ttft_ms",
    "itl_p50_ms": "median_itl_ms",
    "itl_p99_ms": "p99_itl_ms",
}


def client_command(server: Server, place: Place, load: LoadSettings, rate: float, out: Path) -> list[str]:
    """``sglang.bench_serving`` on prompts of random tokens."""
    options = {
        "--backend": "sglang",
        "--base-url": server.address,
        "--model": place.target,
        "--dataset-name": "random-ids",
        "--num-prompts": load.requests,
        "--random-input-len": load.input_tokens,
        "--random-output-len": load.output_tokens,
        "--random-range-ratio": load.range_ratio,
        "--request-rate": rate,
        "--seed": place.settings.seed,
        "--output-file": out,
    }
    words = [str(word) for pair in options.items() for word in pair]
    return [sys.executable, "-m", "sglang.bench_serving", *words, "--tokenize-prompt", "--disable-tqdm"]


def read_report(path: Path, requests: int) -> dict[str, Any]:
    """Figures of the last report in a file.

    Raises:
        UserError: there is none, or not every request was answered.
    """
    try:
        report = json.loads(path.read_text().splitlines()[-1])
        found = {own: report[theirs] for own, theirs in FIGURES.items()}
    except (OSError, ValueError, IndexError, KeyError, TypeError) as error:
        raise UserError(f"{path} is no report of sglang.bench_serving ({error!r})") from None
    if found["requests"] != requests:
        raise UserError(f"{found['requests']} of {requests} requests were answered, see {path}")
    return {key: round(value, 3) for key, value in found.items()}


def verifications(server: Server) -> dict[str, float]:
    """Partial and full verifications so far, by our series; empty where the server has no metrics."""
    try:
        with urllib.request.urlopen(f"{server.address}/metrics", timeout=30) as reply:
            text = reply.read().decode()
    except OSError:
        return {}
    found = {"partial": 0.0, "full": 0.0}
    for kind, value in re.findall(r'^longdraft:verifications_total\{[^}]*kind="(\w+)"[^}]*\} (\S+)$', text, re.M):
        found[kind] += float(value)
    return found


def load_row(server: Server, place: Place, load: LoadSettings, cell: Cell, logs: Path) -> dict[str, Any]:
    """A rate's figures, its own count of answers in.

    Raises:
        UserError: the client failed, or a request did.
    """
    name = f"load-{cell.system.file_name}-{cell.facts['rate']}"
    out, log = logs / f"{name}.jsonl", logs / f"{name}.log"
    out.unlink(missing_ok=True)
    before = verifications(server)
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    with log.open("w") as file:
        command = client_command(server, place, load, cell.facts["rate"], out)
        status = subprocess.run(command, env=environment, stdout=file, stderr=subprocess.STDOUT).returncode
    if status:
        raise UserError(f"sglang.bench_serving ended with {status}, see {log}")
    found = read_report(out, load.requests)
    after = verifications(server)
    more = {kind: after[kind] - before.get(kind, 0.0) for kind in after}
    share = {"partial_share": round(more["partial"] / total, 4)} if (total := sum(more.values())) else {}
    return {**found, **share, "n": found["requests"], "input_tokens": load.input_tokens}
