"""How often a view agrees with the whole cache: ``longdraft bench view_agreement --target T --documents FILE.jsonl --record R``.

One server for each selector and budget, several at once. In mode ``exact`` with ``self_draft`` every cycle gains 20 tokens on the
view, one at a time, and a full verification says how many of them the target would have chosen (the table of the design, section
6, from the product itself). In mode ``partial`` the same server returns what the view chose, which is compared with the target's
own answer: tokens up to the first that differs, whole answers, and both texts for :mod:`longdraft.bench.view_quality`.
Answers whose plain text loops are left out there.

In mode ``exact`` every answer, looping or not, must be plain decoding's; in float32 that is checked. With ``--identity`` nothing
else is asked: greedy answers, and sampled ones with a seed for every prompt (V1, P8). That is ``make test-long``, with every selector,
the worst blocks among them, on prompts of 40 to 7,900 tokens. With ``--draft`` chains are drafted in place of single tokens.
"""

import argparse
import hashlib
import json
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from longdraft.bench.record import make_record, write_record
from longdraft.bench.seeded_identity import SAMPLING, differences
from longdraft.bench.server import Server, generate
from longdraft.bench.token_compare import same_tokens
from longdraft.bench.tree_speed import WHOLE_FLOAT32
from longdraft.draft_models.repetition import ALLOWED, repeated_share
from longdraft.errors import UserError
from longdraft.serve.launch import CPU_ENVIRONMENT, cpu_arguments

PENDING = 20
STEPS = 4  # of a draft's chains
SMALL = 256  # tokens of a view below which it has fewer sinks and recent ones than usual
QUESTION = "Summarize the report above in a few sentences."


@dataclass(frozen=True)
class Case:
    """One server's view."""

    selector: str
    tokens: int

    @property
    def name(self) -> str:
        return f"{self.selector}_{self.tokens}"

    @property
    def settings(self) -> dict[str, Any]:
        """The server's."""
        fewer = {"view_sinks": 16, "view_recent": 32} if self.tokens < SMALL else {}
        return {"view_selector": self.selector, "view_tokens": self.tokens, **fewer}


def read_documents(
    path: Path, tokenizer: Any, lengths: Sequence[int], ask: bool, count: int | None = None
) -> list[dict[str, Any]]:
    """Prompts of a JSONL file: the first tokens of every ``text``, to be continued or, with ``ask``, to be summarised in chat form; or
    ``input_ids`` as they are, up to ``supervised_from``, to be continued.

    Args:
        path: of the file.
        tokenizer: the target's.
        lengths: tokens of each text at most, of one document after the other.
        ask: whether to ask for a summary.
        count: lines that are read; None: all.
    """
    found = []
    for number, line in enumerate(path.read_text().splitlines()[:count]):
        row = json.loads(line)
        if "input_ids" in row and not ask:
            found.append(
                {"id": row.get("id", number), "ids": row["input_ids"][: row.get("supervised_from")], "reference": None}
            )
            continue
        ids = list(tokenizer(row["text"], verbose=False).input_ids)[: lengths[number % len(lengths)]]
        if ask:
            ids = asked_to_summarise(tokenizer, ids)
        found.append({"id": row.get("id"), "ids": ids, "reference": row.get("summary")})
    return found


def asked_to_summarise(tokenizer: Any, ids: Sequence[int]) -> list[int]:
    """Tokens of a chat that asks for a summary of a text of tokens."""
    chat = [{"role": "user", "content": f"{tokenizer.decode(ids)}\n\n{QUESTION}"}]
    asked = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    return list(tokenizer(asked, add_special_tokens=False).input_ids)


def check_room(documents: Sequence[dict[str, Any]], target: str, new_tokens: int) -> None:
    """That the target has positions for every prompt and its answer, before a server starts.

    Raises:
        UserError: one is too long.
    """
    from transformers import AutoConfig

    most = int(AutoConfig.from_pretrained(target).max_position_embeddings)
    longest = max((len(d["ids"]) for d in documents), default=0)
    if longest + new_tokens > most:
        raise UserError(
            f"a prompt of {longest} tokens and an answer of {new_tokens} are more than the target's {most} positions: lower "
            f"--prompt-tokens by {longest + new_tokens - most} or more, or --new-tokens"
        )


