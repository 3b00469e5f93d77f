"""A server with LONGDRAFT returns what a plain one returns, feature by feature (float32; V1, V7, V8, S1, S3)."""

import json
import random
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from server_process import HttpError, ServerProcess, counters, tokens
from tiny_draft import known_prompts

KNOWN = [p.tolist() for p in known_prompts()]
OFF = {"custom_params": {"longdraft": {"mode": "off"}}}


def random_prompt(length: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(256), k=length)


@pytest.mark.parametrize("length", [1, 2, 24, 300, 700, 1500])
def test_greedy_tokens_are_those_of_plain_decoding_twice(
    plain: ServerProcess, drafted: ServerProcess, length: int
) -> None:
    prompt = random_prompt(length, length)
    want = plain.generate(prompt, {"max_new_tokens": 60, "ignore_eos": True})
    for cached in (0, length - 1):  # the second time the prompt comes from the prefix cache, chunks and all
        got = drafted.generate(prompt, {"max_new_tokens": 60, "ignore_eos": True})
        assert tokens(got) == tokens(want)
        assert got["meta_info"]["cached_tokens"] == cached


def test_drafts_are_kept_and_counted(plain: ServerProcess, drafted: ServerProcess) -> None:
    kept = rejected = 0
    for prompt in KNOWN[:4]:
        params = {"max_new_tokens": 64, "ignore_eos": True}
        got = drafted.generate(prompt, params)
        assert tokens(got) == tokens(plain.generate(prompt, params))
        count = counters(got)
        assert count["target_verifications"] + count["accepted"] == 63  # the first token comes from the prefill
        assert count["tau"] == pytest.approx(1 + count["tau_without_bonus"], abs=2e-4)
        kept += count["accepted"]
        rejected += count["drafted"] - count["accepted"]
    assert kept > 40, "the draft learned these prompts: chains must be kept"
    assert rejected > 0, "a draft that is never wrong tests nothing"


def test_off_and_full_share_a_batch(plain: ServerProcess, drafted: ServerProcess) -> None:
    params = {"max_new_tokens": 80, "ignore_eos": True}
    want = [tokens(plain.generate(p, params)) for p in KNOWN[:4]]
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda i: drafted.generate(KNOWN[i], {**params, **(OFF if i % 2 else {})}), range(4)))
    assert [tokens(a) for a in answers] == want
    for i, answer in enumerate(answers):
        count = counters(answer)
        assert count["mode"] == ("off" if i % 2 else "full")
        assert (count["drafted"] == 0) == bool(i % 2)
    assert counters(answers[1])["target_verifications"] == 79


def test_concurrent_requests_of_different_lengths(plain: ServerProcess, drafted: ServerProcess) -> None:
    prompts = [random_prompt(n, 90 + n) for n in (3, 40, 130, 620, 900)] + KNOWN[:3]
    params = {"max_new_tokens": 48, "ignore_eos": True}
    want = [tokens(plain.generate(p, params)) for p in prompts]
    with ThreadPoolExecutor(8) as pool:
        got = list(pool.map(lambda p: tokens(drafted.generate(p, params)), prompts))
    assert got == want


def test_streaming_never_takes_a_token_back(plain: ServerProcess, drafted: ServerProcess) -> None:
    want = tokens(plain.generate(KNOWN[0], {"max_new_tokens": 50, "ignore_eos": True}))
    seen: list[int] = []
    for chunk in drafted.stream(KNOWN[0], {"max_new_tokens": 50, "ignore_eos": True}):
        now = tokens(chunk)
        assert now[: len(seen)] == seen
        seen = now
    assert seen == want
    assert counters(chunk)["accepted"] > 0


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 6, 7, 37])
def test_exact_max_new_tokens(plain: ServerProcess, drafted: ServerProcess, count: int) -> None:
    params = {"max_new_tokens": count, "ignore_eos": True}
    want, got = plain.generate(KNOWN[1], params), drafted.generate(KNOWN[1], params)
    assert tokens(got) == tokens(want) and len(tokens(got)) == count
    assert got["meta_info"]["finish_reason"] == want["meta_info"]["finish_reason"]


