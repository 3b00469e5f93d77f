"""What SGLang's graph capture is told: when graphs are made, with what input, and that the draft's follow at the same sizes."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode

from longdraft.serve import hooks, target_graphs
from longdraft.serve.algorithm import LongDraftAlgorithm
from longdraft.serve.attention_backend import LongDraftAttention
from longdraft.serve.build_drafter import draft_attention
from longdraft.serve.ranks import ALONE
from longdraft.serve.settings import ENVIRONMENT, ServeSettings
from longdraft.serve.shape_choice import ShapeChoice
from longdraft.serve.shape_costs import CostTable
from longdraft.serve.spec_inputs import VerifyInput
from longdraft.serve.tree_shape import candidates
from longdraft.serve.tree_step import TreeStep
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
        tp_size=1,
        speculative_num_steps=None,
        speculative_draft_model_path="folder",
        max_running_requests=None,
        disable_overlap_schedule=False,
        enable_forward_pass_metrics=False,
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
    ours = SimpleNamespace(attn_backend=backend)
    given = hooks.captured_input(None, ours, 6)
    assert isinstance(given, VerifyInput)
    assert (given.plan, given.capture_hidden_mode) == (None, CaptureHiddenMode.FULL)
    stock = SimpleNamespace(attn_backend=object())
    assert hooks.captured_input(lambda self, tokens: ("stock", tokens), stock, 6) == ("stock", 6)


class Capture:
    """In the place of SGLang's graphs of one width."""

    capture_bs, max_bs = (1, 2, 4), 4

    def __init__(self, runner: Any, attn_backend: Any, speculative_num_draft_tokens: int) -> None:
        self.attn_backend, self.num_tokens_per_bs = attn_backend, speculative_num_draft_tokens
        attn_backend.init_cuda_graph_state(self.max_bs, self.max_bs * self.num_tokens_per_bs)


def a_backend(tree_widths: frozenset[int]) -> LongDraftAttention:
    backend = LongDraftAttention(SimpleNamespace(), None, None, torch.zeros(5, 9, dtype=torch.int32))  # type: ignore[arg-type]
    backend.tree_widths = tree_widths
    return backend


def test_a_verification_replays_the_narrowest_graphs_that_hold_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(target_graphs, "DecodeCudaGraphRunner", Capture)
    runner = SimpleNamespace(attn_backend=a_backend(frozenset({6})))
    runner.decode_cuda_graph_runner = first = Capture(runner, runner.attn_backend, 6)
    graphs = target_graphs.TargetGraphs(runner, first)
    for width in (1, 3, 3, 6):
        graphs.add(width)
    assert sorted(graphs.sets) == [(1, None), (3, None), (6, None)]
    assert graphs.sets[6, None] is first
    backends = [graphs.sets[width, None].attn_backend for width in (1, 3, 6)]
    assert len({id(b.static.pages_BW) for b in backends}) == 3, "graphs of two widths share buffers"
    assert [b.static.bits_TW is None for b in backends] == [True, True, False]
    for requests, rows, width in ((1, 1, 1), (4, 2, 3), (2, 4, 6), (5, 1, None), (1, 7, None), (3, 3, 3)):
        assert graphs.select(requests, rows) == width
        if width is not None:
            assert runner.decode_cuda_graph_runner is graphs.sets[width, None]


