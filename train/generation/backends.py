"""Who answers: SGLang's offline engine, or transformers where there is no GPU and in tests.

Legend: B prompts, V vocabulary.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from longdraft.draft_models.repetition import repeated_share, unlooped
from longdraft.errors import UserError
from longdraft.kernels.gumbel import gumbel_argmax
from longdraft.train.generation.decoding import LOOK, Row, decode_rows
from longdraft.train.generation.prompts import Prompt
from longdraft.train.generation.settings import GenerateSettings, SamplingSettings
from longdraft.train.target import load_config, load_target, resolve_dtype
from longdraft.train.tiny_random import PREFIX

# SGLang's engine on a CPU: what `longdraft serve` gives the server there.
CPU_ENVIRONMENT = {"SGLANG_USE_CPU_ENGINE": "1", "SGLANG_PLUGINS": "longdraft"}
CPU_ARGUMENTS = {
    "device": "cpu",
    "attention_backend": "torch_native",
    "max_running_requests": 8,
    "max_total_tokens": 40000,
    "chunked_prefill_size": 512,
    "disable_overlap_schedule": True,
}


SPREAD = 64  # tokens by which prompts of a batch may differ: the longer ones are read a token a step


@dataclass(frozen=True)
class Answer:
    """New token ids, the stop token included; ``finish`` is ``stop`` or ``length``."""

    ids: list[int]
    finish: str


class Backend(Protocol):
    """Answers prompts, in their order."""

    def generate(self, prompts: Sequence[Prompt]) -> list[Answer]: ...

    def close(self) -> None: ...


def resolve_backend(settings: GenerateSettings) -> tuple[str, torch.device]:
    """The backend's name and device that ``auto`` stands for."""
    wanted = settings.backend.device
    device = torch.device("cuda" if wanted == "auto" and torch.cuda.is_available() else wanted.replace("auto", "cpu"))
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UserError("backend.device=cuda, but PyTorch sees no GPU: use auto or cpu")
    name = settings.backend.name
    if name == "auto":
        name = "sglang" if device.type == "cuda" else "transformers"
    if name == "sglang" and settings.target.path.startswith(PREFIX):
        raise UserError(
            f"target.path={settings.target.path!r} exists in memory only: use backend.name=transformers, or a model folder"
        )
    return name, device


def open_backend(settings: GenerateSettings, name: str, device: torch.device, stop_ids: list[int]) -> Backend:
    """Load the target into a backend."""
    kind = SglangBackend if name == "sglang" else TransformersBackend
    backend: Backend = kind(settings, device, stop_ids)
    return backend


def stop_tokens(settings: GenerateSettings, tokenizer: Any) -> list[int]:
    """Ids that end an answer: the model's, its generation config's and the tokenizer's end of text."""
    from transformers import GenerationConfig

    found = [getattr(load_config(settings.target), "eos_token_id", None), tokenizer.eos_token_id]
    if not settings.target.path.startswith(PREFIX):
        try:
            path, revision = settings.target.path, settings.target.revision
            found.append(GenerationConfig.from_pretrained(path, revision=revision).eos_token_id)
        except OSError:  # a model without one
            pass
    flat = {int(t) for ids in found if ids is not None for t in (ids if isinstance(ids, list) else [ids])}
    if not flat:
        raise UserError(
            f"target.path={settings.target.path!r} names no end of text: set eos_token_id in its config.json"
        )
    return sorted(flat)


class SglangBackend:
    """``sglang.Engine``: token ids in and out, so nothing is rendered or tokenised twice."""

    def __init__(self, settings: GenerateSettings, device: torch.device, stop_ids: list[int]) -> None:
        if device.type == "cpu":
            os.environ.update(CPU_ENVIRONMENT)
            os.environ.setdefault("OMP_NUM_THREADS", str(os.cpu_count() or 1))
        from sglang.srt.entrypoints.engine import Engine

        self.sampling, self.stop_ids = settings.sampling, stop_ids
        self.deterministic = settings.sglang.deterministic
        self.engine: Any = Engine(**engine_arguments(settings, device))

    def generate(self, prompts: Sequence[Prompt]) -> list[Answer]:
        s = self.sampling
        shared: dict[str, Any] = {"temperature": s.temperature, "top_p": s.top_p, "max_new_tokens": s.max_new_tokens}
        shared["stop_token_ids"] = self.stop_ids
        parameters = [shared | ({"sampling_seed": p.seed} if self.deterministic else {}) for p in prompts]
        found = self.engine.generate(input_ids=[p.ids for p in prompts], sampling_params=parameters)
        answers = []
        for prompt, out in zip(prompts, found, strict=True):
            reason = out["meta_info"]["finish_reason"]
            if reason["type"] not in ("stop", "length"):
                raise RuntimeError(f"{prompt.name}: SGLang gave up on it ({reason})")
            answers.append(Answer(list(out["output_ids"]), reason["type"]))
        return answers

    def close(self) -> None:
        self.engine.shutdown()


