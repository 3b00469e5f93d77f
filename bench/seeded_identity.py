"""Sampled answers with seeds: ``longdraft bench seeded_identity --target T --draft D --prompts FILE.jsonl --record OUT.json``.

Our worker serves in turn plainly (mode ``off``), with chains of five and with the draft's own tree, in float32. Every prompt has a
seed of its own, the same for all of them, so every token must be plain decoding's. Plain decoding with other seeds is the control:
where it gave the same answers, nothing was sampled; a shape of which no draft was kept shows nothing either.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from longdraft.bench.record import make_record, write_record
from longdraft.bench.server import Server, generate
from longdraft.bench.token_compare import first_difference
from longdraft.bench.tree_speed import Run, command, environment, read_prompts, word
from longdraft.draft_models.checkpoint import read_config
from longdraft.errors import UserError
from longdraft.serve.draft_lm_checks import is_causal_lm

SAMPLING = {"temperature": 0.8, "top_p": 0.95}
CHAIN = "chain5"
TREES = {"longspec": "4,16,16,16,16", "eagle3": "eagle2:5,8,60"}


def decode(server: Server, prompts: list[list[int]], seeds: Sequence[int], batch: int, new_tokens: int) -> Run:
    """Sampled answers to all prompts, ``batch`` at a time, a seed for each prompt."""
    run = Run()
    for start in range(0, len(prompts), batch):
        sampling = [{**SAMPLING, "sampling_seed": seed} for seed in seeds[start : start + batch]]
        run.take(generate(server, prompts[start : start + batch], new_tokens, sampling)[1])
    return run


def differences(want: list[list[int]], got: list[list[int]]) -> list[dict[str, int]]:
    """Number of every prompt whose answers differ, and where they first do."""
    found = [first_difference(a, b) for a, b in zip(want, got, strict=True)]
    return [{"prompt": number, "at": at} for number, at in enumerate(found) if at is not None]


def serve(args: argparse.Namespace, shape: str, mode: str, on_cpu: bool) -> Server:
    """Our worker with a draft's shape, in a mode."""
    words = [*command(args.target, args, on_cpu, shape), "--mode", mode]
    name = "plain" if mode == "off" else shape
    log = args.logs / f"seeded-{name if mode == 'off' else word(shape)}.log"
    return Server(name, words, log, environment(on_cpu, False, args.dtype))


def measure(
    args: argparse.Namespace, prompts: list[list[int]], on_cpu: bool
) -> tuple[dict[str, float], dict[str, bool], list[Any]]:
    """Plain decoding twice, then every shape; figures, checks, and a row for each shape."""
    count, batch = len(prompts), args.batches[0]
    seeds, others = range(count), range(count, 2 * count)
    with serve(args, CHAIN, "off", on_cpu) as server:
        want = decode(server, prompts, seeds, batch, args.new_tokens).tokens
        control = differences(want, decode(server, prompts, others, batch, args.new_tokens).tokens)
    figures: dict[str, float] = {"prompts": count, "other_seeds_differ": len(control)}
    checks = {
        "answers_are_whole": all(len(answer) == args.new_tokens for answer in want),
        "most_answers_differ_with_other_seeds": len(control) > count / 2,
    }
    rows: list[Any] = []
    for shape in args.shapes:
        with serve(args, shape, "full", on_cpu) as server:
            run = decode(server, prompts, seeds, batch, args.new_tokens)
        parted, name = differences(want, run.tokens), word(shape)
        rows.append({"shape": shape, "differences": parted})
        figures |= {f"{name}_mismatches": len(parted), f"{name}_tau": round(run.tau, 4)}
        checks |= {f"{name}_equal": not parted, f"{name}_drafts_kept": run.accepted > 0}
        print(json.dumps({**rows[-1], "tau": figures[f"{name}_tau"]}), flush=True)
    return figures, checks, rows


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="longdraft bench seeded_identity", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--target", required=True)
    parser.add_argument("--draft", required=True)
    parser.add_argument("--prompts", type=Path, required=True, help="JSONL of input_ids, text or conversations")
    parser.add_argument("--shapes", nargs="+", help="chainN, or what --tree takes; chain5 and the draft's own tree")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--count", type=int, default=64, help="prompts")
    parser.add_argument("--prompt-tokens", type=int, default=1024, help="of each prompt at most")
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--attention-backend", default="triton", help="SGLang's, on a card; fa3 has no float32")
    parser.add_argument("--logs", type=Path, default=Path("seeded_identity_logs"))
    parser.add_argument("--record", type=Path, required=True)
    args = parser.parse_args(argv)
    if not args.shapes:
        own = [] if is_causal_lm(args.draft) else [TREES[read_config(args.draft)["longdraft"]["draft"]]]
        args.shapes = [CHAIN, *own]
    args.dtype, args.batches = "float32", [args.batch]  # as the servers' command line reads them
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and write one record; 1 where a check fails, an answer that differs among them."""
    from transformers import AutoTokenizer

    args = parse(argv)
    found = read_prompts(args.prompts, AutoTokenizer.from_pretrained(args.target), args.prompt_tokens)
    if len(found) < args.count:
        raise UserError(
            f"{args.prompts} has {len(found)} prompts, --count is {args.count}: give more, or lower --count"
        )
    figures, checks, rows = measure(args, found[: args.count], not torch.cuda.is_available())
    settings = {
        **{key: getattr(args, key) for key in ("shapes", "batch", "count", "prompt_tokens", "new_tokens", "dtype")},
        **SAMPLING,
        "target": Path(args.target).name,
        "draft": args.draft,
        "prompts": args.prompts.name,
    }
    write_record(make_record("seeded_identity", settings, figures, checks, rows=rows), args.record)
    print(json.dumps({**figures, **checks}, indent=1))
    return 0 if all(checks.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
