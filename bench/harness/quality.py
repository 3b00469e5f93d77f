"""Scores of answers by system, task and context bucket: ``longdraft bench quality FILE.yaml``.

Greedy, up to a stop token. Every answer is scored twice by the task's metric: against the references (``score_reference``) and against
the target's own answer on its full cache (``score_own``). Prompts whose plain answer is empty or loops are left out for every
system; a lossy system's own loops count, since they are what it would have said.
"""

import statistics
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from longdraft.bench.harness.answers import Answer, tau_figures, text_faults
from longdraft.bench.harness.asking import Asking
from longdraft.bench.harness.run import Cell, Rows, run_file
from longdraft.bench.harness.settings import QualitySettings
from longdraft.bench.server import Server
from longdraft.bench.tasks import Example, Task, score


class Quality(Asking[QualitySettings]):
    """Rows are scores."""

    kind = "quality"

    def text(self, answer: Answer) -> str:
        return str(self.place.tokenizer.decode(answer.tokens, skip_special_tokens=True))

    def measure(self, server: Server, cell: Cell) -> tuple[Rows, list[Answer]]:
        own, plain, told = self.answers(server, cell)
        if plain is None:
            return self.failed(cell, "plain decoding has no answers to compare with"), own
        out = {name for names in text_faults(plain).values() for name in names}
        out |= {answer.id for answer in plain if not self.text(answer).strip()}
        task = self.of_cell(cell).task
        kept = [each for each in zip(task.examples, plain, own, strict=True) if each[0].id not in out]
        if not kept:
            return self.failed(cell, f"all {len(plain)} plain answers are empty or loop"), own
        more: dict[str, Any] = {**self.lengths(cell), **self.scores(task, kept)}
        why = "answers are not plain decoding's" if told.get("identical") is False else ""
        more |= {"metric": task.metric, "budget": getattr(cell.system, "budget", None), "left_out": len(out), **told}
        return [self.row(cell, not why, why, len(kept), **more)], own

    def scores(self, task: Task, kept: Sequence[tuple[Example, Answer, Answer]]) -> dict[str, float]:
        """Means over answers, with the standard deviations of both scores; 0 to 1.

        Args:
            task: whose metric scores.
            kept: examples with plain decoding's answer and the system's.
        """
        texts = [(example, self.text(plain), self.text(own)) for example, plain, own in kept]
        reference = [score(task, example, said) for example, _, said in texts if example.references]
        against = [score(task, replace(example, references=(plain,)), said) for example, plain, said in texts]
        answers = [own for _, _, own in kept]
        found = {
            "score_own": statistics.fmean(against),
            "spread_own": statistics.pstdev(against),
            "exact_match_own": statistics.fmean(plain.tokens == own.tokens for _, plain, own in kept),
            "mean_new_tokens": statistics.fmean(len(answer.tokens) for answer in answers),
            "looping": float(sum(answer.looping for answer in answers)),
        }
        if reference:
            found |= {"score_reference": statistics.fmean(reference), "spread": statistics.pstdev(reference)}
        if (tau := tau_figures(answers)).get("tau_micro"):
            found["tau_micro"] = tau["tau_micro"]
        return {key: round(value, 4) for key, value in found.items()}

    def figures(self, rows: Rows) -> dict[str, float]:
        return {
            f"{row['label'].replace(' ', '_')}_{kind}_{row['task']}_{row['bucket']}": row[kind]
            for row in rows
            for kind in ("score_reference", "score_own")
            if row["ok"] and kind in row
        }


def main(argv: Sequence[str] | None = None) -> int:
    """Measure what the file asks for and is not there yet."""
    return run_file(Quality, QualitySettings, (__doc__ or "").split("\n")[0], argv)


if __name__ == "__main__":
    sys.exit(main())
