"""Mode ``exact`` on a real model is plain decoding, greedy and seeded, whatever chooses its views and however small they are (V1, P8).

SmolLM2-135M in float32 with its shipped EAGLE-3 draft, and drafting for itself. ``make test-long`` has every selector and budget on
fifty prompts of up to 8K tokens.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from choosing_pairs import PAIRS
from server_process import SPECULATIVE, STRICT, HttpError, ServerProcess, counters, tokens
from transformers import AutoTokenizer

from longdraft.bench.demo_text import module_text, topic_text
from longdraft.models import demo_model_folder, shipped_draft

NEW = {"max_new_tokens": 24, "ignore_eos": True}
SAMPLED = {"temperature": 0.8, "top_p": 0.95}


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    """Code and prose, from less than the largest view to well beyond it."""
    tokenizer = AutoTokenizer.from_pretrained(demo_model_folder())
    texts, lengths = [topic_text("naming"), module_text("textwrap.py"), topic_text("specialnames")], (230, 720, 1500)
    return [list(tokenizer(t, verbose=False).input_ids)[:n] for t, n in zip(texts, lengths, strict=True)]


def serving(log: Path, arguments: list[str], **settings: Any) -> ServerProcess:
    """SmolLM2 under LONGDRAFT with the overlap schedule."""
    given = {"mode": "exact", "rounds": 2, "confirm_floor": 0.0, **settings}
    environment = {**STRICT, "LONGDRAFT_SETTINGS": json.dumps(given)}
    return ServerProcess(demo_model_folder(), [*SPECULATIVE, *arguments], log, environment, 9000, overlap=True)


@pytest.fixture(scope="module")
def choosing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """Every view is chosen by the next selector and budget."""
    draft = ["--speculative-draft-model-path", str(shipped_draft("smollm2-135m", "eagle3"))]
    server = serving(tmp_path_factory.mktemp("choosing") / "log", draft, view_tokens=1024)
    server.command[1:3] = [str(Path(__file__).with_name("choosing_launch.py"))]
    with server:
        yield server


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """The target drafts for itself on the blocks that matter least."""
    smallest = {"view_selector": "worst", "view_tokens": 64, "view_sinks": 16, "view_recent": 32}
    with serving(tmp_path_factory.mktemp("alone") / "log", [], self_draft=True, **smallest) as server:
        yield server


def in_modes(server: ServerProcess, prompt: list[int], sampling: dict[str, Any]) -> tuple[list[int], dict[str, Any]]:
    """What mode ``off`` says, and the whole answer of mode ``exact``."""
    params = [{**NEW, **sampling, "custom_params": {"longdraft": {"mode": name}}} for name in ("off", "exact")]
    plain, exact = (server.generate(prompt, each) for each in params)
    return tokens(plain), exact


def test_every_selector_and_budget_gives_plain_decodings_tokens(
    choosing: ServerProcess, prompts: list[list[int]]
) -> None:
    confirmed, texts = 0, set()
    for number, prompt in enumerate(prompts):
        for sampling in ({}, {**SAMPLED, "sampling_seed": number}):
            plain, exact = in_modes(choosing, prompt, sampling)
            assert tokens(exact) == plain, f"prompt {number}, {sampling}"
            count = counters(exact)
            assert count["mode"] == "exact" and count["partial_verifications"] > 0
            confirmed += count["confirmed"]
            texts.add(tuple(plain))
    assert len(texts) == 2 * len(prompts), "noise was meant to change what is said"
    assert confirmed > 20, f"{confirmed} confirmed: views were meant to be of use"
    log = choosing.log.read_text()
    missing = [(name, b.tokens) for name, b in PAIRS if f"view chosen by {name} of {b.tokens} tokens" not in log]
    assert not missing and "Traceback" not in log


def test_a_target_that_drafts_for_itself_on_what_matters_least_says_the_same(
    alone: ServerProcess, prompts: list[list[int]]
) -> None:
    for sampling in ({}, {**SAMPLED, "sampling_seed": 7}):
        plain, exact = in_modes(alone, prompts[1], sampling)
        assert tokens(exact) == plain
        assert counters(exact)["partial_verifications"] >= 2 * counters(exact)["full_verifications"] - 1


def test_nothing_approximate_is_served_where_the_operator_does_not_allow_it(
    alone: ServerProcess, prompts: list[list[int]]
) -> None:
    for name in ("partial", "sparse"):
        with pytest.raises(HttpError, match=f"mode='{name}' gives approximate output.* --allow-lossy") as error:
            alone.generate(prompts[0], {**NEW, "custom_params": {"longdraft": {"mode": name}}})
        assert error.value.status == 400
