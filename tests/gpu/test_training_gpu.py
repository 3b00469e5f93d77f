"""Training on a GPU: 16-bit drafts learn, resume, agree with float32 on the CPU, and fit the memory estimate."""

import json
from pathlib import Path

import pytest
import torch
from tiny import tiny_draft, tiny_model, tiny_target

from longdraft.draft_models.target import TargetSpec
from longdraft.schema import load_settings
from longdraft.train.config import ObjectiveSettings, TargetSettings, TrainSettings, resolve_data_paths
from longdraft.train.estimate import count_parameters, estimate_memory
from longdraft.train.long_draft import main
from longdraft.train.loop import train
from longdraft.train.objective import longspec_loss
from longdraft.train.samples import Packed
from longdraft.train.target import load_config, load_target

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
SMOKE = Path(__file__).parents[2] / "recipes/smoke/longspec.yaml"


def losses(run: Path) -> dict[int, float]:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {row["step"]: row["loss"] for row in rows}


@pytest.mark.parametrize("objective", ["ce", "kl"])
def test_a_16_bit_run_learns_and_resumes(objective: str, tmp_path: Path) -> None:
    base = ["--config", str(SMOKE), f"run.output_dir={tmp_path}", f"objective.name={objective}", "schedule.log_every=1"]
    base += ["evaluation.new_tokens=16", "optim.schedule=constant", "schedule.save_every=30"]
    assert main([*base, "schedule.max_steps=30"]) == 0
    assert main([*base, "schedule.max_steps=60"]) == 0
    seen = losses(tmp_path / "smoke-longspec")
    assert sorted(seen) == list(range(1, 61))
    assert sum(seen[i] for i in range(56, 61)) < 0.9 * sum(seen[i] for i in range(1, 6))


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_the_gpus_loss_and_gradient_are_the_cpus(family: str) -> None:
    """Float32 on both: the packed and lagged attention, the target's capture and the chunked losses."""
    target = tiny_target(family)
    draft = tiny_draft(target, window=16)
    ids = torch.randint(0, 256, (90,), generator=torch.Generator().manual_seed(0))
    batch = Packed(ids, torch.cat([torch.arange(40), torch.arange(50) + 7]), ids.roll(-1), [0, 40, 90], ["a", "b"])
    figures = []
    for device in ("cpu", "cuda"):
        target.model.to(device)
        draft.to(device).bind(target.embedding_VE, target.head_VE).zero_grad(set_to_none=True)
        loss = longspec_loss(draft, target, batch.to(torch.device(device)), 2, ObjectiveSettings()).loss
        loss.backward()
        grads = [p.grad.clone().cpu() for p in draft.parameters() if p.grad is not None]
        figures.append((float(loss.detach()), grads))
    assert figures[1][0] == pytest.approx(figures[0][0], rel=1e-3)
    for a, b in zip(figures[0][1], figures[1][1], strict=True):
        assert torch.nn.functional.cosine_similarity(a.flatten(), b.flatten(), 0) > 0.999


def test_the_memory_estimate_holds_within_a_third(tmp_path: Path) -> None:
    """A one-billion-class shape with few layers at 16K tokens: what torch allocates at most, against ``--plan``'s figure."""
    shape = {"hidden_size": 2048, "intermediate_size": 8192, "num_attention_heads": 32, "num_key_value_heads": 8}
    folder = tiny_model(
        "llama", tmp_path / "t", head_dim=64, num_hidden_layers=4, max_position_embeddings=32768, **shape
    )
    (tmp_path / "d.jsonl").write_text(json.dumps({"text": "a long line of text, " * 1000}) + "\n")
    overrides = [f"target.path={folder}", f"data.train={tmp_path}/d.jsonl", "data.eval=null", "data.max_length=16384"]
    overrides += [
        "schedule.max_steps=2",
        "schedule.save_every=9",
        f"run.output_dir={tmp_path}/runs",
        "draft.window=512",
    ]
    settings = load_settings(TrainSettings, SMOKE, overrides)
    resolve_data_paths(settings, SMOKE)
    config = load_config(TargetSettings(path=str(folder)))
    spec = TargetSpec.from_config(config)
    estimate = estimate_memory(spec, count_parameters(config, spec, settings), settings, torch.device("cuda"))
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    assert train(settings, ["test"]) is not None
    peak = torch.cuda.max_memory_allocated() - before
    print(f"peak {peak / 2**30:.2f} GiB, estimate {estimate.total / 2**30:.2f} GiB ({estimate})")
    assert 0.67 < estimate.total / peak < 1.5
    assert load_target(TargetSettings(path=str(folder)), torch.device("cuda")).model.dtype == torch.bfloat16
