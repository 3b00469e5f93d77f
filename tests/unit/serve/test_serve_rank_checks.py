"""What a server of several ranks refuses at start, and what it sets."""

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest
from sglang.srt.server_args import ServerArgs
from test_serve_checks import arguments, refused
from tiny import tiny_draft, tiny_target

from longdraft.draft_models.checkpoint import save_draft
from longdraft.serve.algorithm import LongDraftAlgorithm
from longdraft.serve.checks import check_server_args
from longdraft.serve.settings import ENVIRONMENT


@pytest.fixture(autouse=True)
def _no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ENVIRONMENT, raising=False)


def test_heads_that_do_not_divide_among_the_ranks_are_refused(tmp_path: Path) -> None:
    """Of the target, and of a draft that has query heads of its own on the target's keys."""
    target = tiny_target("llama", num_attention_heads=8, num_key_value_heads=2)
    given: dict[str, Any] = {"config": target.model.config}
    for size in (1, 2, 4, 8):
        check_server_args(arguments(**given, tp_size=size))
    assert re.match(
        r"--tp-size 3 does not fit the target, .*: use one of 1, 2, 4, 8$", refused(arguments(**given, tp_size=3))
    )
    save_draft(tiny_draft(target, cross_group=1), tmp_path / "draft", "tiny")
    given["speculative_draft_model_path"] = str(tmp_path / "draft")
    check_server_args(arguments(**given, tp_size=2))
    assert "--tp-size 4 does not fit the draft's cross-attention, which has 2 query heads" in refused(
        arguments(**given, tp_size=4)
    )


def test_ranks_by_pipeline_or_with_batches_of_their_own_are_refused() -> None:
    assert refused(arguments(pp_size=2)).startswith("--pp-size 2 does not work with LONGDRAFT (pipeline parallelism")
    assert "ranks would draft different batches" in refused(arguments(tp_size=2, enable_dp_attention=True))


def test_ranks_add_up_every_layer_before_a_draft_looks_at_it() -> None:
    for size in (1, 2):
        args = arguments(tp_size=size, flashinfer_allreduce_fusion_backend="auto")
        args.enforce_disable_flashinfer_allreduce_fusion = False
        LongDraftAlgorithm("LONGDRAFT", lambda server_args: object).handle_server_args(args)
        fused = args.flashinfer_allreduce_fusion_backend, args.enforce_disable_flashinfer_allreduce_fusion
        assert fused == (("auto", False) if size == 1 else (None, True))
    names = {field.name for field in dataclasses.fields(ServerArgs)}
    assert {"flashinfer_allreduce_fusion_backend", "enforce_disable_flashinfer_allreduce_fusion"} <= names
