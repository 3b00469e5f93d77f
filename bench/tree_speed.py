"""τ and tokens/s of shapes of drafts on a real model: ``longdraft bench tree_speed --target T --draft D --prompts FILE.jsonl``.

Every shape is served in turn beside a plain SGLang, over the same prompts, in batches of every size. Answers are greedy and go on
behind end tokens, so that all are equally long; prompts whose plain answer loops are left out (more than 30 % repeated 4-grams). A
shape's tokens must be plain decoding's: in bfloat16 they may part where the two candidates' logits tie within the format's step, or
are no further apart than where plain decoding parts from itself in batches of another size (the control).

Speed is that of decoding: prompts are cached by a first request, and a batch's time for one token is taken from its time for all.
"""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from longdraft.bench.record import make_record, write_record
from longdraft.bench.server import Server, generate
from longdraft.bench.token_compare import bf16_step, gap_at_divergence
from longdraft.draft_models.repetition import ALLOWED, repeated_share
from longdraft.errors import UserError, shown
from longdraft.serve.launch import CPU_ENVIRONMENT, cpu_arguments

# SGLang's Triton kernels multiply float32 in TF32 unless told otherwise; one row and several then differ by far more than float32.
# Three products in TF32 are as good as one in float32; without tensor cores ("ieee") a prompt of 8K tokens takes four seconds.
WHOLE_FLOAT32 = {"TRITON_F32_DEFAULT": os.environ.get("TRITON_F32_DEFAULT", "tf32x3")}
SHAPES = ("chain5", "4,16,16,16,16", "eagle2:5,8,60")


@dataclass
class Run:
    """One system at one batch size: answers in the prompts' order, seconds of decoding, what our counters say."""

    tokens: list[list[int]] = field(default_factory=list)
    seconds: float = 0.0
    accepted: int = 0
    verifications: int = 0

    @property
    def tok_s(self) -> float:
        """Tokens behind each answer's first, of the whole batch, a second."""
        return sum(len(answer) - 1 for answer in self.tokens) / self.seconds

    @property
    def tau(self) -> float:
        """Tokens a verification, bonus in."""
        return 1 + self.accepted / max(1, self.verifications)

    def take(self, answers: list[dict[str, Any]]) -> None:
        """Add a batch's answers and what their counters say."""
        for answer in answers:
            self.tokens.append(list(answer["output_ids"]))
            counters = (answer["meta_info"].get("longdraft") or [{}])[-1]
            self.accepted += counters.get("accepted", 0)
            self.verifications += counters.get("target_verifications", 0)


def read_prompts(path: Path, tokenizer: Any, longest: int) -> list[list[int]]:
    """Token ids of a JSONL file's prompts, at most ``longest`` of each.

    A line has ``input_ids`` (up to ``supervised_from`` where that is given), ``text``, or ``conversations``, of which the first
    message is asked.

    Raises:
        UserError: a line that is none of these.
    """
    found = []
    for number, line in enumerate(path.read_text().splitlines(), start=1):
        row = json.loads(line)
        if "input_ids" in row:
            ids = list(row["input_ids"])[: row.get("supervised_from")]
        elif "text" in row:
            ids = list(tokenizer(row["text"], verbose=False).input_ids)
        elif "conversations" in row:
            text = tokenizer.apply_chat_template(row["conversations"][:1], tokenize=False, add_generation_prompt=True)
            ids = list(tokenizer(text, add_special_tokens=False).input_ids)
        else:
            raise UserError(
                f"{path}:{number} has {shown(sorted(row))}: give input_ids, text or conversations in every line"
            )
        found.append(ids[:longest])
    return found


