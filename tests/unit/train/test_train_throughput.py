"""Operations of a step against a counter of torch's, and what the meter and the progress line make of them."""

import io
import time
from typing import Any

import pytest
import torch
from tiny import tiny_draft, tiny_eagle3, tiny_target
from torch.utils.flop_counter import FlopCounterMode

from longdraft.schema import load_settings
from longdraft.train.checkpoints import Progress
from longdraft.train.config import TrainSettings
from longdraft.train.flops import PEAK_TFLOPS, micro_batch_flops, peak_tflops
from longdraft.train.metering import Meter
from longdraft.train.methods.eagle3 import Eagle3Method
from longdraft.train.methods.longspec import LongSpecMethod
from longdraft.train.samples import Packed
from longdraft.train.tracking import ProgressLine


def settings(*more: str) -> TrainSettings:
    return load_settings(TrainSettings, None, ["target.path=tiny-random:llama", "data.train=x", *more])


def packed(length: int, every: int = 1) -> Packed:
    ids = torch.randint(0, 256, (length,), generator=torch.Generator().manual_seed(0))
    labels = torch.where(torch.arange(length) % every == 0, ids.roll(-1), -100)
    return Packed(ids, torch.arange(length), labels, [0, length], ["d"])


@pytest.mark.parametrize("objective", ["ce", "kl"])
def test_the_formula_is_near_what_torch_counts(objective: str) -> None:
    """Short documents, so that attention, of which torch counts the masked half too, is a small part."""
    run = settings(f"objective.name={objective}", "draft.window=32", "lag.max=1")
    target = tiny_target("llama")
    method = LongSpecMethod(run, target, tiny_draft(target, window=32))
    batch = packed(24, every=2)
    with FlopCounterMode(display=False) as counter:
        method(batch, 1).loss.backward()
    assert micro_batch_flops(target.spec, run, batch) == pytest.approx(counter.get_total_flops(), rel=0.12)


def test_the_formula_of_eagle3_is_near_what_torch_counts() -> None:
    run = settings("draft.arch=eagle3", "ttt.steps=3", "ttt.recompute=false", "eagle3.draft_vocab_size=96")
    target = tiny_target("llama", num_hidden_layers=6)
    method = Eagle3Method(run, target, tiny_eagle3(target, draft_vocab_size=96))
    batch = packed(24, every=2)
    with FlopCounterMode(display=False) as counter:
        method(batch, 1).loss.backward()
    assert micro_batch_flops(target.spec, run, batch) == pytest.approx(counter.get_total_flops(), rel=0.15)


def test_attention_grows_with_the_square_of_documents_and_stored_features_need_no_target() -> None:
    spec, run = tiny_target("llama").spec, settings("draft.window=32")
    one, parts = packed(4096), packed(4096)
    parts.cu[:] = [0, 1024, 2048, 3072, 4096]
    saved = micro_batch_flops(spec, run, one) - micro_batch_flops(spec, run, parts)
    width = spec.num_heads * spec.head_dim
    assert saved == pytest.approx((3 + spec.num_layers) * 2 * width * (4096**2 - 4 * 1024**2))
    stored = Packed(one.id_T, one.position_T, one.label_T, one.cu, one.names, capture=object())  # type: ignore[arg-type]
    assert micro_batch_flops(spec, run, stored) < micro_batch_flops(spec, run, one) / 1.5


def test_eagle3_pays_its_steps_for_supervised_rows_alone() -> None:
    spec = tiny_target("llama").spec
    few, more = (settings("draft.arch=eagle3", f"ttt.steps={k}") for k in (2, 4))
    dense, sparse = packed(512), packed(512, every=8)
    steps = micro_batch_flops(spec, more, sparse) - micro_batch_flops(spec, few, sparse)
    assert steps > 0
    assert micro_batch_flops(spec, more, dense) - micro_batch_flops(spec, few, dense) == pytest.approx(8 * steps)


def test_peaks_are_known_by_name_and_can_be_given(monkeypatch: pytest.MonkeyPatch) -> None:
    assert peak_tflops(settings(), torch.device("cpu")) is None
    assert peak_tflops(settings("engine.peak_tflops=2.5"), torch.device("cpu")) == 2.5
    names = {"NVIDIA H200": 989.0, "NVIDIA A100-SXM4-80GB": 312.0, "NVIDIA GeForce GT 710": None}
    for name, peak in names.items():
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device, name=name: name)
        assert peak_tflops(settings(), torch.device("cuda")) == peak
    assert PEAK_TFLOPS["H100"] == 989.0


def row_of(meter: Meter, waits: float, works: float, **more: Any) -> dict[str, Any]:
    meter.start()
    time.sleep(waits)
    meter.got_data()
    time.sleep(works)
    meter.finish(2.0, [1.0], [2.0], 2.0, 100.0, 1e6, **more)
    return meter.row()


def test_a_row_has_the_share_of_the_peak_and_of_waiting() -> None:
    row = row_of(Meter(Progress(), peak_flops=1e9), 0.03, 0.03)
    seconds = row["seconds_per_step"]
    assert row["mfu"] == pytest.approx(1e6 / seconds / 1e9)
    assert row["tflop_per_s"] == pytest.approx(1e-6 / seconds)
    assert 0.03 / seconds <= row["data_wait_share"] <= 1 - 0.03 / seconds
    meter = Meter(Progress())
    assert "mfu" not in row_of(meter, 0.02, 0.0)
    assert row_of(meter, 0.0, 0.02)["data_wait_share"] < 0.2  # each row counts from the last


def test_the_progress_line_says_what_it_knows() -> None:
    row = {"step": 4, "loss": 2.5, "accuracy": 0.25, "tokens_per_s": 1234.0, "data_wait_share": 0.034}
    out = io.StringIO()
    ProgressLine(10, 0, out).show(row)
    ProgressLine(10, 0, out).show(row | {"mfu": 0.412})
    plain, with_peak = out.getvalue().splitlines()
    assert "1,234 tok/s  data wait 3.4%  ETA" in plain
    assert "1,234 tok/s  MFU 41.2%  data wait 3.4%  ETA" in with_peak
