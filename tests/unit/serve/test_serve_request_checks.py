"""Sampling parameters that SGLang would take and then fail on."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.sampling.sampling_params import SamplingParams

from longdraft.errors import UserError
from longdraft.serve.request_checks import (
    check_logprob_start,
    check_overrides,
    check_own,
    check_prompt,
    check_sampling_params,
)
from longdraft.serve.settings import RequestSettings, ServeSettings


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"sampling_seed": "7"}, "sampling_seed must be an integer, got str '7'"),
        ({"sampling_seed": 1.5}, "sampling_seed must be an integer, got float 1.5"),
        ({"max_new_tokens": 10.5}, "max_new_tokens must be an integer, got float 10.5"),
        ({"min_new_tokens": 2.5}, "min_new_tokens must be an integer, got float 2.5"),
        ({"top_k": 1 << 31}, "top_k must be below 2147483648"),
        ({"top_k": True}, "top_k must be an integer, got bool True"),
        (
            {"json_schema": {"type": "object"}},
            "json_schema must be a string, got dict {'type': 'object'}: write it as JSON in a string",
        ),
        ({"regex": 5}, "regex must be a string, got int 5"),
        ({"ebnf": ["a"]}, "ebnf must be a string, got list ['a']"),
        ({"structural_tag": {}}, "structural_tag must be a string, got dict"),
        ({"stream_interval": "2"}, "stream_interval must be an integer, got str '2'"),
        ({"skip_special_tokens": "x"}, "skip_special_tokens must be true or false, got str 'x'"),
        ({"spaces_between_special_tokens": 1}, "spaces_between_special_tokens must be true or false, got int 1"),
        ({"logit_bias": {"5": None}}, "logit_bias[5] must be a number, got NoneType None"),
        ({"logit_bias": {"5": float("nan")}}, "logit_bias[5] must be a number, got float nan"),
        ({"logit_bias": [5]}, "logit_bias must map token ids to numbers, got list [5]"),
        ({"stop_token_ids": [100], "min_new_tokens": 1}, "stop_token_ids must be 0 to 99"),
        ({"custom_params": 3}, "custom_params must be an object"),
    ],
    ids=str,
)
def test_what_would_end_the_server_is_refused_by_name(params: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as error:
        check_sampling_params(SamplingParams(**params), 100)
    assert str(error.value).startswith(message)


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"sampling_seed": -(2**70), "max_new_tokens": 0, "top_k": -1, "stop_token_ids": [3, 500]},
        {"max_new_tokens": None, "logit_bias": {"5": 1, "6": -2.5, "7": float("-inf")}},
        {"stop_token_ids": [99], "min_new_tokens": 4},
        {"json_schema": '{"type": "object"}', "stream_interval": 3, "skip_special_tokens": False},
    ],
    ids=str,
)
def test_what_can_be_served_passes(params: dict[str, Any]) -> None:
    check_sampling_params(SamplingParams(**params), 100)


def test_prompt_logprobs_begin_in_the_prompt() -> None:
    for start in (None, -1, 0, 7, [0, -1], [None]):
        check_logprob_start(start)
    for start in (-2, [0, -5]):
        with pytest.raises(UserError, match="logprob_start_len must be -1"):
            check_logprob_start(start)


EXACT: dict[str, Any] = {"mode": "exact"}
LOSSY: dict[str, Any] = {"mode": "exact", "allow_lossy": True, "sparse_tokens": 256}


@pytest.mark.parametrize(
    ("server", "own", "message"),
    [
        (
            {},
            {"mode": "exact"},
            "mode='exact' needs a server that keeps views: start it with --mode exact, or ask for full",
        ),
        (
            {},
            {"mode": "sparse"},
            "mode='sparse' needs a server that keeps views: start it with --mode exact --allow-lossy",
        ),
        ({"allow_lossy": True}, {"mode": "partial"}, "mode='partial' needs a server that keeps views"),
        (
            EXACT,
            {"mode": "partial", "refresh": 9},
            "mode='partial' gives approximate output, which this server does not: start it with --allow-lossy",
        ),
        (
            EXACT,
            {"mode": "sparse"},
            "mode='sparse' gives approximate output, which this server does not: start it with --allow-lossy",
        ),
        (LOSSY, {"mode": "sparse", "budget": 300}, "budget=300 is more than the server's --sparse-tokens 256"),
        (LOSSY, {"budget": 64}, "budget=64 is for mode sparse, this request's is 'exact'"),
        (LOSSY, {"mode": "off", "refresh": 9}, "refresh=9 is for modes partial and sparse, this request's is 'off'"),
        (LOSSY, {"mode": "sparse", "refresh": 1025}, "refresh=1025: mode sparse computes up to 1024 tokens anew"),
    ],
    ids=str,
)
def test_what_a_server_does_not_have_is_refused(server: dict[str, Any], own: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as error:
        check_own(RequestSettings(**own), ServeSettings(**server))
    assert str(error.value).startswith(f"custom_params.longdraft.{message}")


@pytest.mark.parametrize(
    ("server", "own"),
    [
        ({}, {}),
        (LOSSY, {"mode": "partial", "refresh": 4000}),
        (LOSSY, {"mode": "sparse", "budget": 256, "refresh": 1024}),
        ({**LOSSY, "mode": "sparse"}, {"budget": 32}),
    ],
    ids=str,
)
def test_what_a_server_has_passes(server: dict[str, Any], own: dict[str, Any]) -> None:
    check_own(RequestSettings(**own), ServeSettings(**server))


def test_a_prompt_holds_tokens_of_the_vocabulary() -> None:
    for ids in (None, [], [0, 99], torch.tensor([5]).numpy()):
        check_prompt(ids if ids is None else list(ids), 100)
    for ids, told in (
        ([3, 100], "0 to 99"),
        ([-1], "got -1"),
        (["3"], "got str '3'"),
        ([1.5], "got float 1.5"),
        ([True], "bool"),
    ):
        with pytest.raises(UserError, match=f"input_ids must .*{told}"):
            check_prompt(ids, 100)


def test_embeddings_in_place_of_tokens_are_refused() -> None:
    for request in (SimpleNamespace(), SimpleNamespace(positional_embed_overrides=None)):
        check_overrides(request)
    with pytest.raises(UserError, match="positional_embed_overrides does not work with LONGDRAFT"):
        check_overrides(SimpleNamespace(positional_embed_overrides={"a": 1}))
