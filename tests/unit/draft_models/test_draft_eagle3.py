"""The EAGLE-3 module by itself: vocabulary map, head, step, and what is lent to it."""

import pytest
import torch
from tiny import tiny_eagle3, tiny_target

from longdraft.draft_models.eagle3 import Eagle3Draft

TARGET = tiny_target("llama", num_hidden_layers=5)


def step(draft: Eagle3Draft, ids: torch.Tensor, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows that see themselves alone: attention hands back the values."""
    group = draft.config.num_heads // draft.config.num_kv_heads
    return draft(ids, hidden, torch.arange(len(ids)), lambda q, k, v: v.repeat_interleave(group, 1))


def test_the_vocabulary_map_names_the_chosen_tokens() -> None:
    draft = tiny_eagle3(TARGET, draft_vocab_size=4)
    draft.choose_vocabulary(torch.tensor([200, 3, 77, 3, 0]))
    assert draft.target_ids.tolist() == [0, 3, 77, 200]
    assert draft.d2t.tolist() == [0, 2, 75, 197]
    assert draft.t2d.nonzero().flatten().tolist() == [0, 3, 77, 200]
    assert draft.d2t.dtype == torch.int64 and draft.t2d.dtype == torch.bool


@pytest.mark.parametrize("ids", [[1, 2, 3], [1, 2, 3, 288], [-1, 1, 2, 3], [1, 2, 3, 4, 5]])
def test_a_vocabulary_that_does_not_fit(ids: list[int]) -> None:
    with pytest.raises(ValueError, match="different ids for a draft vocabulary of 4 out of 288"):
        tiny_eagle3(TARGET, draft_vocab_size=4).choose_vocabulary(torch.tensor(ids))


def test_logits_stand_at_the_targets_ids_and_the_rest_cannot_be_drafted() -> None:
    draft = tiny_eagle3(TARGET, draft_vocab_size=4)
    draft.choose_vocabulary(torch.tensor([200, 3, 77, 5]))
    rows = torch.randn(3, 64)
    full, own = draft.logits(rows), draft.draft_logits(rows)
    assert full.shape == (3, 288) and own.shape == (3, 4)
    assert torch.equal(full[:, [3, 5, 77, 200]], own)
    assert int(full.isneginf().sum()) == 3 * 284
    everything = tiny_eagle3(TARGET)
    assert torch.equal(everything.logits(rows), everything.draft_logits(rows))
    assert torch.equal(everything.target_ids, torch.arange(288)) and bool(everything.t2d.all())


@pytest.mark.parametrize("norm_output", [False, True])
def test_the_next_step_reads_the_row_raw_or_normed(norm_output: bool) -> None:
    draft = tiny_eagle3(TARGET, norm_output=norm_output)
    normed, following = step(draft, torch.tensor([5, 6]), torch.randn(2, 64))
    torch.testing.assert_close(normed, following if norm_output else draft.norm(following))


def test_each_feature_has_a_norm_of_its_own() -> None:
    """Scaling one of the three features changes nothing behind its norm."""
    aux = torch.randn(2, 192)
    louder = torch.cat([aux[:, :64], 9 * aux[:, 64:128], aux[:, 128:]], -1)
    normed, plain = tiny_eagle3(TARGET, fc_norm=True), tiny_eagle3(TARGET)
    torch.testing.assert_close(normed.fuse(aux), normed.fuse(louder), rtol=1e-4, atol=1e-4)
    assert not torch.allclose(plain.fuse(aux), plain.fuse(louder), atol=1e-2)
    assert not torch.allclose(normed.fuse(aux), normed.fuse(aux.roll(64, -1)), atol=1e-2), "the order counts"


def test_nothing_lent_is_trained_or_saved() -> None:
    draft = tiny_eagle3(TARGET)
    step(draft, torch.tensor([5, 6]), torch.randn(2, 64))[0].sum().backward()
    assert TARGET.embedding_VE.grad is None
    assert not any("embed" in name for name in draft.state_dict())
    with pytest.raises(ValueError, match=r"embedding is \(288, 32\), the draft's target has \(288, 64\)"):
        draft.bind(torch.zeros(288, 32))


def test_a_half_precision_target_is_read_by_a_float32_draft() -> None:
    draft = tiny_eagle3(TARGET).bind(TARGET.embedding_VE.bfloat16())
    hidden = draft.fuse(torch.randn(2, 192).bfloat16())
    assert step(draft, torch.tensor([5, 6]), hidden)[0].dtype == torch.float32
