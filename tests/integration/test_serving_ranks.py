"""Two ranks of the real server, over gloo, give the tokens of one: in every mode, with every kind of draft, under aborts (S4).

What the ranks would verify and return is compared in every round (``check_ranks``), so that a rank that goes another way ends the
server. The target has eight query heads and four key/value heads, of which each rank has half.
"""

import contextlib
import http.client
import json
import os
import random
import time
import urllib.error
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from server_process import SPECULATIVE, STRICT, ServerProcess, counters, tokens
from tiny import tiny_model
from tiny_draft import known_prompts, train_tiny_draft, train_tiny_eagle3
from tiny_lm import shaken_lm

KNOWN = [p.tolist() for p in known_prompts()]
KINDS = ("longspec", "eagle3", "lm")
LOSSLESS = ("off", "full", "exact")
VIEWS = {
    "mode": "exact",
    "allow_lossy": True,
    "view_tokens": 96,
    "view_sinks": 16,
    "view_recent": 32,
    "sparse_tokens": 96,
    "refresh_missed_mass": 0.3,
    "confirm_floor": 0.2,
}
# SGLang asks for cores of each rank where there are fewer NUMA nodes; and it would compile a mask of the embedding for 20 seconds.
RANKS = {"SGLANG_CPU_OMP_THREADS_BIND": f"0|{(os.cpu_count() or 1) - 1}", "TORCHDYNAMO_DISABLE": "1"}


def long_prompt(length: int, seed: int) -> list[int]:
    """A prompt that the drafts know behind text that they do not."""
    return [*random.Random(seed).choices(range(256), k=length), *KNOWN[seed % len(KNOWN)]]


PROMPTS = [KNOWN[0], KNOWN[3], long_prompt(40, 1), long_prompt(300, 2), long_prompt(700, 3)]


class World(NamedTuple):
    """Folders of the target and its drafts, and SGLang without speculation."""

    target: Path
    drafts: dict[str, Path]
    plain: ServerProcess


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    folder = tmp_path_factory.mktemp("ranks")
    shape = {"num_hidden_layers": 5, "num_attention_heads": 8, "num_key_value_heads": 4, "intermediate_size": 128}
    target = tiny_model("llama", folder / "target", **shape)
    drafts = {
        "longspec": train_tiny_draft(target, folder / "longspec"),
        "eagle3": train_tiny_eagle3(target, folder / "eagle3"),
        "lm": shaken_lm(target, folder / "lm"),
    }
    with ServerProcess(target, [], folder / "plain.log") as plain:
        yield World(target, drafts, plain)


def served(
    world: World, kind: str, size: int, log: Path, settings: dict[str, Any], fault: str | None = None
) -> ServerProcess:
    """A server of so many ranks; with a fault, or ``none``, the ranks share everything of the draft."""
    draft = ["--speculative-draft-model-path", str(world.drafts[kind])]
    environment = {**STRICT, "LONGDRAFT_SETTINGS": json.dumps({"check_ranks": True, **settings})}
    if size > 1:
        environment |= RANKS
    server = ServerProcess(world.target, [*SPECULATIVE, *draft, "--tp-size", str(size)], log, environment, overlap=True)
    if fault is not None:
        server.command[1:3] = [str(Path(__file__).with_name("ranks_launch.py")), fault]
    return server


@pytest.fixture(scope="module", params=KINDS)
def pair(
    request: pytest.FixtureRequest, world: World, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[ServerProcess, ServerProcess]]:
    """One rank and two, with one kind of draft."""
    folder = tmp_path_factory.mktemp(f"pair-{request.param}")
    with (
        served(world, request.param, 1, folder / "one", VIEWS) as one,
        served(world, request.param, 2, folder / "two", VIEWS) as two,
    ):
        yield one, two


def params(mode: str, **more: Any) -> dict[str, Any]:
    return {"custom_params": {"longdraft": {"mode": mode}}, "ignore_eos": True, "max_new_tokens": 50, **more}


@pytest.mark.parametrize("mode", [*LOSSLESS, "partial", "sparse"])
def test_two_ranks_give_the_tokens_of_one(world: World, pair: tuple[ServerProcess, ServerProcess], mode: str) -> None:
    one, two = pair
    want = [one.generate(p, params(mode)) for p in PROMPTS]
    got = [two.generate(p, params(mode)) for p in PROMPTS]
    assert [tokens(a) for a in got] == [tokens(a) for a in want]
    plain = [tokens(world.plain.generate(p, {"ignore_eos": True, "max_new_tokens": 50})) for p in PROMPTS]
    assert ([tokens(a) for a in got] == plain) == (mode in LOSSLESS)
    for a, b in zip(got, want, strict=True):  # rounds are chosen by a clock, so that exact may take other ones
        if mode != "exact":
            assert counters(a)["rounds"] == counters(b)["rounds"]
    assert (sum(counters(a)["accepted"] for a in got) > 0) == (mode != "off")
    if mode in ("exact", "partial", "sparse"):
        assert sum(counters(a)["partial_verifications"] for a in got) > 0


