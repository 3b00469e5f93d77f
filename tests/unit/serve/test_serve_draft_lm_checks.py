"""A language model as the draft is refused in one line where SGLang or the vocabulary would let it serve wrong, or not at all."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tiny import tiny_model
from transformers import AutoTokenizer

from longdraft.draft_models.sparse_recipe import LayerHeads, SparseRecipe
from longdraft.errors import UserError
from longdraft.serve.checks import check_server_args
from longdraft.serve.draft_lm_checks import (
    check_draft_folder,
    check_draft_lm,
    check_vocabulary,
    is_causal_lm,
    token_names,
)
from longdraft.serve.settings import ServeSettings


@pytest.fixture(scope="module")
def draft(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model("qwen3", tmp_path_factory.mktemp("lm") / "draft")


def arguments(tokenizer: Path | str, context: int = 4096, **changes: Any) -> SimpleNamespace:
    """SGLang's, as far as its config of a draft reads them."""
    fields = {
        "tokenizer_path": str(tokenizer), "tokenizer_mode": "auto", "trust_remote_code": False, "revision": None,
        "speculative_draft_model_quantization": None, "decrypted_draft_config_file": None, "context_length": None,
        "json_model_override_args": "{}", "is_embedding": False, "enable_multimodal": None, "dtype": "float32",
        "model_impl": "auto", "sampling_defaults": "model", "quantize_and_serve": False, "enable_multi_layer_eagle": False,
        "language_only": False, "encoder_only": False, "disable_hybrid_swa_memory": False, "model_config_parser": "auto",
        "load_format": "auto", "speculative_draft_load_format": None, "tp_size": 1,
        "get_model_config": lambda: SimpleNamespace(context_len=context),
    }  # fmt: skip
    return SimpleNamespace(**fields | changes)


def changed(draft: Path, folder: Path, **config: Any) -> Path:
    """The draft with other words in its config."""
    folder.mkdir()
    for file in draft.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    (folder / "config.json").write_text(json.dumps(json.loads((draft / "config.json").read_text()) | config))
    return folder


def refused(folder: Path, args: SimpleNamespace, **settings: Any) -> str:
    with pytest.raises(UserError) as error:
        check_draft_lm(args, ServeSettings(**settings), str(folder))
    assert "\n" not in str(error.value)
    return str(error.value)


def test_one_that_fits_passes(draft: Path) -> None:
    check_draft_lm(arguments(draft), ServeSettings(), str(draft))


@pytest.mark.parametrize(
    ("config", "is_one"),
    [
        ('{"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}', True),
        ('{"architectures": ["LlamaForCausalLMEagle3"]}', False),
        ('{"architectures": ["LlamaForCausalLM"], "longdraft": {"draft": "longspec"}}', False),
        ('{"architectures": []}', False),
        ('{"architectures": "LlamaForCausalLM"}', False),
        ('["LlamaForCausalLM"]', False),
        ("no JSON", False),
    ],
)
def test_a_folder_says_what_it_is(config: str, is_one: bool, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(config)
    assert is_causal_lm(tmp_path) == is_one
    if is_one:
        check_draft_folder(str(tmp_path))
    else:
        with pytest.raises(UserError):
            check_draft_folder(str(tmp_path))


def test_what_is_neither_keeps_the_message_about_drafts(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"has no config\.json"):
        check_draft_folder(str(tmp_path))


def test_a_config_that_transformers_refuses_is_told_in_one_line(draft: Path, tmp_path: Path) -> None:
    copy = changed(draft, tmp_path / "copy", num_hidden_layers="x")
    with pytest.raises(
        UserError, match=r"config.json cannot be read \(Validation error for field 'num_hidden_layers'"
    ) as error:
        check_draft_folder(str(copy))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("spoil", "told"),
    [
        (lambda path: path.unlink(), "has no weights: put them there"),
        (lambda path: path.write_bytes(path.read_bytes()[:-100]), "weights cannot be read ("),
        (
            lambda path: path.with_name("model.safetensors.index.json").write_text(
                '{"weight_map": {"a": "b.safetensors"}}'
            ),
            "b.safet",
        ),
        (lambda path: path.with_name("model.safetensors.index.json").write_text("[]"), "weights cannot be read ("),
    ],
)
def test_weights_that_are_not_whole_are_refused(draft: Path, tmp_path: Path, spoil: Any, told: str) -> None:
    """SGLang would find out once the target is loaded, and kill the process."""
    copy = changed(draft, tmp_path / "copy")
    spoil(copy / "model.safetensors")
    assert told in refused(copy, arguments(draft))
    for form in ("load_format", "speculative_draft_load_format"):
        check_draft_lm(arguments(draft, **{form: "dummy"}), ServeSettings(), str(copy))


def test_trees_and_ranked_heads_are_for_other_drafts(draft: Path) -> None:
    assert refused(draft, arguments(draft), tree="4,16,16").startswith("tree='4,16,16'")
    assert "leave it out" in refused(draft, arguments(draft), draft_head_tokens=8, draft_head_counts="counts")


def test_layers_and_heads_of_a_recipe_must_be_there(draft: Path, tmp_path: Path) -> None:
    layers, own = (
        json.loads((draft / "config.json").read_text())["num_hidden_layers"],
        {"mode": "sparse", "allow_lossy": True},
    )
    for layer, head, said in (
        (layers - 1, 0, None),
        (layers, 0, f"draft layer {layers} is none of"),
        (0, 99, "head 99"),
    ):
        target, wanted = LayerHeads(layer=0, heads=[0]), LayerHeads(layer=layer, heads=[head])
        SparseRecipe(target=target, draft=[wanted], lookahead=3).save(recipe := tmp_path / "recipe.json")
        if said is None:
            check_draft_lm(arguments(draft), ServeSettings(**own, sparse_recipe=str(recipe)), str(draft))
        else:
            assert said in refused(draft, arguments(draft), **own, sparse_recipe=str(recipe))


