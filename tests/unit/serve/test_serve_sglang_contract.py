"""What our serving code relies on inside SGLang: hook targets, signatures, fields and base classes of the pinned version."""

import ast
import dataclasses
import functools
import importlib
import inspect
import os
import pkgutil
import subprocess
import sys
from collections import defaultdict
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import sglang
import torch
from sglang.srt.constrained.base_grammar_backend import BaseGrammarObject
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.layers.sampler import Sampler
from sglang.srt.layers.utils.logprob import compute_spec_v2_logprobs
from sglang.srt.managers.schedule_batch import ScheduleBatch
from sglang.srt.managers.scheduler_components.batch_result_processor import SchedulerBatchResultProcessor
from sglang.srt.managers.utils import GenerationBatchResult
from sglang.srt.mem_cache.common import release_kv_cache
from sglang.srt.model_executor import pool_configurator
from sglang.srt.model_executor.forward_batch_info import ForwardBatch
from sglang.srt.plugins.hook_registry import HookRegistry, HookType
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.server_args import ServerArgs
from sglang.srt.speculative import spec_registry
from sglang.srt.speculative.base_spec_worker import BaseSpecWorker
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

import longdraft
from longdraft.draft_models.target import FAMILIES
from longdraft.serve import algorithm, hooks, plugin
from longdraft.serve.algorithm import LongDraftAlgorithm
from longdraft.serve.attention_backend import LongDraftAttention
from longdraft.serve.spec_inputs import DraftInput
from longdraft.serve.worker import LongDraftWorker


