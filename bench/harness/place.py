"""Where systems are served: the target, its drafts, the machine, and how large servers must be."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from longdraft.bench.gpu_full_speed import HEAD, write_models
from longdraft.bench.harness.settings import SHAPE, ForceSettings, HarnessSettings
from longdraft.bench.tree_speed import environment
from longdraft.errors import UserError
from longdraft.models import MODELS, fetch, shipped_draft
from longdraft.serve.launch import cpu_arguments

SHIPPED_FOR = {"smollm2": "smollm2-135m"}
KINDS = ("longspec", "eagle3")
SLACK = 256  # tokens of a request beyond prompt and answer that a server has to have room for


@dataclass(frozen=True)
class Place:
    """What every server of a run shares.

    Args:
        settings: the file's.
        on_cpu: whether there is no GPU.
        batch: requests at once at most.
        context: tokens of a request at most, prompt and answer.
        force: forced acceptance, if any.
        step_times: whether servers of ours write where their steps' time goes.
    """

    settings: HarnessSettings
    on_cpu: bool
    batch: int
    context: int
    force: ForceSettings | None = None
    step_times: bool = False

    @property
    def shape(self) -> bool:
        """Whether weights are random."""
        return self.settings.target.path == SHAPE

    @property
    def dtype(self) -> str:
        asked = self.settings.target.dtype
        return ("float32" if self.on_cpu else "bfloat16") if asked == "auto" else asked

    @cached_property
    def shapes(self) -> dict[str, Path]:
        """Folders of the 8B shape's models."""
        if self.on_cpu:
            raise UserError(f"target.path={SHAPE!r} needs a GPU, there is none: take smollm2")
        found = write_models(self.settings.logs / "models")
        torch.cuda.empty_cache()  # what made them is the servers' now
        return found

    @cached_property
    def target(self) -> Path:
        """Folder of the target.

        Raises:
            UserError: there is none.
        """
        path = self.settings.target.path
        if self.shape:
            return self.shapes["target"]
        if path in MODELS:
            return fetch(path)
        if not (Path(path) / "config.json").is_file():
            raise UserError(
                f"target.path={path!r} holds no config.json: give {', '.join(MODELS)}, {SHAPE} or a model's folder"
            )
        return Path(path)

    @cached_property
    def tokenizer(self) -> Any:
        """The target's.

        Raises:
            UserError: it has none, or one that does not say where its tokens stand in a text.
        """
        from transformers import AutoTokenizer

        folder = self.target
        try:
            found = AutoTokenizer.from_pretrained(folder)
        except Exception as error:  # of many kinds: what is wrong is in the folder
            why = " ".join(str(error).split())[:200]
            raise UserError(
                f"target.path={self.settings.target.path!r} has no tokenizer that loads ({why}): give a whole model's folder"
            ) from None
        if not found.is_fast:
            raise UserError(
                f"target.path={self.settings.target.path!r} has a slow tokenizer: put a tokenizer.json into its folder"
            )
        return found

    def draft(self, word: str) -> Path | None:
        """Folder of a draft of ours; None for ``none``, which looks up.

        Raises:
            UserError: no such draft for this target.
        """
        if word == "none":
            return None
        if word in KINDS and self.shape:
            return self.shapes["longdraft" if word == "longspec" else "longdraft-eagle3"]
        if word in KINDS:
            if (model := SHIPPED_FOR.get(self.settings.target.path)) is None:
                raise UserError(f"draft {word!r} is shipped for {', '.join(SHIPPED_FOR)} only: give the draft's folder")
            return shipped_draft(model, word)
        if not Path(word).is_dir():
            raise UserError(f"draft {word!r} is no folder: give {', '.join(KINDS)}, none, or a draft's folder")
        return Path(word)

    def shape_settings(self, draft: str | None, mode: str) -> dict[str, Any]:
        """Of our servers of the 8B shape: as many rows of the head and as many heads that choose as trained and calibrated ones have."""
        if not self.shape or draft not in KINDS:
            return {}
        name = "longdraft" if draft == "longspec" else "longdraft-eagle3"
        rows = (
            {"draft_head_tokens": HEAD, "draft_head_counts": str(self.shapes["counts"])} if draft == "longspec" else {}
        )
        return rows | ({"sparse_recipe": str(self.shapes[f"{name}-recipe"])} if mode == "sparse" else {})

    def server_words(self) -> list[str]:
        """SGLang's arguments for every system."""
        target = self.settings.target
        own = {"--model-path": str(self.target), "--dtype": self.dtype, "--max-running-requests": str(self.batch)}
        own |= {"--grammar-backend": "none", "--random-seed": str(self.settings.seed)}
        if self.on_cpu:
            own |= {"--max-total-tokens": str(target.pool_tokens or self.batch * (self.context + SLACK))}
        else:
            own |= {"--attention-backend": target.attention_backend, "--sampling-backend": "pytorch"}
            own |= {"--mem-fraction-static": str(target.memory), "--chunked-prefill-size": "16384"}
            own |= {"--cuda-graph-max-bs-decode": str(self.batch)}
            own |= {} if target.pool_tokens is None else {"--max-total-tokens": str(target.pool_tokens)}
        if self.shape:
            own |= {"--load-format": "dummy", "--context-length": str(self.context + SLACK)}
        words = [*(word for pair in own.items() for word in pair), *target.arguments]
        return [*words, *(cpu_arguments(words) if self.on_cpu else ["--skip-server-warmup"])]

    def environment(self, stock: bool) -> dict[str, str]:
        """Of a server's process: stock SGLang runs without our plugin where it can."""
        return environment(self.on_cpu, stock, self.dtype)


def place_of(settings: HarnessSettings, batch: int, context: int, **more: Any) -> Place:
    """On this machine."""
    return Place(settings, not torch.cuda.is_available(), batch, context, **more)
