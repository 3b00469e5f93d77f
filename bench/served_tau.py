"""τ of drafts through the server on a card: ``longdraft bench served_tau --target T --draft NAME=FOLDER ... --answers HELD.jsonl``.

The server in float32 continues every held-out prompt greedily by 256 tokens with a chain of four, many at once. Then one pass of
the target and the draft over each answer says what the reference decoder keeps of it (:mod:`longdraft.train.scoring`, which
equals that decoder): verifications must be equal, and every token the target's own choice. Answers that loop (more than 30 %
repeated 4-grams) count apart. On a machine without a card :mod:`longdraft.bench.shipped_tau` runs the decoder itself.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import torch

from longdraft.bench.record import check_record
from longdraft.bench.server import Generation, Server
from longdraft.bench.shipped_tau import NEW_TOKENS, STEPS, Row, finish, prompts
from longdraft.bench.tree_speed import WHOLE_FLOAT32
from longdraft.draft_models.checkpoint import check_draft, load_draft, read_config
from longdraft.draft_models.longspec import LongSpecDraft
from longdraft.draft_models.repetition import ALLOWED, repeated_share
from longdraft.draft_models.target import TargetSpec
from longdraft.errors import UserError
from longdraft.kernels.view_attention import View
from longdraft.train.config import TargetSettings
from longdraft.train.scoring import score
from longdraft.train.target import FrozenTarget, load_config, load_target

SINKS = 32  # leading tokens that a served draft reads of a context longer than its own
TIE = 1e-3  # of two logits in float32: sums in another order may choose either

Case = tuple[int, str, list[int]]  # prompt length, source, ids


def serve_command(target: str, folder: Path, context: int, parallel: int, longest: int) -> list[str]:
    """A server whose draft reads ``context`` cached tokens, with room for as many prompts of ``longest`` tokens as run at once.

    Float32 is what SGLang's Triton backend can be told.
    """
    words = [sys.executable, "-m", "longdraft.cli", "serve", "--model-path", target, "--draft", str(folder)]
    words += ["--steps", str(STEPS), "--draft-context", str(context), "--dtype", "float32"]
    words += ["--attention-backend", "triton", "--sampling-backend", "pytorch"]
    words += ["--grammar-backend", "none"]
    words += ["--max-running-requests", str(parallel), "--cuda-graph-bs-decode", str(parallel)]
    tokens = parallel * (longest + NEW_TOKENS + 100)
    return [*words, "--max-total-tokens", str(tokens), "--mem-fraction-static", "0.6", "--skip-server-warmup"]


def serve(command: list[str], name: str, cases: list[Case], log: Path, parallel: int) -> list[Generation]:
    """The server's answers, in the order of the cases."""
    with Server(name, command, log, WHOLE_FLOAT32) as server, ThreadPoolExecutor(parallel) as pool:
        ask = partial(server.generate, new_tokens=NEW_TOKENS, timeout=600)
        return list(pool.map(ask, [ids for _, _, ids in cases]))


@torch.no_grad()
def own_choices(target: FrozenTarget, ids: list[int], prompt: int) -> bool:
    """Whether every token behind the prompt is the target's choice, or ties with it."""
    at_L = torch.tensor(ids, device=target.device)
    logits = target.model(at_L[None, :-1], logits_to_keep=len(ids) - prompt, use_cache=False).logits[0].float()
    chosen = logits.gather(1, at_L[prompt:, None])[:, 0]
    return bool((logits.amax(-1) - chosen <= TIE).all())


def measure(
    target: FrozenTarget, name: str, folder: Path, cases: list[Case], answers: list[Generation], context: int
) -> list[Row]:
    """What the server needed for each answer beside what the reference decoder needs."""
    draft = load_draft(folder, target.spec, torch.float32, device=target.device)
    draft = draft.bind(target.embedding_VE, target.head_VE)
    narrow = isinstance(draft, LongSpecDraft) and context < target.spec.max_position
    view = View(context, SINKS, context - SINKS, 1) if narrow else None
    rows: list[Row] = []
    for (length, source, prompt), answer in zip(cases, answers, strict=True):
        ids = prompt + answer.tokens
        wanted = score(target, draft, ids, length, len(answer.tokens), STEPS, view)
        row = Row(
            name,
            length,
            source,
            len(answer.tokens) - 1,
            wanted.stats.verifications,
            int(answer.counters["target_verifications"]),
            own_choices(target, ids, length),
            repeated_share(answer.tokens) > ALLOWED,
        )
        rows.append(row)
        print(json.dumps(vars(row)), flush=True)
    return rows


def checked_drafts(words: Sequence[str], spec: TargetSpec) -> list[tuple[str, Path]]:
    """Names and folders of ``NAME=FOLDER`` words, before the first of them takes its hour.

    Raises:
        UserError: a word without a name, a name twice, or a folder that holds no draft for this target.
    """
    drafts = [(name, Path(folder)) for name, _, folder in (word.partition("=") for word in words)]
    names = [name for name, _ in drafts]
    for word, (name, folder) in zip(words, drafts, strict=True):
        if not name or "=" not in word or names.count(name) > 1:
            raise UserError(f"--draft {word}: write NAME=FOLDER, every name once")
        check_draft(folder, read_config(folder), spec)
    return drafts


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="longdraft bench served_tau", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--target", required=True)
    parser.add_argument("--draft", nargs="+", required=True, metavar="NAME=FOLDER")
    parser.add_argument("--answers", type=Path, required=True, help="generated.jsonl of held-out documents")
    parser.add_argument("--each", type=int, default=1000, help="prompts of every length, at most")
    parser.add_argument("--draft-context", type=int, nargs="+", help="cached tokens that a draft reads; default: all")
    parser.add_argument("--parallel", type=int, default=16, help="requests at once")
    parser.add_argument("--record", type=Path, default=Path("bench/results/served_drafts_tau.json"))
    parser.add_argument("--logs", type=Path, default=Path("served_tau_logs"))
    args = parser.parse_args(argv)
    if not torch.cuda.is_available():
        parser.error("there is no GPU: take `longdraft bench shipped_tau`, which serves on the CPU")
    check_record(args.record)
    if not args.answers.is_file():
        parser.error(f"--answers {args.answers} is no file: give generated.jsonl of longdraft generate")
    if not (cases := list(prompts(args.answers, args.each))):
        parser.error(
            f"--answers {args.answers} has no answer of {NEW_TOKENS} tokens that does not loop: give other documents"
        )
    loading = TargetSettings(path=args.target, dtype="float32", attn="sdpa", liger="off")
    drafts = checked_drafts(args.draft, TargetSpec.from_config(load_config(loading)))
    target = load_target(loading, torch.device("cuda"))
    rows: list[Row] = []
    for context in args.draft_context or [target.spec.max_position]:
        for name, folder in drafts:
            label = name if context >= target.spec.max_position else f"{name}_context{context}"
            longest = max(length for length, _, _ in cases)
            command = serve_command(args.target, folder, context, args.parallel, longest)
            answers = serve(command, label, cases, args.logs / f"{label}.log", args.parallel)
            rows += measure(target, label, folder, cases, answers, context)
    checks = {"tokens_are_the_targets": all(row.same_tokens for row in rows)}
    looping = {
        f"{name}_looping": float(sum(r.looping for r in rows if r.draft == name)) for name in {r.draft for r in rows}
    }
    return finish("served_drafts_tau", "cuda", rows, checks, args.record, **looping)


if __name__ == "__main__":
    sys.exit(main())
