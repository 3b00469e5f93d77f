"""Rows of records as the report reads them: speed, load, acceptance and quality, each checked; and the rows that do not count."""

from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field, NonNegativeFloat, PositiveFloat, PositiveInt

from longdraft.bench.lengths import tokens_word


class Row(BaseModel):
    """What all rows have. ``source`` is the record's file, without its ending."""

    model_config = ConfigDict(extra="ignore", frozen=True, allow_inf_nan=False)
    kind: ClassVar[str]
    system: str
    label: str = ""
    settings: dict[str, Any] = {}
    n: int = Field(0, ge=0)
    source: str = ""

    @property
    def name(self) -> str:
        return self.label or self.system

    @property
    def view_tokens(self) -> int | None:
        """The system's budget."""
        found = self.settings.get("budget")
        return found if type(found) is int and found > 0 else None

    @property
    def bare_name(self) -> str:
        """The name without its budget's word: "partial" of "partial 4K"."""
        if (tokens := self.view_tokens) is None:
            return self.name
        words = {tokens_word(tokens), str(tokens), f"{tokens:,}"}
        return " ".join(w for w in self.name.split() if w.strip(",") not in words).rstrip(",") or self.system


class Speed(Row):
    """Decoding of ``batch`` requests of ``context`` tokens; ``alpha`` is tokens over decode seconds, ``phases`` ms a step."""

    kind = "speed"
    batch: PositiveInt
    context: PositiveInt
    tok_s: PositiveFloat
    tok_s_spread: NonNegativeFloat | None = None
    repeats: PositiveInt = 1
    alpha: PositiveFloat | None = None
    ms_step: PositiveFloat | None = None
    tokens_a_step: PositiveFloat | None = None
    prefill_s: NonNegativeFloat | None = None
    phases: dict[str, NonNegativeFloat] | None = None
    forced_accept: PositiveFloat | None = None

    @property
    def rate(self) -> float:
        """What speedups are made of: tokens over decode seconds, or tokens a second where a record has no more."""
        return self.alpha or self.tok_s

    @property
    def case(self) -> str:
        return f"{self.batch}\u00a0×\u00a0{tokens_word(self.context)}"


class Steps(Row):
    """Where a step's time goes in a record that says nothing else: ``phases`` in ms, and the whole ``step``."""

    kind = "steps"
    batch: PositiveInt
    context: str
    phases: dict[str, NonNegativeFloat]
    step: PositiveFloat


class Load(Row):
    """Requests at a rate (requests a second); latencies in ms."""

    kind = "load"
    rate: PositiveFloat
    requests: PositiveInt
    tok_s: PositiveFloat
    ttft_p50_ms: NonNegativeFloat
    ttft_p99_ms: NonNegativeFloat
    itl_p50_ms: NonNegativeFloat
    itl_p99_ms: NonNegativeFloat
    partial_share: NonNegativeFloat | None = None


class Acceptance(Row):
    """Tokens gained a verification (τ) on a task and a context bucket, micro and macro, with the bonus token and without.

    ``tau_full`` counts full verifications alone; ``confirmed_share`` is of the tokens that views alone had verified.
    """

    kind = "acceptance"
    task: str
    bucket: str
    mean_prompt_tokens: NonNegativeFloat | None = None
    tau_micro: NonNegativeFloat
    tau_micro_no_bonus: NonNegativeFloat
    tau_macro: NonNegativeFloat | None = None
    tau_macro_no_bonus: NonNegativeFloat | None = None
    tau_spread: NonNegativeFloat | None = None
    accept_by_position: list[NonNegativeFloat] | None = None
    tau_full: NonNegativeFloat | None = None
    confirmed_share: NonNegativeFloat | None = None
    tokens: NonNegativeFloat | None = None
    verifications: NonNegativeFloat | None = None


class Quality(Row):
    """Scores, 0 to 1, of a task's answers: against references, and against the target's own full-cache output; spreads of both."""

    kind = "quality"
    task: str
    bucket: str = "all"
    mean_prompt_tokens: NonNegativeFloat | None = None
    metric: str
    budget: PositiveInt | None = None
    score_reference: NonNegativeFloat | None = None
    score_own: NonNegativeFloat | None = None
    exact_match_own: NonNegativeFloat | None = None
    mean_new_tokens: NonNegativeFloat | None = None
    spread: NonNegativeFloat | None = None
    spread_own: NonNegativeFloat | None = None

    @property
    def view_tokens(self) -> int | None:
        return self.budget or super().view_tokens


KINDS: dict[str, tuple[type[Row], str]] = {  # and the field that tells its rows, looked for in this order
    "load": (Load, "rate"),
    "quality": (Quality, "metric"),
    "speed": (Speed, "context"),
    "acceptance": (Acceptance, "task"),
}


class Excluded(BaseModel):
    """A row that does not count, and why."""

    source: str
    name: str
    where: str
    why: str