def command(target: str, args: argparse.Namespace, on_cpu: bool, shape: str | None) -> list[str]:
    """A server's command line; plain SGLang's for None."""
    rest = ["--dtype", args.dtype, "--max-running-requests", str(max(args.batches)), "--grammar-backend", "none"]
    if not on_cpu:
        # The tokens say how large the pool is, so that several servers fit on a card.
        tokens = max(args.batches) * (args.prompt_tokens + args.new_tokens + 600)
        rest += ["--max-total-tokens", str(tokens), "--mem-fraction-static", "0.6"]
        rest += ["--attention-backend", args.attention_backend]
        rest += ["--cuda-graph-max-bs-decode", str(max(args.batches)), "--sampling-backend", "pytorch"]
        rest += ["--skip-server-warmup"]
        if args.dtype == "float32":  # graphs of prefills: minutes of compilation for float32's slow attention
            rest += ["--cuda-graph-backend-prefill", "disabled"]
    if shape is None:
        words = [sys.executable, "-m", "sglang.launch_server", "--model-path", target, *rest]
        if on_cpu:
            words += cpu_arguments(rest)
        return words
    words = [sys.executable, "-m", "longdraft.cli", "serve", "--model-path", target, "--draft", args.draft, *rest]
    chain = shape.removeprefix("chain")
    return [*words, "--steps", chain] if chain.isdigit() else [*words, "--tree", shape]


def environment(on_cpu: bool, plain: bool, dtype: str = "bfloat16") -> dict[str, str]:
    """Stock SGLang runs without our plugin, but on a CPU and in float32, where it lacks what our hooks bring."""
    if on_cpu:
        return {**CPU_ENVIRONMENT, "SGLANG_PLUGINS": "longdraft"}
    if dtype == "float32":
        return {"SGLANG_PLUGINS": "longdraft", **WHOLE_FLOAT32}
    return {"SGLANG_PLUGINS": "none" if plain else "longdraft"}


def decode(server: Server, prompts: list[list[int]], batch: int, new_tokens: int) -> Run:
    """Answers to all prompts, ``batch`` at a time."""
    run = Run()
    for start in range(0, len(prompts), batch):
        ids = prompts[start : start + batch]
        generate(server, ids, 1)  # the prompts are cached now
        begin_s, _ = generate(server, ids, 1)
        all_s, answers = generate(server, ids, new_tokens)
        run.seconds += all_s - begin_s
        run.take(answers)
    return run


def unlooping(
    plain: Server, prompts: list[list[int]], count: int, new_tokens: int, batch: int
) -> tuple[list[list[int]], list[list[int]]]:
    """The first ``count`` prompts whose plain answers do not loop, and those answers; ``batch`` prompts are asked at once.

    Raises:
        UserError: there are none.
    """
    kept: list[list[int]] = []
    answers: list[list[int]] = []
    for start in range(0, len(prompts), batch):
        if len(kept) >= count:
            break
        asked = prompts[start : start + batch]
        for ids, reply in zip(asked, generate(plain, asked, new_tokens)[1], strict=True):
            answer = list(reply["output_ids"])
            if repeated_share(answer) <= ALLOWED:
                kept.append(ids)
                answers.append(answer)
    if not kept:
        raise UserError("every plain answer loops: give other prompts")
    return kept[:count], answers[:count]


def compared(plain: Server, prompts: list[list[int]], want: list[list[int]], got: list[list[int]]) -> list[float]:
    """How far plain decoding puts the two tokens apart at which an answer parts, of every answer that does."""
    gaps = (gap_at_divergence(plain, ids, a, b) for ids, a, b in zip(prompts, want, got, strict=True))
    return [gap for gap in gaps if gap is not None]


def word(shape: str) -> str:
    """A shape in a figure's name."""
    return shape.replace(":", "_").replace(",", "_") if not shape[0].isdigit() else "beam_" + shape.replace(",", "_")


