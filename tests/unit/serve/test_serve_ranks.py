"""What ranks tell one another, over gloo: sums, parts, rank 0's word, and a rank that has come to differ ends all of them."""

import logging
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gloo_ranks import run_gloo

from longdraft.errors import UserError
from longdraft.serve.rank_checks import check_ranks
from longdraft.serve.ranks import ALONE, RanksDiffer, ServerRanks


def ranks_of(size: int, checks: bool, seconds: float) -> ServerRanks:
    return ServerRanks(dist.group.WORLD, range(size), checks, timedelta(seconds=seconds))


def collectives(rank: int, size: int) -> dict[str, Any]:
    ranks = ranks_of(size, True, 30)
    own = torch.arange(6.0).view(2, 3) + 10 * rank
    told = ranks.first(
        "things",
        torch.tensor([1 << 40, -7]),
        torch.tensor([[3], [4]], dtype=torch.int32),
        torch.tensor([True, False]),
        apart=[torch.tensor([100 + rank])],
    )
    return {
        "total": ranks.total(own.t().clone().t()),
        "last": ranks.joined(own),
        "first": ranks.joined(own, 0),
        "middle": ranks.joined(own[:, None].expand(2, 2, 3), 1),
        "told": told,
        "word": ranks.word({"costs": rank + 5}),
        "place": (ranks.rank, ranks.size),
    }


def test_sums_parts_and_rank_0s_word(tmp_path: Path) -> None:
    parts = [torch.arange(6.0).view(2, 3) + 10 * rank for rank in range(2)]
    for rank, got in enumerate(run_gloo(2, collectives, tmp_path)):
        assert torch.equal(got["total"], parts[0] + parts[1])
        assert torch.equal(got["last"], torch.cat(parts, 1)) and torch.equal(got["first"], torch.cat(parts, 0))
        assert torch.equal(got["middle"], torch.cat([p[:, None].expand(2, 2, 3) for p in parts], 1))
        numbers, pages, truths, apart = got["told"]
        assert numbers.tolist() == [1 << 40, -7] and pages.tolist() == [[3], [4]] and truths.tolist() == [True, False]
        assert (pages.dtype, truths.dtype) == (torch.int32, torch.bool)
        assert apart.tolist() == [100], "what need not be the same is rank 0's too"
        assert got["word"] == {"costs": 5} and got["place"] == (rank, 2)


def unlike(rank: int, size: int, checks: bool) -> list[int]:
    ranks = ranks_of(size, checks, 30)
    ranks.first("drafts", torch.tensor([4, 5]))
    return ranks.first("drafts", torch.tensor([4, 5 + rank]))[0].tolist()


def test_a_rank_that_would_say_something_else_is_not_asked(tmp_path: Path) -> None:
    assert run_gloo(2, unlike, tmp_path, False) == [[4, 5], [4, 5]]


def test_a_rank_that_would_say_something_else_ends_all_where_that_is_looked_at(tmp_path: Path) -> None:
    for said in run_gloo(2, unlike, tmp_path, True):
        assert said.startswith("RanksDiffer: rank 1 has other drafts than rank 0 at message 2")


def elsewhere(rank: int, size: int) -> None:
    """Rank 1 has one message less, so that it is alone at its end."""
    ranks = ranks_of(size, True, 3)
    for what in ("drafts", "tokens", "drafts")[: 3 - rank]:
        ranks.first(what, torch.tensor([1]))
    if rank:
        dist.barrier()  # what a rank that goes on does: something else


def test_a_rank_that_has_come_to_another_place_is_not_waited_for_for_ever(tmp_path: Path) -> None:
    assert run_gloo(2, elsewhere, tmp_path)[0].startswith("RanksDiffer: rank 0 is alone at message 3 (drafts)")


def failing(rank: int, size: int, who: list[int]) -> str:
    ranks = ranks_of(size, False, 3)
    try:
        if rank in who:
            raise RuntimeError("no memory")
    except RuntimeError:
        ranks.failed("the drafter failed, its %d requests go on", 2)
    return "goes on"


def test_a_failure_that_all_ranks_have_is_made_good(tmp_path: Path) -> None:
    assert run_gloo(2, failing, tmp_path, [0, 1]) == ["goes on", "goes on"]


@pytest.mark.parametrize("alone", [0, 1])
def test_a_failure_of_one_rank_ends_it_in_time(tmp_path: Path, alone: int) -> None:
    said = run_gloo(2, failing, tmp_path, [alone])
    assert said[alone].startswith(f"RanksDiffer: rank {alone} failed where others did not (the drafter failed")


def test_one_rank_says_nothing_and_waits_for_nobody(caplog: pytest.LogCaptureFixture) -> None:
    x = torch.tensor([1, 2])
    assert ALONE.total(x) is x and ALONE.joined(x) is x and ALONE.word(x) is x
    assert [y is x for y in ALONE.first("x", x, apart=[x])] == [True, True], "no copy, no kernel"
    with caplog.at_level(logging.ERROR):
        try:
            raise RuntimeError("planted")
        except RuntimeError:
            ALONE.failed("request %s failed", "a")
    assert "request a failed" in caplog.text and "planted" in caplog.text


def test_no_handler_of_failures_takes_ranks_that_differ() -> None:
    assert not issubclass(RanksDiffer, Exception)


def test_heads_that_do_not_divide_are_refused_with_numbers_that_do() -> None:
    for size, heads, kv_heads in ((2, 32, 8), (16, 64, 8), (3, 9, 3), (1, 9, 3)):
        check_ranks(size, heads, kv_heads, "target")
    with pytest.raises(
        UserError, match=r"--tp-size 2 .* 9 query heads and 3 key/value heads a layer: use one of 1, 3, 9$"
    ):
        check_ranks(2, 9, 3, "target")
    with pytest.raises(UserError, match=r"--tp-size 6 does not fit the draft, .* use one of 1, 2, 4, 8$"):
        check_ranks(6, 8, 4, "draft")
