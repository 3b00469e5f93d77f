"""Constant queries that find the newest key that a row sees."""

import pytest
import torch
from tiny import tiny_draft, tiny_target

from longdraft.draft_models import newest_key
from longdraft.draft_models.newest_key import Keys, newest_key_queries, newest_log_share, start_at_newest_key
from longdraft.draft_models.rope import Rotary


@pytest.fixture
def rotary() -> Rotary:
    return tiny_draft(tiny_target("llama")).rotary


def documents(rotary: Rotary, lengths: tuple[int, ...]) -> list[Keys]:
    """Keys of a common part and noise, as a target's are; every document's first tokens far before the rest."""
    draw = torch.Generator().manual_seed(3)
    size = 2 * len(rotary.inverse)
    common = torch.randn(2, size, generator=draw)
    found = []
    for length in lengths:
        position = torch.arange(length) + torch.where(torch.arange(length) < 4, 0, 700)
        k = common + 0.3 * torch.randn(length, 2, size, generator=draw)
        found.append(Keys(rotary(k, position), position))
    return found


def test_the_share_is_that_of_the_newest_key_among_those_a_row_sees(rotary: Rotary) -> None:
    k, position = documents(rotary, (19,))[0]
    query = torch.randn(2, k.shape[-1])
    for lag in (1, 3):
        row = torch.tensor([lag, 7, 18])
        got = newest_log_share(query, k, position, row, rotary, lag)
        for i, r in enumerate(row.tolist()):
            for head in range(2):
                q = rotary(query[head][None, None], position[r : r + 1])[0, 0]
                score = k[: r - lag + 1, head] @ q / k.shape[-1] ** 0.5
                torch.testing.assert_close(got[i, head], score.log_softmax(0)[-1])


def test_the_fit_puts_most_attention_on_the_newest_key_of_documents_it_has_not_seen(rotary: Rotary) -> None:
    known, other = documents(rotary, (90, 57, 61, 80))[:3], documents(rotary, (64, 71))[-1]
    query = newest_key_queries(known, rotary, (1, 4), seed=0)
    row = torch.arange(20, len(other.position_T))
    for lag in (1, 4):
        share = newest_log_share(query, other.k_TKD, other.position_T, row, rotary, lag).exp().mean(0)
        even = newest_log_share(torch.zeros_like(query), other.k_TKD, other.position_T, row, rotary, lag).exp().mean(0)
        assert (share > 4 * even).all()  # heads of 16 numbers tell few distances apart


def test_the_same_seed_gives_the_same_queries(rotary: Rotary, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(newest_key, "STEPS", 5)
    known = documents(rotary, (40, 30))
    one, two, other = (newest_key_queries(known, rotary, (1, 2), seed) for seed in (1, 1, 2))
    assert torch.equal(one, two)
    assert not torch.equal(one, other)


def test_the_first_heads_of_every_key_head_begin_there_and_the_others_stay() -> None:
    draft = tiny_draft(tiny_target("llama"), qkv_bias=True)
    target = draft.config.target
    groups, size = target.num_heads // target.num_kv_heads, target.head_dim
    assert groups > 1
    before = draft.cross_attn.q_proj.weight.detach().clone().view(target.num_kv_heads, groups, size, -1)
    bias = draft.cross_attn.q_proj.bias.detach().clone().view(target.num_kv_heads, groups, size)
    query = torch.randn(target.num_kv_heads, size)
    start_at_newest_key(draft, query, 1)
    q = draft.cross_attn.query(torch.randn(3, target.hidden_size)).view(3, target.num_kv_heads, groups, size)
    torch.testing.assert_close(q[:, :, 0], query.expand(3, -1, -1))
    after = draft.cross_attn.q_proj.weight.view(target.num_kv_heads, groups, size, -1)
    assert torch.equal(after[:, 1:], before[:, 1:])
    assert torch.equal(draft.cross_attn.q_proj.bias.view_as(bias)[:, 1:], bias[:, 1:])