@pytest.mark.parametrize("extra", range(6))
def test_a_stop_token_inside_a_run_beats_the_length_behind_it(
    plain: ServerProcess, drafted: ServerProcess, extra: int
) -> None:
    free = tokens(plain.generate(KNOWN[2], {"max_new_tokens": 40, "ignore_eos": True}))
    at = next(i for i in range(15, 40) if free[i] not in free[:i])
    params = {"max_new_tokens": at + 1 + extra, "stop_token_ids": [free[at]]}
    want, got = plain.generate(KNOWN[2], params), drafted.generate(KNOWN[2], params)
    assert tokens(got) == tokens(want)
    assert got["meta_info"]["finish_reason"] == want["meta_info"]["finish_reason"]


def readable_piece(answer: dict[str, Any]) -> tuple[str, int]:
    """A piece of the text that occurs once, and where in characters."""
    text = answer["text"]
    for start in range(10, len(text) - 2):
        piece = text[start : start + 2]
        if piece.isascii() and piece.isprintable() and text.index(piece) == start:
            return piece, start
    raise AssertionError("no readable piece in the text")


@pytest.mark.parametrize("extra", range(6))
@pytest.mark.parametrize("kind", ["stop", "stop_regex"])
def test_a_stop_string_inside_a_run_beats_the_length_behind_it(
    plain: ServerProcess, drafted: ServerProcess, extra: int, kind: str
) -> None:
    for prompt in KNOWN:
        free = plain.generate(prompt, {"max_new_tokens": 60, "ignore_eos": True})
        try:
            piece, _ = readable_piece(free)
        except AssertionError:
            continue
        break
    escaped = piece if kind == "stop" else "".join(f"[{c}]" if c not in "^]\\" else f"\\{c}" for c in piece)
    stopped = plain.generate(prompt, {"max_new_tokens": 60, "ignore_eos": True, kind: [escaped]})
    assert stopped["meta_info"]["finish_reason"]["type"] == "stop"
    params = {"max_new_tokens": len(tokens(stopped)) + extra, "ignore_eos": True, kind: [escaped]}
    want, got = plain.generate(prompt, params), drafted.generate(prompt, params)
    assert got["text"] == want["text"]
    assert tokens(got) == tokens(want)
    assert got["meta_info"]["finish_reason"] == want["meta_info"]["finish_reason"]


def test_eos_inside_a_run_ends_it(plain: ServerProcess, drafted: ServerProcess) -> None:
    ends = 0
    for prompt in KNOWN:
        favour = {"max_new_tokens": 60, "logit_bias": {"257": 3.0}}  # 257 ends a text; alone it is rare
        want, got = plain.generate(prompt, favour), drafted.generate(prompt, favour)
        assert tokens(got) == tokens(want)
        assert got["meta_info"]["finish_reason"] == want["meta_info"]["finish_reason"]
        ends += got["meta_info"]["finish_reason"]["type"] == "stop"
    assert ends > 0


def test_min_new_tokens_holds_the_end_back(plain: ServerProcess, drafted: ServerProcess) -> None:
    params = {"max_new_tokens": 40, "min_new_tokens": 23, "logit_bias": {"257": 60.0}}
    want, got = plain.generate(KNOWN[3], params), drafted.generate(KNOWN[3], params)
    assert tokens(got) == tokens(want) and len(tokens(got)) == 24


PENALTIES: list[dict[str, Any]] = [
    {"frequency_penalty": 0.7},
    {"presence_penalty": 1.1},
    {"repetition_penalty": 1.3},
    {"frequency_penalty": 0.4, "presence_penalty": 0.4},
    {"logit_bias": {"65": 4.0, "66": -4.0}},
]


@pytest.mark.parametrize("params", PENALTIES, ids="+".join)
def test_penalties_count_every_token_at_its_position(
    plain: ServerProcess, drafted: ServerProcess, params: dict[str, Any]
) -> None:
    for prompt in KNOWN[:3]:
        full = {"max_new_tokens": 60, "ignore_eos": True, **params}
        assert tokens(drafted.generate(prompt, full)) == tokens(plain.generate(prompt, full))


