"""How much of a verified run one step may return, so that SGLang ends a request exactly where plain decoding would.

SGLang tests the length before stop tokens, stop strings and the grammar, on the whole run at once. A run that both holds a
stop and reaches the length would end by length with text behind the stop, and of two stop strings in one run it takes the
one that the request lists first, not the one that comes first. Returning a shorter run is always safe: the rest is found
again.
"""

import re
from typing import Any


def room(req: Any) -> int:
    """Tokens that the request may still return."""
    return max(1, int(req.sampling_params.max_new_tokens) - len(req.output_ids))


def stop_tokens(req: Any) -> set[int]:
    """Tokens that end the request, as SGLang decides it."""
    if req.sampling_params.ignore_eos:
        return set()
    stops = set(req.sampling_params.stop_token_ids or ()) | set(req.eos_token_ids or ())
    if req.tokenizer is not None:
        stops |= {req.tokenizer.eos_token_id} | set(req.tokenizer.additional_stop_token_ids or ())
    return {int(token) for token in stops if token is not None}


def before_late_stop(req: Any, run: list[int]) -> list[int]:
    """The part of a run in which no stop string and no stop expression is found; a token that completes one goes alone.

    SGLang decodes a fixed number of tokens before the run's first, and the run; plain decoding as many before each token.
    Where either finds a stop, the token is left to be returned alone, and both see the same.
    """
    params = req.sampling_params
    strings, expressions = params.stop_strs, params.stop_regex_strs
    if not strings and not expressions:
        return run
    before = max(params.stop_str_max_len, params.stop_regex_max_len)
    tail = list(req.output_ids[max(0, len(req.output_ids) - before) :])
    for count in range(1, len(run) + 1):
        seen = tail + run[:count]
        for window in (seen, seen[max(0, len(seen) - before - 1) :]):
            text = req.tokenizer.decode(window)
            if any(s in text for s in strings) or any(re.search(e, text) for e in expressions):
                return run[: max(1, count - 1)]
    return run


def emitted(req: Any, run: list[int]) -> list[int]:
    """The part of a verified run to return now: at least one token, never past a stop or the length."""
    run = run[: room(req)]
    ends = stop_tokens(req)
    for index, token in enumerate(run):
        if token in ends:
            run = run[: index + 1]
            break
    return before_late_stop(req, run)
