"""Pages of 16 slots change no token, whatever shares, ends or loses them, for chains, trees and all kinds of drafts (float32; S3).

Over a float8 cache the tokens are those of plain decoding over one.
"""

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from server_process import CPU_ARGUMENTS, STRICT, ServerProcess, counters, tokens
from tiny_draft import known_prompts

KNOWN = [p.tolist() for p in known_prompts()]
NEW = {"max_new_tokens": 48, "ignore_eos": True}
PAGE, SLOTS = 16, 1600
DRAFTS = {"longspec-chain": [], "eagle3-tree": ["--tree", "eagle2:4,4,16"], "lm-chain": []}


def drafting(target: Path, draft: Path, folder: Path, arguments: list[str], slots: int = 20000) -> ServerProcess:
    """``longdraft serve``, every step of which checks that no slot is lost."""
    server = ServerProcess(target, ["--draft", str(draft), *arguments], folder / "log", STRICT, max_total_tokens=slots)
    server.command[1:3] = ["-m", "longdraft.cli", "serve"]
    server.command[:] = [w for w in server.command if w not in CPU_ARGUMENTS]
    return server


@pytest.fixture(scope="module", params=DRAFTS)
def paged(request: Any, deep_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """Little memory, so that requests are retracted and prefixes evicted."""
    draft = request.getfixturevalue(f"deep_{request.param.split('-')[0]}")
    more = [*DRAFTS[request.param], "--page-size", str(PAGE), "--schedule-conservativeness", "0.05"]
    with drafting(deep_target, draft, tmp_path_factory.mktemp(request.param), more, SLOTS) as server:
        yield server


def random_prompt(length: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(256), k=length)


def test_retractions_and_aborts_change_nothing_and_lose_no_page(
    paged: ServerProcess, deep_plain: ServerProcess
) -> None:
    """First in the file: SGLang admits fewer requests for a while once it had to retract one."""
    prompts = [random_prompt(100, i) for i in range(8)]
    want = [tokens(deep_plain.generate(p, {**NEW, "max_new_tokens": 180})) for p in prompts]
    sampling = {"temperature": 0, **NEW, "max_new_tokens": 180}
    answers = paged.post("/generate", {"input_ids": prompts, "sampling_params": sampling})
    assert [tokens(a) for a in answers] == want
    assert sum(a["meta_info"]["num_retractions"] for a in answers) > 0, "memory was meant to run short"

    def hang_up(at: int) -> None:
        for count, _ in enumerate(paged.stream(prompts[at], NEW)):
            if count == at:
                return

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(hang_up, range(4)))
    assert paged.idle_slots() == SLOTS and paged.alive and "leak" not in paged.log.read_text()


@pytest.mark.parametrize("length", [PAGE - 1, PAGE, PAGE + 1, 700])
def test_chunks_and_shared_pages_change_no_token(paged: ServerProcess, deep_plain: ServerProcess, length: int) -> None:
    """The second time every whole page of the prompt but its last token comes from the cache."""
    prompt = random_prompt(length, length)
    want = tokens(deep_plain.generate(prompt, NEW))
    for cached in (0, (length - 1) // PAGE * PAGE):
        got = paged.generate(prompt, NEW)
        assert tokens(got) == want
        assert got["meta_info"]["cached_tokens"] == cached


def test_conversations_and_forks_share_whole_pages(paged: ServerProcess, deep_plain: ServerProcess) -> None:
    """A prefix that ends in another request's answer, inside a page of its prompt, and inside a page of the answer."""
    first = tokens(paged.generate(KNOWN[5], NEW))
    for prompt, shared in ((KNOWN[5] + first + [65], 71), (KNOWN[5][:20] + KNOWN[6], 20), (KNOWN[5] + first[:9], 32)):
        got = paged.generate(prompt, NEW)
        assert got["meta_info"]["cached_tokens"] == shared // PAGE * PAGE
        assert tokens(got) == tokens(deep_plain.generate(prompt, NEW))


def test_a_batch_of_changing_size_keeps_drafts(paged: ServerProcess, deep_plain: ServerProcess) -> None:
    prompts = [random_prompt(n, 90 + n) for n in (3, 130, 420)] + KNOWN[:5]
    want = [tokens(deep_plain.generate(p, NEW)) for p in prompts]
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda p: paged.generate(p, NEW), prompts))
    assert [tokens(a) for a in answers] == want
    assert sum(counters(a)["accepted"] for a in answers[3:]) > 40, "the draft learned these prompts"
    assert paged.idle_slots() == SLOTS and paged.alive


EIGHT = ["--kv-cache-dtype", "fp8_e4m3"]


@pytest.fixture(scope="module")
def plain_eight(deep_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with ServerProcess(deep_target, EIGHT, tmp_path_factory.mktemp("plain-eight") / "log") as server:
        yield server


@pytest.fixture(scope="module")
def eight(deep_target: Path, deep_longspec: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A draft that reads the float8 pool."""
    more = [*EIGHT, "--page-size", str(PAGE)]
    with drafting(deep_target, deep_longspec, tmp_path_factory.mktemp("eight"), more) as server:
        yield server


def test_a_float8_cache_gives_what_plain_decoding_over_one_gives(
    eight: ServerProcess, plain_eight: ServerProcess, deep_plain: ServerProcess
) -> None:
    """Alone, from the prefix cache and in a batch."""
    prompts = [*KNOWN[:4], *(random_prompt(n, n) for n in (1, 40, 700))]
    want = [tokens(plain_eight.generate(p, NEW)) for p in prompts]
    assert want != [tokens(deep_plain.generate(p, NEW)) for p in prompts], "the rounding was meant to show"
    for _ in range(2):
        answers = [eight.generate(p, NEW) for p in prompts]
        assert [tokens(a) for a in answers] == want
    assert sum(counters(a)["accepted"] for a in answers[:4]) > 0, "the draft learned texts that begin as these"
    with ThreadPoolExecutor(7) as pool:
        assert list(pool.map(lambda p: tokens(eight.generate(p, NEW)), prompts)) == want
    text = eight.log.read_text()
    assert eight.alive and "leak" not in text and "failed" not in text
