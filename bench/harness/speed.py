"""Time of decoding by system, batch size and context, and latency at given rates: ``longdraft bench speed FILE.yaml``.

Prompts are cached by a first request, which is the prefill's time (``prefill_s``, of the largest batch that fits: smaller ones take its
first prompts); a warm-up goes before. Decoding's time is that of a long answer
less that of a short one. ``alpha`` is all timed tokens over all timed seconds (SpecPV), ``speedup`` its quotient with plain
decoding's on the same requests. Where acceptance is forced the text is wrong and only time is told.
"""

import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from longdraft.bench.gpu_full_speed import steady
from longdraft.bench.harness.answers import Answer, compared, text_faults
from longdraft.bench.harness.ledger import digest
from longdraft.bench.harness.load import load_row
from longdraft.bench.harness.place import Place, place_of
from longdraft.bench.harness.prompts import random_prompts, text_prompts
from longdraft.bench.harness.run import Cell, Experiment, Rows, run_file
from longdraft.bench.harness.settings import SpeedSettings
from longdraft.bench.harness.systems.base import System
from longdraft.bench.server import Server, generate, rounds
from longdraft.bench.step_times import breakdown, read_lines
from longdraft.errors import UserError

SHORT = 8  # tokens of the short answer
PHASES = {"sampling": "sample", "host gaps": "gap"}  # a clock's word -> a row's


@dataclass(frozen=True)
class Timed:
    """A batch's decoding, several times."""

    prefill_s: float
    seconds: tuple[float, ...]
    steps: tuple[int, ...]
    tokens: int  # of the batch, each time
    tokens_a_step: float
    replies: list[dict[str, Any]]

    def figures(self) -> dict[str, float]:
        """Of a row."""
        speeds = [self.tokens / seconds for seconds in self.seconds]
        return {
            "tok_s": round(statistics.median(speeds), 3),
            "tok_s_spread": round((max(speeds) - min(speeds)) / 2, 3),
            "repeats": len(speeds),
            "alpha": round(self.tokens * len(speeds) / sum(self.seconds), 3),
            "ms_step": round(1000 * sum(self.seconds) / sum(self.steps), 3),
            "tokens_a_step": round(self.tokens_a_step, 4),
        }


def timed(
    server: Server, ids: Sequence[list[int]], sampling: dict[str, Any], asked: SpeedSettings, lines: "Lines"
) -> Timed:
    """Decoding of a batch whose prompts are cached; ``lines`` are told when the timed answers run."""
    new_tokens = asked.new_tokens
    prompts, each = list(ids), [sampling] * len(ids)
    prefill_s, _ = generate(server, prompts, 2, each)
    for warm in (asked.warm_tokens, SHORT):
        generate(server, prompts, warm, each)
    seconds, steps, rates = [], [], []
    replies: list[dict[str, Any]] = []
    for _ in range(asked.repeats):
        short_s, short = generate(server, prompts, SHORT, each)
        with lines:
            long_s, replies = generate(server, prompts, SHORT + new_tokens, each)
        more = [b - a for a, b in zip(rounds(short), rounds(replies), strict=True)]
        if min(more) < 1:
            raise UserError(f"{new_tokens} more tokens took no more verifications: raise new_tokens")
        seconds.append(long_s - short_s)
        steps.append(max(rounds(replies)) - max(rounds(short)))
        rates.append(statistics.fmean(new_tokens / count for count in more))
    return Timed(prefill_s, tuple(seconds), tuple(steps), len(prompts) * new_tokens, statistics.fmean(rates), replies)


