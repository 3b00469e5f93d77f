"""A draft that ranks share computes what it computes whole: every part of it, on every rank.

Legend: T rows, H query heads, K key/value heads, D head size, E hidden size, N rows of a head.
"""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from thread_ranks import ThreadRanks, run_ranks
from tiny import tiny_draft, tiny_eagle3, tiny_target

from longdraft.draft_models.eagle3 import Eagle3Draft
from longdraft.draft_models.fused_step import FusedStep
from longdraft.draft_models.longspec import LongSpecDraft
from longdraft.draft_models.shares import COLLECTIVE_BYTES, Share, cross_heads, own_rows, split
from longdraft.draft_models.window_state import WindowState
from longdraft.errors import UserError

TARGET = tiny_target("llama", num_hidden_layers=5, num_attention_heads=8, num_key_value_heads=4, intermediate_size=96)
ROWS, SEEN, SIZE = 7, 11, 16
DRAW = torch.Generator().manual_seed(3)
ID, POSITION = torch.randint(0, 288, (ROWS,), generator=DRAW), torch.arange(20, 20 + ROWS)
NEVER = 1 << 60


def attention(q_THD: torch.Tensor, k_SKD: torch.Tensor, v_SKD: torch.Tensor) -> torch.Tensor:
    """Over everything there is."""
    groups = q_THD.shape[1] // k_SKD.shape[1]
    k_SHD, v_SHD = (x.repeat_interleave(groups, 1) for x in (k_SKD, v_SKD))
    weight_HTS = torch.einsum("thd,shd->hts", q_THD, k_SHD).softmax(-1)
    return torch.einsum("hts,shd->thd", weight_HTS, v_SHD)


def hidden(
    draft: LongSpecDraft, k_SKD: torch.Tensor, v_SKD: torch.Tensor, newest_TF: torch.Tensor | None, fused: bool
) -> torch.Tensor:
    layers = len(draft.config.cross_layers)

    def cross(q_THD: torch.Tensor) -> torch.Tensor:
        parts = zip(*(x.chunk(layers, 1) for x in (q_THD, k_SKD, v_SKD)), strict=True)
        return torch.cat([attention(*part) for part in parts], 1)

    forward: Any = FusedStep(draft) if fused else draft
    return torch.as_tensor(forward(ID, POSITION, attention, cross, newest_TF, 2))


