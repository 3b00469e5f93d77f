"""The benchmark of a round's sampling: its trees, its work and its checks, without a card."""

import pytest
import torch

from longdraft.bench import tree_round as bench
from longdraft.kernels.tree_accept import Accepted


def test_trees_have_the_widths_and_parents_of_the_depth_before() -> None:
    tree = bench.beam_shaped(2, "cpu")
    assert torch.bincount(tree.depth_BT[0]).tolist() == [1, *bench.WIDTHS]
    parent = tree.parent_BT[:, 1:]
    assert torch.equal(tree.depth_BT.gather(1, parent) + 1, tree.depth_BT[:, 1:])


def test_the_work_is_what_its_names_say() -> None:
    work, checks = bench.parts(3, "cpu", vocab=50, draft_vocab=40)
    assert set(checks.values()) == {True}
    done = {name: run() for name, (run, _) in work.items()}
    kept = done["accept"]
    assert isinstance(kept, Accepted) and int(kept.count_B.max()) > 0
    assert work["choice_greedy"][1] == 3 * 69 * 50 * 4 and work["candidates_seeded"][1] == 3 * 16 * 40 * 4
    greedy, seeded = done["choice_greedy"], done["choice_seeded"]
    assert isinstance(greedy, torch.Tensor) and isinstance(seeded, torch.Tensor)
    assert greedy.shape == seeded.shape == (3 * 69,) and not torch.equal(greedy, seeded)


def test_without_a_card_it_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert bench.main([]) == 2
    assert "measured on a GPU, and there is none" in capsys.readouterr().err
