"""What a request may hold: a token that is none and a sampling parameter of the wrong type are HTTP 400 in the front end; in the scheduler
they would end the server.
"""

import math
from collections.abc import Mapping
from numbers import Integral, Real
from typing import Any

from longdraft.errors import UserError, shown
from longdraft.serve.settings import (
    LONGEST_REFRESH,
    LOSSY,
    REQUEST_KEY,
    VIEWED,
    RequestSettings,
    ServeSettings,
    read_environment,
    request_settings,
)

INTEGERS = ("max_new_tokens", "min_new_tokens", "top_k", "sampling_seed", "stream_interval")
GRAMMARS = ("json_schema", "regex", "ebnf", "structural_tag")
SWITCHES = ("skip_special_tokens", "spaces_between_special_tokens")  # which a tokenizer takes as they are


def check_sampling_params(params: Any, vocab: int) -> None:
    """Check what SGLang's own verification passes on.

    Args:
        params: SGLang's ``SamplingParams``.
        vocab: tokens of the target.

    Raises:
        UserError: ``custom_params``, an integer, a switch, a grammar, a stop token or a logit bias that is none, with its name.
    """
    if (own := request_settings(params.custom_params)) != RequestSettings():
        check_own(own, read_environment())
    for name in INTEGERS:
        value = getattr(params, name)
        if value is not None and not _is_integer(value):
            raise UserError(f"{name} must be an integer, got {type(value).__name__} {value!r}")
        if value is not None and name != "sampling_seed" and value >= 1 << 31:
            raise UserError(f"{name} must be below 2147483648, got {value}")
    for name in SWITCHES:
        if not isinstance(value := getattr(params, name), bool):
            raise UserError(f"{name} must be true or false, got {type(value).__name__} {value!r}")
    for name in GRAMMARS:
        if not isinstance(value := getattr(params, name), str | None):
            remedy = ": write it as JSON in a string" if isinstance(value, Mapping) else ""
            raise UserError(f"{name} must be a string, got {type(value).__name__} {shown(value)}{remedy}")
    for token in params.stop_token_ids or ():
        if not _is_integer(token):
            raise UserError(f"stop_token_ids must hold integers, got {type(token).__name__} {token!r}")
        if params.min_new_tokens and not 0 <= token < vocab:
            raise UserError(f"stop_token_ids must be 0 to {vocab - 1} where min_new_tokens is set, got {token}")
    bias = params.logit_bias
    if bias is None:
        return
    if not isinstance(bias, Mapping):
        raise UserError(f"logit_bias must map token ids to numbers, got {type(bias).__name__} {bias!r}")
    for token, value in bias.items():
        if isinstance(value, bool) or not isinstance(value, Real) or math.isnan(value):
            raise UserError(f"logit_bias[{token}] must be a number, got {type(value).__name__} {value!r}")


def check_own(own: RequestSettings, server: ServeSettings) -> None:
    """Check what a request asks of us against what the server has.

    Raises:
        UserError: a mode that the server does not serve, or a number that the mode has no use for or no room for.
    """
    mode, where = own.mode or server.mode, f"custom_params.{REQUEST_KEY}"
    if mode in VIEWED and not server.viewed:
        flags = "--mode exact --allow-lossy" if mode in LOSSY else "--mode exact"
        raise UserError(
            f"{where}.mode={mode!r} needs a server that keeps views: start it with {flags}, or ask for full"
        )
    if mode in LOSSY and not server.allow_lossy:
        raise UserError(
            f"{where}.mode={mode!r} gives approximate output, which this server does not: start it with --allow-lossy, or ask for exact"
        )
    if own.budget is not None and mode != "sparse":
        raise UserError(f"{where}.budget={own.budget} is for mode sparse, this request's is {mode!r}: leave it out")
    if own.budget is not None and own.budget > server.sparse_tokens:
        raise UserError(
            f"{where}.budget={own.budget} is more than the server's --sparse-tokens {server.sparse_tokens}: write that or less"
        )
    if own.refresh is not None and mode not in LOSSY:
        raise UserError(
            f"{where}.refresh={own.refresh} is for modes {' and '.join(sorted(LOSSY))}, this request's is {mode!r}: leave it out"
        )
    if own.refresh is not None and mode == "sparse" and own.refresh > LONGEST_REFRESH:
        raise UserError(
            f"{where}.refresh={own.refresh}: mode sparse computes up to {LONGEST_REFRESH} tokens anew, write that or less"
        )


def check_logprob_start(start: Any) -> None:
    """Check where a request's prompt logprobs begin.

    Args:
        start: ``logprob_start_len`` of a request, or a list of a batch's.

    Raises:
        UserError: below -1, which stands for none.
    """
    for value in start if isinstance(start, list) else [start]:
        if value is not None and value < -1:
            raise UserError(f"logprob_start_len must be -1 (no prompt logprobs) or more, got {value}")


def check_prompt(ids: Any, vocab: int) -> None:
    """Check a prompt's tokens, which the target's embedding is indexed with.

    Args:
        ids: of one request; None where it has none.
        vocab: tokens of the target.

    Raises:
        UserError: the first that is no integer, or none of the vocabulary.
    """
    for token in ids or ():
        if type(token) is int and 0 <= token < vocab:  # a prompt may be long
            continue
        if not _is_integer(token):
            raise UserError(f"input_ids must hold integers, got {type(token).__name__} {token!r}")
        if not 0 <= token < vocab:
            raise UserError(f"input_ids must be 0 to {vocab - 1}, the target's vocabulary, got {token}")


def check_overrides(request: Any) -> None:
    """Refuse other embeddings than the tokens' own, which no draft would see.

    Args:
        request: SGLang's, to generate or to embed.

    Raises:
        UserError: it has some.
    """
    if getattr(request, "positional_embed_overrides", None) is not None:
        raise UserError("positional_embed_overrides does not work with LONGDRAFT (drafts read token ids): leave it out")


def _is_integer(value: Any) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)