def own_keys(ranks: ThreadRanks, layers: int, x_SKD: torch.Tensor) -> torch.Tensor:
    """What lies on a rank of the keys or values of several layers, whose heads stand side by side."""
    own = ranks.share().heads(8, 4)[1]
    return torch.cat([part[:, own.start : own.stop] for part in x_SKD.chunk(layers, 1)], 1)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("size", [2, 4, 8], ids=["two", "a-head-each", "two-a-head"])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"qkv_bias": True, "cross_layers": [1, 4], "newest_lags": 3, "final_norm": True, "cross_q_norm": True},
        {"cross_group": 4},
    ],
    ids=["plain", "everything", "more-query-heads"],
)
def test_a_longspec_draft_shared_is_the_draft(settings: dict[str, Any], size: int, fused: bool) -> None:
    whole = tiny_draft(TARGET, **settings)
    layers = len(whole.config.cross_layers)
    k, v = torch.randn(2, SEEN, 4 * layers, SIZE, generator=DRAW)
    newest = whole.read_newest(*torch.randn(2, ROWS, 4 * layers, SIZE, generator=DRAW), POSITION - 1)
    with torch.no_grad():
        want = hidden(copy.deepcopy(whole), k, v, newest, fused)

    def on_rank(ranks: ThreadRanks, least: int) -> tuple[torch.Tensor, list[str], WindowState]:
        draft = copy.deepcopy(whole)
        done = split(draft, ranks.share(least))
        got = hidden(draft, own_keys(ranks, layers, k), own_keys(ranks, layers, v), newest, fused)
        return got, done, WindowState(draft, 1, 4)

    for got, done, state in run_ranks(size, lambda ranks: on_rank(ranks, 0)):
        assert done == ["cross-attention", "self-attention", "MLP"]
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
        assert state.k.shape[2] == max(1, 4 // size), "a ring holds this rank's heads"
    for got, done, state in run_ranks(size, lambda ranks: on_rank(ranks, NEVER)):
        assert done == ["cross-attention"], "keys and values lie by heads, whatever it costs"
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
        assert state.k.shape[2] == 4


@pytest.mark.parametrize("size", [2, 3])
def test_an_eagle3_draft_shared_is_the_draft(size: int) -> None:
    """Its head has 100 rows, of which three ranks have 34, 34 and 32."""
    whole = tiny_eagle3(TARGET, draft_vocab_size=100)
    hidden_TE = torch.randn(ROWS, 64, generator=DRAW)

    def step(draft: Eagle3Draft) -> tuple[torch.Tensor, torch.Tensor]:
        normed_TE, next_TE = draft(ID, hidden_TE, POSITION, attention)
        return draft.logits(normed_TE), next_TE

    def on_rank(ranks: ThreadRanks) -> tuple[tuple[torch.Tensor, torch.Tensor], list[str], int]:
        draft = copy.deepcopy(whole)
        done = split(draft, ranks.share())
        return step(draft), done, len(draft.lm_head.weight)

    with torch.no_grad():
        want = step(whole)
    for got, done, rows in run_ranks(size, on_rank):
        assert done == ["head", "MLP"] and rows == -(-100 // size)
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_an_mlp_that_does_not_divide_stays_whole() -> None:
    draft = tiny_eagle3(TARGET, draft_vocab_size=100)
    assert "MLP" not in run_ranks(5, lambda ranks: split(copy.deepcopy(draft), ranks.share()))[0]


def share(rank: int, size: int, least: int = COLLECTIVE_BYTES) -> Share:
    alone: Callable[[torch.Tensor], torch.Tensor] = lambda x: x  # noqa: E731
    return Share(rank, size, alone, alone, least)


def test_heads_are_divided_as_sglang_divides_them() -> None:
    assert [share(r, 2).heads(32, 8) for r in range(2)] == [
        (range(16), range(4)),
        (range(16, 32), range(4, 8)),
    ]
    assert [share(r, 4).heads(8, 2)[1] for r in range(4)] == [range(1), range(1), range(1, 2), range(1, 2)]
    assert cross_heads(share(1, 2), 2, 4, 2) == [4, 5, 6, 7, 12, 13, 14, 15]
    for heads, size in (((9, 3), 2), ((8, 4), 3), ((12, 6), 4)):
        with pytest.raises(UserError, match=rf"{heads[0]} query heads and {heads[1]} key/value heads .* {size} ranks"):
            share(0, size).heads(*heads)


def test_bytes_decide_what_pays() -> None:
    """Of an 8B target's draft between two cards the MLP and the whole head, of a 70B target's its self-attention too."""

    def sizes(hidden: int, inner: int, heads: int) -> dict[str, int]:
        kv = 8 * hidden // heads
        return {"self": 4 * hidden * (hidden + kv), "mlp": 6 * hidden * inner, "head": 2 * 128256 * hidden}

    small, large = sizes(4096, 14336, 32), sizes(8192, 28672, 64)
    assert {name: share(0, 2).pays(n) for name, n in small.items()} == {"self": False, "mlp": True, "head": True}
    assert all(share(0, 2).pays(n) for n in large.values())
    assert not share(0, 1).pays(1 << 40), "one rank has nobody to share with"


def test_the_last_ranks_rows_are_filled_up() -> None:
    row_NE = torch.arange(10.0).view(5, 2)
    parts = [own_rows(row_NE, share(r, 4)) for r in range(4)]
    assert [p.tolist() for p in parts[:2]] == [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]
    assert parts[2].tolist() == [[8, 9], [0, 0]] and not parts[3].any()
