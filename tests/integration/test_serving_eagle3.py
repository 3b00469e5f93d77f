"""``longdraft serve`` with an EAGLE-3 draft: plain decoding's tokens and the reference decoder's acceptance, whatever the cache does."""

import random
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from server_process import CPU_ARGUMENTS, STRICT, HttpError, ServerProcess, counters, tokens
from tiny_draft import known_prompts
from transformers import AutoModelForCausalLM

from longdraft.draft_models.checkpoint import load_draft
from longdraft.draft_models.eagle3 import Eagle3Draft
from longdraft.draft_models.reference_decode import Decoded, speculative_decode
from longdraft.draft_models.target import TargetSpec

KNOWN = [p.tolist() for p in known_prompts()]
OFF = {"custom_params": {"longdraft": {"mode": "off"}}}
SLOTS, STEPS = 1500, 4


class Reference:
    """The same target and draft without a server."""

    def __init__(self, target: Path, draft: Path) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(target).eval()
        loaded = load_draft(draft, TargetSpec.from_config(self.model.config))
        assert isinstance(loaded, Eagle3Draft)
        self.draft = loaded.bind(self.model.get_input_embeddings().weight)
        self.decode = cache(self._decode)

    def _decode(self, ids: tuple[int, ...], new_tokens: int) -> Decoded:
        return speculative_decode(self.model, self.draft, ids, new_tokens, STEPS)

    def __call__(self, ids: list[int], new_tokens: int) -> Decoded:
        return self.decode(tuple(ids), new_tokens)


@pytest.fixture(scope="module")
def folders(deep_target: Path, deep_eagle3: Path) -> tuple[Path, Path]:
    return deep_target, deep_eagle3


@pytest.fixture(scope="module")
def reference(folders: tuple[Path, Path]) -> Reference:
    return Reference(*folders)


@pytest.fixture(scope="module")
def eagle3(folders: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """Little memory, so that requests are retracted and prefixes evicted; every step checks that no slot is lost."""
    target, draft = folders
    arguments = [
        "--draft",
        str(draft),
        "--steps",
        str(STEPS),
        "--enable-metrics",
        "--schedule-conservativeness",
        "0.05",
    ]
    log = tmp_path_factory.mktemp("served") / "log"
    server = ServerProcess(target, arguments, log, STRICT, max_total_tokens=SLOTS)
    server.command[1:3] = ["-m", "longdraft.cli", "serve"]
    server.command[:] = [w for w in server.command if w not in CPU_ARGUMENTS]
    with server:
        yield server


def free(new_tokens: int, **params: Any) -> dict[str, Any]:
    return {"max_new_tokens": new_tokens, "ignore_eos": True, **params}


def same(answer: dict[str, Any], want: Decoded) -> None:
    """The tokens, and in how many verifications they were won."""
    assert tokens(answer) == want.tokens
    assert counters(answer)["target_verifications"] == want.stats.verifications
    assert counters(answer)["accepted"] + want.stats.verifications == len(want.tokens) - 1


def random_prompt(length: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(256), k=length)


def test_drafts_are_kept_as_the_reference_decoder_keeps_them(eagle3: ServerProcess, reference: Reference) -> None:
    kept = rejected = 0
    for prompt in KNOWN[:4]:
        got = eagle3.generate(prompt, free(64))
        same(got, reference(prompt, 64))
        kept += counters(got)["accepted"]
        rejected += counters(got)["drafted"] - counters(got)["accepted"]
    assert kept > 60 and rejected > 0, "the draft learned these prompts, not by heart"


def flush(server: ServerProcess) -> None:
    """Refused as long as a request runs, and one whose client went away is noticed a little later."""
    for attempt in range(50):
        try:
            server.open("/flush_cache", {}).read()
        except HttpError:
            assert attempt < 49
            time.sleep(0.2)
        else:
            return


def test_retractions_aborts_and_a_flush(eagle3: ServerProcess, reference: Reference) -> None:
    """Early in the file: SGLang admits fewer requests for a while once it had to retract one."""
    prompts = [random_prompt(100, i) for i in range(8)]
    answers = eagle3.post("/generate", {"input_ids": prompts, "sampling_params": {"temperature": 0, **free(180)}})
    assert sum(a["meta_info"]["num_retractions"] for a in answers) > 0, "memory was meant to run short"
    assert [tokens(a) for a in answers] == [reference(p, 180).tokens for p in prompts]

    def hang_up(prompt: list[int]) -> None:
        for count, _ in enumerate(eagle3.stream(prompt, free(100))):
            if count == 3:
                return

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(hang_up, [*prompts[:4], *KNOWN[:4]]))
    flush(eagle3)
    for prompt in (KNOWN[0], random_prompt(1300, 77)):  # the second needs nearly every slot
        same(eagle3.generate(prompt, free(32)), reference(prompt, 32))
    text = eagle3.log.read_text()
    assert eagle3.alive and "leak" not in text and "could not follow" not in text and "drafter failed" not in text


