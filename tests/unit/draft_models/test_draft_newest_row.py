"""The newest cached row that a LongSpec draft reads directly."""

import pytest
import torch
from tiny import tiny_draft, tiny_target

from longdraft.draft_models.initialise import fit_newest_row
from longdraft.draft_models.newest_row import lagged_rows
from longdraft.train.target import FrozenTarget

TARGET = tiny_target("llama", num_hidden_layers=3)


@pytest.mark.parametrize("lag", [1, 3, 9])
def test_rows_are_those_of_the_same_document_a_lag_before(lag: int) -> None:
    x, cu = torch.randn(20, 5), [0, 2, 2, 11, 20]
    got = lagged_rows(x, cu, lag)
    for a, b in ((0, 2), (2, 11), (11, 20)):
        want = torch.cat([torch.zeros(lag, 5), x[a:b]])[: b - a]
        assert torch.equal(got[a:b], want)
    assert lagged_rows(x[:0], [0], lag).shape == (0, 5)


def test_the_gradient_reaches_the_row_that_was_read() -> None:
    x = torch.randn(6, 2, requires_grad=True)
    lagged_rows(x, [0, 3, 6], 1)[4].sum().backward()
    assert x.grad is not None and x.grad.sum(1).tolist() == [0, 0, 0, 2, 0, 0]


def test_features_do_not_depend_on_where_the_token_stood() -> None:
    """Keys are rotated back: the same token alone at another position has the same features."""
    draft = tiny_draft(TARGET, newest_lags=2)
    ids = torch.tensor([7])
    rows = []
    for at in (0, 5, 900):
        position = torch.tensor([at])
        seen = TARGET.capture(ids, position, [0, 1])
        rows.append(draft.read_newest(seen.k_TKD, seen.v_TKD, position))
    for other in rows[1:]:
        torch.testing.assert_close(other, rows[0], rtol=1e-3, atol=1e-3)


@torch.no_grad()
def test_each_lag_has_its_offset_and_larger_ones_share_the_last() -> None:
    draft = tiny_draft(TARGET, newest_lags=2)
    x = torch.randn(3, draft.newest.proj.in_features)  # type: ignore[union-attr]
    one, two, three = (draft.newest(x, lag) for lag in (1, 2, 3))  # type: ignore[misc]
    assert not torch.allclose(one, two) and torch.equal(two, three)


def fitted(target: FrozenTarget) -> tuple[torch.Tensor, torch.Tensor]:
    """What a fit leaves of rows that a second draft made, which differs in the projection alone, and what there was before."""
    draft, maker = (tiny_draft(target, newest_lags=2) for _ in range(2))
    with torch.no_grad():
        for own in (draft, maker):
            own.mlp.down_proj.weight.zero_()  # the rows are then linear in the projection
            own.cross_attn.o_proj.weight.zero_()
            own.newest.lag_offset.weight.zero_()  # type: ignore[union-attr]
        maker.newest.proj.weight.normal_(std=0.3)  # type: ignore[union-attr]
    ids, position = torch.randint(0, 288, (900,)), torch.arange(900)
    seen = target.capture(ids, position, [0, 900])
    inputs = (ids, position, seen.k_TKD, seen.v_TKD, [0, 900], 1)
    with torch.no_grad():
        rows = maker.forward_packed(*inputs)
        before = (rows - draft.forward_packed(*inputs))[100:]
        rows[:100] = 1e6  # not among the rows of the fit
        fit_newest_row(draft, [(lambda: draft.forward_packed(*inputs), rows, torch.arange(100, 900))])
        return (rows - draft.forward_packed(*inputs))[100:], before


def test_a_fit_finds_the_projection_that_made_the_rows() -> None:
    after, before = fitted(TARGET)
    assert after.norm() < 0.1 * before.norm()
