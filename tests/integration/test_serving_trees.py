"""Servers that draft trees return what a plain one returns, greedy and seeded, over both kinds of drafts (float32; V1, V9)."""

import json
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from server_process import CPU_ARGUMENTS, SPECULATIVE, STRICT, ServerProcess, counters, tokens
from tiny_draft import known_prompts

from longdraft.serve.settings import ENVIRONMENT

KNOWN = [p.tolist() for p in known_prompts()]
OFF = {"custom_params": {"longdraft": {"mode": "off"}}}
SHAPES = {"longspec": "4,8,8,4", "eagle3": "eagle2:4,4,16"}
NEW = {"max_new_tokens": 48, "ignore_eos": True}


@pytest.fixture(scope="module", params=SHAPES)
def trees(request: Any, deep_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """Few slots, so that trees are drafted around retractions, and the overlap schedule; every step checks that no slot is lost."""
    folder = tmp_path_factory.mktemp(request.param)
    draft = request.getfixturevalue(f"deep_{request.param}")
    arguments = [*SPECULATIVE, "--speculative-draft-model-path", str(draft)]
    environment = {**STRICT, ENVIRONMENT: json.dumps({"tree": SHAPES[request.param]})}
    log = folder / "log"
    with ServerProcess(deep_target, arguments, log, environment, max_total_tokens=2500, overlap=True) as server:
        yield server
    assert "Traceback" not in log.read_text(), "nothing failed on the way"


def longdraft_serve(target: Path, arguments: list[str], log: Path, slots: int) -> ServerProcess:
    server = ServerProcess(target, arguments, log, STRICT, max_total_tokens=slots)
    server.command[1:3] = ["-m", "longdraft.cli", "serve"]
    server.command[:] = [w for w in server.command if w not in CPU_ARGUMENTS]
    return server


def random_prompt(length: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(256), k=length)


@pytest.mark.parametrize("params", [{}, {"frequency_penalty": 0.7}], ids=str)
def test_tokens_are_those_of_plain_decoding(
    trees: ServerProcess, deep_plain: ServerProcess, params: dict[str, Any]
) -> None:
    for prompt in [*KNOWN[:3], random_prompt(1, 1), random_prompt(700, 2)]:
        want = tokens(deep_plain.generate(prompt, {**NEW, **params}))
        for _ in range(2):  # the second time from the prefix cache
            assert tokens(trees.generate(prompt, {**NEW, **params})) == want


@pytest.mark.parametrize("params", [{"temperature": 0.9}, {"temperature": 1.2, "top_p": 0.8, "top_k": 30}], ids=str)
def test_sampling_with_a_seed_does_not_depend_on_trees(trees: ServerProcess, params: dict[str, Any]) -> None:
    for seed, prompt in enumerate(KNOWN[:4]):
        full = {**NEW, **params, "sampling_seed": seed}
        drafted = trees.generate(prompt, full)
        assert tokens(drafted) == tokens(trees.generate(prompt, {**full, **OFF}))
        assert counters(drafted)["drafted"] > 0


def test_a_batch_of_changing_size_keeps_paths_and_loses_no_slot(
    trees: ServerProcess, deep_plain: ServerProcess
) -> None:
    prompts = [random_prompt(n, 90 + n) for n in (3, 130, 620)] + KNOWN[3:8]
    want = [tokens(deep_plain.generate(p, NEW)) for p in prompts]
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda p: trees.generate(p, NEW), prompts))
    assert [tokens(a) for a in answers] == want
    assert sum(counters(a)["accepted"] for a in answers[3:]) > 40, "the draft learned these prompts"
    assert trees.idle_slots() == 2500


def test_stops_and_logprobs_are_those_of_plain_decoding(trees: ServerProcess, deep_plain: ServerProcess) -> None:
    body = {"return_logprob": True, "top_logprobs_num": 2}
    want = deep_plain.generate(KNOWN[0], NEW, **body)
    got = trees.generate(KNOWN[0], NEW, **body)
    assert tokens(got) == tokens(want)
    for (a, i, _), (b, j, _) in zip(
        got["meta_info"]["output_token_logprobs"], want["meta_info"]["output_token_logprobs"], strict=True
    ):
        assert (i, a) == (j, pytest.approx(b, abs=1e-4))
    stop = {**NEW, "stop_token_ids": [tokens(want)[20]]}
    assert tokens(trees.generate(KNOWN[0], stop)) == tokens(deep_plain.generate(KNOWN[0], stop))


def test_a_server_that_chooses_shapes_returns_the_same_tokens(
    deep_target: Path, deep_eagle3: Path, deep_plain: ServerProcess, tmp_path: Path
) -> None:
    """Costs measured by the real server at start; known prompts are drafted, and no slot is lost to the measuring."""
    arguments = ["--draft", str(deep_eagle3), "--tree", "auto:2,3,2"]
    with longdraft_serve(deep_target, arguments, tmp_path / "log", 4000) as server:
        assert '{"batches": [1, 8], "ms": {"chain0": [' in server.log.read_text()
        chosen: set[str] = set()
        for prompt in [*KNOWN[:3], random_prompt(300, 4)]:
            drafted = server.generate(prompt, NEW)
            assert tokens(drafted) == tokens(deep_plain.generate(prompt, NEW))
            chosen |= set(counters(drafted)["shapes"])
            seeded = {**NEW, "temperature": 1.1, "sampling_seed": 5}
            assert tokens(server.generate(prompt, seeded)) == tokens(server.generate(prompt, {**seeded, **OFF}))
        assert chosen and chosen <= {"chain0", "chain1", "chain2", "chain3", "2,3,2"}
        assert server.idle_slots() == 4000
