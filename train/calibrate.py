"""longdraft calibrate --target.path TARGET --draft DRAFT --documents TEXT.jsonl --out recipe.json

Once for a pair of models: whose attention chooses the tokens that a sparse verification reads. Finds each layer's retrieval heads by
needles in haystacks, then a layer of the target, layers of the draft and the share of the lookahead by Dustin's Algorithm 1, and
writes a recipe that serving reads. The same command continues where a stopped one was.

Legend: S layers, H query heads.
"""

import sys
import time
from collections.abc import Callable, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from longdraft.draft_models.sparse_recipe import LayerHeads, SparseRecipe
from longdraft.errors import UserError
from longdraft.train.calibration.needles import NEEDLES, Prompter, Trial, haystacks, trials
from longdraft.train.calibration.pair import load_lookahead, load_looked_at
from longdraft.train.calibration.retrieval_heads import Asking, ask, best_heads, end_tokens
from longdraft.train.calibration.search import Choice, Objective, Plan, search
from longdraft.train.calibration.settings import CalibrateSettings
from longdraft.train.calibration.state import State
from longdraft.train.calibration.traces import Trace, Tracer, Windows, own_text
from longdraft.train.config import as_list
from longdraft.train.documents import Corpus
from longdraft.train.positions import seeded
from longdraft.train.provenance import origin
from longdraft.train.target import load_tokenizer, weights_fingerprint
from longdraft.train.tracking import redact

Say = Callable[[str], None]
KEPT_DIGITS = 6  # of a head's score in the recipe


