"""The draft's rotation against transformers' own, and window conventions of four libraries."""

from typing import Any

import pytest
import torch
from tiny import tiny_draft, tiny_target
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from longdraft.draft_models import windows
from longdraft.draft_models.rope import Rotary
from longdraft.draft_models.target import TargetSpec
from longdraft.kernels.packed_attention import packed_causal_attention

ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 5e5},
    "linear": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0},
    "llama3": {
        "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 256,
    },
    "yarn": {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 1024},
    "yarn with its options": {
        "rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 1024,
        "attention_factor": 1.3, "beta_fast": 16.0, "beta_slow": 2.0, "truncate": False,
    },
}  # fmt: skip


def config_with(rope: dict[str, Any]) -> LlamaConfig:
    return LlamaConfig(
        hidden_size=64, num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=4096, rope_parameters=rope
    )


@pytest.mark.parametrize("rope", ROPES.values(), ids=ROPES.keys())
def test_rotation_equals_the_targets(rope: dict[str, Any]) -> None:
    """Positions far past the trained ones and out of order, as drafts and Anchor-Offset Indices use them."""
    config = config_with(rope)
    rotary = Rotary(TargetSpec.from_config(config))
    position = torch.tensor([0, 1, 7, 1023, 1024, 4095, 130_000, 3])
    g = torch.Generator().manual_seed(0)
    q, k = (torch.randn(8, heads, 16, generator=g) for heads in (4, 2))
    cos, sin = LlamaRotaryEmbedding(config)(q, position[None])
    want = apply_rotary_pos_emb(q.transpose(0, 1)[None], k.transpose(0, 1)[None], cos, sin)
    for x, target in zip((q, k), want, strict=True):
        torch.testing.assert_close(rotary(x, position), target[0].transpose(0, 1), rtol=1e-5, atol=1e-5)


def test_rotation_of_bfloat16_is_computed_in_float32() -> None:
    rotary = Rotary(TargetSpec.from_config(config_with(ROPES["default"]))).to(torch.bfloat16)
    x = torch.randn(1, 1, 16, generator=torch.Generator().manual_seed(0)).bfloat16()
    exact = Rotary(TargetSpec.from_config(config_with(ROPES["default"])))
    position = torch.tensor([3])
    assert rotary(x, position).dtype == torch.bfloat16
    torch.testing.assert_close(exact(x, position), exact(x.float(), position).bfloat16())


def test_only_distances_matter_to_scores() -> None:
    """D5: shifting queries and keys together leaves their products."""
    rotary = Rotary(TargetSpec.from_config(config_with(ROPES["llama3"])))
    g = torch.Generator().manual_seed(1)
    q, k = (torch.randn(6, 1, 16, generator=g) for _ in range(2))
    at = torch.tensor([0, 2, 3, 9, 10, 40])

    def scores(shift: int) -> torch.Tensor:
        return rotary(q, at + shift)[:, 0] @ rotary(k, at + shift)[:, 0].t()

    torch.testing.assert_close(scores(0), scores(500), rtol=1e-3, atol=1e-3)
    assert not torch.allclose(rotary(q, at), rotary(q, at + 500), atol=1e-2)


@pytest.mark.parametrize("window", [1, 2, 512])
def test_window_conventions_convert(window: int) -> None:
    """Ours counts the visible keys with self; FlashAttention and SGLang count those before self."""
    left, right = windows.to_flash(window)
    assert left + 1 + right == window
    assert windows.from_flash(windows.to_flash(window)) == window
    assert windows.to_sglang(window) == window - 1
    assert windows.to_transformers(window) == window


def test_the_released_drafts_window_is_one_wider_than_its_number() -> None:
    assert windows.from_flash((512, -1)) == 513


def test_our_window_counts_self() -> None:
    """The kernel agrees with the convention: window 3 reaches keys 7, 8 and 9 from row 9."""
    q, k, v = (torch.randn(10, 1, 8, generator=torch.Generator().manual_seed(n)).requires_grad_() for n in range(3))
    packed_causal_attention(q, k, v, [0, 10], 3)[9].sum().backward()
    assert v.grad is not None
    assert v.grad.abs().sum((1, 2)).nonzero().flatten().tolist() == [7, 8, 9]


def test_rotation_is_no_weight() -> None:
    draft = tiny_draft(tiny_target("llama"))
    assert not [name for name in draft.state_dict() if "rotary" in name]
