"""YAML of ``longdraft bench speed | acceptance | quality | arr``: one schema each, sections shared."""

from pathlib import Path
from typing import Any, Literal

from pydantic import ConfigDict, Field, field_validator, model_validator

from longdraft.bench.lengths import tokens_word
from longdraft.draft_models.sparse_recipe import PROTECTED
from longdraft.schema import Settings

SHAPE = "llama-8b-shape"
SystemName = Literal[
    "plain", "eagle3", "ngram", "full", "exact", "partial", "sparse", "streaming", "snapkv", "quest", "self"
]
VIEWS = ("exact", "partial", "streaming", "snapkv", "quest", "self")  # whose budget is a view's
PROMISED = frozenset(
    {"full", "exact", "self"}
)  # systems whose tokens are plain decoding's (SGLang's own promise nothing)
TAKES: dict[str, frozenset[str]] = {  # what a system takes beyond what all of them do
    "plain": frozenset({"mode_off", "draft", "steps"}),  # the last two of mode off alone
    "eagle3": frozenset({"draft", "steps", "window", "accept_length"}),
    "ngram": frozenset({"steps", "accept_length"}),
    "full": frozenset({"draft", "steps", "accept_length", "settings"}),
    "exact": frozenset({"draft", "steps", "budget", "selector", "accept_length", "confirmed_share", "settings"}),
    "partial": frozenset({"draft", "steps", "budget", "selector", "refresh", "accept_length", "settings"}),
    "sparse": frozenset({"draft", "steps", "budget", "refresh", "accept_length", "settings"}),
    **dict.fromkeys(
        ("streaming", "snapkv", "quest"),
        frozenset({"draft", "steps", "budget", "refresh", "accept_length", "settings"}),
    ),
    "self": frozenset({"steps", "budget", "confirmed_share", "settings"}),
}
COMMON = frozenset({"system", "label", "arguments"})
LABEL = 60  # characters of a label at most


class Finite(Settings):
    """Settings whose figures are finite: records are JSON, which has no other."""

    model_config = ConfigDict(allow_inf_nan=False)


def once(values: list[int] | list[float] | list[str], what: str) -> None:
    """Refuse what is asked for twice: one of two such cells would go under.

    Raises:
        ValueError: a value stands there twice.
    """
    if twice := next((value for value in values if values.count(value) > 1), None):  # type: ignore[arg-type]
        raise ValueError(f"{what} {twice!r} stands there twice: name it once")


class SystemSettings(Finite):
    """One system. ``streaming``, ``snapkv`` and ``quest`` are mode ``partial`` on that selector's views; ``self`` drafts with the target
    on a StreamingLLM view, as MagicDec does, and returns what a full verification confirms.
    """

    system: SystemName = Field(description="what answers")
    label: str | None = Field(None, description="its name in rows; None: made of what it is")
    draft: str | None = Field(
        None,
        description="longspec or eagle3 (shipped, or of the shape), none (lookup), or a folder; None: longspec, and for "
        "eagle3 that",
    )
    steps: int = Field(4, ge=1, le=64, description="drafted tokens a verification (self: partial rounds a cycle)")
    budget: int | None = Field(
        None, ge=64, description="cached tokens of a view or a set; None: 4096 of a view, 512 of a sparse set"
    )
    selector: str = Field("mass", description="exact and partial: what chooses a view's blocks")
    refresh: int | None = Field(
        None, ge=1, description="lossy modes: tokens from one full verification to the next at most"
    )
    window: int | None = Field(None, ge=64, description="SGLang's EAGLE-3: tokens that its draft reads; None: all")
    mode_off: bool = Field(
        False, description="plain: longdraft's mode off on a server of ours in place of stock SGLang on its own"
    )
    accept_length: float | None = Field(
        None, ge=1, description="forced mean accept length of this system; None: the file's"
    )
    confirmed_share: float | None = Field(
        None, gt=0, le=1, description="forced chance of a token of a partial round to be confirmed; None: the file's"
    )
    settings: dict[str, Any] = Field(
        {}, description="more of the server's own settings, as `longdraft serve` names them"
    )
    arguments: list[str] = Field([], description="more of SGLang's command line")

    @field_validator("label")
    @classmethod
    def _label_can_be_read(cls, value: str | None) -> str | None:
        if value is not None and not (value.strip() == value and value.isprintable() and 0 < len(value) <= LABEL):
            raise ValueError(f"give 1 to {LABEL} printable characters, no space at either end")
        return value

    @model_validator(mode="after")
    def _fits_the_system(self) -> "SystemSettings":
        allowed = COMMON | TAKES[self.system]
        for name in sorted(self.model_fields_set - allowed):
            raise ValueError(f"{name} says nothing of system {self.system!r}, which takes {', '.join(sorted(allowed))}")
        if self.system == "plain" and not self.mode_off and (given := self.model_fields_set & {"draft", "steps"}):
            raise ValueError(
                f"{min(given)} beside plain stock SGLang: leave it out, or set mode_off, whose server has drafts"
            )
        return self


