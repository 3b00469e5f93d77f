"""Views in training and evaluation: seeded draws, the same for every split of a step, and what reaches the draft."""

from typing import Any

import pytest
import torch
from tiny import tiny_draft, tiny_target

from longdraft.errors import UserError
from longdraft.kernels.view_attention import View
from longdraft.schema import validate
from longdraft.train.config import ObjectiveSettings, TrainSettings, ViewSettings
from longdraft.train.documents import Document
from longdraft.train.methods.longspec import LongSpecMethod
from longdraft.train.objective import longspec_loss
from longdraft.train.samples import Packed, SampleStream, resumed_cursor
from longdraft.train.views import draw_view, served_view

SMALL = {"share": 0.5, "budgets": [8, 16], "sinks": 2, "window": 3, "block": 2}


def settings(**sections: dict[str, Any]) -> TrainSettings:
    base = {"target": {"path": "unused"}, "data": {"train": "unused", "min_length": 2}}
    return validate(TrainSettings, {**base, **sections})


def drawn(micro_batch: int = 1, rank: int = 0, world: int = 1, accumulate: int = 1) -> dict[str, list[View | None]]:
    """Views of each document's first two epochs."""
    corpus = [Document([i] * 30, [True] * 30, f"d{i}") for i in range(8)]
    schedule = {"micro_batch": micro_batch, "accumulate": accumulate}
    stream = SampleStream(corpus, settings(views=SMALL, schedule=schedule), 500, rank, world)  # type: ignore[arg-type]
    found: dict[str, list[View | None]] = {}
    cursor = 0
    while cursor * world < 16:
        micros, cursor = stream.window(cursor)
        for micro in micros:
            for name, view in zip(micro.names, micro.views, strict=True):
                found.setdefault(name, []).append(view)
    return found


def test_a_documents_view_is_the_same_for_every_split_and_another_each_epoch() -> None:
    """Ranks, micro-batches and a resume only change who draws it."""
    want = drawn()
    assert drawn(micro_batch=4) == drawn(micro_batch=2, accumulate=2) == want
    halves = [drawn(rank=rank, world=2) for rank in (0, 1)]
    both = {name: [v for half in halves for v in half.get(name, [])] for name in want}
    key = repr
    assert {n: sorted(v, key=key) for n, v in both.items()} == {n: sorted(v, key=key) for n, v in want.items()}
    assert resumed_cursor([4], 0, 1) == 4
    pairs = [tuple(views) for views in want.values()]
    assert any(a != b for a, b in pairs)
    assert {view is None for pair in pairs for view in pair} == {True, False}


def test_shares_and_budgets_are_what_was_asked_for() -> None:
    asked = ViewSettings(**{**SMALL, "share": 0.25, "recent": 0.5})
    views = [draw_view(asked, 0, 0, index) for index in range(2000)]
    cut = [view for view in views if view is not None]
    assert 400 < len(cut) < 600
    assert {view.budget for view in cut} == {8, 16}
    recent = [view for view in cut if view.blocks == 0 and view.window == view.budget - 2]
    assert 0.4 < len(recent) / len(cut) < 0.6
    assert all(view.window == 3 for view in cut if view not in recent)
    assert len({view.seed for view in cut}) == len(cut)
    assert all(draw_view(ViewSettings(), 0, 0, index) is None for index in range(50)), "off unless asked for"


def batch() -> Packed:
    ids = torch.randint(0, 256, (60,), generator=torch.Generator().manual_seed(2))
    return Packed(ids, torch.cat([torch.arange(25), torch.arange(35)]), ids.roll(-1), [0, 25, 60], ["a", "b"])


def test_the_loss_is_taken_under_the_batchs_views() -> None:
    """And a batch whose views cut nothing has the loss and gradients of one without views, bit for bit."""
    target, packed = tiny_target("llama"), batch()
    draft = tiny_draft(target, window=8)

    def loss(*views: View | None) -> tuple[torch.Tensor, torch.Tensor]:
        draft.zero_grad()
        seen = Packed(packed.id_T, packed.position_T, packed.label_T, packed.cu, packed.names, list(views))
        out = longspec_loss(draft, target, seen, 2, ObjectiveSettings(name="kl"))
        out.loss.backward()
        grad = draft.cross_attn.q_proj.weight.grad
        assert grad is not None
        return out.loss.detach(), grad.clone()

    plain, under = loss(), loss(None, View(12, 2, 4, 2, 1))
    for same in (loss(None, None), loss(View(25, 2, 4, 2), View(64, 2, 4, 2))):
        assert all(torch.equal(a, b) for a, b in zip(plain, same, strict=True))
    assert not torch.equal(plain[0], under[0])
    assert not torch.equal(plain[1], under[1])


def test_a_checkpoint_says_which_budgets_it_was_trained_for() -> None:
    from longdraft.draft_models.config import TrainingFacts

    target = tiny_target("llama")
    for share, want in ((0.0, []), (0.5, [8, 16])):
        method = LongSpecMethod(settings(views={**SMALL, "share": share}), target, tiny_draft(target))
        assert method.facts(TrainingFacts()).views == want


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"views": {"budgets": [1024, 128]}}, "views.budgets.* take 176"),
        ({"views": {"budgets": []}}, "views.budgets"),
        ({"views": {"share": 1.5}}, "views.share"),
        ({"evaluation": {"context": 32}}, "evaluation.context=32 .* recent view: give 33 or more"),
        ({"evaluation": {"context": 100, "view": "mass"}}, "give 176 or more"),
    ],
)
def test_views_without_room_are_refused(sections: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        settings(**sections)


def test_evaluation_reads_what_serving_would() -> None:
    assert served_view(settings()) is None
    recent, mass = (served_view(settings(evaluation={"context": 1024, "view": name})) for name in ("recent", "mass"))
    assert recent == View(1024, 32, 992, 16)
    assert mass == View(1024, 32, 128, 16)