def test_modes_share_a_batch_of_two_ranks(world: World, pair: tuple[ServerProcess, ServerProcess]) -> None:
    """With one that needs its text on the host."""
    _, two = pair
    modes, plain = ["exact", "full", "partial", "sparse", "off"], {"ignore_eos": True, "max_new_tokens": 50}
    more: list[dict[str, Any]] = [{}, {"frequency_penalty": 0.4}, {}, {}, {}]
    with ThreadPoolExecutor(5) as pool:
        got = list(pool.map(lambda i: tokens(two.generate(PROMPTS[i], params(modes[i], **more[i]))), range(5)))
    for mode, answer, prompt, own in zip(modes, got, PROMPTS, more, strict=True):
        assert len(answer) == 50
        if mode in LOSSLESS:
            assert answer == tokens(world.plain.generate(prompt, {**plain, **own}))


def test_seeded_sampling_is_that_of_one_rank(pair: tuple[ServerProcess, ServerProcess]) -> None:
    sampled = {"temperature": 0.9, "top_p": 0.95, "sampling_seed": 11}
    for mode in ("full", "exact"):
        one, two = ([tokens(s.generate(p, params(mode, **sampled))) for p in PROMPTS[:4]] for s in pair)
        assert one == two


def test_aborts_lose_no_slot_and_bend_no_answer(world: World, pair: tuple[ServerProcess, ServerProcess]) -> None:
    _, two = pair
    draw, modes = random.Random(5), ["full", "exact", "partial", "sparse"]

    def ask(i: int) -> None:
        prompt = long_prompt(30 + 23 * i, i)
        if i % 3 == 0:  # a client that goes away
            stream = two.stream(prompt, params(modes[i % 4], max_new_tokens=200))
            next(stream)
            stream.close()
        elif i % 3 == 1:
            with ThreadPoolExecutor(1) as one:
                answer = one.submit(two.generate, prompt, params(modes[i % 4], max_new_tokens=200), rid=f"a{i}")
                time.sleep(draw.random() / 2)
                two.open("/abort_request", {"rid": f"a{i}"}).read()
                answer.exception()
        else:
            assert len(tokens(two.generate(prompt, params(modes[i % 4], max_new_tokens=40)))) == 40

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(ask, range(24)))
    assert two.idle_slots() == 40000 and two.alive
    plain = {"ignore_eos": True, "max_new_tokens": 50}
    for prompt in PROMPTS:
        assert tokens(two.generate(prompt, params("exact"))) == tokens(world.plain.generate(prompt, plain))


@pytest.mark.parametrize(("kind", "tree", "fault"), [("longspec", "2,3,3,3", "together"), ("eagle3", "auto", "none")])
def test_trees_of_drafts_of_which_the_ranks_share_everything(
    world: World, kind: str, tree: str, fault: str, tmp_path: Path
) -> None:
    """What fails on both ranks at once costs drafts, as on one; which tree is best is what rank 0 has measured."""
    with served(world, kind, 2, tmp_path / "log", {"tree": tree}, fault) as two:
        got = [two.generate(p, params("full")) for p in PROMPTS]
        with ThreadPoolExecutor(5) as pool:
            together = list(pool.map(lambda p: tokens(two.generate(p, params("full"))), PROMPTS))
    plain = [tokens(world.plain.generate(p, {"ignore_eos": True, "max_new_tokens": 50})) for p in PROMPTS]
    assert [tokens(a) for a in got] == together == plain
    assert sum(counters(a)["accepted"] for a in got) > 0
    assert (sum(counters(a)["draft_failures"] for a in got) > 0) == (fault == "together")
    shared = (tmp_path / "log").read_text()
    assert ("cross-attention, self-attention, MLP" if kind == "longspec" else "head, MLP") in shared


@pytest.mark.parametrize(
    ("fault", "said"),
    [("alone", "rank 1 failed where others did not"), ("unsummed", "rank 1 has other views and drafts than rank 0")],
    ids=["alone", "unsummed"],
)
def test_ranks_that_differ_end_the_server_and_nobody_waits(world: World, fault: str, said: str, tmp_path: Path) -> None:
    with served(world, "longspec", 2, tmp_path / "log", {**VIEWS, "rounds": 2}, fault) as two:
        end = time.monotonic() + 60
        with contextlib.suppress(urllib.error.URLError, http.client.HTTPException, OSError):
            for _ in range(20):
                two.generate(PROMPTS[4], params("exact"))
        while two.alive and time.monotonic() < end:
            time.sleep(0.2)
        assert not two.alive
    assert said in (tmp_path / "log").read_text()
