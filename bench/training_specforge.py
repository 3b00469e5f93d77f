"""python -m longdraft.bench.training_specforge WORK EVENTS JOB: SpecForge 0.2.0's own trainer on one dummy job.

Its configuration, readers, loader, model, loss, backend and optimizer run as its command line runs them (``specforge.cli``),
in one process that torchrun's variables describe. From outside only this is changed: ``TrainerCore.train_step`` is timed
between device synchronisations, the checkpoint at the end is left out, and packages that its modules import but offline
EAGLE-3 training does not call (``wandb``, ``datasets``) are empty stand-ins where they are not installed.
"""

import importlib.util
import os
import socket
import sys
import types
from pathlib import Path
from typing import Any

from longdraft.bench.training_files import Job, feature_folder, job_arguments
from longdraft.bench.training_meter import Meter

STAND_INS = {"wandb": (), "datasets": ("Dataset", "IterableDataset", "load_dataset", "load_from_disk")}


def prepare_environment(device: str) -> None:
    """What torchrun would set for one process; on a CPU also what lets its kernels run there at all."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    alone = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ.update(alone)
    if device == "cpu":
        os.environ |= {"SPECFORGE_DEVICE": "cpu", "TRITON_INTERPRET": "1", "TORCHDYNAMO_DISABLE": "1"}


def stand_in() -> list[str]:
    """Put empty modules where SpecForge imports packages that this job never calls; returns the names."""
    made = []
    for name, members in STAND_INS.items():
        if sys.modules.get(name, name) is None or importlib.util.find_spec(name) is None:
            module = types.ModuleType(name)
            # transformers and accelerate ask for the spec of a package that they find in sys.modules
            module.__spec__ = importlib.util.spec_from_loader(name, loader=None)
            for member in members:
                setattr(module, member, type(member, (), {}))
            sys.modules[name] = module
            made.append(name)
    return made


def settings(work: Path, job: Job) -> dict[str, Any]:
    """The run's configuration in SpecForge's words; what is not named keeps its default."""
    steps = job.warmup + job.steps
    return {
        "model": {
            "target_model_path": str(work / "target"),
            "draft_model_config": str(work / "draft.json"),
            "draft_checkpoint_path": str(work / "first_weights"),
            "vocab_mapping_path": str(work / "vocabulary.pt"),
        },
        "data": {"hidden_states_path": str(feature_folder(work, job.length, job.rows)), "max_length": job.length},
        "training": {
            "strategy": "eagle3",
            "max_steps": steps,
            "batch_size": 1,
            "fsdp_sharding": job.sharding,
            "learning_rate": 1e-4,
            "ttt_length": job.ttt,
            "attention_backend": job.attention,
            "compact_teacher": job.compact,
            "log_interval": 10**6,
        },
        "run_id": job.name,
        "output_dir": str(work / "specforge-output"),
    }


def watch(meter: Meter) -> None:
    """Time every step of the trainer and leave its last checkpoint out."""
    from specforge.training import controller, trainer

    train_step = controller.TrainerCore.train_step

    def timed(self: Any, batch: Any, ctx: Any = None) -> Any:
        meter.start_step()
        result = train_step(self, batch, ctx)
        depths = [float(result.metrics[f"ploss_{k}"]) for k in range(99) if f"ploss_{k}" in result.metrics]
        meter.finish_step(float(result.loss), depth_losses=depths)
        return result

    controller.TrainerCore.train_step = timed
    trainer.Trainer.save_checkpoint = lambda self: None


def main(argv: list[str] | None = None) -> int:
    """Train as the job says; everything that is known goes to the events file."""
    work, events, job = job_arguments(__doc__, argv)
    prepare_environment(job.device)
    meter = Meter(events, job.warmup)
    try:
        missing = stand_in()
        from specforge.application import resolve_run
        from specforge.cli import _train
        from specforge.config import Config

        watch(meter)
        resolved = resolve_run(Config.model_validate(settings(work, job)))
        meter.say("start", stand_ins=missing)
        _train(resolved)
    except BaseException as error:
        meter.fail(error)
        return 1
    meter.say("end", **meter.memory())
    return 0


if __name__ == "__main__":
    sys.exit(main())
