"""Ranks that divide a sample: their losses and gradients add up to those of one process, to 1e-5."""

from pathlib import Path
from typing import Any

import pytest
import torch
from thread_ranks import ThreadRanks, run_ranks
from tiny import tiny_draft, tiny_target

from longdraft.draft_models.longspec import LongSpecDraft
from longdraft.errors import UserError
from longdraft.kernels.linear_cross_entropy import IGNORED
from longdraft.schema import validate
from longdraft.train.config import ObjectiveSettings, TrainSettings
from longdraft.train.objective import longspec_loss
from longdraft.train.samples import Packed
from longdraft.train.sequence import check_sequence, lagged, share_of, shared_loss

DRAW = torch.Generator().manual_seed(2)


def sample(lengths: list[int]) -> Packed:
    """Documents with a jump of the positions, half of their rows supervised."""
    cu = [0]
    for n in lengths:
        cu.append(cu[-1] + n)
    ids = torch.randint(0, 256, (cu[-1],), generator=DRAW)
    positions = torch.cat([torch.cat([torch.arange(min(n, 2)), 52 + torch.arange(max(n - 2, 0))]) for n in lengths])
    labels = torch.where(torch.rand(cu[-1], generator=DRAW) < 0.5, ids.roll(-1), IGNORED)
    labels[[at - 1 for at in cu[1:]]] = IGNORED
    return Packed(ids, positions, labels, cu, [f"d{i}" for i in range(len(lengths))])


def gradients(draft: LongSpecDraft, loss: torch.Tensor, supervised: int) -> dict[str, torch.Tensor]:
    (loss / max(supervised, 1)).backward()  # as the loop divides it
    return {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in draft.named_parameters()}


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("lengths", [[41], [3, 60, 1, 17], [5]], ids=["one-document", "packed", "short"])
@pytest.mark.parametrize(
    ("family", "settings", "objective", "lag"),
    [
        ("llama", {"window": 9}, "ce", 1),
        ("qwen3", {"window": 64, "newest_lags": 2, "cross_layers": [0, 1]}, "kl", 3),
        ("qwen2", {"window": 1, "qkv_bias": True}, "greedy", 4),
    ],
    ids=["short-window", "newest-row", "own-key-alone"],
)
def test_shares_add_up(
    family: str, settings: dict[str, Any], objective: str, lag: int, lengths: list[int], world: int
) -> None:
    whole, goal = sample(lengths), ObjectiveSettings(name=objective)  # type: ignore[arg-type]
    target = tiny_target(family)
    draft = tiny_draft(target, **settings)
    want = longspec_loss(draft, target, whole, lag, goal)
    grads = gradients(draft, want.loss, whole.supervised)
    owns = [tiny_target(family) for _ in range(world)]  # threads cannot share one: its attention is set for a pass
    drafts = [tiny_draft(own, **settings) for own in owns]

    def on_rank(ranks: ThreadRanks) -> tuple[torch.Tensor, int, dict[str, torch.Tensor], int]:
        own, mine = owns[ranks.rank], drafts[ranks.rank]
        with torch.enable_grad():
            share = share_of(whole, ranks.rank, world, lambda rows: ranks.joined(rows, 0))
            got = shared_loss(mine, own, share, lag, goal)
            return got.loss.detach(), int(got.correct), gradients(mine, got.loss, whole.supervised), len(share.rows)

    found = run_ranks(world, on_rank)
    assert {rows for *_, rows in found} == {-(-len(whole.id_T) // world)}
    torch.testing.assert_close(sum(loss for loss, *_ in found), want.loss.detach(), rtol=1e-5, atol=1e-5)
    assert sum(correct for _, correct, *_ in found) == int(want.correct)
    for name, grad in grads.items():
        total = sum(own[name] for _, _, own, _ in found)
        torch.testing.assert_close(total, grad, rtol=1e-5, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")
    if len(lengths) == 1 and lengths[0] > 20:
        assert all(loss > 0 for loss, *_ in found), "every rank has a part of a long document"


def test_rows_see_keys_of_their_own_document() -> None:
    row, key = lagged([0, 4, 5, 12], 2, 10, 3, torch.device("cpu"))
    assert (row + 2).tolist() == [3, 8, 9] and key.tolist() == [0, 5, 6]
    none, _ = lagged([0, 4], 0, 4, 4, torch.device("cpu"))
    assert not len(none)


def settings_of(tmp_path: Path, **changes: Any) -> TrainSettings:
    data = {"target": {"path": "tiny-random:llama"}, "data": {"train": str(tmp_path)}, "engine": {"sequence": True}}
    return validate(TrainSettings, data | changes)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"draft": {"arch": "eagle3"}}, r"draft\.arch=eagle3"),
        ({"views": {"share": 0.5}}, r"views\.share=0\.5"),
        ({"target": {"path": "tiny-random:llama", "attn": "sdpa"}}, r"target\.attn=sdpa"),
    ],
)
def test_what_is_not_divided_is_refused(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    check_sequence(settings_of(tmp_path))
    with pytest.raises(UserError, match=said):
        check_sequence(settings_of(tmp_path, **changes))
    with pytest.raises(UserError, match="whose attention is its own code"):
        check_sequence(settings_of(tmp_path), packed=False)
