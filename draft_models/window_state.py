"""The LongSpec draft's whole state: self-attention keys and values of the last tokens, one ring a request row.

A pure function of token ids and positions, so it is rebuilt from the last ids after a prefill, a prefix-cache hit or a
retraction, and carried in between. On a CPU a window is read through a mask over its ring; on a card in place, through a page list
of its slots, the rings being one cache of ``rows * ring`` slots.

Legend: B requests, N tokens, S steps of a chain, W window, R ring slots, H query heads, K key/value heads, D head size.
"""

import torch
from torch.nn.functional import scaled_dot_product_attention

from longdraft.draft_models.longspec import LongSpecDraft
from longdraft.kernels.plan import AttentionPlan
from longdraft.kernels.prefix_attention import prefix_output
from longdraft.kernels.ring_windows import ring_windows
from longdraft.kernels.transfer import to_device

EMPTY = -(1 << 40)


class WindowState:
    """Rings of ``window + ahead`` slots: drafts up to ``ahead`` positions ahead never overwrite what the window needs."""

    def __init__(self, draft: LongSpecDraft, rows: int, ahead: int) -> None:
        weight, t = draft.self_attn.k_proj.weight, draft.config.target
        self.draft = draft
        self.window = draft.config.settings.window
        self.ring = self.window + ahead
        shape = (rows, self.ring, draft.self_attn.kv_heads, t.head_dim)
        self.k = torch.zeros(shape, dtype=weight.dtype, device=weight.device)
        self.v = torch.zeros_like(self.k)
        self.position = torch.full((rows, self.ring), EMPTY, dtype=torch.int64, device=weight.device)
        # A row holds a run of positions: from here on up to the newest token.
        self.first = torch.zeros(rows, dtype=torch.int64, device=weight.device)

    @staticmethod
    def bytes_per_row(draft: LongSpecDraft, ahead: int) -> int:
        """Bytes of one ring."""
        t, item = draft.config.target, draft.self_attn.k_proj.weight.element_size()
        return (draft.config.settings.window + ahead) * (2 * t.num_kv_heads * t.head_dim * item + 8) + 8

    def rebuild(self, row: int, ids: list[int], end: int) -> None:
        """Forget the row, then store the last tokens of ``ids``, which end before position ``end``."""
        self.position[row] = EMPTY
        ids = ids[-(self.window - 1) :] if self.window > 1 else []
        self.first[row] = end - len(ids)
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

    @property
    def slots(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of all rings as one cache ``[rows * R, K, D]``, in place."""
        return self.k.flatten(0, 1), self.v.flatten(0, 1)

    def held(self, row_B: torch.Tensor, position_B: torch.Tensor, most: int) -> torch.Tensor:
        """How many of the last ``most`` tokens before a position each row holds, int32.

        Right wherever tokens were stored one behind the other since the row was rebuilt, as texts grow: of a text's start, and
        of a row rebuilt from fewer tokens than its window, a row holds less than ``most``.
        """
        return (position_B - self.first[row_B]).clamp(0, most).int()

    def windows(
        self, row_B: torch.Tensor, position_B: torch.Tensor, steps: int
    ) -> tuple[torch.Tensor, list[AttentionPlan]]:
        """Positions ``[S, B]`` of the next ``steps`` tokens of each request, and their windows as page lists over :attr:`slots`.

        A window holds its own token, whose slot is the first of its list.
        """
        at_SB, pages_SBW, lens_SB = ring_windows(row_B, position_B, self.first, steps, self.window, self.ring)
        batch = len(row_B)
        cu, cu_B1 = list(range(batch + 1)), torch.arange(batch + 1, dtype=torch.int32, device=at_SB.device)
        lists = zip(pages_SBW, lens_SB, strict=True)
        return at_SB, [AttentionPlan.on_device(pages_BW, lens_B, cu_B1, cu) for pages_BW, lens_B in lists]

    def mark(self, row_B: torch.Tensor, at_SB: torch.Tensor) -> None:
        """Tokens at these positions are being stored in :attr:`slots`."""
        self.position[row_B, at_SB % self.ring] = at_SB

    def attend(
        self,
        row_B: torch.Tensor,
        position_B: torch.Tensor,
        q_BHD: torch.Tensor,
        k_BKD: torch.Tensor,
        v_BKD: torch.Tensor,
        window: AttentionPlan | None = None,
        backend: str | None = None,
    ) -> torch.Tensor:
        """Store one token a request and attend from it over its window, itself included; ``[B, H, D]``.

        Args:
            row_B: ring row of each request.
            position_B: where the tokens stand, int64.
            q_BHD, k_BKD, v_BKD: queries, keys and values, rotated.
            window: of :meth:`windows` for these positions; None reads the rings through a mask, the twin.
            backend: of the attention over a page list, as :func:`longdraft.kernels.prefix_attention.prefix_attention` takes it.
        """
        self._put(row_B, position_B, k_BKD, v_BKD)
        if window is not None:
            return prefix_output(q_BHD, *self.slots, window, q_BHD.shape[-1] ** -0.5, backend)
        distance_BR = position_B[:, None] - self.position[row_B]
        visible_BR = (distance_BR >= 0) & (distance_BR < self.window)
        k, v = (x[row_B].transpose(1, 2) for x in (self.k, self.v))
        out = scaled_dot_product_attention(
            q_BHD[:, :, None], k, v, attn_mask=visible_BR[:, None, None], enable_gqa=True
        )
        return out[:, :, 0]
