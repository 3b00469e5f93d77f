"""The training measurement's parts that need no GPU: files, SpecForge's trainer on them, floors, and what a record says."""

import json
import math
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from longdraft.bench.gpu_training import fallback, read_lines, run_process, trials
from longdraft.bench.training_files import SHAPES, Job, feature_folder, vocabulary, write_features, write_models
from longdraft.bench.training_floor import draft_weights, floor_seconds, step_flops
from longdraft.bench.training_meter import Meter
from longdraft.bench.training_ours import train
from longdraft.bench.training_record import checks, figures, summary
from longdraft.train.specforge_seam.feature_files import read_feature_file

TINY = SHAPES["tiny"]
# Stands in for a card without these packages, then runs the worker.
WITHOUT_PACKAGES = """
import sys
for name in ("wandb", "datasets", "yunchang", "flash_attn", "openai", "sglang"):
    sys.modules[name] = None
from longdraft.bench.training_specforge import main
sys.exit(main())
"""


def trial(name: str, peak: float, **more: Any) -> dict[str, Any]:
    return {"name": name, "tok_s": 100.0, "peak_gib": peak, "losses": [1.0, 0.9], "steps": 8, **more}


def test_every_trial_has_a_name_of_its_own_and_the_long_ones_come_first() -> None:
    jobs = trials("llama-8b", "cuda")
    assert len({job.name for job in jobs}) == len(jobs)
    assert [job.name for job in jobs[:2]] == ["ours_answers_32k", "specforge_answers_32k"]
    assert all(Job(**json.loads(job.json())) == job for job in jobs)


def test_floor_of_a_dense_step_is_that_of_its_products() -> None:
    shape = SHAPES["llama-8b"]
    assert draft_weights(shape) == pytest.approx(424.7e6, rel=1e-3)
    dense = Job("specforge", 32768, "answers")
    row = 7 * 3 * 2 * (8192 * 6144 + 4096 * 4096 + 3 * 4096 * 14336 + 4096 * 32000) + 4 * 12288 * 4096
    row += 2 * 4096 * (32000 + 128256)
    attention = 7 * 3.5 * 4 * 4096 * 32768**2 / 2
    assert sum(step_flops(dense, shape).values()) == pytest.approx(32768 * row + attention)
    assert floor_seconds(Job("ours", 32768, "answers"), shape) < 0.06 * floor_seconds(dense, shape)
    assert floor_seconds(Job("ours", 32768, "all"), shape) == floor_seconds(dense, shape)


def test_features_supervise_the_end_and_hold_tokens_of_the_draft(tmp_path: Path) -> None:
    write_features(tmp_path, TINY, 96, "answers", 3, "cpu")
    files = sorted(feature_folder(tmp_path, 96, "answers").iterdir())
    sample = read_feature_file(files[2])
    assert len(files) == 3 and sample.supervised_S.nonzero().flatten().tolist() == list(range(72, 96))
    assert torch.isin(sample.id_S, vocabulary(TINY)).all()
    assert sample.tensors["aux"].shape == (96, 192) and sample.tensors["hidden"].shape == (96, 64)


