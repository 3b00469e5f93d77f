"""What the overlap schedule takes from SGLang: its loop, its relay of lengths, and where it may be told to wait."""

import inspect
from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.managers.overlap_utils import FutureMap, resolve_forward_inputs
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.managers.scheduler_components.batch_result_processor import SchedulerBatchResultProcessor

from longdraft.serve.algorithm import LongDraftAlgorithm
from longdraft.serve.hooks import waits_for_host
from longdraft.serve.relay import LengthRelay
from longdraft.serve.spec_inputs import DraftInput


def test_sglangs_loop_asks_waits_and_processes_as_we_take_it() -> None:
    loop = inspect.getsource(Scheduler.event_loop_overlap)
    assert loop.index("self.is_disable_overlap_for_batch(batch)") < loop.index("if disable_overlap_for_batch:")
    assert loop.index("pop_and_process()") < loop.index("self.run_batch(batch)"), "a wait comes before the launch"
    assert "self.future_map.stash(" in inspect.getsource(Scheduler.run_batch)
    assert "future_map._resolve_spec_extras(batch)" in inspect.getsource(resolve_forward_inputs)
    resolve = inspect.getsource(SchedulerBatchResultProcessor._resolve_spec_v2_tokens)
    assert "self.model_worker.on_verify_complete_cpu(" in resolve
    assert ".output_ids" not in resolve, "a round is counted before its tokens are the request's"
    assert {"stash", "_resolve_spec_extras", "publish", "resolve_seq_lens_cpu"} <= vars(FutureMap).keys()


def relay() -> LengthRelay:
    pool = SimpleNamespace(req_to_token=torch.zeros(6, 4))
    made = LongDraftAlgorithm("LONGDRAFT", lambda server_args: object).create_future_map("cpu", pool, False)
    assert isinstance(made, LengthRelay)
    return made


def test_lengths_follow_their_rows_through_filters_and_merges() -> None:
    lengths, first, second = relay(), DraftInput(), DraftInput()
    first.future_indices, second.future_indices = torch.tensor([2, 5, 1]), torch.tensor([4])
    lengths.publish(first.future_indices, torch.tensor([20, 50, 10]))
    lengths.stash(first.future_indices, first)
    lengths.publish(second.future_indices, torch.tensor([40]))
    first.filter_batch(new_indices=torch.tensor([0, 2]), has_been_filtered=False)
    first.merge_batch(second)
    batch: Any = SimpleNamespace(spec_info=first, seq_lens=None, seq_lens_cpu=torch.zeros(3), seq_lens_sum=0)
    lengths.resolve_seq_lens_cpu(batch)
    lengths._resolve_spec_extras(batch)
    assert batch.seq_lens.tolist() == [20, 10, 40]
    assert batch.seq_lens_cpu is None, "nothing is read on the host"


def test_without_the_overlap_schedule_there_are_no_rows_to_keep() -> None:
    first = DraftInput()
    first.filter_batch(new_indices=torch.tensor([0]))
    first.merge_batch(DraftInput())
    assert first.future_indices is None


@pytest.mark.parametrize("grammar", [False, True])
@pytest.mark.parametrize("decode", [False, True])
@pytest.mark.parametrize("pending", [False, True])
@pytest.mark.parametrize("needs", [False, True, None])
def test_the_scheduler_waits_where_a_decode_round_needs_the_pending_one(
    grammar: bool, decode: bool, pending: bool, needs: bool | None
) -> None:
    """None: a worker of another algorithm, which is not asked."""
    worker = SimpleNamespace() if needs is None else SimpleNamespace(needs_host=lambda batch: needs)
    scheduler = SimpleNamespace(model_worker=worker, result_queue=deque([1] if pending else []))
    batch = SimpleNamespace(forward_mode=SimpleNamespace(is_decode=lambda: decode))
    got = waits_for_host(lambda self, batch: grammar, scheduler, batch)
    assert got is (grammar or (decode and pending and bool(needs)))
    assert waits_for_host(lambda self, batch: False, scheduler, None) is False
