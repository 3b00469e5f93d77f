"""A batch of LongSpec chains over made-up caches, by the module or by the serving step, on any device."""

from typing import Any

import torch
from tiny import tiny_draft, tiny_target

from longdraft.draft_models.chain import argmax_choice, propose_chain
from longdraft.draft_models.fused_step import FusedStep
from longdraft.draft_models.longspec import LongSpecDraft
from longdraft.draft_models.rope import Rotary
from longdraft.draft_models.tree_steps import rows_plan
from longdraft.draft_models.window_state import WindowState
from longdraft.kernels.prefix_attention import prefix_output

WINDOW, STEPS, BATCH, CACHED = 6, 4, 3, 20
LENGTHS = [30, 0, 3]  # one longer than the window, an empty one, one shorter
ROWS = [2, 0, 1]
TARGETS = {name: tiny_target(name, num_hidden_layers=4) for name in ("llama", "qwen3")}
IDS = torch.randint(0, 256, (BATCH, 40), generator=torch.Generator().manual_seed(2))
SETTINGS: list[tuple[str, dict[str, Any]]] = [
    ("llama", {}),
    ("qwen3", {"qkv_bias": True}),
    ("llama", {"final_norm": True, "head_tokens": 50}),
    ("llama", {"cross_layers": [1, 3], "cross_group": 3, "newest_lags": 2}),
]


def make(family: str, settings: dict[str, Any], dtype: torch.dtype, device: str = "cpu") -> LongSpecDraft:
    """A draft with its target's embedding and head where it runs; rotation stays in float32."""
    target = TARGETS[family]
    draft = tiny_draft(target, window=WINDOW, **settings).to(device, dtype)
    draft.rotary = Rotary(target.spec).to(device)
    return draft.bind(target.embedding_VE.to(device, dtype), target.head_VE.to(device, dtype))


class Chains:
    """One batch: fresh rings, a random cache, and what the head gave at each step of the latest run."""

    def __init__(self, draft: LongSpecDraft) -> None:
        weight, config, g = draft.self_attn.q_proj.weight, draft.config, torch.Generator().manual_seed(0)
        self.device, self.draft, self.logits = weight.device, draft, list[torch.Tensor]()
        self.state = WindowState(draft, BATCH + 1, STEPS)
        for row, ids, length in zip(ROWS, IDS.tolist(), LENGTHS, strict=True):
            self.state.rebuild(row, ids[:length], length)
        heads = len(config.cross_layers) * config.target.num_kv_heads
        cache = torch.randn(2, BATCH * CACHED, heads, config.target.head_dim, generator=g, dtype=torch.float64)
        self.cache = cache.to(self.device, weight.dtype)
        slots = torch.randperm(BATCH * CACHED, generator=g).view(BATCH, CACHED)
        self.pages_BW, self.lens_B = slots.int().to(self.device), torch.tensor([20, 1, 7]).int().to(self.device)
        self.plan = rows_plan(BATCH, 1, self.device, self.pages_BW, self.lens_B)
        self.row_B, self.at_B = torch.tensor(ROWS).to(self.device), torch.tensor(LENGTHS).to(self.device)
        self.root_B = IDS[torch.arange(BATCH), LENGTHS].to(self.device)

    def cross_attend(self, q: torch.Tensor) -> torch.Tensor:
        return prefix_output(q, *self.cache, self.plan, q.shape[-1] ** -0.5)

    def choose(self, logits: torch.Tensor, at: torch.Tensor, step: int) -> torch.Tensor:
        self.logits.append(logits)
        return argmax_choice(logits, at, step)

    def run(self, fused: FusedStep | None, keep_last: bool = True) -> torch.Tensor:
        """Drafted tokens ``[B, STEPS]``."""
        self.logits.clear()
        newest = self.draft.read_newest(*self.cache[:, self.pages_BW[:, 0].long()], self.at_B - 1)
        given = self.row_B, self.root_B, self.at_B, STEPS, self.cross_attend, self.choose, None, newest
        return propose_chain(self.state, *given, fused, keep_last=keep_last)