def test_the_dummy_target_chooses_tokens_that_the_draft_has(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    write_models(tmp_path, TINY, "cpu")
    head_VE = load_file(tmp_path / "target" / "model.safetensors")["lm_head.weight"].float()
    choice = (torch.randn(500, TINY.hidden, generator=torch.Generator().manual_seed(1)) @ head_VE.t()).argmax(-1)
    assert torch.isin(choice, vocabulary(TINY)).float().mean() > 0.98


def work(events: Path, job: Job, command: list[str]) -> list[dict[str, Any]]:
    """Run a worker in a process of its own; what it wrote."""
    whole = [sys.executable, *command, str(events.parent), str(events), job.json()]
    done = subprocess.run(whole, capture_output=True, text=True, env=os.environ | {"CUDA_VISIBLE_DEVICES": ""})
    assert done.returncode == 0, (read_lines(events), done.stderr[-2000:])
    return read_lines(events)


def test_both_trainers_run_the_job_from_the_same_loss(tmp_path: Path) -> None:
    """SpecForge's without packages that it only imports; ours with its rows and mean."""
    write_models(tmp_path, TINY, "cpu")
    write_features(tmp_path, TINY, 24, "answers", 2, "cpu")
    job = Job(
        "specforge", 24, "answers", "tiny", "cpu", attention="sdpa", sharding="NO_SHARD", warmup=1, steps=1, ttt=2
    )
    theirs = work(tmp_path / "specforge.jsonl", job, ["-c", WITHOUT_PACKAGES])
    assert [line["event"] for line in theirs] == ["start", "step", "step", "end"]
    assert theirs[0]["stand_ins"] == ["wandb", "datasets"]
    assert not (tmp_path / "specforge-output").exists()  # no checkpoint
    out = summary(job, theirs)
    assert out["tok_s"] == pytest.approx(24 / theirs[2]["seconds"], rel=1e-2) and len(out["depth_losses"]) == 2
    same = replace(job, side="ours", compat=True)
    ours = summary(same, work(tmp_path / "ours.jsonl", same, ["-m", "longdraft.bench.training_ours"]))
    # Random features, so every depth starts near ln 64; the rows are 11 of 24, and the weights sum to 1.8.
    assert out["losses"][0] == pytest.approx(math.log(64) * 11 / 24 * 1.8, rel=0.02)
    assert ours["losses"][0] == pytest.approx(out["losses"][0], rel=1e-4)
    assert ours["losses"][1] < ours["losses"][0]


def test_ours_trains_on_supervised_rows_from_features_and_from_a_running_target(tmp_path: Path) -> None:
    write_models(tmp_path, TINY, "cpu")
    write_features(tmp_path, TINY, 96, "answers", 1, "cpu")
    for online in (False, True):
        job = Job("ours", 96, "answers", "tiny", "cpu", online=online, warmup=1, steps=2)
        events = tmp_path / f"{job.name}.jsonl"
        train(tmp_path, job, Meter(events, job.warmup))
        start, *steps = read_lines(events)
        assert start["event"] == "start" and len(steps) == 3
        assert steps[0]["rows"] == [24, 23, 22, 21, 20, 19, 18] and steps[2]["loss"] < steps[0]["loss"]


def test_running_out_of_memory_is_a_result_and_other_errors_bring_their_traceback(tmp_path: Path) -> None:
    job = replace(trials("llama-8b", "cuda")[1], warmup=1)
    meter = Meter(tmp_path / "oom.jsonl", 1)
    meter.start_step()
    meter.finish_step(2.0)
    meter.fail(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 7.00 GiB."))
    out = summary(job, read_lines(tmp_path / "oom.jsonl"))
    assert out["oom"] is True and "7.00 GiB" in out["message"] and out["losses"] == [2.0] and "tok_s" not in out
    assert figures([out]) == {f"{job.name}_oom_at_gib": 0.0}
    assert fallback(job, out) is None
    try:
        raise RuntimeError("no kernel")
    except RuntimeError as error:
        Meter(tmp_path / "error.jsonl", 1).fail(error)
    out = summary(job, read_lines(tmp_path / "error.jsonl"))
    assert out["error"] == "RuntimeError: no kernel" and "raise RuntimeError" in "".join(out["traceback"])
    ddp = fallback(job, out)
    assert ddp is not None and ddp.sharding == "NO_SHARD" and ddp.name == "specforge_answers_ddp_32k"
    assert fallback(job, out | {"timeout_s": 90}) is None
    plain = fallback(ddp, out)
    assert plain is not None and plain.attention == "sdpa" and fallback(plain, out) is None


def test_a_cut_off_line_and_a_killed_process_leave_the_steps_before(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    step = {"event": "step", "seconds": 0.5, "wait_s": 0.1, "loss": 1.0, "peak_gib": 7.0}
    path.write_text("\n".join([json.dumps(step)] * 5) + '\n{"event": "st')
    out = summary(Job("ours", 2048, "answers"), read_lines(path))
    assert out["steps"] == 5 and out["ms_step"] == 500 and out["tok_s"] == 4096 and out["peak_gib"] == 7.0


def test_a_process_beyond_its_time_is_ended(tmp_path: Path) -> None:
    start = time.perf_counter()
    command = [sys.executable, "-c", "import time; print('up', flush=True); time.sleep(60)"]
    assert run_process(command, tmp_path / "log", tmp_path, 1.0) is None
    assert time.perf_counter() - start < 20


def test_figures_compare_with_the_trial_that_ran_and_memory_is_linear_or_not() -> None:
    done = [trial("ours_all_2k", 4.0), trial("ours_all_8k", 10.0), trial("ours_all_32k", 34.0)]
    done += [trial("specforge_all_ddp_32k", 68.0, tok_s=50.0), trial("specforge_all_32k", 0.0) | {"oom": True}]
    del done[-1]["tok_s"]
    out = figures(done)
    assert out["speed_ratio_all_32k"] == 2.0 and out["memory_ratio_all_32k"] == 0.5
    assert out["ours_all_memory_growth_ratio"] == 1.0 and checks(done)["ours_all_memory_linear"]
    done[2]["peak_gib"] = 106.0  # four times the growth a token
    assert not checks(done)["ours_all_memory_linear"]
    assert checks(done)["specforge_all_32k_ran"] is False


def test_the_same_first_loss_is_checked() -> None:
    theirs = trial("specforge_answers_2k", 1.0, depth_losses=[2.0, 1.0])
    for loss, same in ((2.805, True), (2.83, False)):
        ours = trial("ours_answers_compat_2k", 1.0) | {"losses": [loss]}
        assert checks([theirs, ours])["ours_answers_compat_2k_first_loss_equals_specforge"] is same
