"""The newest row of the target's cache, read as it is: what a cross-attention draft knows of the target's last thought.

Attention blurs it: a draft's row does not know how far the newest key lies behind its own, and softmax spreads over the keys before
that one. SmolLM2-135M's drafts read it with half of their mass at best, and named 46 % of the next tokens on held-out answers where an EAGLE-3 draft, which is handed the
target's features of that one token, named 73 %. Here the draft is handed that token's cached keys, rotated back, and values, through
a projection, and a learned offset for each lag says how old they are: 49 %, trained a fifth shorter, and 51 % with a second layer
read. Nothing more is cached than before: a server reads one slot a request.

Legend: T tokens, K key/value heads of all layers read, D head size, F = 2 K D features, E hidden size, B requests.
"""

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import nn

from longdraft.draft_models.config import LongSpecConfig
from longdraft.draft_models.rope import Rotary
from longdraft.kernels.transfer import to_device


def newest_features(config: LongSpecConfig) -> int:
    """F of a draft that reads the newest row, 0 of another."""
    t = config.target
    return 2 * len(config.cross_layers) * t.num_kv_heads * t.head_dim if config.settings.newest_lags else 0


class NewestRow(nn.Module):
    """Projection of a cached token's keys and values, and an offset a lag; lags beyond the last share its offset."""

    def __init__(self, config: LongSpecConfig) -> None:
        super().__init__()
        t = config.target
        features = newest_features(config)
        self.norm = nn.RMSNorm(features, eps=t.rms_norm_eps)
        self.proj = nn.Linear(features, t.hidden_size, bias=False)
        self.lag_offset = nn.Embedding(config.settings.newest_lags, t.hidden_size)
        nn.init.zeros_(self.lag_offset.weight)

    def features(
        self, k_TKD: torch.Tensor, v_TKD: torch.Tensor, position_T: torch.Tensor, rotary: Rotary
    ) -> torch.Tensor:
        """Normed features ``[T, F]`` of cached rows at their positions."""
        dtype = self.proj.weight.dtype
        plain_TKD = rotary(k_TKD.to(dtype), -position_T)
        return self.norm(torch.cat([plain_TKD.flatten(1), v_TKD.to(dtype).flatten(1)], 1))

    def forward(self, newest_TF: torch.Tensor, lag: int) -> torch.Tensor:
        """``[T, E]`` for rows that stand so many tokens behind the newest cached one."""
        return self.proj(newest_TF) + self.offset(lag)

    def offset(self, lag: int) -> torch.Tensor:
        """``[E]``."""
        return self.lag_offset.weight[min(lag, self.lag_offset.num_embeddings) - 1]


def lagged_rows(x_TF: torch.Tensor, cu: Sequence[int], lag: int) -> torch.Tensor:
    """Row t - lag of the same document in place of row t; zeros where there is none.

    Args:
        x_TF: packed rows.
        cu: document offsets from 0 to T.
        lag: 1 or more.
    """
    first = [row for a, b in pairwise(cu) for row in range(a, min(a + lag, b))]
    shifted_TF = torch.cat([x_TF.new_zeros(min(lag, len(x_TF)), x_TF.shape[1]), x_TF[: max(len(x_TF) - lag, 0)]])
    return shifted_TF.index_fill(0, to_device(first, torch.int64, x_TF.device), 0)
