"""A tiny random target with a byte tokenizer, made in memory from a seed: `target.path=tiny-random:llama` needs no download.

Smoke recipes and tests run the whole pipeline on it. Its text is noise; its shapes are real (grouped heads, biases or
query/key norms as the family has them, tied or separate heads).
"""

import re
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, PretrainedConfig, PreTrainedTokenizerFast, Qwen2Config, Qwen3Config
from transformers.modeling_utils import PreTrainedModel

from longdraft.errors import UserError

PREFIX = "tiny-random:"
SPECIALS = ("<|start|>", "<|end|>", "<|endoftext|>")
VOCABULARY = 288  # 256 bytes, the specials and reserved names, so that every id that a random model picks has a text
CHAT_TEMPLATE = (
    "{% for m in messages %}<|start|>{{ m['role'] }}\n{{ m['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token a byte, three specials and a chat template; it adds nothing to a plain text."""
    names = sorted(pre_tokenizers.ByteLevel.alphabet()) + list(SPECIALS)
    names += [f"<|reserved_{i}|>" for i in range(VOCABULARY - len(names))]
    core = Tokenizer(models.BPE(vocab={name: i for i, name in enumerate(names)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(names[256:])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        bos_token="<|start|>",
        eos_token="<|end|>",
        pad_token="<|endoftext|>",
        clean_up_tokenization_spaces=False,
        model_max_length=16384,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def tiny_config(family: str, **changes: Any) -> PretrainedConfig:
    """Config of a tiny ``llama``, ``qwen2`` or ``qwen3``; ``changes`` replace its fields, ``llama:4`` has four layers.

    Raises:
        UserError: another family.
    """
    family, _, layers = family.partition(":")
    classes = {"llama": LlamaConfig, "qwen2": Qwen2Config, "qwen3": Qwen3Config}
    if family not in classes or not re.fullmatch(r"[1-9]\d?", layers or "2", re.ASCII):
        raise UserError(
            f"target.path='{PREFIX}{family}{layers and ':' + layers}' is not a tiny target: use one of "
            f"{', '.join(PREFIX + f for f in classes)}, and for another depth :1 to :99 behind it"
        )
    fields: dict[str, Any] = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": int(layers or 2),
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32 if family == "qwen3" else 16,  # qwen3: heads * head_dim is not the hidden size
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 16384,
        "tie_word_embeddings": family != "llama",
        "bos_token_id": 256,
        "eos_token_id": 257,
        "pad_token_id": 258,
        "initializer_range": 0.15,  # wide enough that the argmax depends on the whole context and ties are rare
    }
    config: PretrainedConfig = classes[family](**{**fields, **changes})
    return config


def tiny_random_model(family: str, seed: int = 0, **changes: Any) -> PreTrainedModel:
    """The model in float32, the same weights for the same arguments; the global random state is left as it was."""
    from transformers import AutoModelForCausalLM

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: PreTrainedModel = AutoModelForCausalLM.from_config(tiny_config(family, **changes), dtype=torch.float32)
        with (
            torch.no_grad()
        ):  # transformers starts norms at one and biases at zero, which would hide a mistake with them
            for weight in (p for p in model.parameters() if p.dim() == 1):
                weight.add_(0.1 * torch.randn_like(weight))
    model.eval()
    return model