def test_logprobs_are_those_of_plain_decoding(plain: ServerProcess, drafted: ServerProcess) -> None:
    body = {"return_logprob": True, "top_logprobs_num": 3, "token_ids_logprob": [65, 66], "logprob_start_len": 0}
    params = {"max_new_tokens": 30, "ignore_eos": True, "frequency_penalty": 0.3}
    want = plain.generate(KNOWN[4], params, **body)["meta_info"]
    got = drafted.generate(KNOWN[4], params, **body)["meta_info"]
    for key in ("input_token_logprobs", "output_token_logprobs"):
        assert [x[1] for x in got[key]] == [x[1] for x in want[key]]
        assert [x[0] or 0 for x in got[key]] == pytest.approx([x[0] or 0 for x in want[key]], abs=1e-4)
    for key in ("output_top_logprobs", "output_token_ids_logprobs"):
        flat = [[(x[1], x[0]) for x in row] for row in want[key]]
        assert [[x[1] for x in row] for row in got[key]] == [[i for i, _ in row] for row in flat]
        assert [x[0] for row in got[key] for x in row] == pytest.approx([v for row in flat for _, v in row], abs=1e-4)


def test_only_some_of_a_batch_ask_for_the_logprobs_of_given_tokens(
    plain: ServerProcess, drafted: ServerProcess
) -> None:
    """A plain server dies of such a batch."""
    long, short = {"max_new_tokens": 200, "ignore_eos": True}, {"max_new_tokens": 20, "ignore_eos": True}
    body = {"return_logprob": True, "token_ids_logprob": [65, 66]}
    with ThreadPoolExecutor(4) as pool:
        others = [pool.submit(drafted.generate, p, long, return_logprob=True) for p in KNOWN[:3]]
        got = drafted.generate(KNOWN[3], short, **body)
        assert [tokens(f.result()) for f in others] == [tokens(plain.generate(p, long)) for p in KNOWN[:3]]
    want = plain.generate(KNOWN[3], short, **body)
    assert tokens(got) == tokens(want)
    flat, mine = ([x[0] for row in a["meta_info"]["output_token_ids_logprobs"] for x in row] for a in (want, got))
    assert mine == pytest.approx(flat, abs=1e-4)


def test_more_top_logprobs_than_tokens_are_all_of_them(drafted: ServerProcess) -> None:
    params = {"max_new_tokens": 4, "ignore_eos": True}
    got = drafted.generate(KNOWN[0], params, return_logprob=True, top_logprobs_num=100_000)
    assert [len(row) for row in got["meta_info"]["output_top_logprobs"]] == [288] * 4
    assert drafted.alive


GRAMMARS: list[dict[str, Any]] = [
    {"regex": r"(ab|cd){3,9}[0-9]{2}"},
    {"json_schema": json.dumps({"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"]})},
    {"regex": r"[a-z]{20}"},
]


@pytest.mark.parametrize("grammar", GRAMMARS, ids=["regex", "json", "long"])
def test_structured_output(plain: ServerProcess, drafted: ServerProcess, grammar: dict[str, Any]) -> None:
    params = {"max_new_tokens": 48, **grammar}
    want, got = plain.generate(KNOWN[5], params), drafted.generate(KNOWN[5], params)
    assert tokens(got) == tokens(want)
    assert got["meta_info"]["finish_reason"] == want["meta_info"]["finish_reason"]


SAMPLING: list[dict[str, Any]] = [
    {"temperature": 0.2},
    {"temperature": 0.4, "top_p": 0.6},
    {"temperature": 0.9, "top_k": 5},
    {"temperature": 1.0, "min_p": 0.2},
    {"temperature": 0.6, "top_p": 0.9, "top_k": 20, "min_p": 0.02, "frequency_penalty": 0.5},
]


