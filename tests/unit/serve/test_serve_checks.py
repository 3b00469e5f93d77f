"""What the server refuses at start, each in one line that names the flag and the remedy, and what LONGDRAFT sets."""

import dataclasses
import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.server_args import ServerArgs
from tiny import tiny_draft, tiny_eagle3, tiny_target
from transformers import LlamaConfig

from longdraft.draft_models.checkpoint import save_draft
from longdraft.draft_models.token_counts import TokenCounts
from longdraft.errors import UserError
from longdraft.serve.algorithm import LongDraftAlgorithm, validate_server_args
from longdraft.serve.checks import REFUSED, REQUIRED_ONE, check_server_args
from longdraft.serve.settings import ENVIRONMENT
from longdraft.serve.tree_shape import candidates
from longdraft.train.tiny_random import tiny_config

METHODS = {"get_model_config", "get_attention_backends"}


@pytest.fixture(autouse=True)
def _no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ENVIRONMENT, raising=False)


def arguments(config: Any = None, context: int = 4096, **changes: Any) -> SimpleNamespace:
    model = SimpleNamespace(hf_text_config=config or tiny_config("llama"), context_len=context, dtype=torch.bfloat16)
    fields = {
        "device": "cpu",
        "tp_size": 1,
        "attention_backend": None,
        "prefill_attention_backend": None,
        "decode_attention_backend": None,
        "disaggregation_mode": "null",
        "kv_cache_dtype": "auto",
        "speculative_num_steps": None,
        "speculative_num_draft_tokens": None,
        "speculative_draft_model_path": None,
        "speculative_eagle_topk": None,
        "disable_overlap_schedule": False,
        "enable_forward_pass_metrics": False,
        "max_running_requests": None,
        "cuda_graph_config": SimpleNamespace(
            decode=SimpleNamespace(backend="full"), prefill=SimpleNamespace(backend="full")
        ),
        "get_model_config": lambda: model,
    }
    made = SimpleNamespace(**{**fields, **changes})
    made.get_attention_backends = lambda: ServerArgs.get_attention_backends(made)
    return made


def refused(args: SimpleNamespace) -> str:
    with pytest.raises(UserError) as error:
        check_server_args(args)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_plain_arguments_pass() -> None:
    check_server_args(arguments())
    check_server_args(arguments(page_size=16))
    check_server_args(arguments(speculative_num_steps=5, speculative_num_draft_tokens=6, kv_cache_dtype="bfloat16"))


@pytest.mark.parametrize("name", REFUSED)
def test_flags_that_do_not_work_are_refused_with_their_reason(name: str) -> None:
    message = refused(arguments(**{name: "something"}))
    assert message.startswith(f"--{name.replace('_', '-')} does not work with LONGDRAFT ({REFUSED[name]})")
    assert message.endswith("leave it out")
    check_server_args(arguments(**{name: False}))


@pytest.mark.parametrize("name", REQUIRED_ONE)
def test_sizes_that_must_be_one(name: str) -> None:
    assert re.match(rf"--{name.replace('_', '-')} 2 does not work .*: use 1$", refused(arguments(**{name: 2})))
    for value in (None, 1):
        check_server_args(arguments(**{name: value}))


def test_every_checked_flag_is_one_of_this_sglang() -> None:
    """A renamed flag would be refused never."""
    known = {field.name for field in dataclasses.fields(ServerArgs)}
    assert not (REFUSED.keys() | REQUIRED_ONE.keys() | arguments().__dict__.keys() - METHODS) - known


