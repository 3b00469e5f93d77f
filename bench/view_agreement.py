"""How often a view agrees with the whole cache: ``longdraft bench view_agreement --target T --documents FILE.jsonl --record R``.

One server for each selector and budget, several at once. In mode ``exact`` with ``self_draft`` every cycle gains 20 tokens on the
view, one at a time, and a full verification says how many of them the target would have chosen (the table of the design, section
6, from the product itself). In mode ``partial`` the same server returns what the view chose, which is compared with the target's
own answer: tokens up to the first that differs, whole answers, and both texts for :mod:`longdraft.bench.view_quality`.
Answers whose plain text loops are left out.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from longdraft.bench.gpu_full_speed import generate
from longdraft.bench.record import make_record, write_record
from longdraft.bench.server import Server
from longdraft.draft_models.repetition import ALLOWED, repeated_share
from longdraft.errors import UserError
from longdraft.serve.launch import CPU_DEFAULTS, CPU_ENVIRONMENT, CPU_SWITCHES

PENDING = 20
QUESTION = "Summarize the report above in a few sentences."


@dataclass(frozen=True)
class Case:
    """One server's view."""

    selector: str
    tokens: int

    @property
    def name(self) -> str:
        return f"{self.selector}_{self.tokens}"


def read_documents(path: Path, tokenizer: Any, longest: int, ask: bool) -> list[dict[str, Any]]:
    """Prompts of a JSONL file: the first tokens of every ``text``, to be continued or, with ``ask``, to be summarised in chat form."""
    found = []
    for line in path.read_text().splitlines():
        row = json.loads(line)
        ids = list(tokenizer(row["text"], verbose=False).input_ids)[:longest]
        if ask:
            text = f"{tokenizer.decode(ids)}\n\n{QUESTION}"
            chat = [{"role": "user", "content": text}]
            asked = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
            ids = list(tokenizer(asked, add_special_tokens=False).input_ids)
        found.append({"id": row.get("id"), "ids": ids, "reference": row.get("summary")})
    return found


def command(args: argparse.Namespace, case: Case, on_cpu: bool) -> tuple[list[str], dict[str, str]]:
    """A server's command line and environment."""
    words = [sys.executable, "-m", "sglang.launch_server", "--model-path", args.target, "--dtype", args.dtype]
    words += ["--speculative-algorithm", "LONGDRAFT", "--grammar-backend", "none"]
    words += ["--max-running-requests", str(args.batch)]
    if on_cpu:
        words += [word for pair in CPU_DEFAULTS.items() if pair[0] not in words for word in pair] + [*CPU_SWITCHES]
    else:
        share = f"{0.85 / args.parallel:.3f}"
        words += ["--mem-fraction-static", share, "--attention-backend", args.attention_backend]
        words += ["--max-total-tokens", str(args.batch * (args.prompt_tokens + args.new_tokens + 600))]
        words += ["--cuda-graph-bs-decode", str(args.batch), "--sampling-backend", "pytorch", "--skip-server-warmup"]
    settings = {
        "mode": "exact",
        "self_draft": True,
        "pending": PENDING,
        "rounds": PENDING,
        "confirm_floor": 0.0,
        "view_selector": case.selector,
        "view_tokens": case.tokens,
    }
    plugin = {**CPU_ENVIRONMENT} if on_cpu else {}
    return words, plugin | {"SGLANG_PLUGINS": "longdraft", "LONGDRAFT_SETTINGS": json.dumps(settings)}


