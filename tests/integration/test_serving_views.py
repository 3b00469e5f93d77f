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
from prometheus_client.parser import text_string_to_metric_families
from server_process import SPECULATIVE, STRICT, HttpError, ServerProcess, counters, refused, tokens
from tiny_draft import known_prompts

KNOWN = [p.tolist() for p in known_prompts()]
LOSSY = '"allow_lossy": true'
KV_BYTES = 2 * 2 * 2 * 16 * 4  # of a token of the tiny target: keys and values of 2 layers, 2 heads of 16 floats
VIEW = '"view_tokens": 96, "view_sinks": 16, "view_recent": 32'


def long_prompt(length: int, seed: int) -> list[int]:
    """A prompt the draft knows behind text that it does not."""
    return [*random.Random(seed).choices(range(256), k=length), *KNOWN[seed % len(KNOWN)]]


def mode(name: str, **params: Any) -> dict[str, Any]:
    return {"custom_params": {"longdraft": {"mode": name}}, "ignore_eos": True, **params}


@pytest.fixture(scope="module")
def viewed(tiny_target: Path, tiny_draft: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server whose requests are verified on views unless they ask for another mode."""
    arguments = [*SPECULATIVE, "--speculative-draft-model-path", str(tiny_draft), "--enable-metrics"]
    given = {**STRICT, "LONGDRAFT_SETTINGS": f'{{"mode": "exact", {LOSSY}, "rounds": 2, "confirm_floor": 0.2, {VIEW}}}'}
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


def series(server: ServerProcess) -> dict[tuple[str, ...], float]:
    """Our samples on ``/metrics``, by name, mode, context and, where there is one, kind."""
    families = text_string_to_metric_families(server.get("/metrics"))
    samples = [s for family in families for s in family.samples if s.name.startswith("longdraft_")]
    keys = ("mode", "context", "kind")
    return {
        (
            s.name.removeprefix("longdraft_").removesuffix("_total"),
            *(s.labels[k] for k in keys if k in s.labels),
        ): s.value
        for s in samples
    }


def test_metrics_say_what_requests_of_each_mode_gained_and_read(viewed: ServerProcess) -> None:
    viewed.generate(KNOWN[0], {"max_new_tokens": 4})  # of a request that has ended everything is there
    before, asked = series(viewed), [("exact", 300), ("partial", 700), ("full", 300), ("sparse", 2200), ("off", 40)]
    answers = {}
    for name, length in asked:
        answers[name] = counters(viewed.generate(long_prompt(length, length), mode(name, max_new_tokens=50)))
    gained = {key: value - before.get(key, 0.0) for key, value in series(viewed).items()}
    for name, length in asked:
        count, labels = answers[name], (name, "<2K" if length < 2000 else "2K-8K")
        assert gained["rounds", *labels] == count["rounds"] > 0
        tau = gained["tokens", *labels] / gained["rounds", *labels]
        assert tau == pytest.approx(count["tau"], abs=1e-4)
        assert gained["tokens", *labels] - gained["rounds", *labels] == count["accepted"] <= count["drafted"]
        assert gained["drafted_tokens", *labels] == count["drafted"]
        assert gained["draft_failures", *labels] == count["draft_failures"] == 0
        read = {kind: gained["cache_read_bytes", *labels, kind] for kind in ("partial", "full")}
        ran = {kind: gained["verifications", *labels, kind] for kind in ("partial", "full")}
        if name in ("full", "off"):
            assert ran == {"partial": 0, "full": count["rounds"]} and read["partial"] == 0
            continue
        assert ran == {kind: count[f"{kind}_verifications"] for kind in ran}
        assert gained["refreshes", *labels] == count["refreshes"]
        assert gained["fallbacks", *labels] == count["view_fallbacks"]
        assert gained["proposed_tokens", *labels] == count["gained_on_view"]
        assert gained["confirmed_tokens", *labels] == count["confirmed"]
        widest = {"exact": length + 100, "partial": 160, "sparse": 512}[name]  # exact may fall back to its whole cache
        assert 0 < read["partial"] / ran["partial"] <= widest * KV_BYTES
        if ran["full"]:
            assert length * KV_BYTES < read["full"] / ran["full"] < (length + 100) * KV_BYTES
    assert answers["partial"]["refreshes"] > 0 and answers["exact"]["gained_on_view"] > 0


SLOTS = 900
MODES = ["exact", "partial", "sparse", "full", "off"]


@pytest.fixture(scope="module")
def tight(tiny_target: Path, tiny_draft: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """As ``viewed``, with so little memory that requests are retracted, and with refreshes for what views miss."""
    arguments = [*SPECULATIVE, "--speculative-draft-model-path", str(tiny_draft), "--schedule-conservativeness", "0.05"]
    lossy = f'{LOSSY}, "sparse_tokens": 48, "refresh_missed_mass": 0.6'
    given = {**STRICT, "LONGDRAFT_SETTINGS": f'{{"mode": "partial", "rounds": 2, {lossy}, {VIEW}}}'}
    log = tmp_path_factory.mktemp("tight") / "log"
    with ServerProcess(tiny_target, arguments, log, given, SLOTS, overlap=True) as server:
        yield server


def test_three_hundred_requests_under_retractions_and_aborts_lose_no_slot(
    plain: ServerProcess, tight: ServerProcess
) -> None:
    """S3, P11: and what is exact stays so, before a retraction and behind one."""
    prompts = [long_prompt(70, i) for i in range(8)]
    sampling = [{"temperature": 0, **mode(MODES[i % 5], max_new_tokens=110)} for i in range(8)]
    together = tight.post("/generate", {"input_ids": prompts, "sampling_params": sampling})  # must run short of memory
    assert sum(a["meta_info"]["num_retractions"] for a in together) > 0, "memory was meant to run short"
    for i, answer in enumerate(together):
        assert counters(answer)["mode"] == MODES[i % 5] and len(tokens(answer)) == 110
        if MODES[i % 5] not in ("partial", "sparse"):
            assert tokens(answer) == tokens(plain.generate(prompts[i], {"max_new_tokens": 110, "ignore_eos": True}))

    draw = random.Random(3)
    plans = [(draw.choice(MODES), draw.randrange(1, 250), draw.randrange(1, 50), draw.random()) for _ in range(292)]

    def one(i: int) -> None:
        name, length, count, fate = plans[i]
        prompt, params = long_prompt(length, length % 40), mode(name, max_new_tokens=count)
        params["temperature"] = 0.7 * (i % 3 == 0)
        if fate > 0.4:
            assert len(tokens(tight.generate(prompt, params))) == count
            return
        for chunk in tight.stream(prompt, params, rid=f"r{i}"):
            if len(tokens(chunk)) > count * fate:
                if fate < 0.2:
                    return  # the client hangs up
                tight.open("/abort_request", {"rid": f"r{i}"}).read()

    with ThreadPoolExecutor(10) as pool:
        list(pool.map(one, range(len(plans))))
    assert tight.idle_slots() == SLOTS
    text = tight.log.read_text()
    assert tight.alive and "leak" not in text and "Traceback" not in text


def test_a_server_without_views_refuses_what_needs_one(drafted: ServerProcess) -> None:
    for name in ("exact", "partial", "sparse"):
        with pytest.raises(HttpError) as error:
            drafted.generate(KNOWN[0], mode(name))
        assert error.value.status == 400
        flags = "--mode exact" if name == "exact" else "--mode exact --allow-lossy"
        for part in (f"custom_params.longdraft.mode='{name}'", f"start it with {flags}, or ask for full"):
            assert part in error.value.text
    with pytest.raises(HttpError) as error:
        drafted.generate(KNOWN[0], mode("exactly"))
    assert error.value.status == 400 and "exactly" in error.value.text


def test_views_that_cannot_be_served_end_the_start_in_one_line(
    tiny_target: Path, tiny_draft: Path, tmp_path: Path
) -> None:
    log, draft = tmp_path / "log", ("--speculative-draft-model-path", str(tiny_draft))
    bare = refused(tiny_target, log, mode="exact")
    assert "mode='exact' has no draft" in bare and "--draft" in bare and "self_draft" in bare
    tree = refused(tiny_target, log, *draft, mode="exact", tree="4,4,4,4")
    assert "tree='4,4,4,4' with mode='exact'" in tree and "leave the tree out" in tree
    unasked = refused(tiny_target, log, *draft, mode="partial")
    assert "mode='partial' gives approximate output: set allow_lossy too, or take mode exact" in unasked
    small = refused(tiny_target, log, *draft, mode="partial", allow_lossy=True, view_tokens=64)
    assert "tokens=64" in small and "write 176 or more" in small
    tiny = refused(tiny_target, log, *draft, mode="exact", view_tokens=20)
    assert "view_tokens" in tiny and "64" in tiny
