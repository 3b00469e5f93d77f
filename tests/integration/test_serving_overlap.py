"""The overlap schedule changes no token, no count and no end of a request, also beside requests for which it has to wait (V1, S3)."""

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from server_process import SPECULATIVE, STRICT, ServerProcess, counters, tokens
from tiny_draft import known_prompts

KNOWN = [p.tolist() for p in known_prompts()]


@pytest.fixture(scope="module")
def waiting(tiny_target: Path, tiny_draft: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """As ``drafted``, with every round processed before the next one."""
    arguments = [*SPECULATIVE, "--speculative-draft-model-path", str(tiny_draft)]
    with ServerProcess(tiny_target, arguments, tmp_path_factory.mktemp("waiting") / "log", STRICT) as server:
        yield server


KINDS: list[dict[str, Any]] = [
    {"ignore_eos": True},
    {"temperature": 0.7, "sampling_seed": 5},
    {"frequency_penalty": 0.3},
    {"temperature": 0.9, "top_p": 0.8, "top_k": 20, "sampling_seed": 9, "ignore_eos": True},
    {"stop": ["e"]},
    {"regex": r"[a-z]{20,40}"},
    {"custom_params": {"longdraft": {"mode": "off"}}, "ignore_eos": True},
    {"stop_token_ids": [40, 41, 42, 43, 44, 45, 46, 47]},
    {"min_new_tokens": 2},
    {"logit_bias": {"65": 2.0}},
]


def test_one_request_after_the_other_is_counted_alike(drafted: ServerProcess, waiting: ServerProcess) -> None:
    assert drafted.overlaps and not waiting.overlaps
    for number, kind in enumerate(KINDS):
        params = {"max_new_tokens": 50, **kind}
        got, want = (server.generate(KNOWN[number], params) for server in (drafted, waiting))
        assert tokens(got) == tokens(want), kind
        assert got["meta_info"]["finish_reason"] == want["meta_info"]["finish_reason"], kind
        assert counters(got) == counters(want), kind
    assert "Traceback" not in drafted.log.read_text(), "nothing failed on the way"


def test_every_kind_of_request_in_one_batch(drafted: ServerProcess, waiting: ServerProcess) -> None:
    """Rounds that wait and rounds that do not, in turns as requests come and go."""
    draw = random.Random(3)
    plans = [
        (KNOWN[i % len(KNOWN)], {"max_new_tokens": draw.randrange(2, 70), **KINDS[i % len(KINDS)]}) for i in range(40)
    ]

    def run(server: ServerProcess) -> list[Any]:
        with ThreadPoolExecutor(8) as pool:
            answers = list(pool.map(lambda plan: server.generate(*plan), plans))
        return [(tokens(a), a["meta_info"]["finish_reason"]) for a in answers]

    assert run(drafted) == run(waiting)
    assert drafted.idle_slots() == 40000


def test_logprobs_stay_with_their_tokens(plain: ServerProcess, drafted: ServerProcess) -> None:
    params = {"max_new_tokens": 30, "ignore_eos": True}
    want, got = (
        server.generate(KNOWN[4], params, return_logprob=True, top_logprobs_num=2)["meta_info"]
        for server in (plain, drafted)
    )
    assert [x[1] for x in got["output_token_logprobs"]] == [x[1] for x in want["output_token_logprobs"]]
    flat, mine = ([x[0] for row in a["output_top_logprobs"] for x in row] for a in (want, got))
    assert mine == pytest.approx(flat, abs=1e-4)
