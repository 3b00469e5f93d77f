"""The EAGLE-3 draft's state in decoding: keys and values of its layer for every committed token, some rows a request.

Row t holds the target's feature of token t and the embedding of token t + 1 and stands at place and position t. So a request of
L committed tokens has rows 0 .. L - 2, and one feature that waits for the newest token. Rows of drafted tokens are overwritten
by those with the target's features when the tokens are committed; none of the former is ever seen again, since every chain writes
each place before it looks there.

Legend: B requests, M tokens, S slots, A features, E hidden size, H query heads, K key/value heads, D head size, V vocabulary.
"""

import torch
from torch.nn.functional import scaled_dot_product_attention

from longdraft.draft_models.chain import Choose, argmax_choice
from longdraft.draft_models.eagle3 import Eagle3Draft
from longdraft.draft_models.eagle3_chain import propose_eagle3_chain
from longdraft.draft_models.window_state import EMPTY


class FeatureState:
    """Slots a request: as many as tokens, or sinks and a ring of ``window + ahead`` where the draft has a window."""

    def __init__(self, draft: Eagle3Draft, rows: int, tokens: int, ahead: int) -> None:
        """Allocate.

        Args:
            draft: bound to its target.
            rows: requests.
            tokens: most tokens of a request, drafted ones included.
            ahead: most drafted tokens a proposal.
        """
        c, weight = draft.config, draft.fc.weight
        self.draft, self.window, self.sinks = draft, c.settings.window, c.settings.sinks
        ring = tokens if self.window is None else self.window + ahead
        self.ring = max(1, min(ring, tokens - self.sinks))
        shape = (rows, self.sinks + self.ring)
        self.k = torch.zeros(*shape, c.num_kv_heads, c.head_dim, dtype=weight.dtype, device=weight.device)
        self.v = torch.zeros_like(self.k)
        self.place = torch.full(shape, EMPTY, dtype=torch.int64, device=weight.device)
        self.length = torch.zeros(rows, dtype=torch.int64, device=weight.device)
        self.feature = torch.zeros(rows, c.target.hidden_size, dtype=weight.dtype, device=weight.device)

    def forget(self, row: int) -> None:
        """Empty a request's row."""
        self.place[row], self.length[row] = EMPTY, 0

    @torch.no_grad()
    def extend(self, row: int, id_M: torch.Tensor, aux_MA: torch.Tensor) -> None:
        """Commit tokens of one request, in order behind those it has; at least one.

        Args:
            row: the request's.
            id_M: the tokens.
            aux_MA: the target's features of them.
        """
        feature_ME, length = self.draft.fuse(aux_MA), int(self.length[row])
        waiting_ME = torch.cat([self.feature[row : row + 1], feature_ME[:-1]])
        place_M = torch.arange(length - 1, length - 1 + len(id_M), device=id_M.device)
        # The very first token has no feature before it. Of many rows those that a ring would lose at once are left out.
        kept = (place_M >= 0) & ((place_M < self.sinks) | (place_M >= length - 1 + len(id_M) - self.ring))
        row_M, place_M = torch.full_like(place_M[kept], row), place_M[kept]
        x = self.draft.attention_input(id_M[kept], waiting_ME[kept])
        self._put(row_M, place_M, *self.draft.key_value(x, place_M))
        self.feature[row] = feature_ME[-1]
        self.length[row] = length + len(id_M)

    def _put(self, row_N: torch.Tensor, place_N: torch.Tensor, k_NKD: torch.Tensor, v_NKD: torch.Tensor) -> None:
        slot_N = torch.where(place_N < self.sinks, place_N, self.sinks + (place_N - self.sinks) % self.ring)
        self.k[row_N, slot_N], self.v[row_N, slot_N], self.place[row_N, slot_N] = k_NKD, v_NKD, place_N

    def attend(
        self, row_B: torch.Tensor, place_B: torch.Tensor, q_BHD: torch.Tensor, k_BKD: torch.Tensor, v_BKD: torch.Tensor
    ) -> torch.Tensor:
        """Store one row a request and attend from it over what it sees, itself included; ``[B, H, D]``."""
        self._put(row_B, place_B, k_BKD, v_BKD)
        used = min(int(place_B.max()) + 1, self.k.shape[1])
        place_BS = self.place[row_B, :used]
        distance_BS = place_B[:, None] - place_BS
        visible_BS = (distance_BS >= 0) & (place_BS >= 0)
        if self.window is not None:
            visible_BS &= (distance_BS < self.window) | (place_BS < self.sinks)
        k, v = (x[row_B, :used].transpose(1, 2) for x in (self.k, self.v))
        mask = visible_BS[:, None, None]
        return scaled_dot_product_attention(q_BHD[:, :, None], k, v, attn_mask=mask, enable_gqa=True)[:, :, 0]


def propose_from_features(
    state: FeatureState, row_B: torch.Tensor, root_B: torch.Tensor, steps: int, choose: Choose = argmax_choice
) -> torch.Tensor:
    """Draft ``steps`` tokens for each request, ``[B, steps]`` int64 ids of the target.

    Args:
        state: rows that hold every token before the root.
        row_B: each request's row in it.
        root_B: the newest token of each request, which the target has not run over.
        steps: at least 1.
        choose: the draft's pick from its ``[B, V]`` logits, given the position of the token that it read and the step.
    """
    length_B = state.length[row_B]

    def attend(step: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return state.attend(row_B, length_B - 1 + step, q, k, v)

    return propose_eagle3_chain(state.draft, state.feature[row_B], root_B, length_B, steps, attend, choose)