@pytest.mark.parametrize(
    ("changes", "pattern"),
    [
        ({"disaggregation_mode": "prefill"}, r"--disaggregation-mode prefill .* leave it out"),
        ({"page_size": 32}, r"--page-size 32 .* use 1 or 16$"),
        ({"kv_cache_dtype": "fp8_e5m2"}, r"--kv-cache-dtype fp8_e5m2 .* use fp8_e4m3 or auto$"),
        ({"kv_cache_dtype": "fp4_e2m1"}, r"--kv-cache-dtype fp4_e2m1 .* use fp8_e4m3 or auto$"),
        (
            {"kv_cache_dtype": "fp8_e4m3", "attention_backend": "intel_amx"},
            r"fp8_e4m3 .* intel_amx: use --attention-backend torch_native$",
        ),
        (
            {"attention_backend": "triton"},
            r"--attention-backend triton .* --device cpu: use torch_native or intel_amx$",
        ),
        (
            {"device": "cuda", "attention_backend": "trtllm_mha"},
            r"--attention-backend trtllm_mha .* --device cuda: use fa3 or flashinfer or triton$",
        ),
        (
            {"device": "cuda", "attention_backend": "fa3", "prefill_attention_backend": "fa4"},
            r"--prefill-attention-backend fa4 .* use fa3 or flashinfer or triton$",
        ),
        (
            {"device": "cuda", "attention_backend": "fa3", "decode_attention_backend": "torch_native"},
            r"--decode-attention-backend torch_native .* use fa3 or flashinfer or triton$",
        ),
        ({"device": "xpu"}, r"--device xpu .* use cuda or cpu$"),
        ({"speculative_num_steps": 0}, r"--speculative-num-steps 0 is out of range"),
        ({"speculative_num_steps": 101}, r"--speculative-num-steps 101 is out of range"),
        (
            {"speculative_num_steps": 4, "speculative_num_draft_tokens": 4},
            r"--speculative-num-draft-tokens 4 does not fit --speculative-num-steps 4: leave it out",
        ),
        ({"speculative_num_draft_tokens": 9}, r"--speculative-num-draft-tokens 9 .* leave it out"),
    ],
)
def test_values_that_do_not_work(changes: dict[str, Any], pattern: str) -> None:
    assert re.search(pattern, refused(arguments(**changes)))


def test_a_cache_in_bfloat16_is_for_targets_in_bfloat16() -> None:
    args = arguments(kv_cache_dtype="bf16")
    check_server_args(args)
    args.get_model_config().dtype = torch.float32
    assert re.search(r"--kv-cache-dtype bf16 .* torch.float32 .*: use auto$", refused(args))


@pytest.mark.parametrize("prefill", ["fa3", "flashinfer", "triton"])
@pytest.mark.parametrize("decode", ["fa3", "flashinfer", "triton"])
@pytest.mark.parametrize("cache", ["auto", "fp8_e4m3"])
@pytest.mark.parametrize("page", [1, 16])
def test_attention_and_caches_of_a_card_that_work(prefill: str, decode: str, cache: str, page: int) -> None:
    more = {"prefill_attention_backend": prefill, "decode_attention_backend": decode, "kv_cache_dtype": cache}
    check_server_args(arguments(device="cuda", page_size=page, **more))
    check_server_args(arguments(attention_backend="torch_native", kv_cache_dtype=cache, page_size=page))


def test_the_default_chain_may_be_spelled_out() -> None:
    check_server_args(arguments(speculative_num_draft_tokens=5))


def test_bad_settings_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ENVIRONMENT, '{"mode": "fast"}')
    assert "mode='fast'" in refused(arguments())


def yarn(covered: int) -> LlamaConfig:
    rope = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": covered // 4}
    return tiny_config("llama", rope_parameters=rope, max_position_embeddings=covered)


def test_a_context_must_leave_room_for_drafts_within_yarn() -> None:
    check_server_args(arguments(yarn(4096), context=4091))
    assert re.search(r"--context-length 4092 .*\(4096 positions with 5 draft tokens\): use at most 4091", refused(arguments(yarn(4096), context=4092)))  # fmt: skip
    check_server_args(arguments(yarn(4096), context=4093, speculative_num_steps=2))


