"""Every round of mode ``sparse`` by the history alone equals an eager simulation that is fed its tokens: SmolLM2-135M in float32.

The simulation computes with transformers, keeps keys and values as the sets computed them, and knows of each round only how many tokens
it returned. A history's row that is one off, is that of a draft that was refused, or is a round old, and scores that leave out tokens
that were generated, all choose other sets, whose tokens soon are others too.

Legend: H query heads, D head size, N cached tokens, T tokens of a round.
"""

import json
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from server_process import SPECULATIVE, STRICT, ServerProcess
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from longdraft.bench.demo_text import module_text, topic_text
from longdraft.draft_models.sparse_recipe import LayerHeads, SparseRecipe
from longdraft.models import demo_model_folder, shipped_draft

BUDGET, SINKS, WINDOW, NEW = 64, 4, 16, 40
HISTORY = LayerHeads(layer=22, heads=[0, 2, 4, 7])
LEAST = torch.finfo(torch.float32).min


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("rounds")
    SparseRecipe(target=HISTORY, lookahead=0, budget=BUDGET).save(folder / "recipe.json")
    given = {"mode": "sparse", "allow_lossy": True, "sparse_tokens": 2 * BUDGET, "sparse_recipe": str(folder / "recipe.json")}  # fmt: skip
    arguments = [*SPECULATIVE, "--speculative-draft-model-path", str(shipped_draft("smollm2-135m", "longspec"))]
    environment = {**STRICT, "LONGDRAFT_SETTINGS": json.dumps(given)}
    model = demo_model_folder()
    with ServerProcess(model, arguments, folder / "log", environment, 4000, overlap=True) as running:
        yield running


def served(server: ServerProcess, prompt: list[int]) -> tuple[list[int], list[int], int]:
    """Tokens, how many of them every round returned, and how many a set alone verified.

    Chunks may be put together on their way; their counters are all there, but for those of the round that ends the request.
    """
    own = {"longdraft": {"mode": "sparse", "budget": BUDGET}}
    *_, last = server.stream(prompt, {"max_new_tokens": NEW, "ignore_eos": True, "custom_params": own})
    counted = last["meta_info"]["longdraft"]
    assert {each["rounds"] for each in counted} == set(range(counted[-1]["rounds"] + 1)), "a chunk is of one round"
    ends = sorted({1 + each["rounds"] + each["accepted"] for each in counted} | {NEW})
    return list(last["output_ids"]), [b - a for a, b in pairwise(ends)], counted[-1]["verified_on_view"]


class Simulation:
    """A request's cache, and the query of the newest cached token in the history's layer."""

    def __init__(self, model: Any, prompt: list[int]) -> None:
        self.model, self.cache, self.length = model, DynamicCache(), 0
        self.attention = model.model.layers[HISTORY.layer].self_attn
        self.hook = self.attention.register_forward_pre_hook(self._keep, with_kwargs=True)
        self.read(prompt, [])

    def _keep(self, _: Any, args: Any, kwargs: dict[str, Any]) -> None:
        hidden, (cos, sin) = kwargs["hidden_states"], kwargs["position_embeddings"]
        query = self.attention.q_proj(hidden[:, -1:]).unflatten(-1, (-1, self.attention.head_dim)).transpose(1, 2)
        self.query_HD = apply_rotary_pos_emb(query, query, cos[:, -1:], sin[:, -1:])[0][0, :, 0]

    def set(self) -> list[int]:
        """What the next round reads (Eq. 6 without a lookahead)."""
        if self.length <= BUDGET:
            return list(range(self.length))
        key_KND = self.cache.layers[HISTORY.layer].keys[0]
        group = len(self.query_HD) // len(key_KND)
        score_N = torch.zeros(self.length)
        for head in HISTORY.heads:
            score_N += (key_KND[head // group] @ self.query_HD[head] * self.attention.scaling).softmax(-1)
        score_N[:SINKS] = score_N[-WINDOW:] = torch.inf
        return score_N.topk(BUDGET).indices.tolist()

    def read(self, ids: list[int], chosen: list[int]) -> list[int]:
        """Go on behind the chosen tokens alone; greedy choices behind each of ``ids``."""
        count = len(ids)
        mask_TN = torch.full((count, self.length + count), LEAST).triu(self.length + 1)
        hidden_N = torch.ones(self.length, dtype=torch.bool)
        hidden_N[chosen] = False
        mask_TN[:, : self.length] = hidden_N * LEAST
        position_T = torch.arange(self.length, self.length + count)
        given = {"past_key_values": self.cache, "attention_mask": mask_TN[None, None], "position_ids": position_T[None]}
        with torch.no_grad():
            logits = self.model(torch.tensor([ids]), **given).logits[0]
        self.length += count
        return logits.argmax(-1).tolist()


def test_every_round_is_the_eager_one(server: ServerProcess) -> None:
    """Twice: the second answer's prompt comes from the prefix cache, which a set has not touched."""
    folder: Path = demo_model_folder()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    texts = [(module_text("textwrap.py"), 600), (topic_text("specialnames"), 300), (topic_text("naming"), 40)]
    runs = 0
    for text, count in [*texts, texts[0]]:
        prompt = list(tokenizer(text, verbose=False).input_ids)[:count]
        tokens, rounds, on_set = served(server, prompt)
        simulation, at = Simulation(model, prompt), 1
        for gained in rounds:
            chosen = simulation.set()
            want = simulation.read(tokens[at - 1 : at - 1 + gained], chosen)
            assert tokens[at : at + gained] == want, f"{count} tokens, behind {at} generated ones"
            at += gained
            runs += gained > 1
        simulation.hook.remove()
        assert at == NEW and on_set > NEW // 3
    assert runs >= 5, f"{runs} rounds returned several tokens: rows in their middle were meant to be asked for"