def engine_arguments(settings: GenerateSettings, device: torch.device) -> dict[str, Any]:
    """Constructor arguments of SGLang's engine; what is not set is left to SGLang."""
    target, own = settings.target, settings.sglang
    given = {
        "mem_fraction_static": own.mem_fraction,
        "attention_backend": own.attention_backend,
        "max_running_requests": own.max_running_requests,
        "revision": target.revision,
    }
    fixed = {
        "model_path": target.path,
        "skip_tokenizer_init": True,
        "trust_remote_code": target.trust_remote_code,
        "dtype": str(resolve_dtype(target.dtype, device)).removeprefix("torch."),
        "tp_size": own.tensor_parallel,
        "dp_size": own.data_parallel,
        "random_seed": settings.sampling.seed % (1 << 30),
        "enable_deterministic_inference": own.deterministic,
        "log_level": "warning",
    }
    base = CPU_ARGUMENTS if device.type == "cpu" else {}
    return base | own.arguments | fixed | {k: v for k, v in given.items() if v is not None}


class TransformersBackend:
    """A transformers model, its rows decoded together; sampling by shared noise, so batches do not change an answer."""

    def __init__(self, settings: GenerateSettings, device: torch.device, stop_ids: list[int]) -> None:
        self.model = load_target(settings.target, device).model
        self.sampling, self.stop_ids = settings.sampling, stop_ids
        self.settings = settings
        self.max_batch_tokens = settings.target.max_batch_tokens

    def generate(self, prompts: Sequence[Prompt]) -> list[Answer]:
        answers: dict[int, Answer] = {}
        for batch in self._batches(prompts):
            rows = [Row(prompts[i].ids, []) for i in batch]
            choose = Choice(self.sampling, [prompts[i].seed for i in batch], self.model.device)
            decode_rows(self.model, rows, self.sampling.max_new_tokens, self.stop_ids, choose, self._hopeless)
            answers |= {i: self._answer(row.answer) for i, row in zip(batch, rows, strict=True)}
        return [answers[i] for i in range(len(prompts))]

    def _hopeless(self, ids: Sequence[int]) -> bool:
        """Whether a longer answer would be left out, or cut to this, whatever comes."""
        dropped, trimmed = self.settings.drop_repeats, self.settings.trim_repeats
        if dropped is not None:
            grams = self.sampling.max_new_tokens - 3
            return repeated_share(ids) * (len(ids) - 3) > dropped * grams
        whole = ids[: len(ids) // LOOK * LOOK]  # a step that is not whole may still turn out sound
        return trimmed is not None and unlooped(whole, trimmed, LOOK) < len(whole)

    def _answer(self, ids: list[int]) -> Answer:
        return Answer(ids, "stop" if ids and ids[-1] in self.stop_ids else "length")

    def _batches(self, prompts: Sequence[Prompt]) -> list[list[int]]:
        """Indices grouped by length, longest first, so that prompts with their answers stay within the limit."""
        batches: list[list[int]] = []
        for i in sorted(range(len(prompts)), key=lambda i: -len(prompts[i].ids)):
            width = len(prompts[batches[-1][0]].ids) + self.sampling.max_new_tokens if batches else 0
            near = bool(batches) and len(prompts[batches[-1][0]].ids) - len(prompts[i].ids) <= SPREAD
            if near and (len(batches[-1]) + 1) * width <= self.max_batch_tokens:
                batches[-1].append(i)
            else:
                batches.append([i])
        return batches

    def close(self) -> None:
        pass


class Choice:
    """The next token of each row: the likeliest, or the one that the row's seed and the position choose."""

    def __init__(self, sampling: SamplingSettings, seeds: Sequence[int], device: torch.device) -> None:
        self.sampling = sampling
        self.seed_B = torch.tensor(seeds, device=device)

    def __call__(self, logits_BV: torch.Tensor, row_B: torch.Tensor, position: int) -> torch.Tensor:
        s = self.sampling
        if s.temperature == 0:
            return logits_BV.argmax(-1)
        logits_BV = logits_BV.float() / s.temperature
        if s.top_p < 1:
            from transformers import TopPLogitsWarper

            logits_BV = TopPLogitsWarper(s.top_p)(row_B[:, None], logits_BV)
        return gumbel_argmax(logits_BV.log_softmax(-1), self.seed_B[row_B], torch.full_like(row_B, position))