def test_views_have_graphs_of_their_own_with_shorter_page_lists(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(target_graphs, "DecodeCudaGraphRunner", Capture)
    runner = SimpleNamespace(attn_backend=a_backend(frozenset()))
    runner.decode_cuda_graph_runner = first = Capture(runner, runner.attn_backend, 6)
    graphs = target_graphs.TargetGraphs(runner, first)
    graphs.add(3)
    for columns in (4, 2, 4):
        graphs.add(3, columns)
    assert len(graphs.sets) == 4
    for columns in (4, None, 2):
        assert graphs.select(2, 3, columns) == 3 and runner.decode_cuda_graph_runner is graphs.sets[3, columns]
    assert graphs.select(2, 5, 4) is None, "wide verifications read whole caches"
    pages = [graphs.sets[3, columns].attn_backend.static.pages_BW for columns in (None, 4, 2)]
    assert [x.shape[1] for x in pages] == [9 + 3, 4 + 3, 2 + 3]
    static = graphs.sets[3, 4].attn_backend.static
    pages_BW = torch.arange(1, 15, dtype=torch.int32).view(2, 7)
    static.pages_BW[:] = 9
    static.fill_view(pages_BW, torch.tensor([4, 2], dtype=torch.int32), 4)
    assert torch.equal(static.pages_BW[:2], pages_BW) and static.lens_B[:4].tolist() == [4, 2, 1, 1]
    assert not static.pages_BW[2:4].any(), "padding reads slot 0"


@pytest.mark.parametrize("sizes", [[1, 2, 4], None])
def test_the_drafts_graphs_follow_the_targets(sizes: list[int] | None) -> None:
    asked: list[Any] = []
    worker = LongDraftWorker.__new__(LongDraftWorker)
    worker.ranks = ALONE
    worker.step = SimpleNamespace(graphs=None)  # type: ignore[assignment]
    worker.drafter = SimpleNamespace(use_graphs=lambda *given: asked.append(given))  # type: ignore[assignment]
    made = SimpleNamespace(capture_bs=sizes, max_bs=4, num_tokens_per_bs=5) if sizes else None
    worker.runner = SimpleNamespace(decode_cuda_graph_runner=made)
    worker.shapes = []
    worker.init_cuda_graphs()
    assert asked == ([(sizes, [])] if sizes else [])
    assert (worker.step.graphs is None) == (sizes is None)


def test_a_batch_that_no_graph_holds_is_verified_as_it_is() -> None:
    """Static buffers end at the largest captured size."""
    from longdraft.serve.static_plan import StaticPlan

    static = StaticPlan(2, 3, 8, torch.device("cpu"))
    with pytest.raises(RuntimeError):
        static.fill(torch.zeros(4, 8, dtype=torch.int32), torch.tensor([1, 2, 3]), torch.tensor([1, 1, 1]), 1)


def priced(monkeypatch: pytest.MonkeyPatch, costs: str | None, measured: Any) -> TreeStep:
    worker = LongDraftWorker.__new__(LongDraftWorker)
    worker.ranks = ALONE
    worker.step = step = TreeStep.__new__(TreeStep)
    step.choice = ShapeChoice(candidates("auto", 1))
    worker.runner, worker.shapes, worker.costs, worker.most = (
        SimpleNamespace(decode_cuda_graph_runner=None),
        [],
        costs,
        4,
    )
    monkeypatch.setattr("longdraft.serve.worker.measured_costs", measured)
    worker.init_cuda_graphs()
    return step


def test_costs_are_given_or_measured_and_a_measurement_that_fails_ends_no_server(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    measured = CostTable((1, 4), {"chain0": (1.0, 2.0), "chain1": (3.0, 4.0)})
    caplog.set_level("INFO")
    step = priced(monkeypatch, None, lambda step, runner, most: measured)
    assert step.choice.costs == measured
    assert measured.dump() in caplog.text, "what was measured can be given to the next start"
    (tmp_path / "costs.json").write_text(measured.dump())

    def fails(*_: Any) -> CostTable:
        raise RuntimeError("no")

    assert priced(monkeypatch, str(tmp_path / "costs.json"), fails).choice.costs == measured
    broken = priced(monkeypatch, None, fails)
    assert broken.choice.costs is None
    assert broken.choice.pick(3).name == "chain1"
    assert "nothing is chosen" in caplog.text


@pytest.mark.parametrize(
    ("attention", "tree", "backend"),
    [
        ("auto", "chain", None),
        ("flashinfer", "chain", "flashinfer"),
        ("flashinfer", "2,3", None),
        ("flashinfer", "auto", None),
        ("torch", "2,3", "torch"),
        ("fa3", "auto", "fa3"),
    ],
)
def test_drafts_attend_by_the_chosen_backend_where_it_can(attention: Any, tree: str, backend: str | None) -> None:
    assert draft_attention(ServeSettings(attention=attention, tree=tree)) == backend