def digest(documents: list[dict[str, Any]]) -> str:
    """By which two records can be seen to be of the same prompts."""
    return hashlib.sha256(json.dumps([d["ids"] for d in documents]).encode()).hexdigest()


@dataclass
class Done:
    """What a record has so far: the figures of finished cases, where answers part, and which case was measured when, and by what."""

    figures: dict[str, float] = field(default_factory=dict)
    differing: list[Any] = field(default_factory=list)
    cases: dict[str, dict[str, str]] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path, settings: dict[str, Any]) -> "Done":
        """Of an earlier call with the same settings; nothing where there was none, or another one's record is there."""
        try:
            before = json.loads(path.read_text())
            if before["settings"] == json.loads(json.dumps(settings)):
                return cls(before["figures"], before["differing"], before["cases"])
        except (OSError, ValueError, KeyError, TypeError):
            pass
        return cls()

    def write(self, case: str, record: dict[str, Any], path: Path) -> None:
        """A case is finished."""
        self.cases[case] = {key: record[key] for key in ("commit", "date", "device")}
        write_record(record | {"differing": self.differing, "cases": self.cases}, path)


def launch(args: argparse.Namespace, settings: dict[str, Any], on_cpu: bool) -> tuple[list[str], dict[str, str]]:
    """Command line and environment of a server of ours with these settings, as large as its requests need."""
    words = [sys.executable, "-m", "sglang.launch_server", "--model-path", args.target, "--dtype", args.dtype]
    words += ["--speculative-algorithm", "LONGDRAFT", "--grammar-backend", "none"]
    words += ["--max-running-requests", str(args.batch)]
    if on_cpu:
        words += cpu_arguments(words)
    else:
        # The tokens say how large the pool is; a share for each server would seem spent where several start at once.
        words += ["--mem-fraction-static", "0.6", "--attention-backend", args.attention_backend]
        words += ["--max-total-tokens", str(args.batch * (max(args.prompt_tokens) + args.new_tokens + 600))]
        words += ["--cuda-graph-bs-decode", str(args.batch), "--sampling-backend", "pytorch", "--skip-server-warmup"]
    if args.draft is not None:
        words += ["--speculative-draft-model-path", args.draft, "--speculative-num-steps", str(STEPS)]
    plugin = {**CPU_ENVIRONMENT} if on_cpu else WHOLE_FLOAT32 if args.dtype == "float32" else {}
    return words, plugin | {"SGLANG_PLUGINS": "longdraft", "LONGDRAFT_SETTINGS": json.dumps(settings)}


def command(args: argparse.Namespace, case: Case, on_cpu: bool) -> tuple[list[str], dict[str, str]]:
    """A case's server."""
    rounds = PENDING if args.draft is None else PENDING // (STEPS + 1)
    settings = {"mode": "exact", "pending": PENDING, "confirm_floor": 0.0, "rounds": rounds, **case.settings}
    settings["allow_lossy"] = not args.identity
    return launch(args, settings | ({"self_draft": True} if args.draft is None else {}), on_cpu)


def answers(
    server: Server, prompts: list[list[int]], mode: str, args: argparse.Namespace, sampled: bool = False
) -> list[dict[str, Any]]:
    """Answers in one mode, a batch at a time: greedy, or with a seed for each prompt."""
    found: list[dict[str, Any]] = []
    own: dict[str, Any] = {"custom_params": {"longdraft": {"mode": mode}}, **(SAMPLING if sampled else {})}
    for start in range(0, len(prompts), args.batch):
        ids = prompts[start : start + args.batch]
        each = [own | ({"sampling_seed": start + i} if sampled else {}) for i in range(len(ids))]
        found += generate(server, ids, args.new_tokens, each)[1]
    return found


def ids_of(found: list[dict[str, Any]]) -> list[list[int]]:
    """Tokens of each answer."""
    return [list(answer["output_ids"]) for answer in found]


