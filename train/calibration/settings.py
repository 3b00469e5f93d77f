"""Settings of ``longdraft calibrate``: the pair, the documents, and how much of them is looked at."""

from pathlib import Path
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from longdraft.draft_models.sparse_recipe import PROTECTED
from longdraft.schema import Settings
from longdraft.train.config import DataSettings, TargetSettings, as_list


class NeedleSettings(Settings):
    lengths: list[int] = Field([1000, 4000, 8000, 16000], min_length=1, description="tokens of prompts")
    depths: int = Field(10, ge=1, description="places of a needle in a text, from its front to its end")
    haystacks: int = Field(3, ge=1, description="texts that needles are hidden in, put together from the documents")
    count: int = Field(3, ge=1, le=3, description="needles with their questions")
    chat: bool = Field(True, description="ask in the target's chat template where it has one")
    answers: Literal["auto", "own", "given"] = Field(
        "auto",
        description="own: what the target says, where it recalls the needle; given: the right answers, read as if it had said "
        "them; auto: own, and given where no own answer counts",
    )
    new_tokens: int = Field(50, ge=1, description="tokens of an own answer at most")
    recall: float = Field(50.0, ge=0, lt=100, description="ROUGE-1 recall above which an own answer counts, in percent")
    rule: Literal["mass", "argmax"] = Field(
        "mass",
        description="mass: a head's attention on the whole needle; argmax: whether its favourite key is the copied token",
    )

    @field_validator("lengths")
    @classmethod
    def _positive(cls, lengths: list[int]) -> list[int]:
        if min(lengths) < 1:
            raise ValueError("a prompt has 1 token or more")
        return lengths

    @property
    def depth_shares(self) -> list[float]:
        """From 0 to 1; the middle where there is only one."""
        return [0.5] if self.depths == 1 else [i / (self.depths - 1) for i in range(self.depths)]


class TraceSettings(Settings):
    documents: int = Field(8, ge=1, description="texts that are traced")
    tokens: int = Field(8192, ge=32, description="tokens of each before the first step")
    windows: int = Field(16, ge=1, description="verifications that are traced along each, one behind the other")
    window: int = Field(
        4, ge=1, description="rows of a verification that the recovery is the mean of, and steps of a draft"
    )
    continuation: Literal["text", "own"] = Field(
        "text", description="text: along the document as it is; own: along what the target says behind its first tokens"
    )


class SearchSettings(Settings):
    budget: int = Field(512, gt=PROTECTED, description="tokens of a set, sinks and window included (k)")
    skip: float = Field(
        0.5,
        ge=0,
        lt=1,
        description="share of the target's layers, the first ones, whose attention is not asked to be recovered: they look at sinks and "
        "near tokens, and a set that recovers those need not hold what the next token comes from; 0: all layers, as in the paper",
    )
    splits: list[float] = Field(
        [0.25, 0.375, 0.5],
        min_length=1,
        description="shares of the budget for the lookahead while draft layers are chosen",
    )
    draft_layers: int = Field(3, ge=1, description="draft layers at most")
    gain: float = Field(0.001, ge=0, description="recovery that a further draft layer must add")
    trials: int = Field(64, ge=1, description="values of the lookahead's share that are tried")
    step: int = Field(16, ge=1, description="tokens between two values of the lookahead's share")

    @model_validator(mode="after")
    def _fits(self) -> "SearchSettings":
        most = 1 - PROTECTED / self.budget
        if not all(0 < share <= most for share in self.splits):
            raise ValueError(
                f"splits={self.splits}: sinks and window take {PROTECTED} of budget={self.budget}, write shares above 0 up to "
                f"{most:.3f}"
            )
        return self


class CalibrateSettings(Settings):
    """Find whose attention chooses the tokens of sparse verifications, for a pair of target and draft; needed: --target.path,
    --documents, --out. The same command again continues a stopped run.
    """

    out: str = Field(description="JSON file to write, a recipe of mode sparse")
    target: TargetSettings
    draft: str | None = Field(
        None,
        description="folder of a LongSpec or EAGLE-3 draft, or a causal language model with the target's tokenizer; none: the "
        "target's history alone",
    )
    documents: list[str] | str = Field(
        min_length=1, description="JSONL files with text, held out from whatever is evaluated"
    )
    text_field: str = Field("text", description="field of a record that holds plain text")
    heads: int = Field(4, ge=1, description="retrieval heads of each layer")
    seed: int = Field(0, ge=0, lt=1 << 63, description="of the documents' order and of the search")
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="auto: a GPU where there is one")
    needles: NeedleSettings = NeedleSettings()
    traces: TraceSettings = TraceSettings()
    search: SearchSettings = SearchSettings()

    @model_validator(mode="after")
    def _leaves_something_out(self) -> "CalibrateSettings":
        if self.traces.tokens <= self.search.budget:
            raise ValueError(
                f"traces.tokens={self.traces.tokens} with search.budget={self.search.budget}: a set would hold the whole text, "
                "trace longer ones or give a smaller budget"
            )
        return self

    @property
    def data(self) -> DataSettings:
        """The documents as training reads them."""
        return DataSettings(train=self.documents, text_field=self.text_field)

    def identity(self, facts: dict[str, Any]) -> dict[str, Any]:
        """Dotted settings and facts of files that decide the result; a continued run must not change them."""
        sections = ("target", "needles", "traces", "search")
        flat = {f"{s}.{k}": v for s in sections for k, v in getattr(self, s).model_dump(mode="json").items()}
        for key in ("target.max_batch_tokens", "target.trust_remote_code"):
            del flat[key]
        names = {
            # Names without their folders: a run may be continued after a move.
            "target.path": Path(self.target.path).name,
            "draft": self.draft and Path(self.draft).name,
            "documents": [Path(name).name for name in as_list(self.documents)],
        }
        return flat | names | {key: getattr(self, key) for key in ("text_field", "heads", "seed")} | facts
