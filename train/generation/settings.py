"""Settings of ``longdraft generate``: what is asked, of whom, and how it answers."""

from pathlib import Path
from typing import Any, Literal

from pydantic import Field, field_validator

from longdraft.schema import Settings
from longdraft.train.config import DataSettings, TargetSettings, as_list


class PromptSettings(Settings):
    sources: list[str] | str = Field(min_length=1, description="JSONL files, Hugging Face data set names or folders")
    split: str = Field("train", description="of a Hugging Face data set")
    subset: str | None = Field(None, description="configuration name of a Hugging Face data set")
    text_field: str = Field("text", description="field of a record that holds plain text")
    conversation_field: str = Field("conversations", description="field that holds a list of role and content")
    lengths: list[int] = Field([512, 1024, 2048], min_length=1, description="tokens of prompts cut from plain texts")
    per_document: int = Field(1, ge=1, description="prompts cut from one plain text")
    limit: int | None = Field(None, ge=1, description="prompts at most")

    @field_validator("lengths")
    @classmethod
    def _positive(cls, lengths: list[int]) -> list[int]:
        if min(lengths) < 1:
            raise ValueError("a prompt has 1 token or more")
        return lengths

    @property
    def data(self) -> DataSettings:
        """The same sources as training reads them."""
        shared = ("split", "subset", "text_field", "conversation_field")
        return DataSettings(train=self.sources, **self.model_dump(include=set(shared)))


class SamplingSettings(Settings):
    temperature: float = Field(0.0, ge=0, allow_inf_nan=False, description="0 is greedy")
    top_p: float = Field(1.0, gt=0, le=1, description="sample from the likeliest tokens of this mass; 1 is all")
    seed: int = Field(0, ge=0, lt=1 << 63, description="of the cuts and of the sampling")
    max_new_tokens: int = Field(512, ge=1, description="an answer that reaches it is kept as it is")


class BackendSettings(Settings):
    name: Literal["auto", "sglang", "transformers"] = Field(
        "auto", description="auto: sglang on a GPU, transformers on a CPU"
    )
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="auto: a GPU where there is one")
    batch: int = Field(2048, ge=1, description="prompts in flight; their answers are saved together")


class SglangSettings(Settings):
    mem_fraction: float | None = Field(None, gt=0, lt=1, description="share of GPU memory for weights and cache")
    attention_backend: str | None = Field(None, description="None: SGLang's choice")
    max_running_requests: int | None = Field(None, ge=1, description="None: as many as the cache holds")
    tensor_parallel: int = Field(1, ge=1, description="GPUs that share one model")
    data_parallel: int = Field(1, ge=1, description="models that share the prompts")
    arguments: dict[str, bool | int | float | str] = Field(
        {}, description="further arguments of sglang.Engine, such as {max_total_tokens: 500000}"
    )
    deterministic: bool = Field(
        False, description="batch-invariant kernels and a seed for each prompt: the same output every time, slower"
    )


class GenerateSettings(Settings):
    """Make training data from the target's own answers; needed: --target.path, --prompts.sources, --out. Conversations are
    answered from their last question on, plain texts are continued from seeded cuts. The same command again continues a stopped run.
    """

    out: str = Field(description="folder for generated.jsonl and provenance.json")
    target: TargetSettings
    prompts: PromptSettings
    sampling: SamplingSettings = SamplingSettings()
    backend: BackendSettings = BackendSettings()
    sglang: SglangSettings = SglangSettings()
    drop_repeats: float | None = Field(
        None,
        ge=0,
        le=1,
        description="leave out answers with a larger share of repeated 4-grams; 0.3 is our measurements'",
    )
    trim_repeats: float | None = Field(
        None,
        ge=0,
        le=1,
        description="cut answers before the 32 tokens in which their share of repeated 4-grams passes this; "
        "a greedy answer of a small model is sound only so far",
    )
    supervision: Literal["supervised_from", "loss_mask"] = Field(
        "supervised_from", description="how a record says where the answer begins; loss_mask is SpecForge's way, larger"
    )
    text: bool = Field(False, description="also store the answer as text, for people")

    def identity(self, backend: str, fingerprints: dict[str, str]) -> dict[str, Any]:
        """Dotted settings that decide the output; a continued run must not change them.

        Args:
            backend: as resolved.
            fingerprints: of the prompts, by source name.
        """
        sections = ("target", "prompts", "sampling")
        flat = {f"{s}.{k}": v for s in sections for k, v in getattr(self, s).model_dump(mode="json").items()}
        for key in ("target.max_batch_tokens", "target.trust_remote_code", "prompts.limit"):
            del flat[key]
        own = {key: getattr(self, key) for key in ("drop_repeats", "trim_repeats", "supervision", "text")}
        return (
            flat
            | own
            | {
                # Names without their folders: a run may be continued after a move.
                "target.path": Path(self.target.path).name,
                "prompts.sources": [Path(name).name for name in as_list(self.prompts.sources)],
                "prompts.sources.sha256": list(fingerprints.values()),
                "backend.name": backend,
                "sglang.deterministic": self.sglang.deterministic,
            }
        )
