"""Drafts that have half learned a tiny target's text, so that served chains are sometimes kept and sometimes not."""

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, DynamicCache

from longdraft.draft_models.aux_features import aux_features
from longdraft.draft_models.checkpoint import save_draft
from longdraft.draft_models.config import LongSpecConfig, LongSpecSettings, TrainingFacts
from longdraft.draft_models.eagle3 import Eagle3Draft
from longdraft.draft_models.eagle3_config import Eagle3Config, Eagle3Settings
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


def train_tiny_eagle3(target_folder: Path, draft_folder: Path, steps: int = 60, depth: int = 3) -> Path:
    """The same for an EAGLE-3 draft, by training-time test over ``depth`` steps; the target needs four layers."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(target_folder).eval()
    ids, _ = own_text(model, known_prompts(), 100)
    draft = Eagle3Draft(Eagle3Config(TargetSpec.from_config(model.config), Eagle3Settings(draft_vocab_size=200)))
    draft.choose_vocabulary(ids.flatten().bincount(minlength=draft.config.target.vocab_size).topk(200).indices)
    draft.bind(model.get_input_embeddings().weight)
    with torch.no_grad(), aux_features(model, draft.config.aux_layers) as seen:
        model(ids)
        aux = seen.take()[:, : -depth - 1]
    rows = aux.shape[1]
    draft_id = torch.full((draft.config.target.vocab_size,), -100)
    draft_id[draft.target_ids] = torch.arange(200)
    causal = torch.ones(rows, rows, dtype=torch.bool).tril()
    optimizer = torch.optim.AdamW(draft.parameters(), lr=5e-3)
    for _ in range(steps):
        hidden, loss, keys, values = draft.fuse(aux), torch.zeros(()), [], []
        for step in range(depth):
            x = draft.attention_input(ids[:, 1 + step : 1 + step + rows], hidden).flatten(0, 1)
            at = (torch.arange(rows) + step).repeat(len(ids))
            q, k, v = (y.unflatten(0, (len(ids), rows)) for y in (draft.query(x, at), *draft.key_value(x, at)))
            groups = q.shape[-2] // k.shape[-2]
            keys, values = ([*old, new.repeat_interleave(groups, -2)] for old, new in ((keys, k), (values, v)))
            text = torch.einsum("blhd,bmhd->bhlm", q, keys[0]).masked_fill(~causal, float("-inf"))
            own = [torch.einsum("blhd,blhd->bhl", q, key)[..., None] for key in keys[1:]]
            weight = torch.softmax(torch.cat([text, *own], -1) * q.shape[-1] ** -0.5, -1)
            out = torch.einsum("bhlm,bmhd->blhd", weight[..., :rows], values[0])
            for i, value in enumerate(values[1:]):
                out = out + weight[..., rows + i].transpose(1, 2)[..., None] * value
            normed, hidden = draft.finish(hidden, out)
            labels = draft_id[ids[:, 2 + step : 2 + step + rows]]
            loss = loss + torch.nn.functional.cross_entropy(draft.draft_logits(normed).flatten(0, 1), labels.flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(draft.parameters(), 1.0)
        optimizer.step()
    save_draft(draft, draft_folder, "tiny", TrainingFacts(max_lag=depth))
    return draft_folder
