"""Settings of a training run: the YAML file, the ``a.b=value`` overrides and the command line share this schema."""

import math
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from longdraft.draft_models.eagle3_config import Eagle3Settings
from longdraft.schema import OnOff, Settings
from longdraft.train.draft_settings import DraftSettings, TttSettings
from longdraft.train.engine_settings import EngineSettings, PlanSettings, TrackingSettings

Decay = Annotated[float, Field(ge=0, lt=1)]


class RunSettings(Settings):
    name: str = Field("longspec", min_length=1, description="folder of the run under output_dir")
    output_dir: str = Field("runs", description="folder of the runs' folders")
    seed: int = Field(
        0, ge=0, lt=1 << 63, description="of the draft's first weights, the data's order, offsets and lags"
    )
    resume: Literal["auto", "never"] = Field("auto", description="auto continues from the run folder's last checkpoint")


class RecipeSettings(Settings):
    label: Literal["smoke", "real"] | None = Field(
        None,
        description="smoke only shows that the pipeline runs, real gives a draft worth serving; of a shipped recipe",
    )
    gpus: int = Field(0, ge=0, description="GPUs that the batch is written for; 0 is a CPU")
    gpu_hours: float | None = Field(
        None, gt=0, description="what the run costs on H200s, estimated from its arithmetic"
    )
    expects: str = Field("", description="the figure to expect, and where it is from")


class TargetSettings(Settings):
    path: str = Field(
        description="folder or Hugging Face name; tiny-random:llama|qwen2|qwen3 builds a tiny one in memory, tiny-random:llama:4 one of four layers"
    )
    revision: str | None = Field(None, description="of a Hugging Face model; None: its main branch")
    dtype: Literal["auto", "float32", "bfloat16"] = Field(
        "auto", description="auto: bfloat16 on a GPU, float32 on a CPU"
    )
    attn: str = Field(
        "auto",
        description="auto: documents go through the target side by side, without padding; or one of transformers' attention "
        "implementations, such as sdpa, over padded batches",
    )
    liger: Annotated[Literal["auto", "on", "off"], OnOff] = Field(
        "auto",
        description="Liger's fused norm, rotation and SwiGLU in the target; auto: on a GPU, for families it knows",
    )
    trust_remote_code: bool = Field(False, description="run Python code that comes with the model")
    max_batch_tokens: int = Field(
        65536, ge=1, description="tokens that go through the target at once, padding included; or one document"
    )
    shard: bool = Field(
        False, description="spread the weights over the ranks, for a target that one GPU cannot hold; ZeRO-3 only"
    )


class DataSettings(Settings):
    train: list[str] | str = Field(min_length=1, description="JSONL files, Hugging Face data set names or folders")
    eval: list[str] | str | None = Field(None, description="as train; needed by evaluation")
    split: str = Field("train", description="of a Hugging Face data set")
    subset: str | None = Field(None, description="configuration name of a Hugging Face data set")
    text_field: str = Field("text", description="field of a record that holds plain text")
    conversation_field: str = Field("conversations", description="field that holds a list of role and content")
    template: str = Field(
        "auto",
        pattern=r"^(auto|specforge:[\w.-]+)$",
        description="auto: the target's own chat template; specforge:NAME: SpecForge's template of that name",
    )
    max_length: int = Field(2048, ge=2, description="tokens of a document after truncation")
    min_length: int = Field(8, ge=2, description="tokens below which a document is skipped")
    truncation: Literal["middle", "left", "right", "crop"] = Field(
        "middle", description="what a longer document loses; crop keeps a seeded random stretch"
    )
    source: Literal["online", "features"] = Field(
        "online", description="features: what `longdraft capture` stored, instead of a pass of the target"
    )
    features: str | None = Field(None, description="folder that `longdraft capture` wrote")
    packing: bool = Field(False, description="fill each sample up to max_length with whole documents")
    shuffle: bool = Field(True, description="another seeded order of the documents each epoch")

    @model_validator(mode="after")
    def _has_features(self) -> "DataSettings":
        if (self.source == "features") != (self.features is not None):
            raise ValueError(
                f"source={self.source} with features={self.features!r}: set both, to features and to a folder, or neither"
            )
        return self


class PositionSettings(Settings):
    anchors: int = Field(4, ge=0, description="leading positions that stay in place (Anchor-Offset Indices)")
    random_anchors: bool = Field(
        False, description="each document draws how many stay, 0 to anchors, as LongSpec's released code does"
    )
    offset_share: float = Field(1.0, ge=0, le=1, description="share of the documents that get an offset; 0 is off")
    max_position: int | None = Field(
        None, ge=1, description="positions an offset may reach; None: the target's own limit"
    )