class Calibration:
    """One run of the command."""

    def __init__(self, settings: CalibrateSettings, command: list[str], say: Say) -> None:
        self.settings, self.say, self.command = settings, say, command
        if (out := Path(settings.out)).exists():
            raise UserError(f"out={settings.out!r} is there already: give another out, or remove it")
        self.began, self.out = time.monotonic(), out
        if settings.device == "cuda" and not torch.cuda.is_available():
            raise UserError("device='cuda', but PyTorch sees no GPU: use auto or cpu")
        auto = "cuda" if torch.cuda.is_available() else "cpu"
        device = torch.device(auto if settings.device == "auto" else settings.device)
        self.tokenizer = load_tokenizer(settings.target)
        self.target = load_looked_at(settings.target, device)
        self.model = self.target.model
        self.draft = None
        if settings.draft is not None:
            self.draft = load_lookahead(settings.draft, settings.target, self.target, self.tokenizer)
        self.prompter = Prompter(self.tokenizer, settings.needles.chat)
        self.texts, self.corpus = self._read_documents()
        self._check_room()
        self._check_documents()
        facts = {
            "documents.sha256": [source.fingerprint for source in self.corpus.sources],
            "target.weights": weights_fingerprint(settings.target.path),
            "draft.weights": settings.draft and weights_fingerprint(settings.draft),
            "device": device.type,
        }
        self.state = State(out.with_name(f"{out.name}.work"), redact(settings.identity(facts)))

    def _read_documents(self) -> tuple[list[list[int]], Corpus]:
        """Tokens of all documents in a seeded order."""
        corpus = Corpus(self.settings.data.train, self.settings.data, self.tokenizer, self.target.spec.vocab_size)
        order = torch.randperm(len(corpus), generator=seeded("calibrate", self.settings.seed)).tolist()
        return [corpus[i].ids for i in order], corpus

    def _check_room(self) -> None:
        needles, traces, most = self.settings.needles, self.settings.traces, self.target.spec.max_position
        room = most - needles.new_tokens
        if max(needles.lengths) > room:
            raise UserError(
                f"needles.lengths={needles.lengths}: the target has {most} positions, {needles.new_tokens} of them for an answer: give "
                f"lengths up to {room}"
            )
        if (end := self._windows.end) > most:
            raise UserError(f"traces.tokens={traces.tokens} and its windows reach {end} of {most} positions: lower it")
        wanted, reach = (
            max(end, max(needles.lengths) + needles.new_tokens),
            None if self.draft is None else self.draft.reach,
        )
        if reach is not None and wanted > reach:
            raise UserError(
                f"draft={self.settings.draft!r} has {reach} positions, needles and traces reach {wanted}: lower "
                "needles.lengths and traces.tokens, or give another draft"
            )

    def _check_documents(self) -> None:
        """What would else be missed only once the needles are found, which no other settings could go on from."""
        needles, least, hay = self.settings.needles, min(self.settings.needles.lengths), self._haystacks()[0]
        for needle in NEEDLES[: needles.count]:
            self.prompter.hide(needle, hay, 0.0, least)
        if not any(len(ids) >= self._traced_tokens for ids in self.texts):
            raise UserError(
                f"traces.tokens={self.settings.traces.tokens}: no document has the {self._traced_tokens:,} tokens that are traced: "
                "lower it"
            )

    def _haystacks(self) -> list[list[int]]:
        needles = self.settings.needles
        return haystacks(self.texts, needles.haystacks, max(needles.lengths), self.tokenizer.bos_token_id)

    @property
    def _traced_tokens(self) -> int:
        """That a document needs."""
        windows = self._windows
        return windows.first if self.settings.traces.continuation == "own" else windows.end

    @property
    def _windows(self) -> Windows:
        traces = self.settings.traces
        return Windows(traces.tokens, traces.windows, traces.window)

    def run(self) -> SparseRecipe:
        """Find what is left to find and write the recipe."""
        try:
            scores = self._score_heads()
            count = self.settings.heads
            heads = {side: best_heads(torch.tensor(rows), count) for side, rows in scores.items() if side != "answers"}
            first = int(self.settings.search.skip * self.target.spec.num_layers)
            objective = Objective(self._traces(heads), self.settings.search.budget, first)
            choice = search(objective, self._plan(), self.state.once, self.say)
            recipe = self._recipe(heads, scores, choice)
            recipe.save(self.out)
            self.state.remove()
            self.say(f"{self.out} is complete")
            return recipe
        finally:
            self.state.close()

    def _plan(self) -> Plan:
        s, seed = self.settings.search, self.settings.seed
        splits = [round(share * s.budget) for share in s.splits]
        return Plan(s.budget, splits, s.draft_layers, s.gain, s.trials, s.step, seed)

    def _score_heads(self) -> dict[str, Any]:
        """Mean scores of the heads of both models over the answers that count, and what became of the answers."""
        ways = {"auto": ("own", "given"), "own": ("own",), "given": ("given",)}[self.settings.needles.answers]
        for way in ways:
            rows = self._ask_all(way)
            counted = sum(row["hits"] > 0 for row in rows)
            told = {"how": way, "asked": len(rows), "counted": counted, "hits": sum(row["hits"] for row in rows)}
            if counted:
                totals = self.state.values[f"{way} totals"]
                answers = (
                    told if way == ways[0] else {**told, "why": f"no own answer of {len(rows)} recalled its needle"}
                )
                mean = {
                    side: (torch.tensor(total, dtype=torch.float64) / counted).tolist()
                    for side, total in totals.items()
                }
                return {"answers": answers, **mean}
            if way != ways[-1]:
                self.say(f"no answer of {len(rows)} recalls its needle: heads are scored along given answers instead")
        raise UserError(
            f"needles.answers={self.settings.needles.answers!r}: none of {len(rows)} answers recalls more than "
            f"{self.settings.needles.recall:g} % of its needle: give shorter needles.lengths, or needles.answers=given"
        )

    def _ask_all(self, way: str) -> list[dict[str, Any]]:
        """Ask what is left to ask in one way; a row for each answer, in order."""
        rows: list[dict[str, Any]] = self.state.values.setdefault(f"{way} answers", [])
        needles = self.settings.needles
        hay = self._haystacks()
        count = len(needles.lengths) * needles.depths * needles.haystacks * needles.count
        how = Asking(needles.new_tokens, needles.recall, needles.rule, end_tokens(self.model, self.tokenizer))
        for trial in islice(trials(needles, self.prompter, hay), len(rows), None):
            row = self._ask(trial, how, way)
            rows.append(row)
            self.state.save()
            counted = sum(r["hits"] > 0 for r in rows)
            self.say(
                f"needle {len(rows)} of {count}, {way} answers: {trial.name}: recall {row['recall']:.0f} %, {row['hits']} tokens "
                f"({counted} answers count)"
            )
        return rows

    def _ask(self, trial: Trial, how: Asking, way: str) -> dict[str, Any]:
        """One question; its scores are added to the totals of its way."""
        needle = NEEDLES[trial.needle]
        space = "" if self.prompter.chat else " "
        given = self.prompter.encode(space + needle.answer) if way == "given" else None
        text, recall, heads = ask(self.model, self.tokenizer, self.draft, trial, needle, how, given)
        if heads is not None and heads.hits:
            totals = self.state.values.setdefault(f"{way} totals", {})
            for side, score_SH in (("target", heads.target_SH), ("draft", heads.draft_SH)):
                if score_SH is not None:
                    before = torch.tensor(totals[side], dtype=torch.float64) if side in totals else 0
                    totals[side] = (before + score_SH).tolist()
        return {"recall": recall, "hits": heads.hits if heads else 0, "text": text}

    def _traced_ids(self, ids: list[int]) -> list[int] | None:
        """A text as it is traced, as it is or as the target continues it; None where it is too short or loops."""
        windows, own = self._windows, self.settings.traces.continuation == "own"
        if len(ids) < self._traced_tokens:
            return None
        return own_text(self.model, ids[: windows.first], windows.end - windows.first) if own else ids[: windows.end]

    def _traces(self, heads: dict[str, list[list[int]]]) -> list[Trace]:
        """Traces of texts, made now or by an earlier process."""
        wanted, values = self.settings.traces.documents, self.state.values
        done: list[int] = values.setdefault("traced texts", [])
        tracer = Tracer(self.model, self.draft, heads["target"], heads.get("draft", []))
        for number in range(values.get("texts seen", 0), len(self.texts)):
            if len(done) == wanted:
                break
            if (ids := self._traced_ids(self.texts[number])) is not None:
                tracer.trace(ids, self._windows).save(self._trace_file(number))
                done.append(number)
                windows, first = self._windows.count, self._windows.first
                self.say(f"trace {len(done)} of {wanted}: {windows} verifications behind {first:,} tokens")
            values["texts seen"] = number + 1
            self.state.save()
        if not done:
            raise UserError(
                "traces.continuation='own': every own continuation loops: trace the texts as they are, or give other documents"
            )
        return [Trace.load(self._trace_file(number)) for number in done]

    def _trace_file(self, number: int) -> Path:
        return self.state.folder / f"trace-{number}.safetensors"

    def _recipe(self, heads: dict[str, list[list[int]]], scores: dict[str, Any], choice: Choice) -> SparseRecipe:
        layers = self.draft.layers if self.draft else []
        target = LayerHeads(layer=choice.target_layer, heads=heads["target"][choice.target_layer])
        places = sorted(choice.draft_layers)
        draft = [LayerHeads(layer=layers[place], heads=heads["draft"][place]) for place in places]
        return SparseRecipe(
            target=target,
            draft=draft,
            lookahead=choice.lookahead,
            budget=self.settings.search.budget,
            provenance=self._provenance(heads, scores, choice),
        )

    def _provenance(self, heads: dict[str, list[list[int]]], scores: dict[str, Any], choice: Choice) -> dict[str, Any]:
        s, layers = self.settings, self.draft.layers if self.draft else []
        digits = {side: [[round(x, KEPT_DIGITS) for x in row] for row in scores[side]] for side in heads}
        return {
            **origin([_without_folders(word) for word in self.command]),
            "models": {
                "target": {"name": Path(s.target.path).name, "shapes": self.target.spec.hash},
                "draft": None if s.draft is None else {"name": Path(s.draft).name, "layers": layers},
            },
            "settings": self.state.identity,
            "documents": {"names": [Path(n).name for n in as_list(s.documents)], "count": len(self.texts)},
            "answers": scores["answers"],
            "traces": len(self.state.values["traced texts"]),
            "retrieval_heads": heads,
            "head_scores": digits,
            "recovery": {
                "found": choice.recovery,
                "tried": {k: v for k, v in self.state.values.items() if isinstance(v, float)},
            },
            "seconds": round(time.monotonic() - self.began, 1),
        }


def _without_folders(word: str) -> str:
    """A word of a command line that says nothing of this machine."""
    option, equals, value = word.rpartition("=")
    return option + equals + (Path(value).name if "/" in value else value)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line."""
    from longdraft.options import parse_all

    words = list(sys.argv[1:] if argv is None else argv)
    settings = parse_all(CalibrateSettings, words, "longdraft calibrate")
    Calibration(settings, ["longdraft", "calibrate", *words], lambda text: print(text, file=sys.stderr)).run()
    return 0


if __name__ == "__main__":
    sys.exit(main())
