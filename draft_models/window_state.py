"""The LongSpec draft's whole state: self-attention keys and values of the last tokens, one ring a request row.

A pure function of token ids and positions, so it is rebuilt from the last ids after a prefill, a prefix-cache hit or a
retraction, and carried in between. Legend: B requests, N tokens, R ring slots, H query heads, K key/value heads, D head size.
"""

import torch
from torch.nn.functional import scaled_dot_product_attention

from longdraft.draft_models.longspec import LongSpecDraft
from longdraft.kernels.transfer import to_device

EMPTY = -(1 << 40)


class WindowState:
    """Rings of ``window + ahead`` slots: drafts up to ``ahead`` positions ahead never overwrite what the window needs."""

    def __init__(self, draft: LongSpecDraft, rows: int, ahead: int) -> None:
        weight, t = draft.self_attn.k_proj.weight, draft.config.target
        self.draft = draft
        self.window = draft.config.settings.window
        self.ring = self.window + ahead
        shape = (rows, self.ring, t.num_kv_heads, t.head_dim)
        self.k = torch.zeros(shape, dtype=weight.dtype, device=weight.device)
        self.v = torch.zeros_like(self.k)
        self.position = torch.full((rows, self.ring), EMPTY, dtype=torch.int64, device=weight.device)

    @staticmethod
    def bytes_per_row(draft: LongSpecDraft, ahead: int) -> int:
        """Bytes of one ring."""
        t, item = draft.config.target, draft.self_attn.k_proj.weight.element_size()
        return (draft.config.settings.window + ahead) * (2 * t.num_kv_heads * t.head_dim * item + 8)

    def rebuild(self, row: int, ids: list[int], end: int) -> None:
        """Forget the row, then store the last tokens of ``ids``, which end before position ``end``."""
        self.position[row] = EMPTY
        ids = ids[-(self.window - 1) :] if self.window > 1 else []
        if ids:
            device = self.k.device
            position = torch.arange(end - len(ids), end, device=device)
            self.store(torch.full_like(position, row), to_device(ids, torch.int64, device), position)

    def store(self, row_N: torch.Tensor, id_N: torch.Tensor, position_N: torch.Tensor) -> None:
        """Project and keep tokens at their positions; a later token at the same position replaces the former."""
        self._put(row_N, position_N, *self.draft.self_kv(id_N, position_N))

    def _put(self, row_N: torch.Tensor, position_N: torch.Tensor, k_NKD: torch.Tensor, v_NKD: torch.Tensor) -> None:
        slot_N = position_N % self.ring
        self.k[row_N, slot_N] = k_NKD
        self.v[row_N, slot_N] = v_NKD
        self.position[row_N, slot_N] = position_N

    def attend(
        self,
        row_B: torch.Tensor,
        position_B: torch.Tensor,
        q_BHD: torch.Tensor,
        k_BKD: torch.Tensor,
        v_BKD: torch.Tensor,
    ) -> torch.Tensor:
        """Store one token a request and attend from it over its window, itself included; ``[B, H, D]``."""
        self._put(row_B, position_B, k_BKD, v_BKD)
        distance_BR = position_B[:, None] - self.position[row_B]
        visible_BR = (distance_BR >= 0) & (distance_BR < self.window)
        k, v = (x[row_B].transpose(1, 2) for x in (self.k, self.v))
        out = scaled_dot_product_attention(
            q_BHD[:, :, None], k, v, attn_mask=visible_BR[:, None, None], enable_gqa=True
        )
        return out[:, :, 0]
