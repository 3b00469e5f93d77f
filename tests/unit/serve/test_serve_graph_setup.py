"""What SGLang's graph capture is told: when graphs are made, with what input, and that the draft's follow at the same sizes."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode

from longdraft.serve import hooks
from longdraft.serve.algorithm import LongDraftAlgorithm
from longdraft.serve.attention_backend import LongDraftAttention
from longdraft.serve.settings import ENVIRONMENT
from longdraft.serve.spec_inputs import VerifyInput
from longdraft.serve.worker import LongDraftWorker


@pytest.mark.parametrize(
    ("device", "attention", "given", "backend"),
    [
        ("cuda", "auto", "full", "full"),
        ("cuda", "fa3", "breakable", "full"),
        ("cuda", "triton", "full", "full"),
        ("cuda", "flashinfer", "full", "disabled"),
        ("cuda", "torch", "full", "disabled"),
        ("cuda", "auto", "disabled", "disabled"),
        ("cpu", "auto", "full", "disabled"),
    ],
)
def test_graphs_are_made_on_a_card_where_the_attention_can_be_captured(
    monkeypatch: pytest.MonkeyPatch, device: str, attention: str, given: str, backend: str
) -> None:
    monkeypatch.setenv(ENVIRONMENT, f'{{"attention": "{attention}"}}')
    phases = {name: SimpleNamespace(backend=given) for name in ("decode", "prefill")}
    arguments = SimpleNamespace(
        device=device,
        speculative_num_steps=None,
        max_running_requests=None,
        disable_cuda_graph=False,
        cuda_graph_config=SimpleNamespace(**phases),
    )
    LongDraftAlgorithm("LONGDRAFT", lambda server_args: object).handle_server_args(arguments)
    assert (phases["decode"].backend, phases["prefill"].backend) == (backend, "disabled")
    assert arguments.disable_cuda_graph is (backend == "disabled")
    assert arguments.speculative_num_draft_tokens == 5


def test_a_capture_has_our_input_and_stock_models_theirs() -> None:
    backend = LongDraftAttention(SimpleNamespace(), None, None)  # type: ignore[arg-type]
    backend.captured_hidden = CaptureHiddenMode.FULL
    ours = SimpleNamespace(model_runner=SimpleNamespace(attn_backend=backend))
    given = hooks.captured_input(None, ours, 6)
    assert isinstance(given, VerifyInput)
    assert (given.plan, given.capture_hidden_mode) == (None, CaptureHiddenMode.FULL)
    stock = SimpleNamespace(model_runner=SimpleNamespace(attn_backend=object()))
    assert hooks.captured_input(lambda self, tokens: ("stock", tokens), stock, 6) == ("stock", 6)


@pytest.mark.parametrize("sizes", [[1, 2, 4], None])
def test_the_drafts_graphs_follow_the_targets(sizes: list[int] | None) -> None:
    asked: list[Any] = []
    worker = LongDraftWorker.__new__(LongDraftWorker)
    worker.step = SimpleNamespace(graphs=None)  # type: ignore[assignment]
    worker.drafter = SimpleNamespace(use_graphs=asked.append)  # type: ignore[assignment]
    graphs = SimpleNamespace(capture_bs=sizes, max_bs=4) if sizes else None
    worker.runner = SimpleNamespace(decode_cuda_graph_runner=graphs)
    worker.init_cuda_graphs()
    assert asked == ([sizes] if sizes else [])
    assert worker.step.graphs is graphs


def test_a_batch_that_no_graph_holds_is_verified_as_it_is() -> None:
    """Static buffers end at the largest captured size."""
    from longdraft.serve.static_plan import StaticPlan

    static = StaticPlan(2, 3, 8, torch.device("cpu"))
    with pytest.raises(RuntimeError):
        static.fill(torch.zeros(4, 8, dtype=torch.int32), torch.tensor([1, 2, 3]), torch.tensor([1, 1, 1]), 1)
