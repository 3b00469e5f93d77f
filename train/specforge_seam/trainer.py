"""``longdraft train --trainer specforge``: the same recipe, trained by SpecForge's own trainer on its own engine.

Rank 0 writes the first weights and the features under ``<run folder>/specforge``; the other ranks meet it where SpecForge's
process group forms. The trained draft is written there in our format.
"""

import gc
import json
import os
import random
import shutil
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from longdraft.draft_models.config import TrainingFacts
from longdraft.errors import UserError
from longdraft.train.checkpoints import check_trajectory, lock_folder
from longdraft.train.config import TrainSettings
from longdraft.train.documents import Corpus
from longdraft.train.engine import Group
from longdraft.train.loop import position_limit
from longdraft.train.samples import Drawn, SampleStream
from longdraft.train.specforge_seam.feature_files import FeatureSample, read_feature_file, write_feature_file
from longdraft.train.specforge_seam.sides import indexed_target, side_of
from longdraft.train.target import load_target, load_tokenizer, resolve_dtype
from longdraft.train.tiny_random import PREFIX

Sharding = Literal["SHARD_GRAD_OP", "FULL_SHARD", "NO_SHARD"]
PATIENCE_MINUTES = 24 * 60  # ranks wait while rank 0 captures


@dataclass(frozen=True)
class Places:
    """Where a run's files lie."""

    root: Path

    @property
    def features(self) -> Path:
        return self.root / "features"

    @property
    def initial(self) -> Path:
        return self.root / "initial"

    @property
    def target(self) -> Path:
        """A target that is made in memory."""
        return self.root / "target"

    @property
    def indexed(self) -> Path:
        """Links to a target's files, with an index beside them."""
        return self.root / "target-indexed"

    @property
    def checkpoints(self) -> Path:
        return self.root / "checkpoints"

    @property
    def draft(self) -> Path:
        return self.root / "draft"


def check(settings: TrainSettings, sharding: Sharding) -> None:
    """Refuse what SpecForge's trainer does not have.

    Raises:
        UserError: a CPU, a package that is not there, or a setting that it would ignore.
    """
    if sharding != "NO_SHARD" and (settings.engine.device == "cpu" or not torch.cuda.is_available()):
        raise UserError("--trainer specforge needs a GPU (its FSDP refuses a CPU): use one, or leave --trainer out")
    try:  # what its assembly imports last, after the target's pass: a package that it lacks is said before
        import specforge.data.utils  # noqa: F401
    except ImportError as error:
        raise UserError(
            f"--trainer specforge: specforge or what it imports is not installed ({error}): install specforge==0.2.0 with its "
            "dependencies"
        ) from None
    s = settings
    unlike = {
        f"optim.name={s.optim.name}": (s.optim.name != "adamw", "adamw"),
        f"optim.schedule={s.optim.schedule}": (s.optim.schedule == "linear", "cosine or constant"),
        f"optim.min_ratio={s.optim.min_ratio}": (s.optim.min_ratio != 0, "0"),
        "data.packing=True": (s.data.packing, "false"),
        f"engine.name={s.engine.name}": (s.engine.name != "torch", "torch; its engine is FSDP"),
        f"schedule.max_seconds={s.schedule.max_seconds}": (s.schedule.max_seconds is not None, "none"),
        f"tracking.wandb={s.tracking.wandb}": (s.tracking.wandb != "off", "off; it prints every step"),
        f"data.source={s.data.source}": (s.data.source != "online", "online"),
        **side_of(s).unlike(s),
    }
    for named, (wrong, instead) in unlike.items():
        if wrong:
            raise UserError(f"{named}: SpecForge's trainer does not have it, set {instead} or leave --trainer out")