def test_more_steps_than_were_trained_are_warned_of(eagle3: ServerProcess) -> None:
    assert "4 draft steps are served, the draft was trained for 3" in eagle3.log.read_text()


@pytest.mark.parametrize("length", [1, 2, 700, 1300])
def test_chunks_and_prefix_hits_change_no_draft(eagle3: ServerProcess, reference: Reference, length: int) -> None:
    """The second time all of the prompt but its last token comes from the cache, the draft's rows with it."""
    prompt = random_prompt(length, length)
    for cached in (0, length - 1):
        got = eagle3.generate(prompt, free(32))
        assert cached <= got["meta_info"]["cached_tokens"] < cached + 3  # a random prompt may begin as another did
        same(got, reference(prompt, 32))


def test_conversations_and_forks_share_their_rows(eagle3: ServerProcess, reference: Reference) -> None:
    """A prefix that ends in another request's answer, and one that ends inside its prompt."""
    first = tokens(eagle3.generate(KNOWN[5], free(40)))
    for prompt, shared in ((KNOWN[5] + first + [65], 63), (KNOWN[5][:20] + KNOWN[6], 20), (KNOWN[5] + first[:9], 32)):
        got = eagle3.generate(prompt, free(32))
        assert got["meta_info"]["cached_tokens"] == shared
        same(got, reference(prompt, 32))


def test_undrafted_requests_leave_rows_for_others(eagle3: ServerProcess, reference: Reference) -> None:
    undrafted = eagle3.generate(KNOWN[7], free(40, **OFF))
    assert tokens(undrafted) == reference(KNOWN[7], 40).tokens
    assert counters(undrafted)["drafted"] == 0
    prompt = KNOWN[7] + tokens(undrafted)[:30]
    got = eagle3.generate(prompt, free(32))
    assert got["meta_info"]["cached_tokens"] == len(prompt) - 1
    same(got, reference(prompt, 32))


def test_a_batch_of_all_kinds(eagle3: ServerProcess, reference: Reference) -> None:
    prompts = [random_prompt(n, 90 + n) for n in (3, 130, 620)] + KNOWN[:4]
    with ThreadPoolExecutor(8) as pool:
        answers = list(
            pool.map(lambda i: eagle3.generate(prompts[i], free(48, **(OFF if i % 3 == 1 else {}))), range(7))
        )
    for i, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        assert tokens(answer) == reference(prompt, 48).tokens
        if i % 3 != 1:
            same(answer, reference(prompt, 48))


def test_streaming_sessions_and_logprobs(eagle3: ServerProcess, reference: Reference) -> None:
    seen: list[int] = []
    for chunk in eagle3.stream(KNOWN[8], free(40)):
        assert tokens(chunk)[: len(seen)] == seen
        seen = tokens(chunk)
    assert seen == reference(KNOWN[8], 40).tokens
    session, rid, text = eagle3.post("/open_session", {"capacity_of_str_len": 4000}), None, []
    for turn in (8, 9):
        answer = eagle3.generate(KNOWN[turn], free(12), session_params={"id": session, "rid": rid})
        rid, text = answer["meta_info"]["id"], text + KNOWN[turn]
        assert tokens(answer) == reference(text, 12).tokens
        text = text + tokens(answer)
    eagle3.open("/close_session", {"session_id": session}).read()
    body = {"return_logprob": True, "top_logprobs_num": 2, "logprob_start_len": 0}
    off, on = (eagle3.generate(random_prompt(60, 4), free(20, **p), **body)["meta_info"] for p in (OFF, {}))
    for key in ("input_token_logprobs", "output_token_logprobs"):
        assert [x[1] for x in on[key]] == [x[1] for x in off[key]]
        assert [x[0] or 0 for x in on[key]] == pytest.approx([x[0] or 0 for x in off[key]], abs=1e-4)


CONTROLS: list[dict[str, Any]] = [
    {"frequency_penalty": 0.4, "presence_penalty": 0.4},
    {"regex": r"(ab|cd){3,9}[0-9]{2}", "ignore_eos": False},
    {"temperature": 0.6, "top_p": 0.9, "top_k": 20, "sampling_seed": 5},
]


@pytest.mark.parametrize("params", CONTROLS, ids="+".join)
def test_controls_bend_the_target_not_the_draft(eagle3: ServerProcess, params: dict[str, Any]) -> None:
    kept = 0
    for prompt in KNOWN[:3]:
        got = eagle3.generate(prompt, free(48, **params))
        assert tokens(got) == tokens(eagle3.generate(prompt, free(48, **params, **OFF)))
        kept += counters(got)["accepted"]
    assert kept > 0 or "regex" in params