def test_a_draft_that_fits_passes_and_one_that_does_not_is_named(tmp_path: Path) -> None:
    target = tiny_target("llama")
    save_draft(tiny_draft(target), tmp_path / "d", "t")
    check_server_args(arguments(speculative_draft_model_path=str(tmp_path / "d")))
    other = arguments(tiny_config("llama", intermediate_size=128), speculative_draft_model_path=str(tmp_path / "d"))
    assert re.search(r"intermediate_size=96, the target has 128: use the draft", refused(other))
    config = json.loads((tmp_path / "d" / "config.json").read_text())
    config["longdraft"]["draft"] = "medusa"
    (tmp_path / "d" / "config.json").write_text(json.dumps(config))
    assert "is not a LongSpec or EAGLE-3 draft" in refused(arguments(speculative_draft_model_path=str(tmp_path / "d")))


def eagle3_draft(folder: Path, **settings: Any) -> str:
    save_draft(tiny_eagle3(tiny_target("llama", num_hidden_layers=4), **settings), folder, "t")
    return str(folder)


FOUR = tiny_config("llama", num_hidden_layers=4)


def test_an_eagle3_draft_passes_and_one_of_another_target_is_named(tmp_path: Path) -> None:
    folder = eagle3_draft(tmp_path / "d")
    check_server_args(arguments(FOUR, speculative_draft_model_path=folder))
    assert re.search(r"longdraft\.target\.spec\.num_layers=4, the target has 5: use the draft", refused(
        arguments(tiny_config("llama", num_hidden_layers=5), speculative_draft_model_path=folder)
    ))  # fmt: skip


def test_a_stretched_draft_must_cover_the_context_and_the_drafts_behind_it(tmp_path: Path) -> None:
    rope = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
    folder = eagle3_draft(tmp_path / "d", rope=rope)
    check_server_args(arguments(FOUR, context=2043, speculative_draft_model_path=folder))
    message = refused(arguments(FOUR, context=2044, speculative_draft_model_path=folder))
    assert re.search(
        r"covers 2048 positions, 2049 are needed .*a context of at most 2043 \(--context-length 2044\)", message
    )
    check_server_args(arguments(FOUR, context=2045, speculative_num_steps=2, speculative_draft_model_path=folder))


def test_a_draft_may_be_served_to_the_end_of_its_own_positions(tmp_path: Path) -> None:
    folder = eagle3_draft(tmp_path / "d", max_position=1000)
    check_server_args(arguments(FOUR, context=1000, speculative_draft_model_path=folder))
    message = refused(arguments(FOUR, context=1001, speculative_draft_model_path=folder))
    assert "max_position=1000" in message and "--context-length 1001" in message


def test_a_draft_head_of_frequent_tokens_needs_a_longspec_draft_and_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, counts = tiny_target("llama"), tmp_path / "counts.safetensors"
    save_draft(tiny_draft(target), tmp_path / "plain", "t")
    save_draft(tiny_draft(target, head_tokens=9), tmp_path / "ranked", "t")

    def served(folder: str, tokens: int = 20, config: Any = None) -> SimpleNamespace:
        monkeypatch.setenv(ENVIRONMENT, json.dumps({"draft_head_tokens": tokens, "draft_head_counts": str(counts)}))
        return arguments(config, speculative_draft_model_path=str(tmp_path / folder) if folder else None)

    assert "no such file: make it with longdraft counts" in refused(served("plain"))
    vocab = target.spec.vocab_size
    TokenCounts(torch.ones(vocab, dtype=torch.int64), torch.arange(vocab)).save(counts, {})
    check_server_args(served("plain"))
    assert f"a draft head of {vocab + 1} tokens, the target has {vocab}" in refused(served("plain", vocab + 1))
    assert "has a ranked head of 9 tokens of its own: leave it out" in refused(served("ranked"))
    eagle3_draft(tmp_path / "eagle3")
    assert "an EAGLE-3 draft has a head of its own" in refused(served("eagle3", config=FOUR))
    assert "draft_head_tokens is for LongSpec drafts: give one" in refused(served(""))