def summed(found: list[dict[str, Any]]) -> dict[str, int]:
    """Counters of all answers together."""
    counters = [answer["meta_info"]["longdraft"][-1] for answer in found]
    keys = ("gained_on_view", "confirmed", "cycles_refused", "full_verifications", "partial_verifications")
    return {key: sum(c[key] for c in counters) for key in keys}


def identity(plain: list[list[int]], exact: list[dict[str, Any]], kind: str) -> tuple[dict[str, float], list[Any]]:
    """Of one kind of answers: how many are plain decoding's, what views gained for them, and where the others part."""
    seen, parted = summed(exact), differences(plain, ids_of(exact))
    figures = {
        "identical": len(plain) - len(parted),
        "partial_verifications": seen["partial_verifications"],
        "gained_on_view": seen["gained_on_view"],
        "confirmed": seen["confirmed"],
    }
    return {f"{kind}_{key}": value for key, value in figures.items()}, [{"kind": kind, **each} for each in parted]


def agreement(
    plain: list[list[int]], exact: list[dict[str, Any]], partial: list[dict[str, Any]]
) -> tuple[dict[str, float], list[int]]:
    """Figures of answers that do not loop, and how many leading tokens of each partial one are plain decoding's."""
    seen, returned = summed(exact), summed(partial)
    same = [same_tokens(got, want) for got, want in zip(ids_of(partial), plain, strict=True)]
    tried = seen["confirmed"] + seen["cycles_refused"]
    rounds = returned["partial_verifications"] + returned["full_verifications"]
    figures = {
        "documents": len(plain),
        "agreement": seen["confirmed"] / max(1, tried),
        "confirmed_of_20": PENDING * seen["confirmed"] / max(1, seen["gained_on_view"]),
        "partial_identical": sum(got == want for got, want in zip(ids_of(partial), plain, strict=True)),
        "partial_same_tokens_mean": sum(same) / len(same),
        "partial_rounds_share": returned["partial_verifications"] / max(1, rounds),
    }
    return figures, same


def one_case(
    case: Case, args: argparse.Namespace, documents: list[dict[str, Any]], on_cpu: bool
) -> tuple[dict[str, float], list[Any], list[dict[str, Any]]]:
    """Figures of one view, the answers of mode ``exact`` that are not plain decoding's, and a row for each document."""
    words, own = command(args, case, on_cpu)
    prompts = [d["ids"] for d in documents]
    rows: list[dict[str, Any]] = []
    with Server(case.name, words, args.logs / f"view-{case.name}.log", own) as server:
        plain, exact = ids_of(answers(server, prompts, "off", args)), answers(server, prompts, "exact", args)
        figures, parted = identity(plain, exact, "exact")
        if args.identity:
            noisy = ids_of(answers(server, prompts, "off", args, sampled=True))
            more, found = identity(noisy, answers(server, prompts, "exact", args, sampled=True), "seeded")
            figures |= more | {"seeded_differ_from_greedy": len(differences(plain, noisy))}
            parted += found
        else:
            kept = [i for i, ids in enumerate(plain) if repeated_share(ids) <= ALLOWED]
            if not kept:
                raise UserError("every plain answer loops: give other documents")
            partial = answers(server, [prompts[i] for i in kept], "partial", args)
            plain, exact = [plain[i] for i in kept], [exact[i] for i in kept]
            more, same = agreement(plain, exact, partial)
            figures |= more
            rows = [
                {"case": case.name, "id": documents[i]["id"], "plain": p, "partial": a, "same": n}
                for i, p, a, n in zip(kept, plain, ids_of(partial), same, strict=True)
            ]
    print(json.dumps({"case": case.name, **figures}), flush=True)
    named = {f"{case.name}_{key}": round(float(value), 4) for key, value in figures.items()}
    return named, [{"case": case.name, **each} for each in parted], rows