class ViewSettings(Settings):
    share: float = Field(
        0.0, ge=0, le=1, description="share of the documents whose rows read a part of the cache; 0 is off"
    )
    budgets: list[int] = Field(
        [512, 1024, 2048, 4096], min_length=1, description="keys that a row reads at most; a document draws one"
    )
    sinks: int = Field(32, ge=0, description="leading keys in every view")
    window: int = Field(128, ge=1, description="most recent keys in every view; random blocks take the rest")
    block: int = Field(16, ge=1, description="keys of a random block")
    recent: float = Field(
        0.5, ge=0, le=1, description="share of the views without random blocks: sinks and the most recent, as served"
    )

    @model_validator(mode="after")
    def _room(self) -> "ViewSettings":
        need = self.sinks + self.window + self.block
        if min(self.budgets) < need:
            raise ValueError(
                f"views.budgets={self.budgets}: sinks, window and a block take {need}, give budgets of that or more"
            )
        return self


class FeatureSettings(Settings):
    store: list[Literal["kv", "hidden", "aux"]] | None = Field(
        None,
        min_length=1,
        description="what a capture stores: the last layer's keys and values, the rows that feed the head, the outputs of "
        "three layers; None: what the recipe's draft reads",
    )
    aux_layers: tuple[int, int, int] | None = Field(None, description="layers of aux, from 0; None: EAGLE-3's choice")
    variants: int = Field(
        1, ge=1, description="times that every document is stored, each with a crop and an offset of its own"
    )
    max_gib: float = Field(64.0, gt=0, allow_inf_nan=False, description="size above which a capture is refused")
    shard_gib: float = Field(1.0, gt=0, allow_inf_nan=False, description="size of a file")


class ObjectiveSettings(Settings):
    name: Literal["ce", "greedy", "kl"] = Field(
        "ce", description="ce: the data's next token; greedy: the target's own choice; kl: its whole distribution"
    )
    rows: Literal["answers", "all"] = Field("answers", description="all also trains on prompts")
    chunk: int = Field(1024, ge=1, description="rows whose logits exist at once")


class LagSettings(Settings):
    min: int = Field(1, ge=1, description="smallest lag of the target's cache (Flash Noisy Training)")
    max: int = Field(4, ge=1, description="deepest draft step that will be served")

    @model_validator(mode="after")
    def _ordered(self) -> "LagSettings":
        if self.min > self.max:
            raise ValueError(f"lag.min={self.min} is above lag.max={self.max}")
        return self


class OptimSettings(Settings):
    name: Literal["adamw", "muon"] = Field(
        "adamw", description="muon: orthogonalised momentum for matrices, AdamW for the rest; learns more a token"
    )
    lr: float = Field(5e-4, gt=0, allow_inf_nan=False, description="largest learning rate")
    betas: tuple[Decay, Decay] = Field((0.9, 0.95), description="AdamW's decay of its two moments")
    eps: float = Field(1e-6, gt=0, allow_inf_nan=False, description="AdamW's")
    weight_decay: float = Field(0.1, ge=0, allow_inf_nan=False, description="of matrices; vectors have none")
    warmup_ratio: float = Field(0.1, ge=0, le=1, description="share of the steps in which the rate rises to lr")
    schedule: Literal["cosine", "linear", "constant"] = Field("cosine", description="of the rate behind the warm-up")
    min_ratio: float = Field(0.0, ge=0, le=1, description="last learning rate as a share of lr")
    clip: float = Field(1.0, gt=0, description="largest gradient norm")

    def rate(self, step: int, max_steps: int) -> float:
        """Learning rate of a step counted from 1: linear warm-up, then the schedule down to ``min_ratio``."""
        warmup = math.ceil(self.warmup_ratio * max_steps)
        if step <= warmup:
            return self.lr * step / warmup
        done = min((step - 1 - warmup) / max(max_steps - warmup, 1), 1.0)
        shape = {"constant": 1.0, "linear": 1.0 - done, "cosine": 0.5 * (1 + math.cos(math.pi * done))}[self.schedule]
        return self.lr * (self.min_ratio + (1 - self.min_ratio) * shape)


