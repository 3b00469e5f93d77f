"""Answers as measurements need them: what they took, whether their text is sane, and whether it is plain decoding's."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from longdraft.bench.server import Server, generate
from longdraft.bench.token_compare import bf16_step, gap_at_divergence
from longdraft.draft_models.repetition import ALLOWED, repeated_share

TIE = bf16_step(16.0)  # of two logits in bfloat16 that round to neighbours


@dataclass(frozen=True)
class Answer:
    """One greedy answer.

    Attributes:
        tokens: of the text; the first one is the prefill's.
        gained: those that verifications gave; of modes with views those that their counters know, which may lack the last cycle's.
        verifications: forwards of the target that gave them, partial and full.
        full: those among them that read the whole cache.
        kept: at ``[n]``, scheduler steps that kept n drafts, as SGLang counts them; empty without speculation.
        counters: ours; empty for SGLang's systems.
    """

    id: str
    tokens: list[int]
    gained: int
    verifications: int
    full: int
    kept: list[int] = field(default_factory=list)
    counters: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def read(cls, name: str, reply: dict[str, Any]) -> "Answer":
        """From what the server replied."""
        meta = reply["meta_info"]
        own = dict((meta.get("longdraft") or [{}])[-1])
        gained = max(0, int(meta["completion_tokens"]) - 1)
        full = whole = int(meta.get("spec_verify_ct") or gained)
        if "full_verifications" in own:
            full = int(own["full_verifications"])
            whole, gained = full + int(own["partial_verifications"]), int(own["accepted"] + own["target_verifications"])
        kept = list(meta.get("spec_correct_drafts_histogram") or [])
        return cls(name, list(reply["output_ids"]), gained, whole, full, kept, own)

    @property
    def looping(self) -> bool:
        return repeated_share(self.tokens) > ALLOWED

    def as_row(self) -> dict[str, Any]:
        """For a file of answers."""
        return asdict(self)


def ask(
    server: Server,
    prompts: Sequence[tuple[str, list[int]]],
    sampling: dict[str, Any],
    new_tokens: int,
    batch: int,
    beyond_the_end: bool,
) -> list[Answer]:
    """Greedy answers to ``(id, token ids)``, ``batch`` at a time.

    Args:
        server: which.
        prompts: in order.
        sampling: of the system.
        new_tokens: of an answer at most.
        batch: requests at once.
        beyond_the_end: whether answers go on behind a stop token.
    """
    found: list[Answer] = []
    for start in range(0, len(prompts), batch):
        part = prompts[start : start + batch]
        each = [{**sampling, "ignore_eos": beyond_the_end}] * len(part)
        replies = generate(server, [ids for _, ids in part], new_tokens, each)[1]
        found += [Answer.read(name, reply) for (name, _), reply in zip(part, replies, strict=True)]
    return found


def compared(
    server: Server, prompts: Sequence[tuple[str, list[int]]], want: Sequence[Answer], got: Sequence[Answer], exact: bool
) -> dict[str, Any]:
    """Whether answers are plain decoding's: ``identical``, how many ``parted`` from it and the ``largest_gap`` at which one did.

    Args:
        server: one that runs, which says how far apart two candidates' log-probabilities are.
        prompts: of the answers.
        want, got: plain decoding's and the system's, in the prompts' order.
        exact: float32, where every token must be equal; in bfloat16 answers may part where the candidates tie within a step.
    """
    parted = [pair for pair in zip(prompts, want, got, strict=True) if pair[1].tokens != pair[2].tokens]
    if exact:
        return {"identical": not parted, "parted": len(parted)}
    gaps = [gap_at_divergence(server, ids, plain.tokens, own.tokens) or 0.0 for (_, ids), plain, own in parted]
    largest = max(gaps, default=0.0)
    told = {"largest_gap": round(largest, 4)} if math.isfinite(largest) else {}
    return {"identical": largest <= TIE, "parted": len(parted), **told}


def text_faults(answers: Sequence[Answer]) -> dict[str, list[str]]:
    """Ids of answers that have no text, and of those that loop."""
    return {
        "empty": [a.id for a in answers if not a.tokens],
        "looping": [a.id for a in answers if a.tokens and a.looping],
    }


def tau_figures(answers: Sequence[Answer]) -> dict[str, Any]:
    """Accept lengths: τ micro is of all tokens together, macro the mean over answers (SpecPV's, there without the bonus token).

    The bonus token is the one that every verification gives by itself. ``tau_full`` counts full verifications alone. By position: the
    share of scheduler steps that kept so many drafts or more.
    """
    counted = [a for a in answers if a.verifications]
    tokens, verifications = sum(a.gained for a in counted), sum(a.verifications for a in counted)
    if not verifications:
        return {"tokens": tokens, "verifications": 0}
    micro = tokens / verifications
    macro = sum(a.gained / a.verifications for a in counted) / len(counted)
    width = max((len(a.kept) for a in counted), default=0)
    kept = [sum(a.kept[n] for a in counted if n < len(a.kept)) for n in range(width)]
    steps = sum(kept)
    found: dict[str, Any] = {
        "tau_micro": round(micro, 4),
        "tau_macro": round(macro, 4),
        "tau_micro_no_bonus": round(micro - 1, 4),
        "tau_macro_no_bonus": round(macro - 1, 4),
        "accept_by_position": [round(sum(kept[n:]) / steps, 4) for n in range(1, width)] if steps else [],
        "tokens": tokens,
        "verifications": verifications,
    }
    if any(a.full != a.verifications for a in counted) and (full := sum(a.full for a in counted)):
        found["tau_full"] = round(tokens / full, 4)
    if proposed := sum(int(a.counters.get("gained_on_view", 0)) for a in counted):
        found["confirmed_share"] = round(sum(int(a.counters["confirmed"]) for a in counted) / proposed, 4)
    return found