class Speed(Experiment[SpeedSettings]):
    """Cells are batches and contexts, and rates."""

    kind = "speed"
    cached: tuple[str, ...] = ()  # server, system and context whose largest batch's prompts lie in the prefix cache

    def make_place(self) -> Place:
        own = self.settings
        load = 0 if own.load is None else own.load.input_tokens + own.load.output_tokens
        longest = max([max(own.contexts) + max(own.warm_tokens, own.new_tokens) + SHORT, load])
        return place_of(own, max(own.batches), longest, force=own.force, step_times=own.phases)

    def conditions(self, system: System) -> list[dict[str, Any]]:
        own = self.settings
        batches = sorted(own.batches, reverse=True)  # the largest caches what the others ask
        grid = [{"batch": batch, "context": context} for context in own.contexts for batch in batches]
        return grid + [{"rate": rate} for rate in (own.load.rates if own.load else ())]

    def decisive(self, facts: dict[str, Any]) -> dict[str, Any]:
        if "rate" in facts:
            assert self.settings.load is not None
            return self.settings.load.model_dump(exclude={"rates"})
        own = self.settings.model_dump(include={"new_tokens", "warm_tokens", "repeats", "phases"})
        return own | {"prompts": digest(self.prompts(facts["context"])[: facts["batch"]])}

    @cache  # noqa: B019  # one experiment a process
    def prompts(self, context: int) -> list[list[int]]:
        """Of a context's largest batch: smaller ones take the first."""
        own = self.settings
        if own.prompts == "random":
            return random_prompts(len(self.place.tokenizer), context, max(own.batches), own.seed)
        return text_prompts(own.prompts, self.place.tokenizer, context, max(own.batches))

    def compares(self, cell: Cell) -> bool:
        return super().compares(cell) and cell.system.promised and "rate" not in cell.facts

    def measure(self, server: Server, cell: Cell) -> tuple[Rows, list[Answer]]:
        if "rate" in cell.facts:
            assert self.settings.load is not None
            return [self.row(cell, **load_row(server, self.place, self.settings.load, cell, self.settings.logs))], []
        own, batch, context = self.settings, cell.facts["batch"], cell.facts["context"]
        needed, room = batch * (context + SHORT + own.new_tokens), int(server.info()["max_total_num_tokens"])
        if needed > room:
            return self.failed(
                cell, f"does not fit: {needed:,} cached tokens are needed, the server has room for {room:,}"
            ), []
        ids = self.prompts(context)[:batch]
        now = (server.address, cell.system.label, str(context))
        if fresh := self.cached != now:
            server.flush()
            self.cached = now
        lines = Lines(cell.system)
        found = timed(server, ids, cell.system.request(), own, lines)
        answers = [] if own.force else [Answer.read(str(number), reply) for number, reply in enumerate(found.replies)]
        if min(found.seconds) <= 0:  # on a machine that was busy with something else
            return self.failed(cell, f"{own.new_tokens} more tokens took no more time: raise new_tokens"), answers
        more: dict[str, Any] = {**found.figures(), "prompts_sha256": digest(ids), "forced_accept": cell.system.forced}
        more |= lines.figures(batch, found.tokens_a_step) | ({"prefill_s": round(found.prefill_s, 3)} if fresh else {})
        why, told = ("", {}) if own.force else self.judged(server, cell, ids, answers)
        if cut := [len(r["output_ids"]) for r in found.replies if len(r["output_ids"]) != SHORT + own.new_tokens]:
            why = (
                why
                or f"{len(cut)} of {batch} answers ended early (one after {cut[0]} of {SHORT + own.new_tokens} tokens)"
            )
        return [self.row(cell, not why, why, batch, **more, **told)], answers

    def judged(
        self, server: Server, cell: Cell, ids: Sequence[list[int]], answers: list[Answer]
    ) -> tuple[str, dict[str, Any]]:
        """Why a cell's texts do not count, and whether they are plain decoding's where that is promised."""
        faults = {word: len(names) for word, names in text_faults(answers).items() if names}
        why = "; ".join(f"{count} of {len(answers)} answers are {word}" for word, count in faults.items())
        if not cell.system.promised:
            return why, {}
        want = self.ledger.answers.get(self.plain_cell(cell).key)
        if want is None:
            return why or "plain decoding has no answers to compare with", {}
        prompts = [(str(number), own) for number, own in enumerate(ids)]
        told = compared(server, prompts, want, answers, self.place.dtype == "float32")
        not_plain = f"{told['parted']} of {len(answers)} answers are not plain decoding's"
        return why if told["identical"] else not_plain, told

    def finish(self, rows: Rows) -> None:
        plain = {
            (row["batch"], row["context"]): row["alpha"]
            for row in rows
            if row["system"] == "plain" and row["ok"] and "alpha" in row
        }
        for row in rows:
            if row["ok"] and "alpha" in row and (base := plain.get((row["batch"], row["context"]))):
                row["speedup"] = round(row["alpha"] / base, 4)

    def figures(self, rows: Rows) -> dict[str, float]:
        found = {}
        for row in rows:
            if row["ok"] and "alpha" in row:
                case = f"{row['label'].replace(' ', '_')}_tok_s_b{row['batch']}_c{row['context']}"
                found[case] = row["tok_s"]
        return found


class Lines:
    """Step times that a server of ours writes while ``with`` lasts; of none where it writes none."""

    def __init__(self, system: System) -> None:
        settings = system.launch().settings or {}
        self.path = Path(settings["step_times"]) if "step_times" in settings else None
        self.parts: list[list[dict[str, Any]]] = []

    def _read(self) -> list[dict[str, Any]]:
        return read_lines(self.path) if self.path is not None and self.path.exists() else []

    def __enter__(self) -> None:
        self.before = len(self._read())

    def __exit__(self, *_: object) -> None:
        self.parts.append(self._read()[self.before :])

    def figures(self, batch: int, tokens_a_step: float) -> dict[str, Any]:
        """Milliseconds by phase of full batches' steps, and their speed while all requests run, the mean over repeats."""
        parts = breakdown([line for part in self.parts for line in part]).get(batch)
        if parts is None:
            return {}
        phases = {PHASES.get(name, name): round(ms, 3) for name, ms in parts.items() if name != "step"}
        runs = [found for part in self.parts if (found := steady(part, batch, tokens_a_step))]
        means = {key: round(statistics.fmean(run[key] for run in runs), 3) for key in (runs[0] if runs else ())}
        return {"phases": phases, **means}


def main(argv: Sequence[str] | None = None) -> int:
    """Measure what the file asks for and is not there yet."""
    return run_file(Speed, SpeedSettings, (__doc__ or "").split("\n")[0], argv)


if __name__ == "__main__":
    sys.exit(main())
