"""The drafts in recipes/smollm2-135m: their size, their target, their names, and what is told of their making."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from transformers import AutoConfig

from longdraft.draft_models.checkpoint import load_draft
from longdraft.draft_models.eagle3 import Eagle3Draft
from longdraft.draft_models.longspec import LongSpecDraft
from longdraft.draft_models.sparse_recipe import SparseRecipe
from longdraft.draft_models.target import TargetSpec
from longdraft.models import SHIPPED, shipped_draft
from longdraft.train.target import weights_fingerprint

MODEL = "smollm2-135m"
ROOT = Path(__file__).resolve().parents[2] / "recipes"
MOST_BYTES, MOST_BESIDE = 28 << 20, 1 << 20  # of the drafts together; of what lies beside them
TARGET_HASH = "79be065b98870e7d"  # of SmolLM2-135M-Instruct, published or converted for the demo
# What SGLang 0.5.14's stock EAGLE3 reads; its loader skips a name that it does not know without a word.
STOCK_EAGLE3 = {
    "d2t", "t2d", "fc.weight", "lm_head.weight", "norm.weight", "midlayer.input_layernorm.weight", "midlayer.hidden_norm.weight",
    "midlayer.post_attention_layernorm.weight", *(f"midlayer.self_attn.{x}_proj.weight" for x in "qkvo"),
    *(f"midlayer.mlp.{x}_proj.weight" for x in ("gate", "up", "down")),
}  # fmt: skip


def config(kind: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((shipped_draft(MODEL, kind) / "config.json").read_text())
    return found


@pytest.fixture(scope="module")
def target() -> TargetSpec:
    return TargetSpec.from_config(AutoConfig.from_pretrained(ROOT / "shapes/smollm2-135m-instruct"))


def test_the_drafts_fit_into_28_mib_together_and_what_tells_of_them_into_one() -> None:
    sizes = {path: path.stat().st_size for path in (ROOT / MODEL).rglob("*") if path.is_file()}
    assert {path.parent.name for path in sizes if path.name == "model.safetensors"} == set(SHIPPED[MODEL])
    drafts = [size for path, size in sizes.items() if path.parent != ROOT / MODEL]
    assert sum(drafts) <= MOST_BYTES, sizes
    assert sum(sizes.values()) - sum(drafts) <= MOST_BESIDE, sizes


def test_the_pinned_target_is_the_published_model(target: TargetSpec) -> None:
    assert target.hash == TARGET_HASH


@pytest.mark.parametrize(("kind", "module"), [("longspec", LongSpecDraft), ("eagle3", Eagle3Draft)])
def test_a_draft_loads_in_bfloat16_for_the_models_shapes(kind: str, module: type, target: TargetSpec) -> None:
    draft = load_draft(shipped_draft(MODEL, kind), target)
    assert isinstance(draft, module)
    assert {p.dtype for p in draft.parameters()} == {torch.bfloat16}
    assert all(
        bool(torch.isfinite(p).all()) and float(p.detach().float().std()) > 0 for p in draft.parameters() if p.ndim == 2
    )


@pytest.mark.parametrize("kind", SHIPPED[MODEL])
def test_the_config_names_the_target_and_a_training(kind: str) -> None:
    ours = config(kind)["longdraft"]
    assert (ours["target"]["name"], ours["target"]["hash"]) == ("HuggingFaceTB/SmolLM2-135M-Instruct", TARGET_HASH)
    assert config(kind)["dtype"] == "bfloat16"
    assert ours["training"]["max_lag"] >= 4, "chains of four are served"
    assert ours["training"]["max_position"] > 8000, "the model's context is 8K"


def test_the_eagle3_draft_is_what_sglangs_stock_eagle3_reads() -> None:
    folder = shipped_draft(MODEL, "eagle3")
    norms = {f"fc_norm.{i}.weight" for i in range(3)} if config("eagle3")["fc_norm"] else set()
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        assert set(file.keys()) == STOCK_EAGLE3 | norms
        assert file.get_slice("lm_head.weight").get_shape() == [8192, 576]
    assert config("eagle3")["architectures"] == ["LlamaForCausalLMEagle3"]
    assert config("eagle3")["draft_vocab_size"] == 8192


@pytest.mark.parametrize("path", sorted((ROOT / MODEL).rglob("*.json*")), ids=lambda p: f"{p.parent.name}/{p.name}")
def test_nothing_told_names_a_folder_of_a_machine(path: Path) -> None:
    assert not re.findall(r"(?<![\w.~/-])/(?:tmp|home|root|work|opt|usr|mnt)/[^\"\s]*", path.read_text())


@pytest.mark.parametrize("kind", SHIPPED[MODEL])
def test_the_log_holds_command_seed_and_a_whole_training(kind: str) -> None:
    rows = [json.loads(line) for line in (ROOT / MODEL / f"{kind}.log.jsonl").read_text().splitlines()]
    runs = [row for row in rows if "command" in row]
    assert rows[0] in runs and all(isinstance(run["seed"], int) and run["data"] and run["commit"] for run in runs)
    steps = [row for row in rows if "loss" in row]
    assert len(steps) > 20 * len(runs)
    assert sum(row["loss"] for row in steps[-10:]) < sum(row["loss"] for row in steps[:10])
    trained, last = config(kind)["longdraft"]["training"]["steps"], runs[-1]
    told = max(row["step"] for row in rows[rows.index(last) :] if "loss" in row)
    assert trained - last["settings"]["schedule"]["log_every"] < told <= trained


def test_every_source_of_the_data_is_listed_by_hash() -> None:
    listed = json.loads((ROOT / MODEL / "data.json").read_text())
    train, heldout = ([line for lines in listed[part].values() for line in lines] for part in ("train", "heldout"))
    assert train and heldout and isinstance(listed["seed"], int)
    assert all(re.fullmatch(r"[0-9a-f]{16} \S.*", line) for line in train + heldout)
    assert not {line[:16] for line in train} & {line[:16] for line in heldout}, "what is held out is not trained on"


def test_the_making_of_the_answers_trained_on_is_told() -> None:
    told = json.loads((ROOT / MODEL / "generated.json").read_text())
    for kind in SHIPPED[MODEL]:
        first = json.loads((ROOT / MODEL / f"{kind}.log.jsonl").read_text().splitlines()[0])
        trained_on = {(entry["documents"], entry["bytes"]) for entry in first["data"]}
        made = {(one["counts"]["answers"], one["counts"]["bytes"]) for one in told.values()}
        assert len(trained_on & made) >= 2, kind


def test_the_page_says_how_to_make_them_again() -> None:
    text = (ROOT / MODEL / "README.md").read_text()
    for word in (
        "longdraft bench draft_corpus",
        "longdraft generate",
        "longdraft train",
        "seed",
        "data.json",
        "generated.json",
    ):
        assert word in text
    assert all(f"{kind}.log.jsonl" in text for kind in SHIPPED[MODEL])


@pytest.mark.parametrize("kind", SHIPPED[MODEL])
def test_a_sparse_recipe_is_of_the_shipped_pair(kind: str, target: TargetSpec) -> None:
    """Of these weights and no older ones: a draft that is shipped anew is calibrated anew."""
    recipe = SparseRecipe.load(ROOT / MODEL / f"sparse_{kind}_smoke.json")
    facts = recipe.provenance
    assert facts["models"]["target"]["shapes"] == target.hash
    assert facts["settings"]["draft.weights"] == weights_fingerprint(str(shipped_draft(MODEL, kind)))
    assert recipe.target.layer < target.num_layers and max(recipe.target.heads) < target.num_heads
    assert {each.layer for each in recipe.draft} <= set(facts["models"]["draft"]["layers"]) and recipe.draft
    assert facts["answers"]["how"] == "own" and facts["answers"]["counted"] >= 10