class TargetSettings(Finite):
    """The model that all systems serve."""

    path: str = Field(
        "smollm2",
        description="smollm2 (`longdraft models fetch`), llama-8b-shape (random weights; a GPU), or a folder of transformers",
    )
    dtype: Literal["auto", "float32", "bfloat16"] = Field("auto", description="auto: float32 on a CPU, else bfloat16")
    attention_backend: str = Field("fa3", description="SGLang's, on a GPU")
    memory: float = Field(0.85, gt=0, lt=1, description="share of a GPU's memory that SGLang may take")
    pool_tokens: int | None = Field(
        None,
        ge=1024,
        description="cached tokens of a server; None: a GPU's memory decides, a CPU holds what the cells need",
    )
    arguments: list[str] = Field([], description="more of SGLang's command line, for every system")


class HarnessSettings(Finite):
    """What all three measurements take."""

    name: str = Field(description="of the record")
    record: Path = Field(description="file of the record, which a later run of the same file goes on with")
    logs: Path = Field(Path("runs/bench"), description="folder of servers' logs and of random weights")
    seed: int = Field(0, ge=0, description="of prompts and examples")
    max_minutes: float | None = Field(
        None, gt=0, description="stop between two cells before this; the same command goes on; None: run to the end"
    )
    share_servers: bool = Field(
        False, description="systems of ours whose settings do not contradict each other are served by one server"
    )
    target: TargetSettings = Field(TargetSettings(), description="the model")
    systems: list[SystemSettings] = Field(min_length=1, description="what is measured")

    @field_validator("systems")
    @classmethod
    def _plain_is_there(cls, value: list[SystemSettings]) -> list[SystemSettings]:
        if [s.system for s in value].count("plain") != 1:
            raise ValueError("systems need plain exactly once: it is what the others are compared with")
        return value


class ForceSettings(Finite):
    """Forced acceptance: proves time only, the text is wrong."""

    accept_length: float = Field(4.0, ge=1, description="mean tokens a verification, bonus in")
    confirmed_share: float = Field(
        0.95, gt=0, le=1, description="mode exact: chance of a token of a partial round to be confirmed"
    )


class LoadSettings(Finite):
    """Requests at given rates by ``sglang.bench_serving``, on prompts of random tokens."""

    rates: list[float] = Field(min_length=1, description="requests a second")
    requests: int = Field(60, ge=1, description="of each rate")
    input_tokens: int = Field(8000, ge=1, description="of a prompt at most")
    output_tokens: int = Field(256, ge=2, description="of an answer at most")
    range_ratio: float = Field(1.0, gt=0, le=1, description="shortest prompt and answer as a share of the longest")

    @field_validator("rates")
    @classmethod
    def _rates_are_positive(cls, value: list[float]) -> list[float]:
        if min(value) <= 0:
            raise ValueError("give rates above 0")
        once(value, "rate")
        return value


