"""Every family of targets serves the tokens of transformers' greedy decoding, with drafts of all kinds (float32; V1)."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from server_process import CPU_ARGUMENTS, STRICT, ServerProcess, counters, tokens
from tiny import tiny_model, tiny_moe
from tiny_draft import known_prompts, train_tiny_draft, train_tiny_eagle3
from tiny_lm import shaken_lm
from transformers import AutoModelForCausalLM

from longdraft.draft_models.reference_decode import greedy_decode

KNOWN = [p.tolist() for p in known_prompts()]
SERVED: dict[str, tuple[str, Any, list[str]]] = {
    "qwen2-longspec": ("qwen2", train_tiny_draft, []),
    "qwen3-longspec": ("qwen3", train_tiny_draft, ["--tree", "4,8,4"]),
    "qwen3-lm": ("qwen3", shaken_lm, []),
    "qwen3_moe-eagle3": ("qwen3_moe", train_tiny_eagle3, ["--tree", "eagle2:4,4,16", "--page-size", "16"]),
}


@pytest.fixture(scope="module", params=SERVED)
def served(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, ServerProcess]]:
    """The target in transformers, and the server with a draft that has seen its text."""
    family, train, more = SERVED[request.param]
    folder = tmp_path_factory.mktemp(request.param)
    target = tiny_moe(folder / "t") if family == "qwen3_moe" else tiny_model(family, folder / "t", num_hidden_layers=5)
    arguments = ["--draft", str(train(target, folder / "draft")), *more]
    server = ServerProcess(target, arguments, folder / "log", STRICT)
    server.command[1:3] = ["-m", "longdraft.cli", "serve"]
    server.command[:] = [w for w in server.command if w not in CPU_ARGUMENTS]
    with server:
        yield AutoModelForCausalLM.from_pretrained(target).eval(), server


def test_tokens_are_those_of_transformers(served: tuple[Any, ServerProcess]) -> None:
    """Alone, twice, so that the prefix comes from the cache, and in one batch."""
    model, server = served
    params = {"max_new_tokens": 48, "ignore_eos": True}
    want = [greedy_decode(model, prompt, 48) for prompt in KNOWN[:5]]
    for _ in range(2):
        answers = [server.generate(prompt, params) for prompt in KNOWN[:5]]
        assert [tokens(a) for a in answers] == want
    assert sum(counters(a)["accepted"] for a in answers) > 40, "the draft learned these prompts"
    with ThreadPoolExecutor(5) as pool:
        assert list(pool.map(lambda p: tokens(server.generate(p, params)), KNOWN[:5])) == want
    text = server.log.read_text()
    assert server.alive and "failed" not in text and "could not" not in text
