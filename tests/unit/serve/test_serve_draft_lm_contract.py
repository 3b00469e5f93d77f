"""What a language model as the draft uses of SGLang's runner, by its installed version."""

import ast
import inspect
from collections.abc import Callable
from typing import Any

import pytest
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.model_executor import model_runner
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode
from sglang.srt.model_executor.forward_context import ForwardContext
from sglang.srt.speculative.base_spec_worker import BaseSpecWorker

from longdraft.serve import draft_lm
from longdraft.serve.draft_lm import DraftLM
from longdraft.serve.worker import LongDraftWorker


def keywords(called: str) -> set[str]:
    """Keywords with which our code makes one of theirs."""
    found = [
        node
        for node in ast.walk(ast.parse(inspect.getsource(draft_lm)))
        if isinstance(node, ast.Call) and called in (getattr(node.func, "id", None), getattr(node.func, "attr", None))
    ]
    assert found, f"draft_lm no longer calls {called}: drop this check"
    return {k.arg for call in found for k in call.keywords if k.arg}


@pytest.mark.parametrize(
    ("theirs", "called"),
    [
        (model_runner.ModelRunner.__init__, "ModelRunner"),
        (ModelConfig.from_server_args, "from_server_args"),
        (ForwardBatch.__init__, "ForwardBatch"),
        (ForwardContext.__init__, "ForwardContext"),
    ],
)
def test_what_we_give_is_taken(theirs: Callable[..., Any], called: str) -> None:
    given = keywords(called)
    assert given and given <= set(inspect.signature(theirs).parameters)


def test_a_runner_is_made_from_what_the_targets_runner_has() -> None:
    source = inspect.getsource(model_runner.ModelRunner.__init__)
    read = {
        node.attr
        for node in ast.walk(ast.parse(inspect.getsource(draft_lm)))
        if isinstance(node, ast.Attribute) and getattr(node.value, "id", None) == "target"
    }
    assert "dist_port" in read
    for name in read:
        assert f"self.{name} = " in source, name


def test_pools_come_by_the_names_that_sglang_calls_with() -> None:
    theirs, ours = (
        list(inspect.signature(each.alloc_memory_pool).parameters)[1:] for each in (BaseSpecWorker, LongDraftWorker)
    )
    source = inspect.getsource(Scheduler.init_memory_pools)
    assert not theirs or set(theirs) <= {*ours, "kwargs"}
    assert all(f"{name}=" in source for name in ours)
    assert "memory_pool_config" in inspect.signature(model_runner.ModelRunner.alloc_memory_pool).parameters


def test_positions_that_pass_the_context_have_a_rotation() -> None:
    """A chain runs some tokens past a request's end; SGLang extends the rotary tables of every model it loads."""
    source = inspect.getsource(model_runner.ModelRunner.load_model)
    assert "reserve_rope_cache_for_long_sequences(" in source


def test_a_verification_is_what_our_attention_takes() -> None:
    assert ForwardMode.TARGET_VERIFY.is_extend() and ForwardMode.TARGET_VERIFY.is_target_verify()
    assert {"take_pools", "attach", "prefill", "blank", "logits", "keys"} <= set(vars(DraftLM))
