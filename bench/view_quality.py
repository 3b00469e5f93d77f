"""Texts of mode ``partial`` beside the target's own: ``longdraft bench view_quality --target T --answers A.jsonl --record R``.

Reads what :mod:`longdraft.bench.view_agreement` wrote, answers of the target and of every view, and says by selector and budget how
many are equal as a whole and how close the texts are (ROUGE-L, by the rouge-score package): against the target's own answer, which
is what a view should not change, and against the documents' references where they have any, beside the target's own figure.
"""

import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from longdraft.bench.record import make_record, write_record
from longdraft.bench.tasks.metrics import rouge_scorer
from longdraft.errors import UserError

Score = Callable[[str, str], float]  # reference, text


def rouge_l() -> Score:
    """ROUGE-L's F1 with stemming, 0 to 100."""
    scorer = rouge_scorer("en")
    return lambda reference, text: 100 * float(scorer.score(reference, text)["rougeL"].fmeasure)


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Objects of a JSONL file.

    Raises:
        UserError: there are none.
    """
    found = [json.loads(line) for line in path.read_text().splitlines() if line.strip()]
    if not found:
        raise UserError(f"{path} holds no answers: give what `longdraft bench view_agreement --answers FILE` wrote")
    return found


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def quality(
    rows: Sequence[dict[str, Any]], decode: Callable[[list[int]], str], references: dict[str, str], score: Score
) -> dict[str, float]:
    """Figures by case.

    Args:
        rows: answers: ``case``, ``id``, ``plain`` and ``partial`` tokens.
        decode: tokens to text.
        references: texts by the documents' ids; may be empty.
        score: of a text against a reference.
    """
    cases: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        cases[row["case"]].append(row)
    figures: dict[str, float] = {}
    for case, own in cases.items():
        texts = [(row["id"], decode(row["plain"]), decode(row["partial"])) for row in own]
        figures[f"{case}_answers"] = len(own)
        figures[f"{case}_exact_match"] = round(mean([float(row["plain"] == row["partial"]) for row in own]), 4)
        figures[f"{case}_rouge_l_to_target"] = round(mean([score(plain, partial) for _, plain, partial in texts]), 2)
        known = [(references[name], plain, partial) for name, plain, partial in texts if references.get(name)]
        if known:
            figures[f"{case}_references"] = len(known)
            figures[f"{case}_rouge_l_to_reference"] = round(mean([score(r, partial) for r, _, partial in known]), 2)
            figures[f"{case}_rouge_l_target_to_reference"] = round(mean([score(r, plain) for r, plain, _ in known]), 2)
    return figures


def main(argv: Sequence[str] | None = None) -> int:
    """Score and write one record."""
    from transformers import AutoTokenizer

    parser = argparse.ArgumentParser(prog="longdraft bench view_quality", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--target", required=True, help="whose tokenizer decodes")
    parser.add_argument("--answers", type=Path, required=True)
    parser.add_argument("--documents", type=Path, help="JSONL with id and summary: the references")
    parser.add_argument("--record", type=Path, required=True)
    args = parser.parse_args(argv)
    tokenizer = AutoTokenizer.from_pretrained(args.target)
    documents = read_lines(args.documents) if args.documents else []
    references = {row["id"]: row["summary"] for row in documents if row.get("summary")}
    rows = read_lines(args.answers)
    figures = quality(rows, lambda ids: str(tokenizer.decode(ids, skip_special_tokens=True)), references, rouge_l())
    settings = {"target": Path(args.target).name, "answers": args.answers.name, "documents": str(args.documents or "")}
    write_record(make_record("view_quality", settings, figures, {"answers_there": bool(rows)}), args.record)
    print(json.dumps(figures, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