def measure(args: argparse.Namespace, prompts: list[list[int]], on_cpu: bool) -> tuple[dict[str, float], list[Any]]:
    """Plain decoding, then every shape; figures, and a row for each shape and batch size."""
    figures: dict[str, float] = {}
    rows: list[Any] = []
    words, own = command(args.target, args, on_cpu, None), environment(on_cpu, True, args.dtype)
    with Server("plain", words, args.logs / "tree-speed-plain.log", own) as plain:
        prompts, want = unlooping(plain, prompts, args.count, args.new_tokens, max(args.batches))
        figures["prompts"] = len(prompts)
        for batch in args.batches:
            run = decode(plain, prompts, batch, args.new_tokens)
            gaps = compared(plain, prompts, want, run.tokens)
            figures[f"plain_tok_s_b{batch}"] = round(run.tok_s, 2)
            figures[f"plain_b{batch}_identical"] = len(prompts) - len(gaps)
            figures[f"plain_b{batch}_largest_gap"] = max(gaps, default=0.0)
        for shape in args.shapes:
            plain.pause()
            words, own = command(args.target, args, on_cpu, shape), environment(on_cpu, False, args.dtype)
            with Server(shape, words, args.logs / f"tree-speed-{word(shape)}.log", own) as server:
                runs = {batch: decode(server, prompts, batch, args.new_tokens) for batch in args.batches}
            plain.resume()
            for batch, run in runs.items():
                gaps = compared(plain, prompts, want, run.tokens)
                name = f"{word(shape)}_b{batch}"
                rows.append({"shape": shape, "batch": batch, "identical": len(prompts) - len(gaps), "gaps": gaps})
                figures[f"{word(shape)}_tau_b{batch}"] = round(run.tau, 4)
                figures[f"{word(shape)}_tok_s_b{batch}"] = round(run.tok_s, 2)
                figures[f"{name}_identical"] = len(prompts) - len(gaps)
                figures[f"{name}_largest_gap"] = max(gaps, default=0.0)
                print(json.dumps({k: v for k, v in figures.items() if word(shape) in k}), flush=True)
    return figures, rows


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="longdraft bench tree_speed", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--target", required=True)
    parser.add_argument("--draft", required=True)
    parser.add_argument("--prompts", type=Path, required=True, help="JSONL of input_ids, text or conversations")
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), help="chainN, or what --tree takes")
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 16])
    parser.add_argument("--count", type=int, default=64, help="prompts whose plain answer does not loop")
    parser.add_argument("--prompt-tokens", type=int, default=2048)
    parser.add_argument("--new-tokens", type=int, default=256)
    parser.add_argument("--dtype", default=None, help="bfloat16 on a card, float32 on a CPU")
    parser.add_argument("--attention-backend", default="fa3", help="SGLang's, on a card")
    parser.add_argument("--logs", type=Path, default=Path("tree_speed_logs"))
    parser.add_argument("--record", type=Path, required=True)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and write one record; 1 where a token is not plain decoding's."""
    from transformers import AutoTokenizer

    args, on_cpu = parse(argv), not torch.cuda.is_available()
    args.dtype = args.dtype or ("float32" if on_cpu else "bfloat16")
    prompts = read_prompts(args.prompts, AutoTokenizer.from_pretrained(args.target), args.prompt_tokens)
    figures, rows = measure(args, prompts, on_cpu)
    itself = max(figures[f"plain_b{batch}_largest_gap"] for batch in args.batches)
    tie = max(bf16_step(16.0), itself) if args.dtype == "bfloat16" else 0.0
    word_of = "equal_or_tied" if tie else "equal"
    checks = {
        f"{word(row['shape'])}_b{row['batch']}_{word_of}": not row["gaps"] or max(row["gaps"]) <= tie > 0
        for row in rows
    }
    settings = {
        **{key: getattr(args, key) for key in ("shapes", "batches", "count", "prompt_tokens", "new_tokens", "dtype")},
        "target": Path(args.target).name,
        "draft": args.draft,
        "prompts": args.prompts.name,
        "tie_step": tie,
    }
    write_record(make_record("tree_speed", settings, figures, checks, rows=rows), args.record)
    print(json.dumps({**figures, **checks}, indent=1))
    return 0 if all(checks.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
