"""python -m longdraft.bench.gpu_identity --model FOLDER [--draft FOLDER] --out record.json

Unforced decoding of a real model in bf16 on a GPU, with LONGDRAFT and plain. A verification of several rows and a decode of one
round differently, so outputs may part where, and only where, the two candidates' logits tie within bf16's step.
"""

import argparse
import contextlib
import json
import math
import sys
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from longdraft.bench.demo_text import Prompt, prompts
from longdraft.bench.record import make_record, write_record
from longdraft.bench.server import Server
from longdraft.draft_models.repetition import repeated_share

NEW_TOKENS = 256
STEPS = 4
NAMES = str.maketrans({" ": "_", ":": None, ",": None})


def bf16_step(value: float) -> float:
    """Distance between neighbouring bfloat16 numbers at a value (8 significant bits)."""
    return float(2.0 ** (math.floor(math.log2(max(abs(value), 1e-3))) - 7))


def candidates(server: Server, ids: list[int]) -> dict[int, float]:
    """Log-probabilities of the ten best next tokens by plain decoding."""
    body = {
        "input_ids": ids,
        "sampling_params": {"max_new_tokens": 1, "temperature": 0},
        "return_logprob": True,
        "top_logprobs_num": 10,
    }
    request = urllib.request.Request(
        f"{server.address}/generate", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=120) as reply:
        answer = json.load(reply)
    return {int(token): float(value) for value, token, *_ in answer["meta_info"]["output_top_logprobs"][0]}


def gap_at_divergence(plain: Server, ids: list[int], want: list[int], got: list[int]) -> float | None:
    """How far apart plain decoding puts the two tokens at which the outputs part; None for equal outputs."""
    at = next((i for i, (a, b) in enumerate(zip(want, got, strict=False)) if a != b), None)
    if at is None:
        return None
    best = candidates(plain, ids + want[:at])
    return (
        abs(best.get(want[at], math.inf) - best.get(got[at], math.inf))
        if want[at] in best and got[at] in best
        else math.inf
    )


def server_command(model: Path, draft: str | None) -> list[str]:
    command = [
        sys.executable,
        "-m",
        "sglang.launch_server",
        "--model-path",
        str(model),
        "--dtype",
        "bfloat16",
        "--attention-backend",
        "fa3",
    ]
    command += [
        "--sampling-backend",
        "pytorch",
        "--grammar-backend",
        "none",
        "--mem-fraction-static",
        "0.3",
        "--skip-server-warmup",
    ]
    if draft is not None:
        command += ["--speculative-algorithm", "LONGDRAFT", "--speculative-num-steps", str(STEPS)]
    if draft:
        command += ["--speculative-draft-model-path", draft]
    return command


def compare(plain: Server, drafted: Server, tokenizer: Any, asked: list[Prompt]) -> list[dict[str, Any]]:
    """One row a prompt: equal or tied, accept length, repetition."""
    rows = []
    for prompt in asked:
        ids = prompt.ids(tokenizer)
        want, got = plain.generate(ids, NEW_TOKENS), drafted.generate(ids, NEW_TOKENS)
        gap = gap_at_divergence(plain, ids, want.tokens, got.tokens)
        rows.append(
            {
                "prompt": prompt.name,
                "context_tokens": len(ids),
                "identical": gap is None and want.tokens == got.tokens,
                "gap": gap,
                "tau": got.counters["tau"],
                "drafted": got.counters["drafted"],
                "repeated_4grams": round(repeated_share(got.tokens), 3),
                "plain_tok_s": round(want.tokens_per_s, 1),
                "longdraft_tok_s": round(got.tokens_per_s, 1),
            }
        )
        print(rows[-1], flush=True)
    return rows


def main(argv: list[str] | None = None) -> int:
    """Serve plain and drafted, compare, write one record."""
    from transformers import AutoTokenizer

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--draft", default="", help="LongSpec draft folder; empty: lookup only")
    parser.add_argument("--logs", type=Path, default=Path("/tmp/longdraft-logs"))
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args(argv)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    asked = prompts()
    name, limit = ("longspec" if args.draft else "lookup"), bf16_step(16.0)
    logs = args.logs
    stock = Server("plain", server_command(args.model, None), logs / "identity-plain.log", {"SGLANG_PLUGINS": "none"})
    command = server_command(args.model, args.draft)
    ours = Server(name, command, logs / f"identity-{name}.log", {"SGLANG_PLUGINS": "longdraft"})
    with ThreadPoolExecutor(2) as pool, contextlib.ExitStack() as stack:
        for server in pool.map(stack.enter_context, (stock, ours)):  # both at once: a start takes a minute
            print(f"{server.name} is up", flush=True)
        rows = compare(stock, ours, tokenizer, asked)
    figures = {f"{name}_tau_{row['prompt'].translate(NAMES)}": row["tau"] for row in rows}
    figures[f"{name}_largest_gap"] = max(row["gap"] or 0.0 for row in rows)
    checks = {f"{name}_equal_or_tied": figures[f"{name}_largest_gap"] <= limit}
    settings = {
        "model": args.model.name,
        "dtype": "bfloat16",
        "steps": STEPS,
        "new_tokens": NEW_TOKENS,
        "tie_step": limit,
    }
    write_record(make_record("full_mode_identity", settings, figures, checks, rows=rows), args.out)
    return 0 if all(checks.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