@pytest.fixture
def empty_registries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Registrations of a test must not stay in the process."""
    monkeypatch.setattr(spec_registry, "_REGISTRY", {})
    monkeypatch.setattr(HookRegistry, "_hooks", defaultdict(list))


def test_importing_the_plugin_imports_nothing_heavy() -> None:
    """SGLang imports it in every process, also in those that must not touch a GPU."""
    code = (
        "import sys, longdraft.serve.plugin\n"
        "print([m for m in ('torch', 'sglang', 'transformers', 'triton') if m in sys.modules])"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_pinned_version_is_the_installed_one() -> None:
    assert sglang.__version__ == plugin.SGLANG_VERSION


def test_another_sglang_ends_the_process_loudly(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], empty_registries: None
) -> None:
    """SGLang only logs a plugin that raises and serves without it; SystemExit gets through."""
    monkeypatch.setattr(sglang, "__version__", "0.5.99")
    with pytest.raises(SystemExit) as stop:
        plugin.register()
    assert stop.value.code == 2
    message = capsys.readouterr().err.splitlines()[-1]
    assert message.startswith("error: the longdraft plugin could not be loaded: sglang 0.5.99 is installed")
    assert message.endswith("pip install sglang==0.5.14")
    assert "LONGDRAFT" not in spec_registry._REGISTRY


def test_a_hook_target_that_is_gone_ends_the_process_loudly(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], empty_registries: None
) -> None:
    monkeypatch.setattr(hooks, "HOOKS", [("sglang.srt.server_args.ServerArgs._gone", print, HookType.BEFORE)])
    with pytest.raises(SystemExit):
        plugin.register()
    assert "_gone" in capsys.readouterr().err.splitlines()[-1]


def test_registering_makes_the_algorithm_known(empty_registries: None) -> None:
    plugin.register()
    found = SpeculativeAlgorithm.from_string("longdraft")
    assert isinstance(found, LongDraftAlgorithm)
    assert found.validate_server_args is algorithm.validate_server_args
    assert found.create_worker(SimpleNamespace(disable_overlap_schedule=True)) is LongDraftWorker
    assert {target for target, _, _ in hooks.HOOKS} <= HookRegistry._hooks.keys()


def test_the_algorithm_answers_every_question_and_only_one_kind() -> None:
    """Being EAGLE would keep hidden states and change radix keys; being nothing would size the cache wrongly."""
    mine = LongDraftAlgorithm("LONGDRAFT", lambda server_args: object)
    questions = [n for n in vars(SpeculativeAlgorithm) if n.startswith(("is_", "supports_"))]
    assert questions
    yes = {n for n in questions if callable(getattr(mine, n)) and not inspect.signature(getattr(mine, n)).parameters and getattr(mine, n)()}  # fmt: skip
    assert yes == {"is_some", "is_speculative", "is_standalone"}
    assert mine.has_draft_kv() is True
    assert mine.carries_draft_hidden_states() is False
    assert mine.need_topk() is False
    for name in ("create_future_map", "carries_draft_hidden_states", "need_topk"):
        assert hasattr(SpeculativeAlgorithm, name), "the stock algorithm is asked this too"


@pytest.mark.parametrize("target", [target for target, _, _ in hooks.HOOKS + hooks.CPU_HOOKS])
def test_hook_targets_exist(target: str) -> None:
    assert callable(pkgutil.resolve_name(target))


@pytest.mark.parametrize(
    ("target", "hook"), [(t, hook) for t, hook, kind in hooks.HOOKS + hooks.CPU_HOOKS if kind is HookType.REPLACE]
)
def test_replacements_take_the_arguments_of_what_they_replace(target: str, hook: Any) -> None:
    theirs, ours = (list(inspect.signature(f).parameters) for f in (pkgutil.resolve_name(target), hook))
    assert ours == theirs


def test_the_prefill_hook_takes_the_arguments_of_what_it_wraps() -> None:
    theirs = inspect.signature(TorchNativeAttnBackend._run_sdpa_forward_extend)
    ours = inspect.signature(hooks.extend_attention)
    assert list(ours.parameters)[1:] == list(theirs.parameters)


def test_hooks_read_fields_that_exist() -> None:
    fields = {field.name for field in dataclasses.fields(ServerArgs)}
    assert {
        "speculative_algorithm",
        "speculative_eagle_topk",
        "speculative_draft_model_path",
        "trust_remote_code",
    } <= fields
    made = pkgutil.resolve_name("sglang.srt.managers.tokenizer_manager.TokenizerManager._create_tokenized_object")
    assert list(inspect.signature(made).parameters)[:4] == ["self", "obj", "input_text", "input_ids"]
    assert "custom_params" in vars(SamplingParams())
    for path in ("XGrammarGrammar", "XGrammarGrammarBackend"):
        target = pkgutil.resolve_name(f"sglang.srt.constrained.xgrammar_backend.{path}.apply_vocab_mask")
        assert {"logits", "vocab_mask"} <= inspect.signature(target).parameters.keys()


def test_early_arguments_touch_only_our_algorithm() -> None:
    ours = SimpleNamespace(
        speculative_algorithm="longdraft", speculative_eagle_topk=None, speculative_draft_model_path=None
    )
    theirs = SimpleNamespace(
        speculative_algorithm="EAGLE", speculative_eagle_topk=None, speculative_draft_model_path="x"
    )
    none = SimpleNamespace(speculative_algorithm=None, speculative_eagle_topk=None, speculative_draft_model_path=None)
    for args in (ours, theirs, none):
        hooks.early_arguments(args)
    assert (ours.speculative_eagle_topk, theirs.speculative_eagle_topk, none.speculative_eagle_topk) == (1, None, None)


def test_prompts_are_checked_for_every_server_and_embeddings_for_ours() -> None:
    for name, obj, ids, told in (
        (None, SimpleNamespace(), [100], "input_ids must be 0 to 99"),
        ("LONGDRAFT", SimpleNamespace(positional_embed_overrides={}), [1], "positional_embed_overrides"),
        (None, SimpleNamespace(positional_embed_overrides={}), [1], None),
        ("LONGDRAFT", SimpleNamespace(), [1], None),
    ):
        server = SimpleNamespace(speculative_algorithm=name)
        manager = SimpleNamespace(model_config=SimpleNamespace(vocab_size=100), server_args=server)
        with nullcontext() if told is None else pytest.raises(ValueError, match=told):
            hooks.check_ids(manager, obj, "", ids)


def test_a_bad_request_is_a_value_error_of_the_front_end() -> None:
    """The front end turns ValueError into HTTP 400."""
    with pytest.raises(ValueError, match=r"custom_params\.longdraft\.mode='x'"):
        hooks.check_request(SamplingParams(custom_params={"longdraft": {"mode": "x"}}), 100)
    hooks.check_request(SamplingParams(custom_params={"longdraft": {"mode": "off"}}), 100)


@pytest.mark.parametrize(
    ("causal", "cache"), [(True, torch.float32), (False, torch.float32), (True, torch.float8_e4m3fn)]
)
def test_the_cpu_prefill_equals_the_stock_one(causal: bool, cache: torch.dtype) -> None:
    """Two requests, one with a cached prefix; scattered slots."""
    g = torch.Generator().manual_seed(0)
    k_cache, v_cache = (torch.randn(40, 2, 8, generator=g).to(cache) for _ in range(2))
    table = torch.randperm(40, generator=g).view(2, 20).to(torch.int32)
    query = torch.randn(9, 4, 8, generator=g)
    lens, prefix = torch.tensor([5, 16]), torch.tensor([0, 12])
    outs = [torch.zeros_like(query) for _ in range(2)]
    stock = TorchNativeAttnBackend._run_sdpa_forward_extend
    for out, run in zip(outs, (stock, functools.partial(hooks.extend_attention, None)), strict=True):
        run(
            SimpleNamespace(), query, out, k_cache, v_cache, table, torch.tensor([1, 0]), lens, prefix, lens - prefix,
            scaling=0.3, enable_gqa=True, causal=causal,
        )  # fmt: skip
    torch.testing.assert_close(outs[1], outs[0], rtol=1e-4, atol=1e-5)


def test_the_prefill_hook_leaves_sliding_windows_to_sglang() -> None:
    seen: list[Any] = []
    rest = [torch.zeros(1)] * 9
    hooks.extend_attention(lambda *a: seen.append(a), SimpleNamespace(), *rest, sliding_window_size=8)
    (called,) = seen
    names = list(inspect.signature(TorchNativeAttnBackend._run_sdpa_forward_extend).parameters)
    assert len(called) == len(names) and called[names.index("sliding_window_size")] == 8


def keywords(module: str, called: str) -> set[str]:
    """Keyword names of every call to a class in one of our files."""
    tree = ast.parse(Path(str(importlib.import_module(module).__file__)).read_text())
    calls = [n for n in ast.walk(tree) if isinstance(n, ast.Call) and getattr(n.func, "id", None) == called]
    assert calls, f"{module} no longer makes a {called}: drop this check"
    return {k.arg for call in calls for k in call.keywords if k.arg}


@pytest.mark.parametrize(
    ("module", "theirs"),
    [("longdraft.serve.verify", ForwardBatch), ("longdraft.serve.decode_step", GenerationBatchResult)],
)
def test_the_fields_that_we_fill_exist(module: str, theirs: type) -> None:
    assert keywords(module, theirs.__name__) <= {field.name for field in dataclasses.fields(theirs)}


def test_the_worker_is_complete_and_called_as_sglang_calls() -> None:
    assert not LongDraftWorker.__abstractmethods__
    for name in ("clear_cache_pool", "init_attention_backends"):
        assert inspect.signature(getattr(BaseSpecWorker, name)) == inspect.signature(
            getattr(LongDraftWorker, name)
        ).replace(return_annotation=inspect.Signature.empty)
    for name in (
        "alloc_memory_pool", "init_cuda_graphs", "on_verify_complete_cpu", "war_fastpath_runner", "spec_v2_attn_backends",
        "forward_batch_generation", "prepare_for_kv_cache_release", "update_weights_from_disk", "update_weights_from_ipc",
        "update_weights_from_tensor",
    ):  # fmt: skip
        assert hasattr(LongDraftWorker, name)


def test_calls_into_sglangs_logprobs_have_their_parameters() -> None:
    assert list(inspect.signature(compute_spec_v2_logprobs).parameters) == [
        "batch", "logits_output", "predict", "accept_index", "speculative_num_steps",
    ]  # fmt: skip
    assert len(inspect.signature(Sampler._attach_logprobs_to_output).parameters) == 7


def test_grammar_objects_offer_what_masks_need() -> None:
    for name in (
        "finished", "is_terminated", "allocate_vocab_mask", "fill_vocab_mask", "accept_token", "rollback",
        "apply_vocab_mask", "move_vocab_mask",
    ):  # fmt: skip
        assert hasattr(BaseGrammarObject, name)


def test_everything_but_verification_reaches_the_stock_backend() -> None:
    """Methods of the base class are found before ``__getattr__``, so each that the stock one overrides must be passed on."""
    heard: list[str] = []

    class Stock(AttentionBackend):
        extra = 3

        def init_forward_metadata(self, forward_batch: Any) -> None:
            heard.append("metadata")

        def forward_decode(self, *args: Any, **kwargs: Any) -> torch.Tensor:
            heard.append("decode")
            return torch.zeros(1)

        def forward_extend(self, *args: Any, **kwargs: Any) -> torch.Tensor:
            heard.append("extend")
            return torch.zeros(1)

        def support_triton(self) -> bool:
            return False

    mine = LongDraftAttention(Stock(), None, None)
    batch = SimpleNamespace(forward_mode=SimpleNamespace(is_target_verify=lambda: False))
    mine.init_forward_metadata(batch)
    mine.forward_decode()
    layer = SimpleNamespace(layer_id=0, tp_q_head_num=1, head_dim=4)
    mine.forward_extend(torch.zeros(1, 4), None, None, layer, batch)
    assert heard == ["metadata", "decode", "extend"]
    assert mine.extra == 3
    assert mine.support_triton() is False
    missing = {
        name
        for name, value in vars(TorchNativeAttnBackend).items()
        if callable(value) and name in vars(AttentionBackend) and name not in vars(LongDraftAttention)
    } - {"__init__", "get_cuda_graph_seq_len_fill_value"}
    assert not missing, "the stock CPU backend overrides these, ours hides them"


def test_every_family_of_targets_hands_out_hidden_layers() -> None:
    """An EAGLE-3 draft's target is one of these; another is refused before its weights are loaded."""
    classes = {
        "llama": "llama.LlamaForCausalLM", "mistral": "mistral.MistralForCausalLM", "qwen2": "qwen2.Qwen2ForCausalLM",
        "qwen3": "qwen3.Qwen3ForCausalLM", "qwen2_moe": "qwen2_moe.Qwen2MoeForCausalLM",
        "qwen3_moe": "qwen3_moe.Qwen3MoeForCausalLM",
    }  # fmt: skip
    assert classes.keys() == set(FAMILIES)
    for path in classes.values():
        assert hasattr(pkgutil.resolve_name(f"sglang.srt.models.{path}"), "set_eagle3_layers_to_capture")


