"""τ of drafts by context, twice: ``longdraft bench shipped_tau --target T --draft NAME=FOLDER ... --answers HELD.jsonl``.

The reference decoder and the real server, both on the CPU in float32, continue the same held-out prompts greedily by 256 tokens
with a chain of four; tokens and verifications must be equal. Prompts are those of ``longdraft generate``'s file, cut from
documents; answers that loop (more than 30 % repeated 4-grams) are left out.
"""

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from longdraft.bench.record import make_record, write_record
from longdraft.bench.server import Server
from longdraft.draft_models.checkpoint import load_draft
from longdraft.draft_models.reference_decode import speculative_decode
from longdraft.draft_models.repetition import ALLOWED, repeated_share
from longdraft.train.config import TargetSettings
from longdraft.train.target import load_target

NEW_TOKENS, STEPS = 256, 4


@dataclass(frozen=True)
class Row:
    """One prompt with one draft: tokens of the answer behind the first, and what they took on both sides."""

    draft: str
    length: int
    source: str
    gained: int
    verifications: int
    served_verifications: int
    same_tokens: bool
    looping: bool


def prompts(path: Path, each: int) -> Iterator[tuple[int, str, list[int]]]:
    """The first prompts of every length whose known answer does not loop: ``(length, source, ids)``."""
    taken: dict[int, int] = {}
    for line in path.read_text().splitlines():
        row = json.loads(line)
        length = row["supervised_from"]
        answer = row["input_ids"][length : length + NEW_TOKENS]
        if len(answer) < NEW_TOKENS or repeated_share(answer) > ALLOWED or taken.get(length, 0) >= each:
            continue
        taken[length] = taken.get(length, 0) + 1
        yield length, str(row.get("source", "")), row["input_ids"][:length]


def serve_command(target: str, folder: Path, context: int) -> list[str]:
    """A server on the CPU whose draft reads as much as the reference decoder's."""
    words = [sys.executable, "-m", "longdraft.cli", "serve", "--model-path", target, "--draft", str(folder)]
    words += ["--steps", str(STEPS), "--draft-context", str(context), "--device", "cpu", "--dtype", "float32"]
    return [*words, "--max-running-requests", "2", "--max-total-tokens", str(2 * context)]


def measure(target: str, name: str, folder: Path, cases: list[tuple[int, str, list[int]]], log: Path) -> list[Row]:
    """Both sides of one draft, prompt by prompt."""
    model = load_target(TargetSettings(path=target, dtype="float32"), torch.device("cpu"))
    draft = load_draft(folder, model.spec, torch.float32).bind(model.embedding_VE, model.head_VE)
    context, rows = model.spec.max_position, []
    with Server(name, serve_command(target, folder, context), log) as server:
        for length, source, ids in cases:
            served = server.generate(ids, NEW_TOKENS, timeout=1800)
            server.pause()  # two cores are too few for both
            decoded = speculative_decode(model.model, draft, ids, NEW_TOKENS, STEPS)
            server.resume()
            row = Row(
                name,
                length,
                source,
                len(decoded.tokens) - 1,
                decoded.stats.verifications,
                int(served.counters["target_verifications"]),
                served.tokens == decoded.tokens,
                repeated_share(decoded.tokens) > ALLOWED,
            )
            rows.append(row)
            print(json.dumps(vars(row)), flush=True)
    return rows


def figures(rows: list[Row]) -> dict[str, float]:
    """τ by draft and prompt length, of answers that do not loop: tokens a verification, so the bonus token is in."""
    out: dict[str, float] = {}
    for draft, length in sorted({(row.draft, row.length) for row in rows}):
        mine = [row for row in rows if (row.draft, row.length) == (draft, length) and not row.looping]
        if not mine:
            continue
        gained = sum(row.gained for row in mine)
        out[f"{draft}_{length}_answers"] = len(mine)
        out[f"{draft}_{length}_tau_reference"] = round(gained / sum(row.verifications for row in mine), 4)
        out[f"{draft}_{length}_tau_served"] = round(gained / sum(row.served_verifications for row in mine), 4)
    return out


def finish(name: str, device: str, rows: list[Row], checks: dict[str, bool], path: Path, **more: float) -> int:
    """Write and print the record of all rows; 1 where a check fails, or the two sides differ in their verifications."""
    checks |= {"verifications_equal": all(row.verifications == row.served_verifications for row in rows)}
    settings = {"steps": STEPS, "new_tokens": NEW_TOKENS, "dtype": "float32", "device": device}
    record = make_record(name, settings, figures(rows) | more, checks, rows=[vars(row) for row in rows])
    write_record(record, path)
    print(json.dumps({**record["figures"], **checks}, indent=1))
    return 0 if all(checks.values()) else 1


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="longdraft bench shipped_tau", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--target", required=True)
    parser.add_argument("--draft", nargs="+", required=True, metavar="NAME=FOLDER")
    parser.add_argument("--answers", type=Path, required=True, help="generated.jsonl of held-out documents")
    parser.add_argument("--each", type=int, default=8, help="prompts of every length")
    parser.add_argument("--record", type=Path, default=Path("bench/results/shipped_drafts_tau.json"))
    parser.add_argument("--logs", type=Path, default=Path("shipped_tau_logs"))
    args = parser.parse_args(argv)
    cases = list(prompts(args.answers, args.each))
    rows: list[Row] = []
    for name, _, folder in (word.partition("=") for word in args.draft):
        rows += measure(args.target, name, Path(folder), cases, args.logs / f"{name}.log")
    return finish(
        "shipped_drafts_tau", "cpu", rows, {"tokens_equal": all(row.same_tokens for row in rows)}, args.record
    )


if __name__ == "__main__":
    sys.exit(main())
