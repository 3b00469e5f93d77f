"""Mode ``sparse``, and ``exact`` on its sets, on a real server with a real model: SmolLM2-135M in float32 with its shipped LongSpec draft.

P1, P11, P12, U7, V1 and P8. One server, which chooses sets of tokens for all its modes: of 256 for ``sparse``, or of fewer where a request
asks for that, and of 128 for ``exact``.
"""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from server_process import SPECULATIVE, STRICT, HttpError, ServerProcess, counters, refused, tokens
from transformers import AutoTokenizer

from longdraft.bench.demo_text import module_text, topic_text
from longdraft.draft_models.sparse_recipe import LayerHeads, SparseRecipe
from longdraft.models import demo_model_folder, shipped_draft

NEW = {"max_new_tokens": 24, "ignore_eos": True}
SETTINGS: dict[str, Any] = {
    "mode": "sparse", "allow_lossy": True, "sparse_tokens": 256, "view_selector": "dustin", "view_tokens": 128,
    "view_sinks": 16, "view_recent": 16, "rounds": 2, "confirm_floor": 0.0,
}  # fmt: skip


def drafted() -> list[str]:
    return ["--speculative-draft-model-path", str(shipped_draft("smollm2-135m", "longspec"))]


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    """Code and prose: one that fits into a set, and two that do not."""
    tokenizer = AutoTokenizer.from_pretrained(demo_model_folder())
    texts, lengths = [topic_text("naming"), module_text("textwrap.py"), topic_text("specialnames")], (190, 420, 640)
    return [list(tokenizer(t, verbose=False).input_ids)[:n] for t, n in zip(texts, lengths, strict=True)]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """Heads and layers are those of the shipped calibration."""
    folder = tmp_path_factory.mktemp("sparse")
    recipe = shipped_draft("smollm2-135m", "longspec").with_name("sparse_longspec_smoke.json")
    given = {**SETTINGS, "sparse_recipe": str(recipe)}
    environment = {**STRICT, "LONGDRAFT_SETTINGS": json.dumps(given)}
    model = demo_model_folder()
    with ServerProcess(model, [*SPECULATIVE, *drafted()], folder / "log", environment, 9000, overlap=True) as running:
        yield running


def ask(server: ServerProcess, prompt: list[int], mode: str, own: dict[str, Any] | None = None, **params: Any) -> Any:
    entry = {"mode": mode, **(own or {})}
    return server.generate(prompt, {**NEW, **params, "custom_params": {"longdraft": entry}})


def flush(server: ServerProcess) -> None:
    server.idle_slots()  # nothing is flushed while something runs
    server.open("/flush_cache", {}).read()


def test_a_set_that_holds_everything_is_plain_decoding(server: ServerProcess, prompts: list[list[int]]) -> None:
    plain, sparse = (ask(server, prompts[0], mode) for mode in ("off", "sparse"))
    assert tokens(sparse) == tokens(plain)
    count = counters(sparse)
    assert count["mode"] == "sparse" and not count["verified_on_view"] and not count["partial_verifications"]
    small = counters(ask(server, prompts[0], "sparse", {"budget": 64}))
    assert small["verified_on_view"] == NEW["max_new_tokens"] - 1, "a smaller set of its own does not"


def test_exact_on_sets_of_tokens_is_plain_decoding(server: ServerProcess, prompts: list[list[int]]) -> None:
    """Although every round's set depends on what was drafted in it: greedy, and sampled by a seed."""
    confirmed = 0
    for number, prompt in enumerate(prompts):
        for sampling in ({}, {"temperature": 0.8, "top_p": 0.95, "sampling_seed": number}):
            plain, exact = (ask(server, prompt, mode, **sampling) for mode in ("off", "exact"))
            assert tokens(exact) == tokens(plain), f"prompt {number}, {sampling}"
            count = counters(exact)
            assert count["partial_verifications"] > 0 and not count["verified_on_view"]
            confirmed += count["confirmed"]
    assert confirmed > 30, f"{confirmed} confirmed: sets were meant to be of use"


def test_a_second_turn_behind_a_sparse_one_is_a_cold_run(server: ServerProcess, prompts: list[list[int]]) -> None:
    """P11, P12: with a refresh and without, nothing that a set computed is found by another request."""
    prompt = prompts[1]
    for own in ({"budget": 64}, {"budget": 64, "refresh": 8}):
        flush(server)
        first = ask(server, prompt, "sparse", own)
        count = counters(first)
        assert count["verified_on_view"] == NEW["max_new_tokens"] - 1
        assert (count["refreshes"] > 0) == ("refresh" in own)
        turn = [*prompt, *tokens(first), *prompts[0][:9]]
        second = ask(server, turn, "full")
        known = second["meta_info"]["cached_tokens"]
        assert len(prompt) <= known and (known > len(prompt)) == ("refresh" in own)
        flush(server)
        cold = ask(server, turn, "off")
        assert not cold["meta_info"]["cached_tokens"] and tokens(second) == tokens(cold)


def test_modes_share_a_batch(server: ServerProcess, prompts: list[list[int]]) -> None:
    asked = [(1, "exact"), (1, "sparse"), (2, "full"), (2, "sparse"), (0, "partial"), (2, "off")]
    plain = [tokens(ask(server, prompt, "off")) for prompt in prompts]
    with ThreadPoolExecutor(len(asked)) as pool:
        got = list(pool.map(lambda each: ask(server, prompts[each[0]], each[1]), asked))
    for (at, mode), answer in zip(asked, got, strict=True):
        assert counters(answer)["mode"] == mode and len(tokens(answer)) == NEW["max_new_tokens"]
        if mode not in ("sparse", "partial"):
            assert tokens(answer) == plain[at], mode
    log = server.log.read_text()
    assert "2 layers of the draft look ahead" in log and "Traceback" not in log


def test_what_a_request_cannot_have_is_refused(server: ServerProcess, prompts: list[list[int]]) -> None:
    for mode, own, said in (
        ("sparse", {"budget": 257}, "budget=257 is more than the server's --sparse-tokens 256"),
        ("exact", {"budget": 64}, "budget=64 is for mode sparse"),
        ("full", {"refresh": 64}, "refresh=64 is for modes partial and sparse"),
        ("sparse", {"refresh": 4096}, "write that or less"),
    ):
        with pytest.raises(HttpError, match=said) as error:
            ask(server, prompts[0], mode, own)
        assert error.value.status == 400


def test_a_sparse_server_must_be_allowed_and_its_recipe_must_fit(tmp_path: Path) -> None:
    log, model = tmp_path / "log", demo_model_folder()
    unasked = refused(model, log, *drafted(), mode="sparse")
    assert "mode='sparse' gives approximate output: set allow_lossy too" in unasked
    absent = refused(model, log, *drafted(), mode="sparse", allow_lossy=True, sparse_recipe="none.json")
    assert "sparse recipe 'none.json' cannot be read" in absent and "longdraft calibrate" in absent
    target = LayerHeads(layer=20, heads=[9])
    SparseRecipe(target=target, lookahead=0).save(recipe := tmp_path / "recipe.json")
    unfit = refused(model, log, *drafted(), mode="sparse", allow_lossy=True, sparse_recipe=str(recipe))
    assert "not head 9" in unfit and "9 query heads" in unfit