def checks_of(
    cases: Sequence[Case], missing: Sequence[str], figures: dict[str, float], prompts: int, args: argparse.Namespace
) -> dict[str, bool]:
    """What a record answers for: that all ran, that views were read, and in float32 that every token is plain decoding's."""
    ran = [case.name for case in cases if case.name not in missing]
    kinds = ("exact", "seeded") if args.identity else ("exact",)
    checks = {
        "every_case_ran": not missing,
        "views_were_read": all(figures[f"{name}_{kind}_partial_verifications"] > 0 for name in ran for kind in kinds),
    }
    if args.dtype == "float32":
        for kind in kinds:
            checks[f"{kind}_identical"] = all(figures[f"{name}_{kind}_identical"] == prompts for name in ran)
    if args.identity:
        differ = [figures[f"{name}_seeded_differ_from_greedy"] for name in ran]
        checks["most_seeded_answers_differ_from_greedy"] = all(count > prompts / 2 for count in differ)
    return checks


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="longdraft bench view_agreement", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--target", required=True)
    parser.add_argument("--documents", type=Path, required=True, help="JSONL with text, and summary where there is one")
    parser.add_argument("--draft", help="folder of a draft; without one the target drafts for itself")
    parser.add_argument("--identity", action="store_true", help="mode exact alone, greedy and seeded")
    parser.add_argument("--ask", action="store_true", help="ask for a summary in place of continuing the text")
    parser.add_argument("--selectors", nargs="+", default=["mass", "quest", "specpv", "snapkv", "streaming"])
    parser.add_argument("--budgets", nargs="+", type=int, default=[512, 1024, 2048, 4096])
    parser.add_argument("--count", type=int, default=20, help="documents")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--parallel", type=int, default=1, help="servers at once")
    parser.add_argument("--prompt-tokens", nargs="+", type=int, default=[7900], help="of the documents in turn")
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--dtype", default=None, help="bfloat16 on a card, float32 on a CPU")
    parser.add_argument("--attention-backend", default="fa3", help="SGLang's, on a card")
    parser.add_argument("--logs", type=Path, default=Path("view_agreement_logs"))
    parser.add_argument("--answers", type=Path, help="write all answers here, JSONL")
    parser.add_argument("--record", type=Path, required=True)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure what the record lacks; 1 where a check fails, an ``exact`` answer in float32 that is not plain decoding's among them."""
    from transformers import AutoTokenizer

    args, on_cpu = parse(argv), not torch.cuda.is_available()
    args.dtype = args.dtype or ("float32" if on_cpu else "bfloat16")
    tokenizer = AutoTokenizer.from_pretrained(args.target)
    documents = read_documents(args.documents, tokenizer, args.prompt_tokens, args.ask, args.count)
    cases = [Case(selector, tokens) for selector in args.selectors for tokens in args.budgets]
    names = ("selectors", "budgets", "batch", "prompt_tokens", "new_tokens", "dtype", "ask", "identity")
    settings = {key: getattr(args, key) for key in names} | {"pending": PENDING}
    settings |= {"target": Path(args.target).name, "draft": args.draft and Path(args.draft).name}
    settings |= {"documents": args.documents.name, "prompts_sha256": digest(documents)}
    settings |= SAMPLING if args.identity else {}
    check_room(documents, args.target, args.new_tokens)
    done = Done.read(args.record, settings)
    missing = [case.name for case in cases if case.name not in done.cases]
    checks = checks_of(cases, missing, done.figures, len(documents), args)
    with ThreadPoolExecutor(args.parallel) as pool:
        left = [case for case in cases if case.name in missing]
        started = {pool.submit(one_case, case, args, documents, on_cpu): case.name for case in left}
        for future in as_completed(started):
            try:
                more, differing, found = future.result()
            except Exception as error:
                print(f"{started[future]} failed: {error}", flush=True)
                continue
            missing.remove(started[future])
            done.figures |= {"prompts": len(documents), **more}
            done.differing += differing
            checks = checks_of(cases, missing, done.figures, len(documents), args)
            name = "exact_matrix" if args.identity else "view_agreement"
            done.write(started[future], make_record(name, settings, done.figures, checks), args.record)  # so far
            if args.answers is not None:
                args.answers.parent.mkdir(parents=True, exist_ok=True)
                with args.answers.open("a" if len(done.cases) > 1 else "w") as file:
                    file.write("".join(json.dumps(row) + "\n" for row in found))
    return 0 if all(checks.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
