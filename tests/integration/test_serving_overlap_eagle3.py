"""EAGLE-3 drafts under the overlap schedule while memory runs short (S3)."""

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from server_process import SPECULATIVE, STRICT, ServerProcess, counters, tokens
from tiny_draft import known_prompts

KNOWN = [p.tolist() for p in known_prompts()]
SLOTS = 1500


@pytest.fixture(scope="module")
def eagle3(deep_target: Path, deep_eagle3: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """An EAGLE-3 draft with little memory, so that requests are retracted and prefixes evicted."""
    arguments = [
        *SPECULATIVE,
        "--speculative-draft-model-path",
        str(deep_eagle3),
        "--schedule-conservativeness",
        "0.05",
    ]
    log = tmp_path_factory.mktemp("eagle3") / "log"
    with ServerProcess(deep_target, arguments, log, STRICT, max_total_tokens=SLOTS, overlap=True) as server:
        yield server


def test_eagle3_drafts_with_retractions_and_aborts(deep_plain: ServerProcess, eagle3: ServerProcess) -> None:
    assert eagle3.overlaps
    prompts = [random.Random(i).choices(range(256), k=60) for i in range(4)] + KNOWN[:4]
    params = {"max_new_tokens": 200, "ignore_eos": True}
    want = [tokens(deep_plain.generate(p, params)) for p in prompts]
    sampling = {"temperature": 0, **params}  # sent at once: one by one, on a busy machine, memory may do for them
    got = eagle3.post("/generate", {"input_ids": prompts, "sampling_params": sampling})
    assert [tokens(a) for a in got] == want
    assert sum(a["meta_info"]["num_retractions"] for a in got) > 0, "memory was meant to run short"
    assert sum(counters(a)["accepted"] for a in got) > 0

    def hang_up(number: int) -> None:
        for chunk in eagle3.stream(prompts[number % 8], {"max_new_tokens": 200, "ignore_eos": True}):
            if len(tokens(chunk)) > number:
                return

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(hang_up, range(24)))
    assert eagle3.idle_slots() == SLOTS
    answers = [eagle3.generate(prompts[0], params) for _ in range(2)]  # what was cached before may be evicted by now
    assert [tokens(a) for a in answers] == [want[0]] * 2 and answers[1]["meta_info"]["cached_tokens"] > 0
    assert "Traceback" not in eagle3.log.read_text()
