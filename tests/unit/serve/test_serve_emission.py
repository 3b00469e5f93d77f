"""Runs returned step by step end a request exactly as one token at a time does, by SGLang's own rules (V5, V8)."""

from array import array

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from serve_fakes import BareRequest, PieceTokenizer
from sglang.srt.sampling.sampling_params import SamplingParams

from longdraft.serve.emission import emitted, room

PIECES = ["a", "b", "c", "ab", "bc", "d", "e", "f"]


def request(**params: object) -> BareRequest:
    tokenizer = PieceTokenizer(PIECES, eos=6, more_stops={7})
    return BareRequest(SamplingParams(**params), tokenizer, eos={6})


def one_by_one(req: BareRequest, text: list[int]) -> BareRequest:
    for token in text:
        if req.finished():
            break
        req.gain([token])
    return req


def in_runs(req: BareRequest, text: list[int], widths: list[int]) -> BareRequest:
    """Each step verifies a run of the text and returns what may be returned of it."""
    steps = 0
    while not req.finished() and len(req.output_ids) < len(text):
        at = len(req.output_ids)
        run = text[at : at + widths[steps % len(widths)]]
        now = emitted(req, run)
        assert now == run[: len(now)], "a prefix of the run"
        assert now, "at least one token a step"
        req.gain(now)
        steps += 1
    return req


def outcome(req: BareRequest) -> tuple[list[int], list[int], object]:
    reason = req.finished_reason.to_json() if req.finished_reason else None
    return list(req.output_ids), list(req.output_ids_through_stop), reason


@settings(max_examples=300, deadline=None)
@given(
    text=st.lists(st.integers(0, 7), min_size=1, max_size=30),
    widths=st.lists(st.integers(1, 7), min_size=1, max_size=5),
    length=st.integers(1, 30),
    ignore_eos=st.booleans(),
    stop_ids=st.one_of(st.none(), st.lists(st.integers(0, 5), max_size=2)),
    stops=st.lists(st.text("abcd", min_size=1, max_size=4), max_size=3),
    regexes=st.lists(st.sampled_from(["a+c", "b$", "^a", "[cd]d", "a.b", "(?<!b)cd", "d*e"]), max_size=2),
)
def test_runs_end_where_single_tokens_end(
    text: list[int],
    widths: list[int],
    length: int,
    ignore_eos: bool,
    stop_ids: list[int] | None,
    stops: list[str],
    regexes: list[str],
) -> None:
    """Stop tokens, strings and expressions in any mix with the length: same tokens, same reason, nothing behind the stop."""
    params = {
        "max_new_tokens": length,
        "ignore_eos": ignore_eos,
        "stop_token_ids": stop_ids,
        "stop": stops,
        "stop_regex": regexes,
    }
    assert outcome(in_runs(request(**params), text, widths)) == outcome(one_by_one(request(**params), text))


def test_of_two_stop_strings_the_one_that_comes_first_ends_the_request() -> None:
    """SGLang looks for them in the request's order over the whole run: 'd' would win with 'a' and 'c' returned before it."""
    req = in_runs(request(max_new_tokens=9, stop=["d", "b"]), [0, 1, 2, 5, 0], [5])
    assert list(req.output_ids) == [0, 1]
    assert req.finished_reason.to_json() == {"type": "stop", "matched": "b"}


def test_an_anchored_expression_sees_every_token_as_the_last() -> None:
    req = in_runs(request(max_new_tokens=9, stop_regex=["b$"]), [0, 1, 2, 5], [4])
    assert list(req.output_ids) == [0, 1]


def test_a_stop_token_beats_the_length_only_before_its_last_token() -> None:
    """At the last token the length wins, as it does one token at a time."""
    for text, kind in (([0, 6, 1], "stop"), ([0, 1, 6], "length")):
        req = in_runs(request(max_new_tokens=3), text, [3])
        assert outcome(req) == outcome(one_by_one(request(max_new_tokens=3), text))
        assert req.finished_reason.to_json()["type"] == kind


def test_without_stops_a_run_comes_back_whole_up_to_the_length() -> None:
    """The tokens that a verification won must not be handed out one by one."""
    req = request(max_new_tokens=10, ignore_eos=True)
    assert emitted(req, [0, 6, 7, 5]) == [0, 6, 7, 5]
    req.output_ids = array("q", [0] * 7)
    assert emitted(req, [0, 6, 7, 5]) == [0, 6, 7]
    with_string = request(max_new_tokens=10, stop="dddd", ignore_eos=True)
    assert emitted(with_string, [0, 6, 7, 5]) == [0, 6, 7, 5]


@pytest.mark.parametrize(("written", "left"), [(0, 4), (3, 1), (4, 1), (9, 1)])
def test_room_is_what_the_length_leaves_and_never_nothing(written: int, left: int) -> None:
    """A step returns at least one token, also for a request that asked for none."""
    req = request(max_new_tokens=4)
    req.output_ids = array("q", [0] * written)
    assert room(req) == left


def test_a_request_without_tokenizer_stops_at_its_own_ids() -> None:
    req = BareRequest(SamplingParams(max_new_tokens=9, stop_token_ids=[3]), None, eos={5})
    assert emitted(req, [1, 2, 5, 1]) == [1, 2, 5]
    assert emitted(req, [1, 3, 5, 1]) == [1, 3]
