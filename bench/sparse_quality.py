"""Quality of mode ``sparse`` beside views of as many tokens: ``longdraft bench sparse_quality --target T --draft D --documents F --record R``.

Dustin's Table 3 in shape, on documents of one's own: sets by history and lookahead (H: as the recipe divides them, or halves), by
history alone (T) and by lookahead alone (D), and views by StreamingLLM's, SnapKV's and Quest's rules and by attention mass, at equal
budgets. Answers are compared with the target's own (equal as a whole, equal leading tokens, ROUGE-L) and, where documents have a
``summary``, with that (ROUGE-L, and its change from the target's own answers). Greedy; stop tokens end an answer; documents whose
plain answer loops are left out.

Mode ``sparse`` is never refreshed unless asked; a view's mode ``partial`` is refreshed every 20 tokens at most, as it always is. ``full``, on
the whole cache, is the control: in bf16 what it does not reach is rounding. A server has one view, so there is one for each; the
variants of sparse, whose budgets and refreshes are requests' own, are served beside the first three.
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch

from longdraft.bench.drift_figures import OFF, ratio
from longdraft.bench.record import make_record, write_record
from longdraft.bench.server import Server, generate
from longdraft.bench.sparse_drift import refresh
from longdraft.bench.token_compare import same_tokens
from longdraft.bench.view_agreement import Case, check_room, digest, launch, read_documents
from longdraft.bench.view_quality import Score, quality, rouge_l
from longdraft.draft_models.repetition import ALLOWED, repeated_share
from longdraft.draft_models.sparse_recipe import PROTECTED
from longdraft.errors import UserError

VARIANTS = {"h": "history and lookahead", "t": "history alone", "d": "lookahead alone"}
Decode = Callable[[list[int]], str]


@dataclass(frozen=True)
class Asked:
    """One case: what its requests ask of us, and which counter says that they were verified as the case says."""

    name: str
    label: str
    own: dict[str, Any]
    counter: str


CONTROL = Asked("full", "whole cache", {"mode": "full"}, "target_verifications")


@dataclass(frozen=True)
class Serving:
    """One server: its view and its variant of sparse sets, of which one may be missing."""

    view: Case | None
    variant: str | None

    @property
    def name(self) -> str:
        return "_".join(["sparse", *([self.variant] if self.variant else []), *([self.view.name] if self.view else [])])

    def settings(self, args: argparse.Namespace) -> dict[str, Any]:
        """The server's."""
        most = max(args.budgets)
        own = {
            "mode": "sparse",
            "allow_lossy": True,
            "sparse_tokens": most,
            **(self.view.settings if self.view else {}),
        }
        lookahead = {"t": 0, "d": most - PROTECTED, "h": args.lookahead}[self.variant or "h"]
        given = {"sparse_recipe": args.recipe, "sparse_lookahead": lookahead}
        return own | {key: value for key, value in given.items() if value is not None}

    def cases(self, args: argparse.Namespace) -> Iterator[Asked]:
        """What is asked of it."""
        if self.view is not None:
            label = f"{self.view.selector} view, {self.view.tokens} tokens"
            yield Asked(self.view.name, label, {"mode": "partial"}, "partial_verifications")
        for tokens in args.budgets if self.variant else ():
            for every in args.refresh:
                own = {"mode": "sparse", "budget": tokens, **({} if every == OFF else {"refresh": int(every)})}
                name, label = (
                    f"sparse_{self.variant}_{tokens}",
                    f"sparse, {VARIANTS[str(self.variant)]}, {tokens} tokens",
                )
                if every != OFF:
                    name, label = f"{name}_refresh_{every}", f"{label}, a refresh every {every}"
                yield Asked(name, label, own, "verified_on_view")


def servings(args: argparse.Namespace) -> list[Serving]:
    """Servers for all views and variants, as few as there can be."""
    views = [Case(selector, tokens) for selector in args.selectors for tokens in args.budgets]
    return [Serving(view, variant) for view, variant in zip_longest(views, args.variants)]


def ask(
    server: Server, prompts: list[list[int]], own: dict[str, Any], args: argparse.Namespace
) -> list[dict[str, Any]]:
    """Greedy answers up to a stop token, ``batch`` at a time."""
    found: list[dict[str, Any]] = []
    for start in range(0, len(prompts), args.batch):
        ids = prompts[start : start + args.batch]
        each = [{"ignore_eos": False, "custom_params": {"longdraft": own}}] * len(ids)
        found += generate(server, ids, args.new_tokens, each)[1]
    return found


@dataclass
class Documents:
    """Prompts, their references, and the target's own answers once there are some."""

    rows: list[dict[str, Any]]
    plain: list[list[int]]

    def unlooped(self) -> "Documents":
        """Those whose plain answer does not loop.

        Raises:
            UserError: there are none.
        """
        kept = [i for i, ids in enumerate(self.plain) if repeated_share(ids) <= ALLOWED]
        if not kept:
            raise UserError(
                f"all {len(self.plain)} plain answers have more than {ALLOWED:.0%} repeated 4-grams: give other --documents, or "
                "lower --new-tokens"
            )
        return Documents([self.rows[i] for i in kept], [self.plain[i] for i in kept])


