"""The demo's comparison of the modes on one long prompt: plain decoding, ``full``, ``exact`` and ``partial`` on one server."""

import statistics
from dataclasses import dataclass, field
from typing import Any

from longdraft.bench.demo_text import Prompt, module_text
from longdraft.bench.server import Generation, Server
from longdraft.bench.token_compare import same_tokens

MODES = ("off", "full", "exact", "partial")
VIEW = 1024  # tokens of a view
CONTEXT = 5200
TURNS = 3


@dataclass
class ModeAnswers:
    """Answers to one prompt in every mode, one a turn."""

    ids: list[int]
    found: dict[str, list[Generation]] = field(default_factory=lambda: {mode: [] for mode in MODES})

    def tok_s(self, mode: str) -> float:
        """Median tokens a second."""
        return statistics.median(g.tokens_per_s for g in self.found[mode])

    def tokens(self, mode: str) -> list[int]:
        """Of the first answer."""
        return self.found[mode][0].tokens


def prompt() -> Prompt:
    """A long text, held out of the training like the demo's other prompts."""
    return Prompt("modes", module_text("argparse.py"), CONTEXT)


def ask_modes(server: Server, ids: list[int], new_tokens: int) -> ModeAnswers:
    """The prompt in every mode, the modes taking turns to be first; the prefix cache holds it from the start."""
    answers = ModeAnswers(ids)
    server.generate(ids, 2)
    for turn in range(TURNS):
        for mode in (*MODES[turn:], *MODES[:turn]):
            answers.found[mode].append(server.generate(ids, new_tokens, mode=mode))
    return answers


def mode_rows(answers: ModeAnswers, draft: str) -> dict[str, Any]:
    """The record's part: tokens a second, ratios to plain decoding, and what views confirmed."""
    plain = answers.tok_s("off")
    rows = {}
    for mode in MODES:
        counters = answers.found[mode][0].counters
        rows[mode] = {
            "tok_s": round(answers.tok_s(mode), 2),
            "ratio": round(answers.tok_s(mode) / plain, 3) if plain else 0.0,
            "identical": all(g.tokens == answers.tokens("off") for g in answers.found[mode]),
            "tokens_before_the_first_other": same_tokens(answers.tokens("off"), answers.tokens(mode)),
            "full_verifications": counters.get("full_verifications", counters.get("target_verifications", 0)),
            "partial_verifications": counters.get("partial_verifications", 0),
            "gained_on_view": counters.get("gained_on_view", 0),
            "confirmed": counters.get("confirmed", 0),
        }
    return {"context_tokens": len(answers.ids), "view_tokens": VIEW, "draft": draft, "rows": rows}


def mode_checks(modes: dict[str, Any]) -> dict[str, bool]:
    """What the comparison should show."""
    rows = modes["rows"]
    return {
        "exact and full: identical": rows["full"]["identical"] and rows["exact"]["identical"],
        f"exact faster than full at {modes['context_tokens']:,} tokens": rows["exact"]["ratio"] > rows["full"]["ratio"],
    }


def mode_line(modes: dict[str, Any], name: str) -> str:
    """The comparison in a sentence."""
    rows, count = modes["rows"], modes["rows"]["off"]["tokens_before_the_first_other"]
    exact, partial = rows["exact"], rows["partial"]
    return (
        f"modes at {modes['context_tokens']:,} tokens with {name}, views of {modes['view_tokens']:,}: plain {rows['off']['tok_s']:.1f} "
        f"tokens/s, full {rows['full']['ratio']:.2f}×, exact {exact['ratio']:.2f}× (the same tokens: "
        f"{'yes' if exact['identical'] else 'NO'}; {exact['confirmed']} of {exact['gained_on_view']} tokens gained on the view "
        f"were confirmed), partial {partial['ratio']:.2f}× (the same tokens for {partial['tokens_before_the_first_other']} of {count})"
    )