def test_heads_that_do_not_divide_among_the_ranks_are_refused(draft: Path) -> None:
    check_draft_lm(arguments(draft, tp_size=2), ServeSettings(), str(draft))
    assert "--tp-size 3 does not fit the draft, which has 4 query heads" in refused(draft, arguments(draft, tp_size=3))


def test_a_context_that_the_draft_does_not_reach_is_refused(draft: Path, tmp_path: Path) -> None:
    short = changed(draft, tmp_path / "short", max_position_embeddings=512)
    message = refused(short, arguments(draft))
    assert "max_position_embeddings=512" in message and "--context-length 512 or less" in message
    check_draft_lm(arguments(draft, 512, context_length=512), ServeSettings(), str(short))


def test_what_sglang_would_run_as_a_prediction_head_is_refused(draft: Path, tmp_path: Path) -> None:
    mimo = changed(draft, tmp_path / "mimo", architectures=["MiMoForCausalLM"])
    assert "runs a MiMoForCausalLM draft as MiMoMTP" in refused(mimo, arguments(draft))


def test_layers_that_our_attention_does_not_compute_are_refused(draft: Path, tmp_path: Path) -> None:
    sliding = changed(draft, tmp_path / "sliding", is_hybrid_swa=True)
    assert "the draft Qwen3ForCausalLM has sliding-window layers" in refused(sliding, arguments(draft))


def test_a_calibration_of_another_draft_is_refused(draft: Path, tmp_path: Path) -> None:
    path = tmp_path / "recipe.json"
    settings = {"mode": "sparse", "allow_lossy": True, "sparse_recipe": str(path)}
    for layer, said in ((1, None), (40, "draft layer 40 is none of the draft model's")):
        own = LayerHeads(layer=layer, heads=[0])
        SparseRecipe(target=LayerHeads(layer=0, heads=[0]), draft=[own], lookahead=100).save(path)
        if said is None:
            check_draft_lm(arguments(draft), ServeSettings(**settings), str(draft))
        else:
            assert said in refused(draft, arguments(draft), **settings)


def test_a_folder_without_a_tokenizer_is_refused(draft: Path, tmp_path: Path) -> None:
    bare = changed(draft, tmp_path / "bare")
    for file in bare.glob("*token*"):
        file.unlink()
    message = refused(bare, arguments(draft))
    assert message.startswith(f"draft folder {bare}: its tokenizer cannot be read") and "put its files there" in message


def test_more_tokens_on_either_side_are_no_difference() -> None:
    """Padding, or tokens that a fine-tuned model has more."""
    few, more = {0: "a", 1: "b"}, {0: "a", 1: "b", 2: "<chat>"}
    check_vocabulary(few, more, "f")
    check_vocabulary(more, few, "f")


@pytest.mark.parametrize(
    ("target", "draft", "said"),
    [
        ({0: "a", 1: "b", 2: "c"}, {0: "a", 1: "B", 2: "C"}, "token 1 of its tokenizer is 'B', of the target's 'b' (2 of 3 differ)"),
        ({0: "a", 2: "c"}, {0: "a", 1: "b", 2: "c"}, "token 1 of its tokenizer is 'b', of the target's None (1 of 3 differ)"),
        ({0: "a"}, {}, "token 0 of its tokenizer is None"),
        ({0: "x" * 500}, {0: "a"}, "characters"),
    ],
)  # fmt: skip
def test_another_token_is_named_with_how_many_there_are(
    target: dict[int, str], draft: dict[int, str], said: str
) -> None:
    with pytest.raises(UserError) as error:
        check_vocabulary(target, draft, "folder/d")
    assert said in str(error.value) and "draft folder folder/d: " in str(error.value)
    assert len(str(error.value)) < 400


def test_added_tokens_count(draft: Path, tmp_path: Path) -> None:
    """Chat tokens are added ones in most tokenizers."""
    tokenizer = AutoTokenizer.from_pretrained(draft)
    size = len(tokenizer)
    folders = []
    for token in ("<one>", "<other>"):
        own = AutoTokenizer.from_pretrained(draft)
        own.add_special_tokens({"additional_special_tokens": [token]})
        folders.append(changed(draft, tmp_path / token.strip("<>")))
        own.save_pretrained(folders[-1])
    names = [token_names(arguments(draft), str(folder), "its") for folder in folders]
    assert [n[size] for n in names] == ["<one>", "<other>"]
    assert f"token {size} of its tokenizer is '<other>', of the target's '<one>'" in refused(
        folders[1], arguments(folders[0])
    )


def test_the_servers_checks_come_to_it(draft: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In place of what is checked of our own drafts."""
    seen: list[str] = []
    monkeypatch.setattr("longdraft.serve.checks.check_draft_lm", lambda args, settings, folder: seen.append(folder))
    monkeypatch.delenv("LONGDRAFT_SETTINGS", raising=False)
    model = SimpleNamespace(hf_text_config=SimpleNamespace(), context_len=4096, dtype=None)
    args = arguments(
        draft, device="cpu", attention_backend=None, prefill_attention_backend=None, decode_attention_backend=None,
        disaggregation_mode=None, kv_cache_dtype="auto", speculative_num_steps=4, speculative_num_draft_tokens=None,
        speculative_draft_model_path=str(draft), get_model_config=lambda: model,
    )  # fmt: skip
    check_server_args(args)
    assert seen == [str(draft)]