class ScheduleSettings(Settings):
    max_steps: int = Field(1000, ge=1, description="optimizer steps of the run")
    micro_batch: int = Field(1, ge=1, description="samples a forward pass and rank")
    accumulate: int = Field(1, ge=1, description="forward passes a step and rank")
    save_every: int = Field(200, ge=1, description="steps between checkpoints")
    eval_every: int | None = Field(None, ge=1, description="None evaluates only at the end")
    log_every: int = Field(10, ge=1, description="steps between progress lines and rows of metrics.jsonl")
    keep: int = Field(2, ge=1, description="newest checkpoints that stay")
    max_seconds: float | None = Field(None, gt=0, description="save and stop after this time")


class EvaluationSettings(Settings):
    prompts: int = Field(8, ge=0, description="prompts cut from the eval documents; 0 is off")
    lengths: list[int] = Field([], description="prompt lengths in tokens to cut; empty: where the answer begins")
    new_tokens: int = Field(
        256, ge=2, description="greedy tokens that follow a prompt; what loops among them is left out of τ"
    )
    steps: int | None = Field(None, ge=1, description="drafted tokens a verification; None: lag.max")
    context: int | None = Field(None, ge=1, description="cached tokens that the draft reads at most; None: all of them")
    view: Literal["recent", "mass"] = Field(
        "recent",
        description="which: views.sinks and the most recent; or also the blocks that the last token attends to most",
    )


