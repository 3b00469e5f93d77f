"""A language model as the draft: plain decoding's tokens in the reference's verifications, whatever the cache does (D2, D7, S3).

The draft is the target itself, shaken a little, with a cache of another shape and a padded vocabulary whose padding it likes best. A draft key that is wrong or missing
anywhere shows in the number of verifications.
"""

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from server_process import SPECULATIVE, STRICT, ServerProcess, counters, refused, tokens
from tiny_draft import known_prompts
from tiny_lm import Reference, shaken
from transformers import AutoConfig, AutoTokenizer

KNOWN = [p.tolist() for p in known_prompts()]
OFF = {"custom_params": {"longdraft": {"mode": "off"}}}
SLOTS, STEPS = 1500, 4


@pytest.fixture(scope="module")
def reference(deep_target: Path, deep_lm: Path) -> Reference:
    return Reference(deep_target, deep_lm, STEPS)


@pytest.fixture(scope="module")
def drafted(deep_target: Path, deep_lm: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """Little memory, so that requests are retracted and prefixes evicted, and the overlap schedule; every step checks that no slot is lost."""
    arguments = [*SPECULATIVE, "--speculative-draft-model-path", str(deep_lm), "--schedule-conservativeness", "0.05"]
    log = tmp_path_factory.mktemp("served") / "log"
    with ServerProcess(deep_target, arguments, log, STRICT, max_total_tokens=SLOTS, overlap=True) as server:
        yield server


def free(new_tokens: int, **params: Any) -> dict[str, Any]:
    return {"max_new_tokens": new_tokens, "ignore_eos": True, **params}


def same(answer: dict[str, Any], want: tuple[list[int], int]) -> None:
    """The tokens, and in how many verifications they were won."""
    text, verifications = want
    assert tokens(answer) == text
    assert counters(answer)["target_verifications"] == verifications
    assert counters(answer)["accepted"] + verifications == len(text) - 1


def random_prompt(length: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(256), k=length)


def test_retractions_aborts_and_a_flush(drafted: ServerProcess, reference: Reference) -> None:
    """First in the file: SGLang admits fewer requests for a while once it had to retract one."""
    prompts = [random_prompt(100, i) for i in range(8)]
    answers = drafted.post("/generate", {"input_ids": prompts, "sampling_params": {"temperature": 0, **free(180)}})
    assert sum(a["meta_info"]["num_retractions"] for a in answers) > 0, "memory was meant to run short"
    assert [tokens(a) for a in answers] == [reference(p, 180)[0] for p in prompts]

    def hang_up(prompt: list[int]) -> None:
        for count, _ in enumerate(drafted.stream(prompt, free(100))):
            if count == 3:
                return

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(hang_up, [*prompts[:4], *KNOWN[:4]]))
    assert drafted.idle_slots() == SLOTS
    drafted.open("/flush_cache", {}).read()
    for prompt in (KNOWN[0], random_prompt(1300, 77)):  # the second needs nearly every slot
        same(drafted.generate(prompt, free(32)), reference(prompt, 32))
    text = drafted.log.read_text()
    assert drafted.alive and "leak" not in text and "could not follow" not in text and "drafter failed" not in text


def test_the_second_cache_has_the_slots_of_the_first_and_is_counted(
    drafted: ServerProcess, deep_target: Path, deep_lm: Path
) -> None:
    """Said before SGLang sizes its pool: keys and values of all layers of the draft, in layers of the target's cache."""
    lines = drafted.log.read_text().splitlines()
    made = [at for at, line in enumerate(lines) if "KV Cache is allocated" in line]
    assert len(made) == 2 and all(f"#tokens: {SLOTS}" in lines[at] for at in made)
    own, config = AutoConfig.from_pretrained(deep_lm), AutoConfig.from_pretrained(deep_target)
    size = own.num_hidden_layers * 2 * own.num_key_value_heads * own.head_dim * 4
    layers = own.num_hidden_layers * own.num_key_value_heads // config.num_key_value_heads
    assert layers > config.num_hidden_layers
    said = f"keeps {size} bytes beside every cached token, room for {layers} layers"
    assert any(said in line for line in lines[: made[0]])


def test_drafts_are_kept_as_the_reference_keeps_them(drafted: ServerProcess, reference: Reference) -> None:
    kept = rejected = 0
    for prompt in KNOWN[:4]:
        got = drafted.generate(prompt, free(64))
        same(got, reference(prompt, 64))
        kept += counters(got)["accepted"]
        rejected += counters(got)["drafted"] - counters(got)["accepted"]
    assert kept > 150 and rejected > 40, "the draft was meant to be right often and wrong often"


