"""Modes ``exact`` and ``partial`` on real servers: exact is plain decoding, and partial leaves no approximate key behind.

P1, P8, P11, P12, V1 and S3, on a tiny random target in float32 with the overlap schedule on, views of 64 tokens, and a memory
check in every step.
"""

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from server_process import SPECULATIVE, STRICT, ServerProcess, counters, tokens
from tiny_draft import known_prompts

KNOWN = [p.tolist() for p in known_prompts()]
VIEW = '"view_tokens": 96, "view_sinks": 16, "view_recent": 32'


def long_prompt(length: int, seed: int) -> list[int]:
    """A prompt the draft knows behind text that it does not."""
    return [*random.Random(seed).choices(range(256), k=length), *KNOWN[seed % len(KNOWN)]]


def mode(name: str, **params: Any) -> dict[str, Any]:
    return {"custom_params": {"longdraft": {"mode": name}}, "ignore_eos": True, **params}


@pytest.fixture(scope="module")
def viewed(tiny_target: Path, tiny_draft: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server whose requests are verified on views unless they ask for another mode."""
    arguments = [*SPECULATIVE, "--speculative-draft-model-path", str(tiny_draft)]
    given = {**STRICT, "LONGDRAFT_SETTINGS": f'{{"mode": "exact", "rounds": 2, "confirm_floor": 0.2, {VIEW}}}'}
    log = tmp_path_factory.mktemp("viewed") / "log"
    with ServerProcess(tiny_target, arguments, log, given, overlap=True) as server:
        yield server


@pytest.mark.parametrize("length", [1, 40, 72, 300, 700, 1500])
def test_exact_is_plain_decoding_twice(plain: ServerProcess, viewed: ServerProcess, length: int) -> None:
    prompt = long_prompt(length, length)
    want = plain.generate(prompt, {"max_new_tokens": 70, "ignore_eos": True})
    for _ in range(2):  # the second time the prompt comes from the prefix cache, and the view from its last row
        got = viewed.generate(prompt, {"max_new_tokens": 70, "ignore_eos": True})
        assert tokens(got) == tokens(want)
    count = counters(got)
    assert count["mode"] == "exact"
    if length > 1:
        assert count["partial_verifications"] and count["gained_on_view"] >= count["confirmed"]
    if (
        length == 40
    ):  # a view of half of it agrees at times, one of a twentieth hardly ever: the target's weights are random
        assert count["confirmed"] > 20


def test_modes_share_a_batch(plain: ServerProcess, viewed: ServerProcess) -> None:
    prompts = [long_prompt(n, 7 * n) for n in (30, 130, 620, 900, 200, 333)]
    modes = ["exact", "full", "off", "exact", "partial", "partial"]
    params = {"max_new_tokens": 60, "ignore_eos": True}
    want = [tokens(plain.generate(p, params)) for p in prompts]
    with ThreadPoolExecutor(6) as pool:
        got = list(pool.map(lambda i: viewed.generate(prompts[i], mode(modes[i], max_new_tokens=60)), range(6)))
    for name, answer, wanted in zip(modes, got, want, strict=True):
        assert counters(answer)["mode"] == name
        assert len(tokens(answer)) == 60
        if name != "partial":
            assert tokens(answer) == wanted


def test_partial_is_full_where_the_view_holds_everything(plain: ServerProcess, viewed: ServerProcess) -> None:
    prompt = KNOWN[0]
    got = viewed.generate(prompt, mode("partial", max_new_tokens=40))
    assert tokens(got) == tokens(plain.generate(prompt, {"max_new_tokens": 40, "ignore_eos": True}))


def test_a_second_turn_behind_a_partial_one_is_a_cold_run(plain: ServerProcess, viewed: ServerProcess) -> None:
    """P11, P12: nothing that a view computed is found by another request."""
    differing = 0
    for seed, length in enumerate((250, 400, 611, 900)):
        prompt = long_prompt(length, seed)
        first = viewed.generate(prompt, mode("partial", max_new_tokens=57))
        wanted = plain.generate(prompt, {"max_new_tokens": 57, "ignore_eos": True})
        differing += tokens(first) != tokens(wanted)
        assert counters(first)["partial_verifications"] > counters(first)["full_verifications"] > 0
        turn = [*prompt, *tokens(first), *KNOWN[3][:9]]
        second = viewed.generate(turn, mode("exact", max_new_tokens=40))
        assert second["meta_info"]["cached_tokens"] >= len(prompt)
        assert tokens(second) == tokens(plain.generate(turn, {"max_new_tokens": 40, "ignore_eos": True}))
    assert differing, "a view on which nothing ever changes tests nothing"


def test_seeded_sampling_is_the_same_in_every_mode(viewed: ServerProcess) -> None:
    prompt = long_prompt(500, 5)
    params = {"temperature": 0.9, "top_p": 0.95, "sampling_seed": 11}
    texts = [
        tokens(viewed.generate(prompt, mode(name, max_new_tokens=60, **params))) for name in ("off", "full", "exact")
    ]
    assert texts[0] == texts[1] == texts[2]


def test_requests_that_need_their_text_are_verified_fully(plain: ServerProcess, viewed: ServerProcess) -> None:
    prompts = [long_prompt(n, n) for n in (200, 340)]
    params = {"max_new_tokens": 50, "frequency_penalty": 0.4, "ignore_eos": True}
    want = [tokens(plain.generate(p, params)) for p in prompts]
    with ThreadPoolExecutor(3) as pool:
        beside = pool.submit(viewed.generate, long_prompt(400, 2), mode("partial", max_new_tokens=80))
        got = list(
            pool.map(lambda p: tokens(viewed.generate(p, {**params, **mode("exact", max_new_tokens=50)})), prompts)
        )
        assert len(tokens(beside.result())) == 80
    assert got == want


def test_many_requests_of_all_modes_lose_no_slot(viewed: ServerProcess) -> None:
    draw, before = random.Random(3), viewed.idle_slots()

    def one(i: int) -> None:
        name = draw.choice(["exact", "partial", "full", "off"])
        prompt, count = long_prompt(draw.randrange(1, 500), i), draw.randrange(1, 60)
        if draw.random() < 0.3:  # the connection is dropped in the middle
            for chunk in viewed.stream(prompt, mode(name, max_new_tokens=count)):
                if len(tokens(chunk)) > count // 2:
                    break
        else:
            assert len(tokens(viewed.generate(prompt, mode(name, max_new_tokens=count)))) == count

    with ThreadPoolExecutor(10) as pool:
        list(pool.map(one, range(60)))
    assert viewed.idle_slots() == before
