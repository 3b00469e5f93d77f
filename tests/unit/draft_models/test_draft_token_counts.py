"""A draft head over the most frequent tokens: counts on disk, every refusal, and the draft that is narrowed by them."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from tiny import tiny_draft, tiny_target

from longdraft.draft_models.reference_decode import greedy_decode, speculative_decode
from longdraft.draft_models.token_counts import TokenCounts
from longdraft.errors import UserError

TARGET = tiny_target("llama")
COUNT = torch.tensor([5, 0, 9, 1, 0, 7])
RANK = torch.tensor([4, 2, 5, 0, 3, 1])  # token 4 is wanted whatever its count


def test_counts_survive_their_file_and_leave_nothing_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "new" / "counts.safetensors"
    for _ in range(2):  # an existing file is replaced
        TokenCounts(COUNT, RANK).save(path, {"target": "t"})
    read = TokenCounts.load(path, 6)
    assert torch.equal(read.count_V, COUNT) and torch.equal(read.rank_V, RANK)
    assert [p.name for p in path.parent.iterdir()] == ["counts.safetensors"]
    assert read.top(3).tolist() == [2, 4, 5]
    assert read.coverage(read.top(3)) == pytest.approx(16 / 22)
    assert read.coverage(read.top(6)) == 1
    with pytest.raises(UserError, match="a draft head of 7 tokens, the target has 6: give fewer"):
        read.top(7)


def test_files_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    def refused(path: Path, vocab: int = 6) -> str:
        with pytest.raises(UserError) as error:
            TokenCounts.load(path, vocab)
        assert "longdraft counts" in str(error.value)
        return str(error.value)

    assert "no such file" in refused(tmp_path / "none")
    (tmp_path / "text").write_text("text")
    assert "cannot be read" in refused(tmp_path / "text")
    save_file({"count": COUNT}, tmp_path / "half")
    assert "cannot be read" in refused(tmp_path / "half")
    TokenCounts(COUNT, RANK).save(tmp_path / "good", {})
    assert "are of 6 tokens, the target has 7" in refused(tmp_path / "good", 7)
    save_file({"count": COUNT, "rank": torch.zeros(6, dtype=torch.int64)}, tmp_path / "twice")
    assert "do not rank every token once" in refused(tmp_path / "twice")


def test_a_narrowed_draft_proposes_the_best_of_its_tokens_and_nothing_else() -> None:
    whole, draft = tiny_draft(TARGET), tiny_draft(TARGET)
    ids = torch.tensor([3, 50, 101, 200])
    draft.narrow_head(ids)
    hidden = torch.randn(7, TARGET.spec.hidden_size)
    torch.testing.assert_close(draft.draft_logits(hidden), whole.logits(hidden)[:, ids])
    assert draft.target_ids is not None and draft.target_ids.tolist() == ids.tolist()
    assert torch.equal(draft.logits(hidden).argmax(-1), ids[whole.logits(hidden)[:, ids].argmax(-1)])
    assert whole.target_ids is None and torch.equal(whole.draft_logits(hidden), whole.logits(hidden))
    draft.bind(TARGET.embedding_VE, TARGET.head_VE * 2)  # new weights of the target
    torch.testing.assert_close(draft.draft_logits(hidden), 2 * whole.logits(hidden)[:, ids])


def test_decoding_with_a_narrowed_draft_gives_the_targets_tokens() -> None:
    draft = tiny_draft(TARGET)
    draft.narrow_head(torch.tensor([1, 2, 3]))
    ids = list(range(20, 60))
    want = greedy_decode(TARGET.model, ids, 15)
    assert set(want) - {1, 2, 3}
    assert speculative_decode(TARGET.model, draft, ids, 15, 3).tokens == want


def test_a_draft_that_was_trained_with_a_ranked_head_keeps_it() -> None:
    with pytest.raises(UserError, match="has a ranked head of 5 tokens of its own: leave it out"):
        tiny_draft(TARGET, head_tokens=5).narrow_head(torch.tensor([1, 2, 3]))