class TrainSettings(Settings):
    """Everything that a training run is made of."""

    recipe: RecipeSettings = RecipeSettings()
    run: RunSettings = RunSettings()
    target: TargetSettings
    draft: DraftSettings = DraftSettings()
    data: DataSettings
    positions: PositionSettings = PositionSettings()
    views: ViewSettings = ViewSettings()
    features: FeatureSettings = FeatureSettings()
    objective: ObjectiveSettings = ObjectiveSettings()
    lag: LagSettings = LagSettings()
    eagle3: Eagle3Settings = Eagle3Settings()
    ttt: TttSettings = TttSettings()
    optim: OptimSettings = OptimSettings()
    schedule: ScheduleSettings = ScheduleSettings()
    evaluation: EvaluationSettings = EvaluationSettings()
    engine: EngineSettings = EngineSettings()
    tracking: TrackingSettings = TrackingSettings()
    plan: PlanSettings = PlanSettings()

    @model_validator(mode="after")
    def _fits(self) -> "TrainSettings":
        # FlashAttention in transformers finds packed documents by the positions that are 0: one must be.
        p = self.positions
        if "flash" in self.target.attn and p.offset_share > 0 and (p.anchors == 0 or p.random_anchors):
            raise ValueError(
                f"target.attn={self.target.attn} with offsets needs positions.anchors of 1 or more in every document "
                "(random_anchors draws 0 too), or use auto"
            )
        self._refuse_other_archs()
        v, e = self.views, self.evaluation
        least = v.sinks + (v.window + v.block if e.view == "mass" else 1)
        if e.context is not None and e.context < least:
            raise ValueError(f"evaluation.context={e.context} has no room for a {e.view} view: give {least} or more")
        return self

    @model_validator(mode="after")
    def _engine_fits(self) -> "TrainSettings":
        zero = self.engine.name == "deepspeed"
        if zero and self.engine.config is None:
            raise ValueError("engine.name=deepspeed needs engine.config, such as recipes/deepspeed/zero2.yaml")
        if not zero and (self.engine.config is not None or self.target.shard):
            given = "engine.config" if self.engine.config is not None else "target.shard"
            raise ValueError(f"{given} is for engine.name=deepspeed: set that, or leave it out")
        if self.target.shard and (self.draft.init == "target" or self.draft.fit_tokens):
            given = "draft.init=target" if self.draft.init == "target" else f"draft.fit_tokens={self.draft.fit_tokens}"
            raise ValueError(
                f"{given} reads the whole target: not with target.shard=true; use draft.init_from, or neither"
            )
        if self.target.shard and self.target.liger == "on":
            raise ValueError(
                "target.liger=on is for a target that is whole on every rank, not target.shard=true: use auto or off"
            )
        if zero and self.optim.name != "adamw":
            raise ValueError(
                f"optim.name={self.optim.name} needs whole matrices, which ZeRO cuts up: use adamw, or engine.name=torch"
            )
        return self

    @model_validator(mode="after")
    def _newest_heads_can_start(self) -> "TrainSettings":
        draft = self.draft
        if draft.newest_heads and draft.init_from is not None:
            raise ValueError(
                f"draft.newest_heads={draft.newest_heads} is for a new draft, draft.init_from brings its weights: leave one out"
            )
        if draft.newest_heads and draft.cross_q_norm:
            raise ValueError(
                f"draft.newest_heads={draft.newest_heads} needs queries of any length: set draft.cross_q_norm=false"
            )
        if draft.newest_heads and not (draft.qkv_bias and draft.fit_tokens):
            missing = "draft.fit_tokens=200000" if draft.qkv_bias else "draft.qkv_bias=true"
            raise ValueError(
                f"draft.newest_heads={draft.newest_heads} starts as biases fitted to the target's keys: set {missing}"
            )
        return self

    @model_validator(mode="after")
    def _queries_can_be_copied(self) -> "TrainSettings":
        draft = self.draft
        if not draft.copy_queries:
            return self
        for name, taken in (("init_from", draft.init_from is not None), ("newest_heads", draft.newest_heads > 0)):
            if taken:
                raise ValueError(f"draft.copy_queries sets the queries that draft.{name} brings: leave one out")
        if not draft.fit_tokens:
            raise ValueError("draft.copy_queries fits the target's queries on draft.fit_tokens: set it, such as 200000")
        if draft.cross_q_norm:
            raise ValueError("draft.copy_queries fits queries as they are: set draft.cross_q_norm=false")
        return self

    def _refuse_other_archs(self) -> None:
        """What is set for another draft than this one would be ignored without a word."""
        if self.draft.arch == "longspec":
            for name, default in (("eagle3", Eagle3Settings()), ("ttt", TttSettings())):
                if getattr(self, name) != default:
                    raise ValueError(f"section {name} is EAGLE-3's: set draft.arch=eagle3, or remove it")
            return
        plain = DraftSettings()
        own = sorted(DraftSettings.model_fields.keys() - {"arch", "init", "init_from", "fit_tokens"})
        found = [f"draft.{name}" for name in own if getattr(self.draft, name) != getattr(plain, name)]
        found += [] if self.lag == LagSettings() else ["lag"]
        if found:
            raise ValueError(f"{found[0]} is LongSpec's: with draft.arch=eagle3 use the sections eagle3 and ttt")
        if self.draft.fit_tokens and self.draft.init != "target" and self.draft.init_from is None:
            raise ValueError(
                "draft.fit_tokens fits to the target's own head and norm: with draft.arch=eagle3 set draft.init=target"
            )
        if self.objective.name != "ce":
            raise ValueError(f"objective.name={self.objective.name!r} is LongSpec's: EAGLE-3 learns the distribution")
        if self.views.share or self.evaluation.context is not None:
            raise ValueError("views.share and evaluation.context are LongSpec's: an EAGLE-3 draft reads its own cache")

    @property
    def folder(self) -> Path:
        """The run's own folder."""
        return Path(self.run.output_dir) / self.run.name

    @property
    def eval_steps(self) -> int:
        return self.evaluation.steps or (self.lag.max if self.draft.arch == "longspec" else self.ttt.steps)

    @property
    def read_features(self) -> list[str]:
        """What the draft and its objective read of the target, in the words of ``features.store``."""
        if self.draft.arch == "eagle3":
            return ["aux", "hidden"]
        teaches = self.objective.name != "ce" or self.draft.fit_tokens > 0
        return ["kv", "hidden"] if teaches else ["kv"]

    @property
    def stored_features(self) -> list[str]:
        """What a capture stores."""
        return list(self.features.store or self.read_features)

    def trajectory(self) -> dict[str, Any]:
        """Dotted settings that decide the weights; a resumed run must not change them."""
        sections = ("target", "draft", "data", "positions", "views", "objective", "lag", "eagle3", "ttt", "optim")
        flat = {f"{s}.{k}": v for s in sections for k, v in getattr(self, s).model_dump(mode="json").items()}
        free = ("target.max_batch_tokens", "target.liger", "target.trust_remote_code", "target.shard", "data.eval")
        for key in free:
            del flat[key]
        # Names without their folders: a run may be resumed from another place, or after a move.
        return flat | {
            "target.path": Path(self.target.path).name,
            "data.features": self.data.features and Path(self.data.features).name,
            "data.train": [Path(name).name for name in as_list(self.data.train)],
            "run.seed": self.run.seed,
            "schedule.micro_batch": self.schedule.micro_batch,
            "schedule.accumulate": self.schedule.accumulate,
        }


def as_list(value: list[str] | str | None) -> list[str]:
    """A setting that may be one name or several."""
    return [value] if isinstance(value, str) else list(value or [])
