"""Tiny random targets on disk, for tests of training and serving: ``from tiny import tiny_model``."""

from pathlib import Path
from typing import Any

from longdraft.train.tiny_random import byte_tokenizer, tiny_random_model


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
