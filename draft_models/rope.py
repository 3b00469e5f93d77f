"""The target's rotary embedding, computed from its parameters for any positions.

Legend: T tokens, H heads, D head size.
"""

from types import SimpleNamespace

import torch

from longdraft.draft_models.target import TargetSpec
from longdraft.kernels.rotate import rotate


def rotary_frequencies(target: TargetSpec) -> tuple[torch.Tensor, float]:
    """``(inverse frequencies [D / 2] float32, factor of cosine and sine)`` of the target's rotary parameters."""
    size, base = target.head_dim, float(target.rope["rope_theta"])
    kind = target.rope["rope_type"]
    if kind == "default":
        return 1.0 / base ** (torch.arange(0, size, 2, dtype=torch.float32) / size), 1.0
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = SimpleNamespace(
        rope_parameters=dict(target.rope),
        head_dim=size,
        hidden_size=target.hidden_size,
        num_attention_heads=target.num_heads,
        max_position_embeddings=target.max_position,
        standardize_rope_params=lambda: None,
    )
    return ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))


class Rotary(torch.nn.Module):
    """Rotates queries or keys at their positions, in float32, as the target does (rotate-half layout)."""

    inverse: torch.Tensor

    def __init__(self, target: TargetSpec) -> None:
        super().__init__()
        with torch.device(
            "cpu"
        ):  # also where the module is built on the meta device: scaled kinds read what they compute
            inverse, self.factor = rotary_frequencies(target)
        self.register_buffer("inverse", inverse, persistent=False)

    def angles(self, position: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosine and sine, float32 ``[..., D / 2]``, of integer positions of any shape, times the rotation's factor."""
        angle = position.to(torch.float32)[..., None] * self.inverse.to(torch.float32)
        cos, sin = angle.cos(), angle.sin()
        return (cos, sin) if self.factor == 1.0 else (cos * self.factor, sin * self.factor)

    def forward(self, x_THD: torch.Tensor, position_T: torch.Tensor) -> torch.Tensor:
        """``x`` rotated, same shape and dtype (float64 stays that throughout); ``position_T`` are integers."""
        return rotate(x_THD, *self.angles(position_T))
