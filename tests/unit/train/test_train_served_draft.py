"""What is trained is what is served: invariants D1, D2, D7 and D8."""

import itertools

import pytest
import torch
from tiny import tiny_draft, tiny_target

from longdraft.draft_models.chain import propose_chain
from longdraft.draft_models.longspec import LongSpecDraft
from longdraft.draft_models.window_state import WindowState
from longdraft.kernels.dense_attention import dense_attention
from longdraft.train.target import Capture, FrozenTarget

LENGTH, WINDOW, LAGS = 40, 8, (1, 2, 3, 4)


def case(family: str, **settings: object) -> tuple[FrozenTarget, LongSpecDraft, torch.Tensor, Capture]:
    target = tiny_target(family)
    draft = tiny_draft(target, window=WINDOW, **settings)
    ids = torch.randint(0, 256, (LENGTH,), generator=torch.Generator().manual_seed(1))
    return target, draft, ids, target.capture(ids, torch.arange(LENGTH), [0, LENGTH])


@torch.no_grad()
def trained(
    draft: LongSpecDraft, ids: torch.Tensor, seen: Capture, lag: int, cu: list[int] | None = None
) -> torch.Tensor:
    cu = cu or [0, len(ids)]
    position = torch.cat([torch.arange(b - a) for a, b in itertools.pairwise(cu)])
    return draft.forward_packed(ids, position, seen.k_TKD, seen.v_TKD, cu, lag)


def chain_logits(draft: LongSpecDraft, ids: torch.Tensor, seen: Capture, root: int) -> list[torch.Tensor]:
    """The served chain's logits from a root, while its choices are made to follow the text."""
    state, heard = WindowState(draft, 1, max(LAGS)), list[torch.Tensor]()
    state.rebuild(0, ids[:root].tolist(), root)

    def follow_the_text(logits: torch.Tensor, position: torch.Tensor, step: int) -> torch.Tensor:
        heard.append(logits[0])
        return ids[root + step + 1][None]

    def cross_attend(q: torch.Tensor) -> torch.Tensor:
        return dense_attention(q, seen.k_TKD[:root], seen.v_TKD[:root], q.shape[-1] ** -0.5)[0]

    row, at = torch.tensor([0]), torch.tensor([root])
    newest = draft.read_newest(seen.k_TKD[root - 1 : root], seen.v_TKD[root - 1 : root], at - 1)
    root_1, steps = ids[root : root + 1], max(LAGS)
    propose_chain(state, row, root_1, at, steps, cross_attend, follow_the_text, newest_BF=newest)
    return heard


@pytest.mark.parametrize("lag", LAGS)
@pytest.mark.parametrize("newest_lags", [0, 3])
def test_a_row_sees_no_target_key_younger_than_its_lag(lag: int, newest_lags: int) -> None:
    """Noisy causality: keys and values at rows above t - lag change nothing, the one at t - lag does (D1)."""
    _, draft, ids, seen = case("llama", newest_lags=newest_lags)
    t = 20
    before = trained(draft, ids, seen, lag)[t]
    for first_changed, same in ((t - lag + 1, True), (t - lag, False)):
        k, v = seen.k_TKD.clone(), seen.v_TKD.clone()
        k[first_changed:] += 3.0
        v[first_changed:] -= 3.0
        after = trained(draft, ids, Capture({"k": k, "v": v}), lag)[t]
        assert torch.equal(before, after) is same


@pytest.mark.parametrize("lag", LAGS)
def test_slicing_equals_a_dense_mask_within_documents(lag: int) -> None:
    """D1: the lagged attention of packed documents against an explicit mask, first rows zero."""
    from longdraft.kernels.packed_attention import lagged_attention

    q, k, v = (torch.randn(30, heads, 16, generator=torch.Generator().manual_seed(heads)) for heads in (4, 2, 2))
    cu = [0, 3, 17, 30]
    got = lagged_attention(q, k, v, cu, lag)
    for a, b in itertools.pairwise(cu):
        row = torch.arange(b - a)
        want, _ = dense_attention(q[a:b], k[a:b], v[a:b], 0.25, row[None] <= row[:, None] - lag)
        torch.testing.assert_close(got[a:b], want)
        assert (got[a : min(a + lag, b)] == 0).all()


@pytest.mark.parametrize(
    "settings",
    [{}, {"final_norm": True, "qkv_bias": True, "cross_q_norm": True}, {"newest_lags": 3}],
    ids=["plain", "options", "newest"],
)
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_training_at_lag_p_equals_the_served_draft_at_depth_p_minus_1(family: str, settings: dict[str, object]) -> None:
    """D2: the chain drafts from root T with the target's keys 0 .. T - 1; training sees that at row T + p - 1 under lag p."""
    _, draft, ids, seen = case(family, **settings)
    for root in (1, 5, WINDOW, 30):
        heard = chain_logits(draft, ids, seen, root)
        for lag in LAGS:
            want = draft.logits(trained(draft, ids, seen, lag))[root + lag - 1]
            torch.testing.assert_close(heard[lag - 1], want, rtol=1e-4, atol=1e-4)


def test_state_rebuilt_from_the_last_ids_equals_the_carried_one() -> None:
    """D7: the rings agree on all that a later token can see."""
    _, draft, ids, _ = case("qwen3")
    carried, rebuilt = (WindowState(draft, 2, 4) for _ in range(2))
    zero = torch.tensor([0])
    for t in range(LENGTH):
        carried.store(zero, ids[t : t + 1], torch.tensor([t]))
    rebuilt.rebuild(1, ids.tolist(), LENGTH)
    q, k, v = (torch.randn(1, heads, 32, generator=torch.Generator().manual_seed(heads)) for heads in (4, 2, 2))
    outs = [s.attend(torch.tensor([row]), torch.tensor([LENGTH]), q, k, v) for s, row in ((carried, 0), (rebuilt, 1))]
    torch.testing.assert_close(outs[0], outs[1])


def test_old_tokens_matter_only_through_the_target() -> None:
    """D8: with the target's cache held fixed, tokens that left the window change nothing; the oldest one in it does."""
    _, draft, ids, seen = case("llama")
    t = 30
    before = trained(draft, ids, seen, 1)[t]
    for last_changed, same in ((t - WINDOW, True), (t - WINDOW + 1, False)):
        changed = ids.clone()
        changed[: last_changed + 1] = (changed[: last_changed + 1] + 1) % 256
        assert torch.equal(before, trained(draft, changed, seen, 1)[t]) is same


@pytest.mark.parametrize("newest_lags", [0, 3])
def test_packed_documents_train_as_if_alone(newest_lags: int) -> None:
    target, draft, ids, _ = case("llama", newest_lags=newest_lags)
    cu = [0, 7, 25, LENGTH]
    position = torch.cat([torch.arange(b - a) for a, b in itertools.pairwise(cu)])
    packed = trained(draft, ids, target.capture(ids, position, cu), 2, cu)
    for a, b in itertools.pairwise(cu):
        alone = trained(draft, ids[a:b], target.capture(ids[a:b], torch.arange(b - a), [0, b - a]), 2)
        torch.testing.assert_close(packed[a:b], alone, rtol=1e-4, atol=1e-4)
