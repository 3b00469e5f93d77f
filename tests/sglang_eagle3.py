"""Runs SGLang's own EAGLE-3 model on a CPU, in a process of its own: ``python sglang_eagle3.py FOLDER...``.

Each folder holds a draft and ``inputs.safetensors`` (embedding, aux, ids, positions); beside them it writes
``outputs.safetensors`` with the rows before the head, the rows for the next step, the logits and the map to target ids, and
prints one JSON line with the parameters that the loader filled.
"""

import dataclasses
import json
import os
import socket
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ["SGLANG_USE_CPU_ENGINE"] = "1"

import torch
from safetensors.torch import load_file, save_file
from sglang.srt.distributed import init_distributed_environment, initialize_model_parallel
from sglang.srt.models.llama_eagle3 import LlamaForCausalLMEagle3
from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler
from transformers import AutoConfig


def bare_server_args() -> ServerArgs:
    """Every default, without the checks that need a model."""
    args = object.__new__(ServerArgs)
    for field in dataclasses.fields(ServerArgs):
        made = field.default_factory() if field.default_factory is not dataclasses.MISSING else field.default
        object.__setattr__(args, field.name, None if made is dataclasses.MISSING else made)
    args.device = "cpu"
    return args


class Causal(torch.nn.Module):
    """In the place of SGLang's attention, which needs a cache pool."""

    def __init__(self, heads: int, kv_heads: int, size: int) -> None:
        super().__init__()
        self.counts, self.size = (heads, kv_heads, kv_heads), size

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, forward_batch: Any) -> torch.Tensor:
        q, k, v = (
            x.unflatten(-1, (n, self.size)).transpose(0, 1)[None] for x, n in zip((q, k, v), self.counts, strict=True)
        )
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return out[0].transpose(0, 1).flatten(1)


@torch.no_grad()
def run(folder: Path) -> None:
    config = AutoConfig.from_pretrained(folder)
    model = LlamaForCausalLMEagle3(config)
    for weight in model.parameters():
        weight.fill_(float("nan"))
    model.load_weights(iter(load_file(folder / "model.safetensors").items()))
    filled = sorted(name for name, p in model.named_parameters() if not bool(p[: len(p) // 2].isnan().any()))
    inputs = load_file(folder / "inputs.safetensors")
    rows = model.model.embed_tokens.weight.data
    rows[: len(inputs["embedding"])] = inputs["embedding"]
    layer = model.model.layers[0].self_attn
    layer.attn = Causal(config.num_attention_heads, config.num_key_value_heads, config.head_dim)
    batch = SimpleNamespace(mm_input_embeds=None, spec_info=SimpleNamespace(hidden_states=inputs["aux"]))
    batch.forward_mode = SimpleNamespace(is_extend=lambda: False)
    normed, (recycled,) = model.model(inputs["ids"], inputs["positions"], batch)
    logits = normed @ model.lm_head.weight[: config.draft_vocab_size].t()
    out = {"normed": normed, "next": recycled, "logits": logits, "ids": model.get_hot_token_id()}
    save_file({name: x.clone() for name, x in out.items()}, folder / "outputs.safetensors")
    print(json.dumps({"folder": folder.name, "filled": filled}), flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    set_global_server_args_for_scheduler(bare_server_args())
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    init_distributed_environment(1, 0, f"tcp://127.0.0.1:{port}", 0, backend="gloo")
    initialize_model_parallel()
    for name in sys.argv[1:]:
        run(Path(name))
