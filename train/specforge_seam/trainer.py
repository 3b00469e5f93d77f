"""``longdraft train --trainer specforge``: the same recipe, trained by SpecForge's own trainer on its own engine.

Rank 0 writes the first weights and the features under ``<run folder>/specforge``; the other ranks meet it where SpecForge's
process group forms. The trained draft is written there in our format.
"""

import json
import os
import random
import shutil
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from longdraft.draft_models.checkpoint import CONFIG, save_draft
from longdraft.draft_models.config import TrainingFacts
from longdraft.errors import UserError
from longdraft.train.checkpoints import check_trajectory, lock_folder
from longdraft.train.config import TrainSettings
from longdraft.train.documents import Corpus
from longdraft.train.engine import Group
from longdraft.train.first_weights import build_draft, fit, rank_head
from longdraft.train.loop import position_limit
from longdraft.train.samples import Drawn, SampleStream
from longdraft.train.specforge_seam.feature_files import FeatureSample, read_feature_file, write_feature_file
from longdraft.train.target import FrozenTarget, load_target, load_tokenizer, resolve_dtype
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
        return self.root / "target"

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
    if sharding != "NO_SHARD" and not torch.cuda.is_available():
        raise UserError("--trainer specforge needs a GPU (its FSDP refuses a CPU): use one, or leave --trainer out")
    try:
        import specforge  # noqa: F401
    except ImportError as error:
        raise UserError(
            f"--trainer specforge: specforge is not installed ({error}): install specforge==0.2.0"
        ) from None
    s = settings
    unlike = {
        f"objective.name={s.objective.name}": (s.objective.name != "ce", "ce"),
        f"optim.name={s.optim.name}": (s.optim.name != "adamw", "adamw"),
        f"optim.schedule={s.optim.schedule}": (s.optim.schedule == "linear", "cosine or constant"),
        f"optim.min_ratio={s.optim.min_ratio}": (s.optim.min_ratio != 0, "0"),
        "data.packing=True": (s.data.packing, "false"),
        f"data.source={s.data.source}": (s.data.source != "online", "online"),
        f"views.share={s.views.share}": (s.views.share > 0, "0"),
    }
    for named, (wrong, instead) in unlike.items():
        if wrong:
            raise UserError(f"{named}: SpecForge's trainer does not have it, set {instead} or leave --trainer out")


def train_with_specforge(settings: TrainSettings, sharding: Sharding = "SHARD_GRAD_OP") -> Path | None:
    """Train a recipe's LongSpec draft with SpecForge; under torchrun this is one of its ranks.

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
                f"optim.weight_decay={o.weight_decay} are not used",
                flush=True,
            )
            prepare(settings, places, world)
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
    group = Group(settings.engine) if world == 1 else _alone(settings)
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
        draft = build_draft(settings, target)
        rank_head(draft, settings, corpus, tokenizer)
        fit(draft, target, settings, corpus, limit, group)
        save_draft(draft, making, target.name)
        _add_objective(making / CONFIG, settings)
        making.rename(places.initial)
    s = settings.schedule
    wanted = s.max_steps * s.micro_batch * s.accumulate * world
    count = tokens = 0
    stream = SampleStream(corpus, settings, limit)
    for index in range(len(corpus)):
        if (drawn := stream.drawn(0, index)) is None:
            continue
        path = places.features / f"{index:08d}.ckpt"
        if not path.exists():
            _capture(target, drawn, settings, path)
        count, tokens = count + 1, tokens + len(drawn.document.ids)
        if count in (1, 100):  # early, so that a disk that is too small is seen before the work
            size = tokens / count * min(wanted, len(corpus)) * target.spec.kv_bytes_per_token / 2**30
            print(f"features in {places.features}: about {size:.1f} GiB in 16 bit", flush=True)
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


def _capture(target: FrozenTarget, drawn: Drawn, settings: TrainSettings, path: Path) -> None:
    document, position = drawn.document, drawn.position_L.to(target.device)
    ids = torch.tensor(document.ids, device=target.device)
    seen = target.capture(ids, position, [0, len(ids)])
    mask = torch.ones_like(ids) != 0 if settings.objective.rows == "all" else torch.tensor(document.supervised)
    write_feature_file(FeatureSample(ids, mask, {"position": position, "k": seen.k_TKD, "v": seen.v_TKD}), path)


def _add_objective(path: Path, settings: TrainSettings) -> None:
    """SpecForge's run config takes nothing of ours: the objective's settings travel in the draft's JSON."""
    training = {
        "lag_min": settings.lag.min,
        "lag_max": settings.lag.max,
        "seed": settings.run.seed,
        "chunk": settings.objective.chunk,
    }
    path.write_text(json.dumps(json.loads(path.read_text()) | {"longspec_training": training}, indent=1) + "\n")


def run_config(settings: TrainSettings, places: Places, sharding: Sharding) -> Any:
    """SpecForge's run config of a recipe; continues from its newest checkpoint if there is one."""
    from specforge.config import Config

    s, device = settings, torch.device("cuda" if torch.cuda.is_available() else "cpu")
    latest = places.checkpoints / f"{s.run.name}-latest"
    if latest.exists() and s.run.resume == "never":
        raise UserError(f"{latest} exists: use another run.name, or run.resume=auto")
    start = {"draft_checkpoint_path": str(places.initial)}
    model = {
        "target_model_path": str(places.target) if s.target.path.startswith(PREFIX) else s.target.path,
        "draft_model_config": str(places.initial),
        "torch_dtype": str(resolve_dtype(s.engine.dtype, device)).removeprefix("torch."),
        "trust_remote_code": s.target.trust_remote_code,
        **({} if latest.exists() else start),
    }
    training = {
        "strategy": "longspec",
        "attention_backend": "sdpa",
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
    from specforge.training.model_loading import load_draft_config_source

    from longdraft.train.specforge_seam.longspec_draft import LongSpecDraftModel

    latest = places.checkpoints / f"{settings.run.name}-latest" / "training_state.pt"
    state = torch.load(latest, map_location="cpu", weights_only=True)
    draft = LongSpecDraftModel(load_draft_config_source(str(places.initial)))
    draft.load_state_dict(state["draft_state_dict"])
    length = position = 0
    for path in places.features.glob("*.ckpt"):
        sample = read_feature_file(path)
        length = max(length, len(sample.id_S))
        position = max(position, int(sample.tensors["position"].max()) + 1)
    facts = TrainingFacts(
        steps=int(state["global_step"]),
        max_length=length,
        max_position=position,
        anchors=settings.positions.anchors,
        max_lag=settings.lag.max,
    )
    save_draft(draft, places.draft, settings.target.path, facts, state["draft_state_dict"])
    print(f"saved {places.draft}", flush=True)
    return places.draft