def train_with_specforge(settings: TrainSettings, sharding: Sharding = "SHARD_GRAD_OP") -> Path | None:
    """Train a recipe's draft with SpecForge; under torchrun this is one of its ranks.

    Args:
        settings: the recipe. Its optimizer has fixed betas and no weight decay, which is said.
        sharding: of SpecForge's engine; ``NO_SHARD`` is plain data parallelism, which runs on a CPU too.

    Returns:
        On rank 0 the draft's folder, None elsewhere.

    Raises:
        UserError: as :func:`check`, and settings, files or a target that do not fit.
    """
    check(settings, sharding)
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    places = Places(settings.folder / "specforge")
    lock = lock_folder(settings.folder) if rank == 0 else None
    try:
        if rank == 0:
            keep_trajectory(settings, places)
            o = settings.optim
            print(
                f"SpecForge's AdamW: betas 0.9, 0.999 and no weight decay; optim.betas={o.betas} and "
                f"optim.weight_decay={o.weight_decay} are not used; evaluation.* is not run",
                flush=True,
            )
            prepare(settings, places, world)
            gc.collect()  # the target is in cycles; its memory is the trainer's now
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
        _run(settings, places, sharding)
        return export(settings, places) if rank == 0 else None
    finally:
        if lock is not None:
            lock.close()


def keep_trajectory(settings: TrainSettings, places: Places) -> None:
    """Write down the settings that features and weights depend on, or check them against a former start's.

    Raises:
        UserError: one that changed.
    """
    path = places.root / "trajectory.json"
    if path.is_file():
        check_trajectory(json.loads(path.read_text()), settings.trajectory(), settings.run.name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(settings.trajectory(), indent=1) + "\n")


def prepare(settings: TrainSettings, places: Places, world: int) -> None:
    """First weights and features; what is there already stays, so a stopped capture goes on.

    Raises:
        UserError: too few usable documents for one step of all ranks.
    """
    side, group = side_of(settings), Group(settings.engine) if world == 1 else _alone(settings)
    target = load_target(settings.target, group.device)
    tokenizer = load_tokenizer(settings.target)
    corpus = Corpus(settings.data.train, settings.data, tokenizer)
    limit = position_limit(settings, target.spec.max_position)
    making = places.root / "making"
    shutil.rmtree(making, ignore_errors=True)
    if settings.target.path.startswith(PREFIX) and not places.target.exists():
        target.model.save_pretrained(making)  # SpecForge reads embedding and head from a folder
        making.rename(places.target)  # once: a resumed run checks that its files are the same
    if not places.initial.exists():
        side.write_first(settings, target, corpus, tokenizer, limit, group, making)
        making.rename(places.initial)
    source = target_folder(settings, places)
    if settings.draft.arch == "eagle3" and source.is_dir():
        indexed_target(source, places.indexed)
    s = settings.schedule
    wanted = s.max_steps * s.micro_batch * s.accumulate * world
    count = tokens = 0
    stream = SampleStream(corpus, settings, limit)
    for index in range(len(corpus)):
        if (drawn := stream.drawn(0, index)) is None:
            continue
        path = places.features / f"{index:08d}.ckpt"
        if not path.exists():
            _write(drawn, side.tensors(target, drawn, places.initial), settings, path)
        count, tokens = count + 1, tokens + len(drawn.document.ids)
        if count in (1, 100):  # early, so that a disk that is too small is seen before the work
            size = path.stat().st_size / len(drawn.document.ids) * tokens / count * min(wanted, len(corpus)) / 2**30
            print(f"features in {places.features}: about {size:.1f} GiB", flush=True)
        if count == wanted:
            break
    if count < world * s.micro_batch:
        raise UserError(
            f"data.train has {count} usable documents, a step of {world} ranks needs {world * s.micro_batch}: give more, or "
            "lower schedule.micro_batch"
        )


def _alone(settings: TrainSettings) -> Group:
    """Rank 0's device without a process group: the others are not there yet."""
    former = os.environ.pop("WORLD_SIZE")
    try:
        return Group(settings.engine)
    finally:
        os.environ["WORLD_SIZE"] = former


def _write(drawn: Drawn, tensors: dict[str, torch.Tensor], settings: TrainSettings, path: Path) -> None:
    ids, every = torch.tensor(drawn.document.ids), settings.objective.rows == "all"
    mask = torch.ones_like(ids) != 0 if every else torch.tensor(drawn.document.supervised)
    mask[0] = False  # nothing leads to a document's first token
    write_feature_file(FeatureSample(ids, mask, tensors), path)


