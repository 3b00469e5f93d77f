"""A verification's inputs and the ring of remembered tokens against plain loops; the best place against sorting."""

import math

import pytest
import torch
from view_kernel_case import any_chains, any_ring

from longdraft.kernels.chain_inputs import chain_inputs, remember
from longdraft.kernels.row_ops import best_place


@pytest.mark.parametrize("seed", range(40))
def test_chains_are_padded_with_their_last_token_which_writes_to_slot_0(seed: int) -> None:
    newest_B, draft_BK, limit_B, length_B, row_B, table_RC = given = any_chains(seed)
    made = chain_inputs(*given)
    for b in range(len(newest_B)):
        tokens, limit, length = [int(newest_B[b]), *draft_BK[b].tolist()], int(limit_B[b]), int(length_B[b])
        places = [min(t, limit) for t in range(len(tokens))]
        assert made.id_BT[b].tolist() == [tokens[p] for p in places]
        assert made.position_BT[b].tolist() == [length + p for p in places]
        slots = table_RC[row_B[b]].tolist()
        assert made.slot_BT[b].tolist() == [slots[length + t] if t <= limit else 0 for t in range(len(tokens))]


@pytest.mark.parametrize("seed", range(40))
def test_a_ring_holds_the_latest_tokens_and_no_other_rows_change(seed: int) -> None:
    ring_RI, row_B, position_B, id_BN = any_ring(seed)
    wanted = ring_RI.tolist()
    for row, position, ids in zip(row_B.tolist(), position_B.tolist(), id_BN.tolist(), strict=True):
        for n, token in enumerate(ids):
            wanted[row][(position + n) % ring_RI.shape[1]] = token
    remember(ring_RI, row_B, position_B, id_BN)
    assert ring_RI.tolist() == wanted


def test_the_best_place_is_the_first_of_the_largest_and_never_a_nan() -> None:
    nan, inf = math.nan, math.inf
    rows = [[1.0, 3.0, 3.0], [nan, 2.0, nan], [nan, nan, nan], [-inf, -inf, nan], [0.0, inf, inf]]
    assert best_place(torch.tensor(rows)).tolist() == [1, 1, 0, 0, 1]
