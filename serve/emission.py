"""How much of a verified run one step may return, so that SGLang ends a request exactly where plain decoding would.

SGLang tests the length before stop tokens, stop strings and the grammar, on the whole run at once. A run that both holds a
stop and reaches the length would end by length with text behind the stop. Returning a shorter run is always safe: the
rest is found again.
"""

from collections.abc import Callable
from typing import Any


def room(req: Any) -> int:
    """Tokens that the request may still return."""
    return max(1, int(req.sampling_params.max_new_tokens) - len(req.output_ids))


def stops_at(req: Any) -> Callable[[int], bool]:
    """Whether a token ends the request, as SGLang decides it."""
    if req.sampling_params.ignore_eos:
        return lambda token: False
    stops = set(req.sampling_params.stop_token_ids or ()) | set(req.eos_token_ids or ())
    if req.tokenizer is not None:
        stops |= {req.tokenizer.eos_token_id} | set(req.tokenizer.additional_stop_token_ids or ())
    return stops.__contains__


def has_late_stop(req: Any) -> bool:
    """True for stops that only SGLang itself can find (strings and expressions over decoded text)."""
    return bool(req.sampling_params.stop_strs or req.sampling_params.stop_regex_strs)


def emitted(req: Any, run: list[int]) -> list[int]:
    """The part of a verified run to return now: at least one token, never past a stop token or the length."""
    left = room(req)
    if len(run) >= left:
        # The last token by length goes alone where a stop may hide in what comes before it.
        run = run[: left - 1] if has_late_stop(req) and left > 1 else run[:left]
    ends = stops_at(req)
    for index, token in enumerate(run):
        if ends(token):
            return run[: index + 1]
    return run