@pytest.mark.parametrize("length", [1, 2, 700, 1300])
def test_chunks_and_prefix_hits_change_no_draft(drafted: ServerProcess, reference: Reference, length: int) -> None:
    """The second time all of the prompt but its last token comes from the cache, the draft's keys with it."""
    prompt = random_prompt(length, length)
    for cached in (0, length - 1):
        got = drafted.generate(prompt, free(32))
        assert cached <= got["meta_info"]["cached_tokens"] < cached + 3  # a random prompt may begin as another did
        same(got, reference(prompt, 32))


def test_conversations_and_forks_share_both_caches(drafted: ServerProcess, reference: Reference) -> None:
    """A prefix that ends in another request's answer, whose last token is not handed on, and one that ends inside its prompt."""
    first = tokens(drafted.generate(KNOWN[5], free(40)))
    text = KNOWN[5] + first
    for prompt, shared in (([*text, 65], len(text) - 1), (KNOWN[5][:20] + KNOWN[6], 20), (text[:-31], len(text) - 32)):
        got = drafted.generate(prompt, free(32))
        assert shared - 1 <= got["meta_info"]["cached_tokens"] <= shared
        same(got, reference(prompt, 32))


def test_an_undrafted_answer_is_no_prefix_but_its_prompt_is(drafted: ServerProcess, reference: Reference) -> None:
    """Alone it runs without the draft, whose keys of the answer are missing then; beside others the draft runs along, which proves nothing."""
    undrafted = drafted.generate(KNOWN[7], free(40, **OFF))
    assert tokens(undrafted) == reference(KNOWN[7], 40)[0]
    assert counters(undrafted)["drafted"] == 0
    prompt = KNOWN[7] + tokens(undrafted)[:30]
    got = drafted.generate(prompt, free(32))
    assert got["meta_info"]["cached_tokens"] == len(KNOWN[7])
    same(got, reference(prompt, 32))


def test_a_batch_of_all_kinds(drafted: ServerProcess, reference: Reference) -> None:
    prompts = [random_prompt(n, 90 + n) for n in (3, 130, 620)] + KNOWN[:4]
    with ThreadPoolExecutor(8) as pool:
        answers = list(
            pool.map(lambda i: drafted.generate(prompts[i], free(48, **(OFF if i % 3 == 1 else {}))), range(7))
        )
    for i, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        assert tokens(answer) == reference(prompt, 48)[0]
        if i % 3 != 1:
            same(answer, reference(prompt, 48))


CONTROLS: list[dict[str, Any]] = [
    {"frequency_penalty": 0.4, "presence_penalty": 0.4},
    {"regex": r"(ab|cd){3,9}[0-9]{2}", "ignore_eos": False},
    {"temperature": 0.6, "top_p": 0.9, "top_k": 20, "sampling_seed": 5},
    {"stop": ["no such text"]},
]


@pytest.mark.parametrize("params", CONTROLS, ids="+".join)
def test_controls_bend_the_target_not_the_draft(drafted: ServerProcess, params: dict[str, Any]) -> None:
    """Most of them are rounds on the host; the last is greedy decoding there."""
    kept = 0
    for prompt in KNOWN[:3]:
        got = drafted.generate(prompt, free(48, **params))
        assert tokens(got) == tokens(drafted.generate(prompt, free(48, **params, **OFF)))
        kept += counters(got)["accepted"]
    assert kept > (60 if params.keys() & {"stop", "temperature"} else 0) or "regex" in params


def test_rounds_on_the_host_and_on_the_device_keep_the_same(drafted: ServerProcess, reference: Reference) -> None:
    """A request that needs its text joins and leaves a batch, whose rounds move to the host and back."""
    stop = {"stop": ["no such text"]}

    def ask(i: int) -> dict[str, Any]:
        return drafted.generate(KNOWN[i], free(90 if i < 2 else 25, **(stop if i >= 2 else {})))

    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(ask, range(4)))
    for i, answer in enumerate(answers):
        same(answer, reference(KNOWN[i], 90 if i < 2 else 25))


def test_another_vocabulary_ends_the_start_in_one_line(deep_target: Path, deep_lm: Path, tmp_path: Path) -> None:
    other = shaken(deep_lm, tmp_path / "other", 0.0)
    tokenizer = AutoTokenizer.from_pretrained(deep_lm)
    tokenizer.add_tokens(["<one more>"])
    tokenizer.save_pretrained(other)
    text = (other / "tokenizer.json").read_text()
    (other / "tokenizer.json").write_text(text.replace('"a"', '"<a>"', 1))
    line = refused(deep_target, tmp_path / "log", "--speculative-draft-model-path", str(other))
    assert (
        "is '<a>', of the target's 'a' (1 of 288 differ)" in line
        and "give a draft that has the target's tokenizer" in line
    )
