"""Language models drafting for SmolLM2-135M in float32: itself, whose drafts are all kept, and most of its layers, in every mode (V1, P8)."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from server_process import CPU_ARGUMENTS, SPECULATIVE, STRICT, ServerProcess, counters, tokens
from tiny_lm import shaken
from transformers import AutoTokenizer

from longdraft.bench.demo_text import module_text, topic_text
from longdraft.models import demo_model_folder

STEPS, SLOTS = 3, 6000
NEW = {"max_new_tokens": 25, "ignore_eos": True}
SAMPLED = {"temperature": 0.8, "top_p": 0.95, "sampling_seed": 3}


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    """Prose and code, of one chunk of prefill and of two."""
    tokenizer = AutoTokenizer.from_pretrained(demo_model_folder())
    texts = [topic_text("naming"), module_text("textwrap.py"), topic_text("specialnames")]
    return [list(tokenizer(t, verbose=False).input_ids)[:n] for t, n in zip(texts, (90, 540, 30), strict=True)]


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """``longdraft serve``: the target is its own draft."""
    arguments = ["--draft", str(demo_model_folder()), "--steps", str(STEPS)]
    log = tmp_path_factory.mktemp("own") / "log"
    server = ServerProcess(demo_model_folder(), arguments, log, STRICT, SLOTS)
    server.command[1:3] = ["-m", "longdraft.cli", "serve"]
    server.command[:] = [w for w in server.command if w not in CPU_ARGUMENTS]
    with server:
        yield server


@pytest.fixture(scope="module")
def layers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """The target without its last layers drafts, on a server that keeps views, with the overlap schedule."""
    folder = tmp_path_factory.mktemp("layers")
    draft = shaken(demo_model_folder(), folder / "draft", 0.0, layers=24)
    settings = {
        "mode": "exact",
        "rounds": 2,
        "confirm_floor": 0.0,
        "view_tokens": 192,
        "view_recent": 64,
        "view_sinks": 16,
        "allow_lossy": True,
        "sparse_tokens": 96,
    }
    environment = {**STRICT, "LONGDRAFT_SETTINGS": json.dumps(settings)}
    arguments = [*SPECULATIVE[:-1], str(STEPS), "--speculative-draft-model-path", str(draft)]
    with ServerProcess(demo_model_folder(), arguments, folder / "log", environment, SLOTS, overlap=True) as server:
        yield server


def ask(server: ServerProcess, ids: list[int], mode: str, **params: Any) -> dict[str, Any]:
    return server.generate(ids, {**NEW, **params, "custom_params": {"longdraft": {"mode": mode}}})


def all_kept(answer: dict[str, Any]) -> bool:
    """Every verification gained as many tokens as it could, so that the last of each chain was missing in the draft's cache."""
    count = counters(answer)
    return bool(count["accepted"] == count["drafted"] and count["target_verifications"] == 24 // (STEPS + 1))


def test_what_drafts_for_itself_is_always_right(own: ServerProcess, prompts: list[list[int]]) -> None:
    """Cold, in chunks, from the prefix cache, in a second turn, side by side, and sampled."""
    plain = [tokens(ask(own, p, "off")) for p in prompts]
    with ThreadPoolExecutor(3) as pool:
        together = list(pool.map(lambda p: ask(own, p, "full"), prompts))
    turns = [[*p, *t, 198] for p, t in zip(prompts, plain, strict=True)]
    second = ask(own, turns[0], "full")
    assert [tokens(a) for a in together] == plain and all(all_kept(a) for a in together)
    assert (
        second["meta_info"]["cached_tokens"] == len(turns[0]) - 3
    )  # not its last token, which no step of the draft has read
    assert tokens(second) == tokens(ask(own, turns[0], "off")) and all_kept(second)
    sampled = ask(own, prompts[2], "full", **SAMPLED)
    assert tokens(sampled) == tokens(ask(own, prompts[2], "off", **SAMPLED)) != plain[2] and all_kept(sampled)


def test_an_abort_loses_no_slot(own: ServerProcess, prompts: list[list[int]]) -> None:
    for count, _ in enumerate(own.stream(prompts[1], NEW)):
        if count == 2:
            break
    assert own.idle_slots() == SLOTS and all_kept(ask(own, prompts[1], "full"))
    text = own.log.read_text()
    assert "Traceback" not in text and "leak" not in text


def test_most_of_its_layers_draft_in_every_mode(layers: ServerProcess, prompts: list[list[int]]) -> None:
    plain = tokens(ask(layers, prompts[1], "off"))
    full, exact, *near = (ask(layers, prompts[1], mode) for mode in ("full", "exact", "partial", "sparse"))
    assert tokens(full) == tokens(exact) == plain and [len(tokens(a)) for a in near] == [len(plain)] * 2
    assert all(counters(a)["partial_verifications"] > 0 for a in (exact, *near))
    assert counters(near[1])["verified_on_view"] == len(plain) - 1
    assert 0 < counters(full)["accepted"] < counters(full)["drafted"]
    text = layers.log.read_text()
    assert "Traceback" not in text and "drafter failed" not in text and "1 layers of the draft look ahead" in text
