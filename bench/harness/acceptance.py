"""Tokens a verification by system, task and context bucket: ``longdraft bench acceptance FILE.yaml``.

Greedy answers to tasks' prompts go on behind a stop token, so that all are equally long. τ is given micro and macro, with and without
the bonus token, of answers that do not loop and whose plain answer does not; tokens of ``full``, ``exact`` and ``self`` must be plain
decoding's.
"""

import sys
from collections.abc import Sequence

from longdraft.bench.harness.answers import Answer, tau_figures, text_faults
from longdraft.bench.harness.asking import Asking
from longdraft.bench.harness.run import Cell, Rows, run_file
from longdraft.bench.harness.settings import AcceptanceSettings
from longdraft.bench.server import Server


class Acceptance(Asking[AcceptanceSettings]):
    """Rows are accept lengths."""

    kind = "acceptance"
    beyond_the_end = True

    def measure(self, server: Server, cell: Cell) -> tuple[Rows, list[Answer]]:
        own, plain, told = self.answers(server, cell)
        faults = text_faults(own)
        out = {name for names in (*faults.values(), text_faults(plain or own)["looping"]) for name in names}
        kept = [answer for answer in own if answer.id not in out]
        why = "" if kept else f"all {len(own)} answers are left out: {counted(faults)}"
        if plain is None:
            why = "plain decoding has no answers to compare with"
        elif told.get("identical") is False:
            why = "answers are not plain decoding's"
        more = {**self.lengths(cell), "left_out": len(own) - len(kept), **told, **tau_figures(kept)}
        return [self.row(cell, not why, why, len(kept), **more)], own

    def figures(self, rows: Rows) -> dict[str, float]:
        return {
            f"{row['label'].replace(' ', '_')}_tau_{row['task']}_{row['bucket']}": row["tau_micro"]
            for row in rows
            if row["ok"] and "tau_micro" in row
        }


def counted(faults: dict[str, list[str]]) -> str:
    """How many of each fault."""
    return ", ".join(f"{len(names)} {word}" for word, names in faults.items() if names) or "their plain answers loop"


def main(argv: Sequence[str] | None = None) -> int:
    """Measure what the file asks for and is not there yet."""
    return run_file(Acceptance, AcceptanceSettings, (__doc__ or "").split("\n")[0], argv)


if __name__ == "__main__":
    sys.exit(main())
