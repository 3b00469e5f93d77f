"""Language models that draft for another one, and what a server with one of them must do: ``from tiny_lm import shaken, Reference``."""

from functools import cache
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

PADDING = 32  # rows behind the target's vocabulary, each the loudest where nothing holds it back


def shaken(target: Path, folder: Path, noise: float, layers: int | None = None, padding: int = 0) -> Path:
    """A copy of a model that is right often and wrong often.

    Args:
        target: folder of the model and its tokenizer.
        folder: where to.
        noise: of every matrix, as a part of its own spread.
        layers: how many to keep; None: all.
        padding: more rows of embedding and head; a row of the head thrice as large as the target's row of some token.
    """
    model = AutoModelForCausalLM.from_pretrained(target)
    size = model.config.vocab_size
    if layers is not None:
        del model.model.layers[layers:]
        model.config.num_hidden_layers = layers
        if getattr(model.config, "layer_types", None):
            model.config.layer_types = model.config.layer_types[:layers]
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight += noise * weight.std() * torch.randn(weight.shape, generator=draw)
        if padding:
            model.resize_token_embeddings(size + padding, mean_resizing=False)
            head = model.get_output_embeddings().weight
            head[size:] = 3 * head[torch.arange(padding) * 3]
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(target).save_pretrained(folder)
    return folder


def reshaped(target: Path, folder: Path) -> Path:
    """The same function with a cache of another shape: a key and value head for every query head, and a layer more that adds nothing."""
    model = AutoModelForCausalLM.from_pretrained(target)
    config, weights = model.config, model.state_dict()
    groups, size = config.num_attention_heads // config.num_key_value_heads, config.head_dim
    for name, weight in list(weights.items()):
        if ".k_proj." in name or ".v_proj." in name:
            weights[name] = weight.unflatten(0, (-1, size)).repeat_interleave(groups, 0).flatten(0, 1)
        if name.startswith("model.layers.0."):
            last = weights[name] * (0 if ".o_proj." in name or ".down_proj." in name else 1)
            weights[name.replace(".0.", f".{config.num_hidden_layers}.", 1)] = last
    config.num_key_value_heads, config.num_hidden_layers = config.num_attention_heads, config.num_hidden_layers + 1
    if getattr(config, "layer_types", None):
        config.layer_types = [*config.layer_types, config.layer_types[-1]]
    made = AutoModelForCausalLM.from_config(config)
    made.load_state_dict(weights)
    made.save_pretrained(folder)
    AutoTokenizer.from_pretrained(target).save_pretrained(folder)
    return folder


def shaken_lm(target: Path, folder: Path) -> Path:
    """A copy that is right most of the time, of another shape and with a padded vocabulary."""
    return shaken(reshaped(target, folder.with_name(f"{folder.name}-still")), folder, 0.02, padding=PADDING)


class Reference:
    """Target and draft without a server: greedy text, and in how many verifications chains win it."""

    def __init__(self, target: Path, draft: Path, steps: int) -> None:
        self.target, self.draft = (AutoModelForCausalLM.from_pretrained(x).eval() for x in (target, draft))
        self.steps = steps
        self.decode = cache(self._decode)

    def __call__(self, ids: list[int], count: int) -> tuple[list[int], int]:
        """``count`` tokens behind a prompt, and the verifications behind the first of them."""
        return self.decode(tuple(ids), count)

    @torch.no_grad()
    def _decode(self, ids: tuple[int, ...], count: int) -> tuple[list[int], int]:
        text = self._greedy(self.target, list(ids), count)
        have, verifications = 1, 0
        while have < count:
            chain = self._greedy(self.draft, [*ids, *text[:have]], min(self.steps, count - have - 1))
            kept = next((i for i, (a, b) in enumerate(zip(chain, text[have:], strict=False)) if a != b), len(chain))
            have, verifications = have + kept + 1, verifications + 1
        return text, verifications

    def _greedy(self, model: torch.nn.Module, ids: list[int], count: int) -> list[int]:
        if count < 1:
            return []
        past, given, out = None, torch.tensor([ids]), []
        for _ in range(count):
            seen = model(given, past_key_values=past, use_cache=True, logits_to_keep=1)
            past = seen.past_key_values
            given = seen.logits[:, -1, : self.target.config.vocab_size].argmax(-1, keepdim=True)
            out.append(int(given))
        return out
