"""Mode ``sparse`` with a language model that looks ahead: a copy of the target, which looks where the target will (P11, U7)."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from server_process import SPECULATIVE, STRICT, ServerProcess, counters, tokens
from tiny_lm import shaken
from transformers import AutoTokenizer

from longdraft.bench.demo_text import module_text
from longdraft.draft_models.sparse_recipe import LayerHeads, SparseRecipe
from longdraft.models import demo_model_folder

NEW = {"max_new_tokens": 24, "ignore_eos": True}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """Sets that the lookahead alone chooses, by two layers of the draft, of which one is of no use."""
    folder = tmp_path_factory.mktemp("sparse-lm")
    draft = shaken(demo_model_folder(), folder / "draft", 0.0, layers=24)
    looking = [LayerHeads(layer=18, heads=[0, 2]), LayerHeads(layer=20, heads=[0, 2, 5])]
    SparseRecipe(target=looking[0], draft=looking, lookahead=492, budget=512).save(folder / "recipe.json")
    given = {
        "mode": "sparse", "allow_lossy": True, "sparse_tokens": 128, "sparse_lookahead": 108, "view_selector": "dustin",
        "view_tokens": 128, "view_sinks": 16, "view_recent": 16, "rounds": 2, "confirm_floor": 0.0,
        "sparse_recipe": str(folder / "recipe.json"),
    }  # fmt: skip
    environment = {**STRICT, "LONGDRAFT_SETTINGS": json.dumps(given)}
    arguments = [*SPECULATIVE, "--speculative-draft-model-path", str(draft)]
    with ServerProcess(demo_model_folder(), arguments, folder / "log", environment, 6000, overlap=True) as running:
        yield running


def ask(server: ServerProcess, ids: list[int], mode: str) -> dict[str, Any]:
    return server.generate(ids, {**NEW, "custom_params": {"longdraft": {"mode": mode}}})


def test_sets_of_the_lookahead_serve(server: ServerProcess) -> None:
    """``exact`` is plain decoding, as ever; ``sparse`` says much the same from a quarter of the text."""
    prompt = list(
        AutoTokenizer.from_pretrained(demo_model_folder())(module_text("textwrap.py"), verbose=False).input_ids
    )[:500]
    plain, exact, sparse = (ask(server, prompt, mode) for mode in ("off", "exact", "sparse"))
    assert tokens(exact) == tokens(plain)
    assert counters(exact)["partial_verifications"] > 0 and counters(sparse)["partial_verifications"] > 0
    same = next((i for i, (a, b) in enumerate(zip(tokens(plain), tokens(sparse), strict=True)) if a != b), 24)
    assert same >= 8, f"{same} tokens are the same: the sets were meant to hold what matters"
    text = server.log.read_text()
    assert "2 layers of the draft look ahead" in text and "Traceback" not in text and "no set of tokens" not in text