def target_folder(settings: TrainSettings, places: Places) -> Path:
    """Where the target's files are; a hub's name is no folder and stays as it is."""
    return places.target if settings.target.path.startswith(PREFIX) else Path(settings.target.path)


def run_config(settings: TrainSettings, places: Places, sharding: Sharding) -> Any:
    """SpecForge's run config of a recipe; continues from its newest checkpoint if there is one."""
    from specforge.config import Config

    s, device = settings, torch.device("cuda" if torch.cuda.is_available() else "cpu")
    latest = places.checkpoints / f"{s.run.name}-latest"
    if latest.exists() and s.run.resume == "never":
        raise UserError(f"{latest} exists: use another run.name, or run.resume=auto")
    start = {"draft_checkpoint_path": str(places.initial)}
    side_model, side_training = side_of(s).sections(s, places.initial)
    source = places.indexed if places.indexed.exists() else target_folder(s, places)
    model = {
        **side_model,
        "target_model_path": str(source),
        "draft_model_config": str(places.initial),
        "torch_dtype": str(resolve_dtype(s.engine.dtype, device)).removeprefix("torch."),
        "trust_remote_code": s.target.trust_remote_code,
        **({} if latest.exists() else start),
    }
    training = {
        **side_training,
        "strategy": side_of(s).strategy,
        "fsdp_sharding": sharding,
        "num_epochs": s.schedule.max_steps * s.schedule.accumulate,  # max_steps ends the run
        "max_steps": s.schedule.max_steps,
        "batch_size": s.schedule.micro_batch,
        "accumulation_steps": s.schedule.accumulate,
        "learning_rate": s.optim.lr,
        "lr_scheduler": s.optim.schedule,
        "warmup_ratio": s.optim.warmup_ratio,
        "max_grad_norm": s.optim.clip,
        "save_interval": s.schedule.save_every,
        "max_checkpoints": s.schedule.keep,
        "log_interval": s.schedule.log_every,
        "seed": s.run.seed,
        "dist_timeout": PATIENCE_MINUTES,
        "resume_from": str(latest.resolve()) if latest.exists() else None,
    }
    world = int(os.environ.get("WORLD_SIZE", "1"))
    local = int(os.environ.get("LOCAL_WORLD_SIZE", str(world)))
    trainer = {"nproc_per_node": local, "nnodes": world // local, "master_addr": os.environ.get("MASTER_ADDR")}
    return Config.model_validate(
        {
            "run_id": s.run.name,
            "output_dir": str(places.checkpoints),
            "model": model,
            "data": {"hidden_states_path": str(places.features), "max_length": s.data.max_length},
            "training": training,
            "deployment": {"trainer": trainer},
        }
    )


def _run(settings: TrainSettings, places: Places, sharding: Sharding) -> None:
    """SpecForge's own order: seed, process group, assembly, training."""
    from specforge.application import build_application_run, resolve_run
    from specforge.distributed import destroy_distributed, init_distributed

    from longdraft.train.specforge_seam.registration import registry

    if "RANK" not in os.environ:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = str(free.getsockname()[1])
        alone = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        os.environ.update(alone)
    os.environ["FSDP_SHARDING"] = sharding
    random.seed(settings.run.seed)
    torch.manual_seed(settings.run.seed)
    init_distributed(timeout=PATIENCE_MINUTES)
    try:
        resolved = resolve_run(run_config(settings, places, sharding), registry=registry())
        build_application_run(resolved).run()
    finally:
        destroy_distributed()


def export(settings: TrainSettings, places: Places) -> Path:
    """The newest checkpoint's draft in our format.

    Returns:
        The folder, as serving takes it.
    """
    latest = places.checkpoints / f"{settings.run.name}-latest" / "training_state.pt"
    state = torch.load(latest, map_location="cpu", weights_only=True)
    length = position = 0
    for path in places.features.glob("*.ckpt"):
        sample = read_feature_file(path)
        length = max(length, len(sample.id_S))
        position = max(position, int(sample.tensors["position"].max()) + 1)
    facts = TrainingFacts(steps=int(state["global_step"]), max_length=length, max_position=position)
    side_of(settings).export(settings, places.initial, state["draft_state_dict"], facts, places.draft)
    print(f"saved {places.draft}", flush=True)
    return places.draft
