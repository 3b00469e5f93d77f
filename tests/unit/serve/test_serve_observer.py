"""What the target computes reaches the drafter token by token, and a drafter that fails on it takes nothing down."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode

from longdraft.errors import UserError
from longdraft.serve.drafters.base import Computed, Drafter, DraftRequest, Pick
from longdraft.serve.drafters.lookup import LookupDrafter
from longdraft.serve.observer import Observer
from longdraft.serve.ranks import ALONE
from longdraft.serve.worker import LongDraftWorker

TABLE = torch.tensor([[9, 8, 7, 6, 5], [10, 11, 12, 13, 14], [20, 21, 22, 23, 24]], dtype=torch.int32)


class Watching(Drafter):
    observed_layers = (1, 2, 3)

    def __init__(self, fails: bool = False) -> None:
        self.fails = fails
        self.seen: list[Computed] = []
        self.missed: list[int] = []

    def observe(self, computed: Computed) -> None:
        if self.fails:
            raise RuntimeError("planted")
        self.seen.append(computed)

    def unobserved(self, slot_T: torch.Tensor) -> None:
        self.missed += slot_T.tolist()

    def propose(self, requests: list[DraftRequest], pick: Pick) -> list[list[int]]:
        return [[] for _ in requests]

    def committed(self, request: DraftRequest, tokens: list[int]) -> None: ...

    def forget(self, rid: str) -> None: ...

    def clear(self) -> None: ...


def output(rows: int) -> SimpleNamespace:
    return SimpleNamespace(hidden_states=torch.arange(rows * 6.0).view(rows, 6))


def prefill_of(rows: list[int], prefix: list[int], lens: list[int]) -> Any:
    """Requests at rows of the page table, of which ``prefix`` tokens are cached and ``lens`` are computed."""
    slots = torch.cat([TABLE[r, p : p + n] for r, p, n in zip(rows, prefix, lens, strict=True)])
    return SimpleNamespace(
        extend_lens=lens,
        prefix_lens=prefix,
        input_ids=torch.arange(100, 100 + sum(lens)),
        out_cache_loc=slots,
        req_pool_indices=torch.tensor(rows),
        req_to_token_pool=SimpleNamespace(req_to_token=TABLE),
    )


def test_a_prefill_is_told_with_positions_slots_and_the_slots_before() -> None:
    """A whole prompt, one behind a cached prefix, and the last token of one that is all cached."""
    drafter, out = Watching(), output(6)
    aux = out.hidden_states
    Observer(drafter).prefilled(prefill_of([2, 0, 1], [0, 2, 4], [3, 2, 1]), out)
    (seen,) = drafter.seen
    assert seen.id_T.tolist() == [100, 101, 102, 103, 104, 105]
    assert seen.position_T.tolist() == [0, 1, 2, 2, 3, 4]
    assert seen.slot_T.tolist() == [20, 21, 22, 7, 6, 14]
    assert seen.before_T.tolist() == [20, 20, 21, 8, 7, 13]
    assert seen.slot_T.dtype == seen.before_T.dtype == torch.int64
    assert seen.aux_TA is aux
    assert out.hidden_states is None, "SGLang would copy them to the host"


def test_a_verification_is_told_with_drafts_and_all() -> None:
    drafter = Watching()
    forward: Any = SimpleNamespace(
        input_ids=torch.tensor([5, 6, 7, 8]),
        positions=torch.tensor([2, 3, 1, 2]),
        out_cache_loc=torch.tensor([7, 6, 21, 22]),
        req_pool_indices=torch.tensor([0, 2]),
    )
    Observer(drafter).verified(forward, TABLE, torch.tensor([0, 0, 1, 1]), output(4))
    (seen,) = drafter.seen
    assert seen.before_T.tolist() == [8, 7, 20, 21]
    assert (seen.position_T.tolist(), seen.slot_T.tolist()) == ([2, 3, 1, 2], [7, 6, 21, 22])


def test_a_drafter_that_observes_nothing_is_left_alone() -> None:
    observer, out = Observer(LookupDrafter(2)), output(1)
    observer.ask(SimpleNamespace())
    observer.prefilled(prefill_of([0], [0], [1]), out)
    assert observer.capture == CaptureHiddenMode.NULL
    assert out.hidden_states is not None


def test_a_forward_without_rows_tells_nothing() -> None:
    drafter = Watching()
    Observer(drafter).prefilled(prefill_of([0], [0], [1]), None)
    Observer(drafter).prefilled(prefill_of([0], [0], [1]), SimpleNamespace(hidden_states=None))
    assert not drafter.seen


def test_a_drafter_that_fails_hears_which_slots_it_missed(caplog: pytest.LogCaptureFixture) -> None:
    drafter = Watching(fails=True)
    Observer(drafter).prefilled(prefill_of([2], [1], [3]), output(3))
    assert drafter.missed == [21, 22, 23]
    assert "could not follow 3 tokens" in caplog.text


def test_the_target_is_asked_for_the_drafts_layers_and_every_row() -> None:
    asked: list[list[int]] = []
    observer = Observer(Watching())
    observer.ask(SimpleNamespace(set_eagle3_layers_to_capture=asked.append))
    assert asked == [[1, 2, 3]]
    assert observer.capture == CaptureHiddenMode.FULL


def test_a_target_without_hidden_layers_is_refused() -> None:
    with pytest.raises(UserError, match=r"SimpleNamespace does not hand out hidden layers.*use a LongSpec draft"):
        Observer(Watching()).ask(SimpleNamespace())


@pytest.mark.parametrize(("per_slot", "layers"), [(0, 0), (1, 1), (256, 1), (257, 2), (768, 3)])
def test_sglang_is_told_to_leave_room_beside_its_cache(per_slot: int, layers: int) -> None:
    """A cache layer of this target takes 2 * 2 heads * 32 numbers of 2 bytes a token."""
    config = SimpleNamespace(get_num_kv_heads=lambda ranks: 2, head_dim=32)
    runner = SimpleNamespace(model_config=config, kv_cache_dtype=torch.bfloat16)
    worker: Any = SimpleNamespace(runner=runner, drafter=SimpleNamespace(bytes_per_slot=per_slot), ranks=ALONE)
    LongDraftWorker._reserve(worker)
    assert runner.eagle_draft_num_layers == layers


@pytest.mark.parametrize(
    ("exact", "whole", "protected", "handed_back"),
    [(None, 40, 0, 40), (None, 39, 0, 39), (25, 39, 0, 25), (30, 0, 12, 12), (None, 50, 0, 40)],
)
def test_an_ended_request_hands_back_what_is_exact_and_what_the_draft_has(
    exact: int | None, whole: int, protected: int, handed_back: int
) -> None:
    """Never less than what the prefix cache protects already."""
    asked = []

    def whole_of(rid: str, count: int) -> int:
        asked.append((rid, count))
        return min(count, whole)

    drafter = SimpleNamespace(handed_back=whole_of, forget=asked.append)
    looked: list[Any] = []
    step, metrics = SimpleNamespace(exact_of=lambda req: exact), SimpleNamespace(look=looked.append)
    worker: Any = SimpleNamespace(drafter=drafter, step=step, metrics=metrics)
    req = SimpleNamespace(
        rid="r", kv_committed_len=40, cache_protected_len=protected, to_finish=None, finished_reason=None
    )
    LongDraftWorker.prepare_for_kv_cache_release(worker, req)
    assert looked == [req], "its last rounds are counted"
    assert req.kv_committed_len == handed_back
    assert asked == [("r", 40), "r"], "it is asked before it forgets"


def test_a_drafter_that_fails_on_a_prefill_is_told_which_slots() -> None:
    class Second(Watching):
        observed_layers = None

        def prefilled(self, batch: Any) -> None:
            raise RuntimeError("planted")

    drafter = Second()
    Observer(drafter).prefilled(prefill_of([2, 0], [0, 2], [3, 2]), output(5))
    assert drafter.missed == [20, 21, 22, 7, 6] and not drafter.seen