def answers(server: Server, prompts: list[list[int]], mode: str, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Greedy answers in one mode, a batch at a time."""
    found: list[dict[str, Any]] = []
    own = {"custom_params": {"longdraft": {"mode": mode}}}
    for start in range(0, len(prompts), args.batch):
        ids = prompts[start : start + args.batch]
        found += generate(server, ids, args.new_tokens, [own] * len(ids))[1]
    return found


def summed(found: list[dict[str, Any]]) -> dict[str, int]:
    """Counters of all answers together."""
    counters = [answer["meta_info"]["longdraft"][-1] for answer in found]
    keys = ("gained_on_view", "confirmed", "cycles_refused", "full_verifications", "partial_verifications")
    return {key: sum(c[key] for c in counters) for key in keys}


def same_tokens(a: Sequence[int], b: Sequence[int]) -> int:
    """Leading tokens that are equal."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def one_case(
    case: Case, args: argparse.Namespace, documents: list[dict[str, Any]], on_cpu: bool
) -> tuple[dict[str, float], list[dict[str, Any]]]:
    """Figures of one view, and a row for each document."""
    words, own = command(args, case, on_cpu)
    prompts = [d["ids"] for d in documents]
    with Server(case.name, words, args.logs / f"view-{case.name}.log", own) as server:
        plain = [list(a["output_ids"]) for a in answers(server, prompts, "off", args)]
        kept = [i for i, ids in enumerate(plain) if repeated_share(ids) <= ALLOWED]
        if not kept:
            raise UserError("every plain answer loops: give other documents")
        documents, prompts, plain = [documents[i] for i in kept], [prompts[i] for i in kept], [plain[i] for i in kept]
        exact, partial = (answers(server, prompts, mode, args) for mode in ("exact", "partial"))
    seen, returned = summed(exact), summed(partial)
    same = [same_tokens(a["output_ids"], p) for a, p in zip(partial, plain, strict=True)]
    tried = seen["confirmed"] + seen["cycles_refused"]
    figures = {
        "documents": len(documents),
        "agreement": seen["confirmed"] / max(1, tried),
        "confirmed_of_20": PENDING * seen["confirmed"] / max(1, seen["gained_on_view"]),
        "exact_identical": sum(list(a["output_ids"]) == p for a, p in zip(exact, plain, strict=True)),
        "partial_identical": sum(list(a["output_ids"]) == p for a, p in zip(partial, plain, strict=True)),
        "partial_same_tokens_mean": sum(same) / len(same),
        "partial_rounds_share": returned["partial_verifications"]
        / max(1, returned["partial_verifications"] + returned["full_verifications"]),
    }
    rows = [
        {"case": case.name, "id": d["id"], "plain": p, "partial": list(a["output_ids"]), "same": n}
        for d, p, a, n in zip(documents, plain, partial, same, strict=True)
    ]
    print(json.dumps({"case": case.name, **figures}), flush=True)
    return {f"{case.name}_{key}": round(float(value), 4) for key, value in figures.items()}, rows


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="longdraft bench view_agreement", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--target", required=True)
    parser.add_argument("--documents", type=Path, required=True, help="JSONL with text, and summary where there is one")
    parser.add_argument("--ask", action="store_true", help="ask for a summary in place of continuing the text")
    parser.add_argument("--selectors", nargs="+", default=["mass", "quest", "specpv", "snapkv", "streaming"])
    parser.add_argument("--budgets", nargs="+", type=int, default=[512, 1024, 2048, 4096])
    parser.add_argument("--count", type=int, default=20, help="documents")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--parallel", type=int, default=1, help="servers at once")
    parser.add_argument("--prompt-tokens", type=int, default=7900)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--dtype", default=None, help="bfloat16 on a card, float32 on a CPU")
    parser.add_argument("--attention-backend", default="fa3", help="SGLang's, on a card")
    parser.add_argument("--logs", type=Path, default=Path("view_agreement_logs"))
    parser.add_argument("--answers", type=Path, help="write all answers here, JSONL")
    parser.add_argument("--record", type=Path, required=True)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and write one record; 1 where an ``exact`` answer in float32 is not plain decoding's."""
    from transformers import AutoTokenizer

    args, on_cpu = parse(argv), not torch.cuda.is_available()
    args.dtype = args.dtype or ("float32" if on_cpu else "bfloat16")
    documents = read_documents(args.documents, AutoTokenizer.from_pretrained(args.target), args.prompt_tokens, args.ask)
    cases = [Case(selector, tokens) for selector in args.selectors for tokens in args.budgets]
    figures: dict[str, float] = {}
    rows: list[dict[str, Any]] = []
    failed: list[str] = []
    with ThreadPoolExecutor(args.parallel) as pool:
        started = [pool.submit(one_case, case, args, documents[: args.count], on_cpu) for case in cases]
        for case, future in zip(cases, started, strict=True):
            try:
                more, found = future.result()
            except Exception as error:
                print(f"{case.name} failed: {error}", flush=True)
                failed.append(case.name)
                continue
            figures |= more
            rows += found
    names = ("selectors", "budgets", "count", "batch", "prompt_tokens", "new_tokens", "dtype", "ask")
    settings = {key: getattr(args, key) for key in names}
    settings |= {"target": Path(args.target).name, "documents": args.documents.name, "pending": PENDING}
    same = all(
        figures[f"{c.name}_exact_identical"] == figures[f"{c.name}_documents"] for c in cases if c.name not in failed
    )
    checks = {"every_case_ran": not failed}
    if args.dtype == "float32":
        checks["exact_identical"] = same
    write_record(make_record("view_agreement", settings, figures, checks), args.record)
    if args.answers is not None:
        args.answers.parent.mkdir(parents=True, exist_ok=True)
        args.answers.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return 0 if all(checks.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
