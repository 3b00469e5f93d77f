"""A LongSpec draft that has half learned a tiny target's text, so that served chains are sometimes kept and sometimes not."""

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, DynamicCache

from longdraft.draft_models.checkpoint import save_draft
from longdraft.draft_models.config import LongSpecConfig, LongSpecSettings
from longdraft.draft_models.longspec import LongSpecDraft
from longdraft.draft_models.target import TargetSpec
from longdraft.kernels.linear_cross_entropy import linear_cross_entropy


def own_text(model: torch.nn.Module, prompts: torch.Tensor, new_tokens: int) -> tuple[torch.Tensor, DynamicCache]:
    """Greedy continuations of equal-length prompts, and the target's cache of all but the last token."""
    cache, parts, feed = DynamicCache(), [prompts], prompts
    with torch.no_grad():
        for _ in range(new_tokens):
            feed = model(feed, past_key_values=cache).logits[:, -1:].argmax(-1)
            parts.append(feed)
    return torch.cat(parts, 1), cache


def known_prompts() -> torch.Tensor:
    """Prompts ``[12, 24]`` whose continuations the draft has seen."""
    return torch.randint(0, 256, (12, 24), generator=torch.Generator().manual_seed(1))


def train_tiny_draft(target_folder: Path, draft_folder: Path, steps: int = 150, window: int = 32) -> Path:
    """Train on the continuations of :func:`known_prompts` and save; a few seconds."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(target_folder).eval()
    spec = TargetSpec.from_config(model.config)
    ids, cache = own_text(model, known_prompts(), 100)
    k, v = cache.layers[-1].keys.transpose(1, 2), cache.layers[-1].values.transpose(1, 2)  # type: ignore[union-attr]
    rows, length = ids.shape[0], ids.shape[1] - 1
    inputs, labels = ids[:, :-1].reshape(-1), ids[:, 1:].reshape(-1)
    positions = torch.arange(length).repeat(rows)
    cu = [length * i for i in range(rows + 1)]
    draft = LongSpecDraft(LongSpecConfig(spec, LongSpecSettings(window=window)))
    draft.bind(model.get_input_embeddings().weight, model.get_output_embeddings().weight)
    optimizer = torch.optim.AdamW(draft.parameters(), lr=5e-3)
    for step in range(steps):
        hidden = draft.forward_packed(inputs, positions, k.flatten(0, 1), v.flatten(0, 1), cu, 1 + step % 4)
        loss, _ = linear_cross_entropy(hidden, draft.head_VE, labels)
        optimizer.zero_grad()
        (loss / labels.numel()).backward()
        torch.nn.utils.clip_grad_norm_(draft.parameters(), 1.0)
        optimizer.step()
    save_draft(draft, draft_folder, "tiny")
    return draft_folder
