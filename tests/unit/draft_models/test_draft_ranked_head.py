"""The ranked head: the draft proposes some tokens only, everything around it stays the same."""

from pathlib import Path

import pytest
import torch
from tiny import tiny_draft, tiny_target

from longdraft.draft_models.checkpoint import load_draft, save_draft
from longdraft.draft_models.config import LongSpecConfig, LongSpecSettings
from longdraft.draft_models.longspec import LongSpecDraft
from longdraft.draft_models.reference_decode import greedy_decode, speculative_decode
from longdraft.errors import UserError

TARGET = tiny_target("llama")
IDS = torch.tensor([200, 7, 50, 9, 101])


def ranked() -> LongSpecDraft:
    draft = tiny_draft(TARGET, head_tokens=5)
    draft.rank_head(IDS)
    return draft


def test_logits_are_those_of_the_whole_head_for_ranked_tokens_and_nothing_else() -> None:
    draft = ranked()
    hidden = torch.randn(3, TARGET.spec.hidden_size)
    logits, whole = draft.logits(hidden), hidden @ TARGET.head_VE.t()
    assert logits.shape == whole.shape
    torch.testing.assert_close(logits[:, IDS], whole[:, IDS])
    left_out = torch.ones(TARGET.spec.vocab_size, dtype=torch.bool)
    left_out[IDS] = False
    assert torch.isneginf(logits[:, left_out]).all()


def test_labels_become_rows_of_the_ranked_head_or_are_left_out() -> None:
    draft = ranked()
    labels = torch.tensor([7, 8, 200, -100, 9, 287, 0, 50, 101])
    rows = draft.ranked_label(labels)
    assert rows.tolist() == [0, -100, 4, -100, 1, -100, -100, 2, 3]
    assert torch.equal(draft.drafting_head_NE[rows[rows >= 0]], TARGET.head_VE[labels[rows >= 0]])


def test_without_a_ranked_head_labels_and_head_are_the_targets() -> None:
    draft = tiny_draft(TARGET)
    labels = torch.tensor([3, -100])
    assert draft.ranked_label(labels) is labels
    assert torch.equal(draft.drafting_head_NE, TARGET.head_VE)
    assert "head_ids" not in draft.state_dict()


def test_a_checkpoint_keeps_the_ranked_tokens(tmp_path: Path) -> None:
    draft = ranked()
    weights = {name: p.detach() for name, p in draft.named_parameters()}  # what an engine gathers
    save_draft(draft, tmp_path / "draft", "tiny", state=weights)
    loaded = load_draft(tmp_path / "draft", TARGET.spec).bind(TARGET.embedding_VE, TARGET.head_VE)
    assert loaded.head_ids is not None
    assert loaded.head_ids.tolist() == sorted(IDS.tolist())
    hidden = torch.randn(2, TARGET.spec.hidden_size)
    assert torch.equal(loaded.logits(hidden), draft.logits(hidden))


def test_decoding_gives_the_targets_tokens_also_those_that_are_left_out() -> None:
    ids = list(range(20, 60))
    want = greedy_decode(TARGET.model, ids, 20)
    assert set(want) - set(IDS.tolist())
    assert speculative_decode(TARGET.model, ranked(), ids, 20, 3).tokens == want


def test_sizes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(UserError, match="head_tokens=289"):
        LongSpecDraft(LongSpecConfig(TARGET.spec, LongSpecSettings(head_tokens=289)))
    with pytest.raises(ValueError, match="4 different ids"):
        tiny_draft(TARGET, head_tokens=5).rank_head(torch.tensor([1, 2, 3, 4, 4]))