def case_rows(case: Asked, documents: Documents, found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A row for each answer, as :mod:`longdraft.bench.view_quality` reads them, with its counters."""
    rows = []
    for document, plain, answer in zip(documents.rows, documents.plain, found, strict=True):
        got, counters = list(answer["output_ids"]), answer["meta_info"]["longdraft"][-1]
        row = {"case": case.name, "id": document["id"], "plain": plain, "partial": got, "same": same_tokens(got, plain)}
        row["counters"] = {key: counters[key] for key in {case.counter, "target_verifications", "accepted"}}
        rows.append(row)
    return rows


def serve(
    serving: Serving, args: argparse.Namespace, documents: Documents, on_cpu: bool
) -> tuple[Documents, list[dict[str, Any]]]:
    """All rows of one server's cases; the first server answers plainly before, and as the control."""
    words, environment = launch(args, serving.settings(args), on_cpu)
    cases = list(serving.cases(args))
    with Server(serving.name, words, args.logs / f"{serving.name}.log", environment) as server:
        if not documents.plain:
            answers = ask(server, [row["ids"] for row in documents.rows], {"mode": "off"}, args)
            documents = Documents(documents.rows, [list(a["output_ids"]) for a in answers]).unlooped()
            cases = [CONTROL, *cases]
        prompts = [row["ids"] for row in documents.rows]
        rows = []
        for case in cases:
            rows += case_rows(case, documents, ask(server, prompts, case.own, args))
            print(f"{case.label}: {len(prompts)} answers", flush=True)
    return documents, rows


def figures_of(
    rows: Sequence[dict[str, Any]], decode: Decode, references: dict[str, str], score: Score
) -> dict[str, float]:
    """Figures of all cases: those of :func:`longdraft.bench.view_quality.quality`, and what follows.

    Args:
        rows: of :func:`case_rows`.
        decode: tokens to text.
        references: by the documents' ids; may be empty.
        score: of a text against a reference.
    """
    found = quality(rows, decode, references, score)
    for name in dict.fromkeys(row["case"] for row in rows):
        own = [row for row in rows if row["case"] == name]
        verified = sum(row["counters"]["target_verifications"] for row in own)
        found[f"{name}_same_tokens_mean"] = round(sum(row["same"] for row in own) / len(own), 3)
        found[f"{name}_same_tokens_share"] = round(
            sum(row["same"] for row in own) / sum(len(r["plain"]) for r in own), 4
        )
        found[f"{name}_looping"] = sum(repeated_share(row["partial"]) > ALLOWED for row in own)
        accepted = sum(row["counters"]["accepted"] for row in own)
        found[f"{name}_accept_length"] = round(1 + accepted / max(1, verified), 4)
        changes = {
            at: (score(references[row["id"]], decode(row["partial"])) - score(references[row["id"]], decode(row["plain"])), 1.0)
            for at, row in enumerate(own)
            if references.get(row["id"])
        }  # fmt: skip
        if len(changes) > 1:
            change, error = ratio(changes)
            found[f"{name}_rouge_l_to_reference_change"] = round(change, 3)
            found[f"{name}_rouge_l_to_reference_change_error"] = round(error, 3)
    return found


COLUMNS = {
    "equal": "exact_match",
    "equal leading tokens": "same_tokens_share",
    "ROUGE-L to target": "rouge_l_to_target",
    "ROUGE-L to reference": "rouge_l_to_reference",
    "change": "rouge_l_to_reference_change",
}


def table(cases: Sequence[Asked], figures: dict[str, float]) -> str:
    """Markdown: a row a case."""
    rows = [["", *COLUMNS], ["---"] * (len(COLUMNS) + 1)]
    for case in cases:
        values = (figures.get(f"{case.name}_{key}") for key in COLUMNS.values())
        rows.append([case.label, *("" if value is None else f"{value:.2f}" for value in values)])
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="longdraft bench sparse_quality", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--target", required=True)
    parser.add_argument("--draft", required=True, help="folder of a draft, whose lookahead chooses")
    parser.add_argument("--documents", type=Path, required=True, help="JSONL with text, and summary where there is one")
    parser.add_argument(
        "--continue", action="store_true", help="continue the text in place of summarising it", dest="on"
    )
    parser.add_argument("--variants", nargs="+", choices=list(VARIANTS), default=list(VARIANTS))
    parser.add_argument("--selectors", nargs="*", default=["streaming", "snapkv", "quest", "mass"])
    parser.add_argument(
        "--budgets", nargs="+", type=int, default=[128, 256, 512], help="cached tokens of sets and views"
    )
    parser.add_argument("--refresh", nargs="+", type=refresh, default=[OFF], help="of mode sparse: off, or tokens")
    parser.add_argument(
        "--lookahead", type=int, help="tokens that the draft chooses of H's largest set; as the recipe says, or half"
    )
    parser.add_argument("--recipe", help="file of longdraft calibrate")
    parser.add_argument("--count", type=int, default=20, help="documents")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--parallel", type=int, default=1, help="servers at once")
    parser.add_argument("--prompt-tokens", nargs="+", type=int, default=[7900], help="of the documents in turn")
    parser.add_argument("--new-tokens", type=int, default=256)
    parser.add_argument("--dtype", default=None, help="bfloat16 on a card, float32 on a CPU")
    parser.add_argument("--attention-backend", default="fa3", help="SGLang's, on a card")
    parser.add_argument("--logs", type=Path, default=Path("sparse_quality_logs"))
    parser.add_argument("--answers", type=Path, help="write all answers here, JSONL")
    parser.add_argument("--record", type=Path, required=True)
    return parser.parse_args(argv)


def served_by_all(
    args: argparse.Namespace, documents: Documents, on_cpu: bool
) -> Iterator[tuple[Documents, list[dict[str, Any]]]]:
    """Rows server by server: the first one alone, whose plain answers the others are compared with."""
    first, *others = servings(args)
    documents, rows = serve(first, args, documents, on_cpu)
    yield documents, rows
    with ThreadPoolExecutor(args.parallel) as pool:
        started = {pool.submit(serve, each, args, documents, on_cpu): each.name for each in others}
        for future in as_completed(started):
            try:
                yield future.result()
            except Exception as error:
                print(f"{started[future]} failed: {error}", flush=True)


def longer_than_sets(args: argparse.Namespace, documents: list[dict[str, Any]]) -> None:
    """Raises UserError: prompts that a set would hold whole."""
    if short := sum(len(document["ids"]) <= max(args.budgets) for document in documents):
        raise UserError(
            f"{short} of {len(documents)} prompts have no more than {max(args.budgets)} tokens, so that a set holds all of them: "
            "lower --budgets, raise --prompt-tokens or give longer --documents"
        )


def settings_of(args: argparse.Namespace, documents: list[dict[str, Any]]) -> dict[str, Any]:
    """For the record."""
    names = (
        "variants",
        "selectors",
        "budgets",
        "refresh",
        "lookahead",
        "batch",
        "prompt_tokens",
        "new_tokens",
        "dtype",
    )
    found = {key: getattr(args, key) for key in names} | {"asked_for_a_summary": not args.on}
    found |= {key: (value := getattr(args, key)) and Path(value).name for key in ("target", "draft", "recipe")}
    return found | {"documents": args.documents.name, "prompts_sha256": digest(documents)}


def checks_of(cases: Sequence[Asked], rows: Sequence[dict[str, Any]]) -> dict[str, bool]:
    """What a record answers for: that every case is there and was served as it says."""
    counted = {case.name: [r["counters"][case.counter] for r in rows if r["case"] == case.name] for case in cases}
    return {
        "every_case_ran": all(counted.values()),
        "every_case_was_verified_as_it_says": all(sum(own) > 0 for own in counted.values()),
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and write one record, anew behind every server; 1 where a case is missing or was not served as it says."""
    from transformers import AutoTokenizer

    args, on_cpu = parse(argv), not torch.cuda.is_available()
    args.dtype = args.dtype or ("float32" if on_cpu else "bfloat16")
    tokenizer = AutoTokenizer.from_pretrained(args.target)
    read = read_documents(args.documents, tokenizer, args.prompt_tokens, not args.on, args.count)
    longer_than_sets(args, read)
    check_room(read, args.target, args.new_tokens)
    cases = [CONTROL, *(case for serving in servings(args) for case in serving.cases(args))]
    references = {row["id"]: row["reference"] for row in read if row["reference"]}
    score, settings, labels = rouge_l(), settings_of(args, read), {case.name: case.label for case in cases}
    rows: list[dict[str, Any]] = []
    figures: dict[str, float] = {}
    checks: dict[str, bool] = {}
    for documents, more in served_by_all(args, Documents(read, []), on_cpu):
        rows += more
        figures = {"documents": len(documents.rows), "left_out_looping": len(read) - len(documents.rows)}
        figures |= figures_of(rows, lambda ids: str(tokenizer.decode(ids, skip_special_tokens=True)), references, score)
        checks = checks_of(cases, rows)
        write_record(make_record("sparse_quality", settings, figures, checks, labels=labels), args.record)  # so far
        if args.answers is not None:
            args.answers.parent.mkdir(parents=True, exist_ok=True)
            args.answers.write_text("".join(json.dumps(row) + "\n" for row in rows))
    print(table(cases, figures))
    return 0 if all(checks.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
