"""python -m longdraft.bench.training_ours WORK EVENTS JOB: our EAGLE-3 method and engine on one dummy job.

From the files that SpecForge's side reads: a step copies the sample's features to the card, as SpecForge's does, and runs the
training method and the torch engine on them. With ``online`` the frozen target (its shape, random weights) runs inside the step
and nothing is read but token ids, which SpecForge 0.2.0 does only with a server of its own beside the trainer.

Legend: T rows, E hidden size, A three times E, V target vocabulary.
"""

import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from longdraft.bench.training_files import SHAPES, Job, Shape, feature_folder, job_arguments, vocabulary
from longdraft.bench.training_meter import Meter
from longdraft.draft_models.eagle3 import Eagle3Draft
from longdraft.draft_models.eagle3_config import Eagle3Config, Eagle3Settings
from longdraft.draft_models.target import TargetSpec
from longdraft.kernels.linear_cross_entropy import IGNORED
from longdraft.train.config import (
    DataSettings,
    OptimSettings,
    TargetSettings,
    TrainSettings,
)
from longdraft.train.draft_settings import DraftSettings, TttSettings
from longdraft.train.engine_settings import EngineSettings
from longdraft.train.engines.base import Engine
from longdraft.train.engines.group import Group
from longdraft.train.engines.torch_engine import TorchEngine
from longdraft.train.methods.base import Method
from longdraft.train.methods.eagle3 import Eagle3Method
from longdraft.train.samples import Packed
from longdraft.train.specforge_seam.feature_files import read_feature_file
from longdraft.train.target import Capture, FrozenTarget

OPTIM = OptimSettings(lr=1e-4, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0, clip=0.5)


class FeatureTarget(FrozenTarget):
    """Embedding and head of a target whose hidden rows come from files; it cannot run."""

    def __init__(self, shape: Shape, weights: dict[str, torch.Tensor], device: torch.device) -> None:
        from transformers import LlamaConfig

        self.name, self.max_batch_tokens = "dummy", 1 << 20
        self.spec = TargetSpec.from_config(LlamaConfig(**shape.target_config))
        self._embedding = weights["model.embed_tokens.weight"].to(device)
        self._head = weights["lm_head.weight"].to(device)

    @property
    def device(self) -> torch.device:
        return self._embedding.device

    @property
    def embedding_VE(self) -> torch.Tensor:
        return self._embedding

    @property
    def head_VE(self) -> torch.Tensor:
        return self._head


def running_target(shape: Shape, weights: dict[str, torch.Tensor], device: torch.device) -> FrozenTarget:
    """The whole target with random weights, embedding and head those of the files."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    with device:
        model: Any = AutoModelForCausalLM.from_config(
            LlamaConfig(**shape.target_config), dtype=torch.bfloat16, attn_implementation="sdpa"
        )
    with torch.no_grad():
        model.get_input_embeddings().weight.copy_(weights["model.embed_tokens.weight"])
        model.get_output_embeddings().weight.copy_(weights["lm_head.weight"])
    return FrozenTarget(model, "dummy", max_batch_tokens=1 << 20)


def build_draft(work: Path, shape: Shape, target: FrozenTarget) -> Eagle3Draft:
    """The draft in bf16 with the first weights that SpecForge's side loads."""
    with target.device:
        draft = Eagle3Draft(Eagle3Config(target.spec, Eagle3Settings(draft_vocab_size=shape.draft_vocab)))
    state = torch.load(work / "first_weights" / "training_state.pt", weights_only=True)["draft_state_dict"]
    draft.load_state_dict(state)
    frequencies = draft.rotary.inverse
    draft = draft.to(device=target.device, dtype=torch.bfloat16)
    draft.rotary.inverse = frequencies.to(target.device)  # a cast to 16 bit would bend far positions
    assert torch.equal(draft.target_ids.cpu(), vocabulary(shape))
    return draft.train().bind(target.embedding_VE, target.head_VE)


def build_training(work: Path, job: Job, target: FrozenTarget) -> tuple[Method, Engine]:
    """Method and engine; the optimizer is set as SpecForge's."""
    shape = SHAPES[job.shape]
    settings = TrainSettings(
        target=TargetSettings(path="dummy"),
        data=DataSettings(train="dummy"),
        draft=DraftSettings(arch="eagle3"),
        eagle3=Eagle3Settings(draft_vocab_size=shape.draft_vocab),
        ttt=TttSettings(steps=job.ttt, recompute=job.recompute, compat="specforge-0.2.0" if job.compat else "none"),
        optim=OPTIM,
    )
    method = Eagle3Method(settings, target, build_draft(work, shape, target))
    group = Group(EngineSettings(device="cuda" if job.device == "cuda" else "cpu"))
    return method, TorchEngine(method, settings.optim, group)


def read_batch(work: Path, job: Job) -> Packed:
    """The sample as a micro-batch of one document with its features, in host memory (not pinned, as SpecForge's are)."""
    sample = read_feature_file(feature_folder(work, job.length, job.rows) / "sample-0000.ckpt")
    label_T = torch.full_like(sample.id_S, IGNORED)
    label_T[:-1] = torch.where(sample.supervised_S[1:], sample.id_S[1:], IGNORED)
    capture = None if job.online else Capture({name: rows.clone() for name, rows in sample.tensors.items()})
    place_T = torch.arange(job.length)
    return Packed(sample.id_S.clone(), place_T, label_T, [0, job.length], ["dummy"], capture=capture)


def train(work: Path, job: Job, meter: Meter) -> None:
    """All steps of the job."""
    device, shape = torch.device(job.device), SHAPES[job.shape]
    weights = load_file(work / "target" / "model.safetensors")
    target = running_target(shape, weights, device) if job.online else FeatureTarget(shape, weights, device)
    del weights
    (method, engine), batch = build_training(work, job, target), read_batch(work, job)
    divisor = method.denominator(batch)
    meter.say("start", **meter.memory())
    for step in range(1, job.warmup + job.steps + 1):
        meter.start_step()
        moved = batch.to(device)
        copied = meter.sync() - meter.start
        out = engine.loss(moved, step)
        engine.backward(out.loss / divisor)
        norm = engine.step(OPTIM.lr)
        hits, rows = (x.tolist() for x in (out.hits_K, out.rows_K))
        meter.finish_step(float(out.loss.detach()) / divisor, copy_s=copied, norm=norm, hits=hits, rows=rows)
        del moved, out


def main(argv: list[str] | None = None) -> int:
    """Train as the job says; everything that is known goes to the events file."""
    work, events, job = job_arguments(__doc__, argv)
    meter = Meter(events, job.warmup)
    try:
        train(work, job, meter)
    except BaseException as error:
        meter.fail(error)
        return 1
    meter.say("end", **meter.memory())
    return 0


if __name__ == "__main__":
    sys.exit(main())
