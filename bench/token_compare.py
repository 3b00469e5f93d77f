"""Answers beside plain decoding's, token by token: where they part, and how near the two candidates are there.

A verification of several rows and a decode of one round differently, so in bfloat16 answers may part where, and only where, the
candidates' logits tie within the format's step.
"""

import json
import math
from collections.abc import Sequence

from longdraft.bench.server import Server


def first_difference(want: Sequence[int], got: Sequence[int]) -> int | None:
    """Index of the first token that differs or that one of them lacks; None for equal answers."""
    at = same_tokens(want, got)
    return None if at == len(want) == len(got) else at


def same_tokens(a: Sequence[int], b: Sequence[int]) -> int:
    """Leading tokens that are equal."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def bf16_step(value: float) -> float:
    """Distance between neighbouring bfloat16 numbers at a value (8 significant bits)."""
    return float(2.0 ** (math.floor(math.log2(max(abs(value), 1e-3))) - 7))


def candidates(server: Server, ids: list[int]) -> dict[int, float]:
    """Log-probabilities of the ten best next tokens by plain decoding."""
    body = {
        "input_ids": ids,
        "sampling_params": {"max_new_tokens": 1, "temperature": 0},
        "return_logprob": True,
        "top_logprobs_num": 10,
    }
    with server.post("/generate", body, 120) as reply:
        answer = json.load(reply)
    return {int(token): float(value) for value, token, *_ in answer["meta_info"]["output_top_logprobs"][0]}


def gap_at_divergence(plain: Server, ids: list[int], want: list[int], got: list[int]) -> float | None:
    """How far apart plain decoding puts the two tokens at which the outputs part; None for equal outputs, infinite where one ends."""
    at = first_difference(want, got)
    if at is None:
        return None
    if at >= min(len(want), len(got)):
        return math.inf
    best = candidates(plain, ids + want[:at])
    return (
        abs(best.get(want[at], math.inf) - best.get(got[at], math.inf))
        if want[at] in best and got[at] in best
        else math.inf
    )
