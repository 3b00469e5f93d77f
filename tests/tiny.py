"""Tiny random targets on disk, for tests of training and serving: ``from tiny import tiny_model``."""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from longdraft.draft_models.config import LongSpecConfig, LongSpecSettings
from longdraft.draft_models.eagle3 import Eagle3Draft
from longdraft.draft_models.eagle3_config import Eagle3Config, Eagle3Settings
from longdraft.draft_models.longspec import LongSpecDraft
from longdraft.train.target import FrozenTarget
from longdraft.train.tiny_random import byte_tokenizer, tiny_random_model

OF_THE_FAMILY = {"model_type", "architectures", "layer_types", "transformers_version"}


def tiny_model(family: str, folder: str | Path, seed: int = 0, **changes: Any) -> Path:
    """Write a tiny ``llama``, ``qwen2`` or ``qwen3`` (float32, 288 tokens, 16K positions) with its byte tokenizer.

    Args:
        family: which architecture.
        folder: where to; made if missing.
        seed: of the weights.
        changes: config fields to replace, such as ``num_hidden_layers=3``.

    Returns:
        The folder, as transformers and SGLang load it.
    """
    folder = Path(folder)
    model = tiny_random_model(family, seed, **changes)
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


def tiny_target(family: str = "llama", seed: int = 0, **changes: Any) -> FrozenTarget:
    """The same model in memory, frozen."""
    return FrozenTarget(tiny_random_model(family, seed, **changes), f"tiny-random:{family}")


def tiny_draft(target: FrozenTarget, seed: int = 0, **settings: Any) -> LongSpecDraft:
    """A random draft bound to the target, with weights large enough that every part of it shows in its output."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        draft = LongSpecDraft(LongSpecConfig(target.spec, LongSpecSettings(**settings)))
        _show_everything(draft)
    return draft.bind(target.embedding_VE, target.head_VE)


def tiny_eagle3(target: FrozenTarget, seed: int = 0, **settings: Any) -> Eagle3Draft:
    """A random EAGLE-3 draft, as :func:`tiny_draft`, its vocabulary spread at random; the target needs four layers."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        draft = Eagle3Draft(Eagle3Config(target.spec, Eagle3Settings(**settings)))
        _show_everything(draft)
        draft.choose_vocabulary(torch.randperm(target.spec.vocab_size)[: draft.config.vocab_size])
    return draft.bind(target.embedding_VE, target.head_VE)


def _show_everything(draft: torch.nn.Module) -> None:
    with torch.no_grad():
        for weight in draft.parameters():
            weight.normal_(std=0.2) if weight.dim() > 1 else weight.add_(0.2 * torch.randn_like(weight))


def tiny_moe(folder: str | Path, seed: int = 0, layers: int = 5) -> Path:
    """A tiny ``qwen3_moe`` of 8 experts, 2 for a token, as :func:`tiny_model` writes its families."""
    dense = tiny_random_model("qwen3", seed).config.to_dict()
    shared = {name: dense[name] for name in Qwen3MoeConfig().to_dict().keys() & dense.keys() - OF_THE_FAMILY}
    sparse = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True}
    config = Qwen3MoeConfig(**{**shared, **sparse, "num_hidden_layers": layers, "tie_word_embeddings": False})
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return Path(folder)