def test_lookup_serves_targets_that_no_draft_could_read() -> None:
    """Without a draft folder nothing reads the last layer, so its shape does not matter."""
    check_server_args(arguments(SimpleNamespace(model_type="gemma2", rope_parameters=None)))


def test_a_refusal_ends_the_launch_with_one_line_and_status_two(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        validate_server_args(arguments(pp_size=2))
    assert stop.value.code == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert (
        err
        == "error: --pp-size 2 does not work with LONGDRAFT (pipeline parallelism is not supported with speculation): use 1\n"
    )


@pytest.mark.parametrize(("given", "steps"), [(None, 4), (1, 1), (6, 6)])
def test_the_algorithm_sets_what_a_chain_needs(given: int | None, steps: int) -> None:
    args = arguments(speculative_num_steps=given)
    LongDraftAlgorithm("LONGDRAFT", lambda server_args: object).handle_server_args(args)
    assert (args.speculative_num_steps, args.speculative_num_draft_tokens) == (steps, steps + 1)
    assert args.speculative_eagle_topk == 1
    assert args.disable_overlap_schedule is True
    assert args.disable_cuda_graph is True, "page lists change width every step"
    assert args.max_running_requests == 48


@pytest.mark.parametrize(
    ("changes", "settings", "reason"),
    [
        ({}, {}, None),
        ({"disable_overlap_schedule": True}, {}, ""),
        ({"speculative_draft_model_path": None}, {}, "lookup drafter"),
        ({}, {"tree": "2,3"}, None),
        ({}, {"tree": "auto"}, None),
        ({"device": "cuda"}, {"attention": "flashinfer"}, "attention='flashinfer'"),
        ({"device": "cuda"}, {"attention": "fa3"}, None),
        ({"device": "cuda"}, {}, None),
        ({}, {"attention": "torch"}, None),
        ({"enable_forward_pass_metrics": True}, {}, "--enable-forward-pass-metrics"),
    ],
)
def test_overlap_stays_on_where_rounds_need_no_host(
    changes: dict[str, Any], settings: dict[str, Any], reason: str | None, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    monkeypatch.setenv(ENVIRONMENT, json.dumps(settings))
    args = arguments(**{"speculative_draft_model_path": "folder", **changes})
    LongDraftAlgorithm("LONGDRAFT", lambda server_args: object).handle_server_args(args)
    assert args.disable_overlap_schedule is (reason is not None)
    assert bool(caplog.records) is bool(reason), "said where it was not asked for"
    assert (reason or "") in caplog.text


def test_the_users_batch_size_stays() -> None:
    args = arguments(max_running_requests=3)
    LongDraftAlgorithm("LONGDRAFT", lambda server_args: object).handle_server_args(args)
    assert args.max_running_requests == 3


@pytest.mark.parametrize(
    ("changes", "pattern"),
    [
        ({"speculative_draft_model_path": None}, r"tree='2,3' needs a draft: give one with --draft"),
        ({"speculative_num_steps": 4}, r"--speculative-num-steps 4 does not fit tree='2,3', which has 2: leave it out"),
        ({"speculative_num_draft_tokens": 3}, r"--speculative-num-draft-tokens 3 does not fit tree='2,3', which has 6"),
    ],
)
def test_a_tree_sets_steps_and_draft_tokens_itself(
    changes: dict[str, Any], pattern: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ENVIRONMENT, json.dumps({"tree": "2,3"}))
    assert re.match(pattern, refused(arguments(**{"speculative_draft_model_path": "folder", **changes})))


@pytest.mark.parametrize(
    ("tree", "settings", "pattern"),
    [
        ("2,2,2,2", {"window": 3}, r"tree='2,2,2,2' is 4 deep, the draft's window holds 3 tokens: make it flatter"),
        ("9,2", {"head_tokens": 8}, r"tree='9,2' takes 9 tokens at once, the draft knows 8: make it narrower"),
    ],
)
def test_a_tree_that_the_draft_cannot_grow_is_refused(
    tree: str, settings: dict[str, Any], pattern: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tiny_target("llama")
    save_draft(tiny_draft(target, **settings), tmp_path / "d", "t")
    monkeypatch.setenv(ENVIRONMENT, json.dumps({"tree": tree}))
    config = target.model.config
    assert re.match(pattern, refused(arguments(config, speculative_draft_model_path=str(tmp_path / "d"))))
    monkeypatch.setenv(ENVIRONMENT, json.dumps({"tree": "2,2"}))
    check_server_args(arguments(config, speculative_draft_model_path=str(tmp_path / "d")))


def test_a_trees_places_are_sglangs_draft_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ENVIRONMENT, json.dumps({"tree": "2,3"}))
    args = arguments(device="cuda")
    LongDraftAlgorithm("LONGDRAFT", lambda server_args: object).handle_server_args(args)
    assert (args.speculative_num_steps, args.speculative_num_draft_tokens) == (2, 6)
    assert args.cuda_graph_config.decode.backend == "full"


@pytest.mark.parametrize(
    ("tree", "steps", "drafted"), [("auto", 4, 5), ("auto:2,3", 2, 6), ("auto:eagle2:3,2,8", 3, 8)]
)
def test_a_choice_reserves_for_the_largest_shape(
    tree: str, steps: int, drafted: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ENVIRONMENT, json.dumps({"tree": tree}))
    args = arguments(device="cuda")
    LongDraftAlgorithm("LONGDRAFT", lambda server_args: object).handle_server_args(args)
    assert (args.speculative_num_steps, args.speculative_num_draft_tokens) == (steps, drafted)
    largest = max(candidates(tree, steps), key=lambda shape: shape.places)
    assert largest.places == drafted


def test_a_choice_needs_a_draft_and_costs_of_every_shape(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ENVIRONMENT, json.dumps({"tree": "auto"}))
    assert refused(arguments()).startswith("tree='auto' needs a draft: give one with --draft")
    costs = tmp_path / "costs.json"
    costs.write_text(json.dumps({"batches": [1], "ms": {f"chain{depth}": [1.0] for depth in range(3)}}))
    monkeypatch.setenv(ENVIRONMENT, json.dumps({"tree": "auto", "tree_costs": str(costs)}))
    given = {"speculative_draft_model_path": "folder", "speculative_num_steps": 3}
    assert "has no row 'chain3' in ms, only ['chain0', 'chain1', 'chain2']: measure it too" in refused(
        arguments(**given)
    )


def test_a_choice_of_absurdly_many_chains_is_refused_before_it_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    def made(text: str, steps: int) -> list[Any]:
        raise AssertionError(f"{steps} chains would fill the memory")

    monkeypatch.setenv(ENVIRONMENT, json.dumps({"tree": "auto"}))
    monkeypatch.setattr("longdraft.serve.checks.candidates", made)
    given = {"speculative_draft_model_path": "folder", "speculative_num_steps": 10**9}
    assert "--speculative-num-steps 1000000000 is out of range: use 1 to 100" in refused(arguments(**given))


def test_chains_of_a_choice_are_held_to_the_drafts_window(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tiny_target("llama")
    save_draft(tiny_draft(target, window=3), tmp_path / "d", "t")
    monkeypatch.setenv(ENVIRONMENT, json.dumps({"tree": "auto"}))
    given = {"speculative_draft_model_path": str(tmp_path / "d")}
    assert "tree='auto' is 4 deep, the draft's window holds 3" in refused(arguments(target.model.config, **given))
    check_server_args(arguments(target.model.config, speculative_num_steps=3, **given))