@pytest.mark.parametrize("params", SAMPLING, ids="+".join)
def test_sampling_with_a_seed_does_not_depend_on_drafting(drafted: ServerProcess, params: dict[str, Any]) -> None:
    kept = 0
    for seed, prompt in enumerate(KNOWN[:4]):
        full = {"max_new_tokens": 60, "ignore_eos": True, "sampling_seed": seed, **params}
        undrafted = tokens(drafted.generate(prompt, {**full, **OFF}))
        got = drafted.generate(prompt, full)
        assert tokens(got) == undrafted
        kept += counters(got)["accepted"]
    assert kept > 0


def test_seeds_repeat_and_differ_and_n_samples_differ(drafted: ServerProcess) -> None:
    params = {"temperature": 1.0, "max_new_tokens": 24, "ignore_eos": True}
    first, again = (tokens(drafted.generate(KNOWN[0], {**params, "sampling_seed": 7})) for _ in range(2))
    other = tokens(drafted.generate(KNOWN[0], {**params, "sampling_seed": 8}))
    assert first == again != other
    unseeded = drafted.generate(KNOWN[0], {**params, "n": 3})
    assert len({tuple(tokens(a)) for a in unseeded}) == 3  # type: ignore[arg-type]


def test_openai_endpoints_take_a_mode_and_a_seed(plain: ServerProcess, drafted: ServerProcess) -> None:
    chat = {"model": "m", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 30, "temperature": 0}
    text = {"model": "m", "prompt": "hello there", "max_tokens": 30, "temperature": 0}
    for path, body in (("/v1/chat/completions", chat), ("/v1/completions", text)):
        want = plain.post(path, body)["choices"][0]
        for custom in ({}, OFF):
            got = drafted.post(path, {**body, **custom})["choices"][0]
            assert got.get("message", got.get("text")) == want.get("message", want.get("text"))
            assert got["finish_reason"] == want["finish_reason"]


@pytest.mark.parametrize(
    "params",
    [
        {"sampling_seed": "7"},
        {"max_new_tokens": 9.5},
        {"logit_bias": {"5": None}},
        {"skip_special_tokens": "no"},
        {"json_schema": {"type": "object"}},
    ],
    ids=str,
)
def test_sampling_parameters_of_a_wrong_type_are_http_400(drafted: ServerProcess, params: dict[str, Any]) -> None:
    with pytest.raises(HttpError) as error:
        drafted.generate(KNOWN[0], params)
    assert error.value.status == 400 and next(iter(params)) in error.value.text
    with pytest.raises(HttpError) as error:
        drafted.generate(KNOWN[0], return_logprob=True, logprob_start_len=-5)
    assert error.value.status == 400 and "logprob_start_len" in error.value.text
    assert drafted.alive and tokens(drafted.generate(KNOWN[0]))


BAD: list[tuple[Any, str]] = [
    ("full", "custom_params"),
    ([1], "custom_params"),
    ({"longdraft": "off"}, "custom_params.longdraft"),
    ({"longdraft": {"mode": "fast"}}, "custom_params.longdraft.mode"),
    ({"longdraft": {"mode": 3}}, "custom_params.longdraft.mode"),
    ({"longdraft": {"modes": "off"}}, "custom_params.longdraft.modes"),
]


@pytest.mark.parametrize("token", [1 << 20, -1, 1 << 40], ids=str)
def test_a_prompt_of_no_tokens_is_http_400(drafted: ServerProcess, token: int) -> None:
    """SGLang's target indexes its embedding with it, and the scheduler ends."""
    with pytest.raises(HttpError) as error:
        drafted.generate([5, token])
    assert error.value.status == 400 and "input_ids must be 0 to" in error.value.text and drafted.alive
    assert len(tokens(drafted.generate([5, 6], {"ignore_eos": True}))) == 32


@pytest.mark.parametrize(("custom", "field"), BAD, ids=str)
def test_bad_custom_params_are_http_400(drafted: ServerProcess, custom: Any, field: str) -> None:
    with pytest.raises(HttpError) as error:
        drafted.generate(KNOWN[0], {"custom_params": custom})
    assert error.value.status == 400 and field in error.value.text
    if isinstance(custom, dict):
        chat = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "custom_params": custom}
        with pytest.raises(HttpError) as error:
            drafted.post("/v1/chat/completions", chat)
        assert error.value.status == 400 and field in error.value.text
    assert drafted.alive
