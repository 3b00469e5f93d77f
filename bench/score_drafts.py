"""Accept length of drafts on known continuations: ``longdraft bench score_drafts --target T --draft NAME=FOLDER ...``.

The continuations are what ``longdraft generate`` wrote for held-out documents (greedy). τ is given with and without the bonus
token, by prompt length and kind of document; outputs with more than 30 % repeated 4-grams are left out and counted.
"""

import argparse
import itertools
import json
import sys
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from longdraft.bench.record import make_record, write_record
from longdraft.draft_models.acceptance import AcceptStats
from longdraft.draft_models.checkpoint import load_draft
from longdraft.draft_models.longspec import LongSpecDraft
from longdraft.draft_models.repetition import ALLOWED, repeated_share
from longdraft.draft_models.token_counts import TokenCounts
from longdraft.errors import UserError
from longdraft.kernels.view_attention import View
from longdraft.train.config import TargetSettings
from longdraft.train.scoring import score
from longdraft.train.target import FrozenTarget, load_target

SHORTEST = 64  # tokens of an answer that count
CUT_FROM = 1024  # tokens from which a prompt was cut to a length; shorter ones are chats of any length


@dataclass(frozen=True)
class Answer:
    """A prompt with its greedy continuation; it counts in every group."""

    groups: tuple[str, ...]
    ids: list[int]
    prompt: int


@dataclass
class Sum:
    """One draft on one group of answers."""

    stats: AcceptStats = field(default_factory=AcceptStats)
    accepted_at: list[int] = field(default_factory=list)
    answers: int = 0

    def figures(self) -> dict[str, Any]:
        count = max(self.stats.verifications, 1)
        return {
            "answers": self.answers,
            "verifications": self.stats.verifications,
            "tau": round(self.stats.tau, 4),
            "tau_without_bonus": round(self.stats.tau_without_bonus, 4),
            "reached_depth": [round(n / count, 4) for n in self.accepted_at],
        }


def read_answers(path: Path, new_tokens: int, kinds: list[str]) -> tuple[list[Answer], Counter[str]]:
    """Answers of a file that do not loop, and how many do by group.

    An answer that ends early counts with what it has; a loop is measured on the tokens that count.

    Args:
        path: of ``longdraft generate``.
        new_tokens: tokens of an answer that count.
        kinds: of the documents, by line of the prompts' file; empty does not tell them apart.
    """
    kept: list[Answer] = []
    looping: Counter[str] = Counter()
    for line in path.read_text().splitlines():
        row = json.loads(line)
        ids, prompt = row["input_ids"], row["supervised_from"]
        answer = ids[prompt : prompt + new_tokens]
        if len(answer) < SHORTEST:
            continue
        length = str(prompt) if prompt >= CUT_FROM else "chat"
        groups: tuple[str, ...] = (length,)
        if kinds:
            groups = (length, f"{length} {kinds[int(row['source'].split(':')[1].split('#')[0]) - 1]}")
        if repeated_share(answer) > ALLOWED:
            looping.update(groups)
        else:
            kept.append(Answer(groups, ids, prompt))
    return kept, looping


def measure(
    target: FrozenTarget, draft: Any, answers: list[Answer], new_tokens: int, steps: int, view: View | None
) -> dict[str, Sum]:
    """Sums by group."""
    sums: dict[str, Sum] = {}
    for answer in answers:
        length = min(new_tokens, len(answer.ids) - answer.prompt)
        got = score(target, draft, answer.ids, answer.prompt, length, steps, view)
        for group in answer.groups:
            into = sums.setdefault(group, Sum(accepted_at=[0] * steps))
            into.stats.merge(got.stats)
            into.accepted_at = [a + b for a, b in zip(into.accepted_at, got.accepted_at, strict=True)]
            into.answers += 1
    return dict(sorted(sums.items()))


def named(words: list[str]) -> list[tuple[str, Path]]:
    """``NAME=PATH`` words."""
    return [(name, Path(path)) for name, _, path in (word.partition("=") for word in words)]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="longdraft bench score_drafts", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--target", required=True)
    parser.add_argument("--dtype", default="auto", choices=("auto", "float32", "bfloat16"))
    parser.add_argument("--draft", nargs="+", required=True, metavar="NAME=FOLDER")
    parser.add_argument("--answers", type=Path, required=True, help="generated.jsonl of held-out documents")
    parser.add_argument("--documents", type=Path, help="the JSONL that the prompts were cut from, with a kind a record")
    parser.add_argument("--new-tokens", type=int, default=256)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument(
        "--context", type=int, help="cached tokens that a LongSpec draft reads: 32 sinks and the newest"
    )
    parser.add_argument(
        "--head-tokens", type=int, nargs="+", default=[], help="LongSpec: score heads of so many tokens too"
    )
    parser.add_argument("--head-counts", type=Path, help="file of `longdraft counts`, for --head-tokens")
    parser.add_argument("--record", type=Path, help="write a record here")
    parser.add_argument("--record-name", default="draft_tau")
    args = parser.parse_args(argv)
    if bool(args.head_tokens) != (args.head_counts is not None):
        parser.error("--head-tokens and --head-counts belong together")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    target = load_target(TargetSettings(path=args.target, dtype=args.dtype), device)
    kinds = [json.loads(line)["kind"] for line in args.documents.read_text().splitlines()] if args.documents else []
    answers, looping = read_answers(args.answers, args.new_tokens, kinds)
    figures: dict[str, float] = {f"{group}_looping": count for group, count in sorted(looping.items())}
    print(f"{len(answers)} answers; left out for looping: {dict(sorted(looping.items()))}", flush=True)
    rows: list[dict[str, Any]] = []
    view = View(args.context, 32, args.context - 32, 1) if args.context else None
    counts = TokenCounts.load(args.head_counts, target.spec.vocab_size) if args.head_counts else None
    heads = [None, *args.head_tokens]
    for (plain, folder), head in itertools.product(named(args.draft), heads):
        draft = load_draft(folder, target.spec, device=device).bind(target.embedding_VE, target.head_VE)
        name = plain if head is None else f"{plain}@{head}"
        if head is not None and counts is not None:
            if not isinstance(draft, LongSpecDraft):
                raise UserError(f"--head-tokens is for LongSpec drafts, {folder} holds another: leave it out")
            draft.narrow_head(ids := counts.top(head))
            figures[f"head_{head}_coverage"] = round(counts.coverage(ids), 5)
        for group, result in measure(target, draft, answers, args.new_tokens, args.steps, view).items():
            row = {"draft": name, "group": group, **result.figures()}
            rows.append(row)
            figures[f"{name}_{group}_tau"] = row["tau"]
            print(json.dumps(row), flush=True)
    if args.record is not None:
        settings = {"steps": args.steps, "new_tokens": args.new_tokens, "context": args.context, "target": args.target}
        write_record(make_record(args.record_name, settings, figures, {}, rows=rows), args.record)
    return 0


if __name__ == "__main__":
    sys.exit(main())