class SpeedSettings(HarnessSettings):
    """``longdraft bench speed``: time of decoding by system, batch size and context."""

    prompts: str = Field(
        "library", description="random tokens, library (sources of the standard library), or a JSONL file with text"
    )
    batches: list[int] = Field([1], description="requests at once")
    contexts: list[int] = Field(description="tokens of each prompt")
    new_tokens: int = Field(384, ge=2, description="of each answer that are timed")
    warm_tokens: int = Field(256, ge=1, description="of an answer before, which is not timed")
    repeats: int = Field(3, ge=1, description="timed answers of a cell")
    force: ForceSettings | None = Field(None, description="force acceptance; needed for random weights")
    phases: bool = Field(False, description="have servers of ours write where their steps' time goes")
    load: LoadSettings | None = Field(None, description="also requests at given rates")

    @field_validator("batches", "contexts")
    @classmethod
    def _sizes_are_positive(cls, value: list[int]) -> list[int]:
        if not value or min(value) < 1:
            raise ValueError("give one size or more, each at least 1")
        once(value, "size")
        return value

    @model_validator(mode="after")
    def _parts_fit(self) -> "SpeedSettings":
        if self.target.path == SHAPE and self.force is None:
            raise ValueError(
                f"target.path={SHAPE!r} has random weights: force acceptance (force: {{accept_length: 4}})"
            )
        if self.load is not None and self.share_servers:
            raise ValueError(
                "load with share_servers: requests of sglang.bench_serving take the server's mode, so leave one out"
            )
        if self.phases and self.share_servers:
            raise ValueError(
                "phases with share_servers: steps of several systems would come into one file, so leave one out"
            )
        if self.force is None and any(s.accept_length or s.confirmed_share for s in self.systems):
            raise ValueError("a system's accept_length without force: add force to the file")
        return self


class TaskSettings(Finite):
    """One task."""

    name: str = Field(description="of longdraft.bench.tasks")
    folder: Path | None = Field(None, description="with its data; None: the file's")
    count: int = Field(20, ge=1, description="examples")
    prompt_tokens: list[int] = Field([2048], min_length=1, description="lengths of prompts, a bucket each")
    new_tokens: int | None = Field(None, ge=2, description="of an answer at most; None: the task's own")

    @field_validator("prompt_tokens")
    @classmethod
    def _buckets_differ(cls, value: list[int]) -> list[int]:
        if min(value) < 1:
            raise ValueError("give lengths of at least 1")
        once([tokens_word(tokens) for tokens in value], "bucket")
        return value


class AskingSettings(HarnessSettings):
    """What is asked of tasks."""

    tasks: list[TaskSettings] = Field(min_length=1, description="what is asked")
    data: Path | None = Field(None, description="folder of the tasks' files; generated tasks need none")
    batch: int = Field(4, ge=1, description="requests at once")

    @field_validator("tasks")
    @classmethod
    def _tasks_differ(cls, value: list[TaskSettings]) -> list[TaskSettings]:
        once([task.name for task in value], "task")
        return value


class AcceptanceSettings(AskingSettings):
    """``longdraft bench acceptance``: tokens a verification by system, task and context bucket; answers go on behind their end."""


class QualitySettings(AskingSettings):
    """``longdraft bench quality``: scores by system, task and context bucket, against references and the target's own answers."""


class ArrSettings(Settings):
    """``longdraft bench arr FILE.yaml``: options of ``longdraft bench arr``; what is left out is as there."""

    target: str = Field(description="folder, or smollm2")
    recipe: Path = Field(description="what longdraft calibrate wrote for this pair")
    documents: Path = Field(description="JSONL with text, none of which the recipe was found on")
    record: Path = Field(description="file of the record")
    draft: str | None = Field(
        None, description="whose lookahead is looked at: a folder; of smollm2 also longspec or eagle3"
    )
    count: int | None = Field(None, ge=1, description="documents")
    tokens: int | None = Field(None, ge=1, description="of each before the first verification")
    windows: int | None = Field(None, ge=1, description="verifications along each")
    window: int | None = Field(None, ge=1, description="rows of a verification, and steps of a draft")
    own: bool = Field(False, description="along the target's own continuations in place of the texts")
    budgets: list[int] | None = Field(None, min_length=1, description=f"tokens of sets, more than {PROTECTED} each")
    lags: list[int] | None = Field(
        None, min_length=1, description="tokens between history's row and the window, 1 among them"
    )
    split_step: int | None = Field(None, ge=1, description="tokens between two splits of a budget")
    kl_points: int | None = Field(None, ge=0, description="sets by which recovery and distortion are compared")
    kl_budget: int | None = Field(None, ge=1, description="tokens of each of them")
    kl_rows: int | None = Field(None, ge=1, description="tokens over which they are compared")
    dtype: Literal["auto", "float32", "bfloat16"] | None = Field(None, description="of the target")
    seed: int | None = Field(None, ge=0, description="of the sets of kl_points")
    plots: Path | None = Field(None, description="folder to draw into")