def test_what_the_observer_reads_and_sets_exists() -> None:
    fields = {field.name for field in dataclasses.fields(ScheduleBatch)}
    assert {
        "extend_lens",
        "prefix_lens",
        "capture_hidden_mode",
        "out_cache_loc",
        "input_ids",
        "req_pool_indices",
    } <= fields
    assert "hidden_states" in {field.name for field in dataclasses.fields(LogitsProcessorOutput)}
    assert '"eagle_draft_num_layers"' in inspect.getsource(pool_configurator)


class _Pool:
    def __init__(self, rows: int, width: int) -> None:
        self.req_to_token = torch.full((rows, width), -1, dtype=torch.int32)


def test_slots_are_reserved_per_step_and_never_past_the_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """S3: each slot goes to one place; near the context limit the row ends the reservation."""
    from longdraft.serve import spec_inputs

    given: list[int] = []

    def allocate(tree_cache: Any, count: int) -> torch.Tensor:
        start = sum(given)
        given.append(count)
        return torch.arange(100 + start, 100 + start + count)

    monkeypatch.setattr(spec_inputs, "alloc_token_slots", allocate)
    monkeypatch.setattr(spec_inputs, "get_alloc_reserve_per_decode", lambda: 10)
    reqs = [
        SimpleNamespace(req_pool_idx=row, kv_allocated_len=held, kv_committed_len=used, decode_batch_idx=0)
        for row, held, used in ((0, 5, 5), (2, 12, 8), (1, 28, 27), (3, 30, 29))
    ]
    pool = _Pool(4, 30)
    batch: Any = SimpleNamespace(reqs=reqs, req_to_token_pool=pool, tree_cache=SimpleNamespace(page_size=1))
    DraftInput().prepare_for_decode(batch)
    assert [r.kv_allocated_len for r in reqs] == [15, 18, 30, 30]
    assert [r.kv_committed_len for r in reqs] == [6, 9, 28, 30]
    assert given == [10 + 6 + 2]
    written = pool.req_to_token[pool.req_to_token >= 0].tolist()
    assert sorted(written) == list(range(100, 118))
    assert (pool.req_to_token[0, 5:15] >= 0).all()
    assert (pool.req_to_token[2, 12:18] >= 0).all()
    assert (pool.req_to_token[1, 28:30] >= 0).all()
    reqs[0].kv_allocated_len = 30
    batch.reqs = reqs[:1]
    DraftInput().prepare_for_decode(batch)
    assert len(given) == 1, "a full row asks for nothing"


def test_the_package_is_the_checkout_under_test() -> None:
    assert Path(str(longdraft.__file__)).is_file()


def test_a_finished_request_is_shown_to_the_worker_before_its_slots_are_shared() -> None:
    finish = inspect.getsource(SchedulerBatchResultProcessor._handle_finish_state_updated_req)
    assert finish.index("prepare_release(req)") < finish.index("release_kv_cache(req")
    assert 'is_insert and not getattr(req, "skip_radix_cache_insert", False)' in inspect.getsource(release_kv_cache)
