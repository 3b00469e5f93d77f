"""Samples: truncation, packing, labels, and an order that covers, repeats and resumes."""

from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from longdraft.errors import UserError
from longdraft.schema import validate
from longdraft.train.config import TrainSettings
from longdraft.train.documents import Document
from longdraft.train.samples import Packed, SampleStream, answer_start, pack, resumed_cursor, truncate


def chat(prompt: int, answer: int) -> Document:
    return Document(list(range(prompt + answer)), [False] * prompt + [True] * answer, "d")


def settings(**sections: dict[str, Any]) -> TrainSettings:
    data = {"train": "unused", "min_length": 2, **sections.pop("data", {})}
    return validate(TrainSettings, {"target": {"path": "unused"}, "data": data, **sections})


def stream(lengths: list[int], rank: int = 0, world: int = 1, **sections: dict[str, Any]) -> SampleStream:
    corpus = [Document([i] * n, [True] * n, f"d{i}") for i, n in enumerate(lengths)]
    return SampleStream(corpus, settings(**sections), 500, rank, world)  # type: ignore[arg-type]


def test_middle_truncation_keeps_the_whole_answer_and_both_ends_of_the_prompt() -> None:
    cut = truncate(chat(100, 20), 60, "middle")
    assert cut.ids == [*range(20), *range(80, 120)]
    assert cut.supervised == [False] * 40 + [True] * 20


def test_middle_truncation_of_a_long_answer_keeps_its_beginning_and_a_quarter_of_prompt() -> None:
    cut = truncate(chat(100, 500), 40, "middle")
    assert cut.ids == [*range(5), *range(95, 130)]
    assert cut.supervised == [False] * 10 + [True] * 30
    short_prompt = truncate(chat(4, 500), 40, "middle")
    assert short_prompt.ids == list(range(40))


def test_middle_truncation_of_a_text_keeps_both_ends_and_does_not_train_the_seam() -> None:
    cut = truncate(Document(list(range(100)), [True] * 100, "d"), 11, "middle")
    assert cut.ids == [*range(5), *range(94, 100)]
    assert cut.supervised == [i != 5 for i in range(11)]


@pytest.mark.parametrize(("how", "first"), [("right", 0), ("left", 70)])
def test_side_truncation(how: str, first: int) -> None:
    assert truncate(chat(50, 50), 30, how).ids == list(range(first, first + 30))


def test_crop_is_a_stretch_that_the_key_decides() -> None:
    begins = {truncate(chat(0, 50), 30, "crop", seed).ids[0] for seed in range(200)}
    assert begins == set(range(21))
    assert truncate(chat(0, 50), 30, "crop", 7) == truncate(chat(0, 50), 30, "crop", 7)


@given(
    st.lists(st.booleans(), min_size=1, max_size=80),
    st.integers(2, 80),
    st.sampled_from(["middle", "left", "right", "crop"]),
)
def test_truncation_keeps_order_length_and_never_adds_supervision(mask: list[bool], limit: int, how: str) -> None:
    cut = truncate(Document(list(range(len(mask))), mask, "d"), limit, how, 1)
    assert len(cut.ids) == len(cut.supervised) == min(limit, len(mask))
    assert all(a < b for a, b in zip(cut.ids, cut.ids[1:], strict=False))
    assert all(mask[i] for i, kept in zip(cut.ids, cut.supervised, strict=True) if kept)


@given(st.lists(st.booleans(), max_size=30))
def test_answer_start_is_the_last_run(mask: list[bool]) -> None:
    start = answer_start(mask)
    if not any(mask):
        assert start == len(mask)
        return
    assert mask[start]
    assert start == 0 or not mask[start - 1]
    runs = [i for i in range(len(mask)) if mask[i] and (i == 0 or not mask[i - 1])]
    assert start == runs[-1]


def test_labels_are_the_next_token_of_the_same_document() -> None:
    one, two = Document([5, 6, 7], [False, False, True], "a"), Document([8, 9], [True, True], "b")
    packed = pack([one, two], [torch.arange(3), torch.arange(2)], all_rows=False)
    assert packed.label_T.tolist() == [-100, 7, -100, 9, -100]
    assert packed.cu == [0, 3, 5]
    assert packed.supervised == 2
    everything = pack([one, two], [torch.arange(3), torch.arange(2)], all_rows=True)
    assert everything.label_T.tolist() == [6, 7, -100, 9, -100]


def names(micros: list[Packed]) -> list[str]:
    return [name for micro in micros for name in micro.names]


def test_every_document_comes_once_an_epoch_in_another_order_each() -> None:
    one = stream([10] * 7, schedule={"micro_batch": 7})
    first, cursor = one.window(0)
    second, _ = one.window(cursor)
    assert sorted(names(first)) == sorted(names(second)) == sorted({f"d{i}" for i in range(7)})
    assert names(first) != names(second)
    assert names(stream([10] * 7, schedule={"micro_batch": 7}, run={"seed": 1}).window(0)[0]) != names(first)


def test_a_window_depends_on_the_cursor_alone() -> None:
    sections: dict[str, Any] = {"data": {"packing": True, "max_length": 40}, "schedule": {"accumulate": 2}}
    lengths = [10, 33, 7, 21, 14, 9, 40, 12]
    one, cursors, seen = stream(lengths, **sections), [0], []
    for _ in range(6):
        window, cursor = one.window(cursors[-1])
        seen.append(window)
        cursors.append(cursor)
    for i in (4, 1, 3):
        again, _ = stream(lengths, **sections).window(cursors[i])
        assert names(again) == names(seen[i])
        assert all(torch.equal(a.position_T, b.position_T) for a, b in zip(again, seen[i], strict=True))


def test_packing_fills_up_to_the_limit_and_loses_nothing() -> None:
    lengths = [10, 33, 7, 21, 14, 9, 40, 12]
    one = stream(lengths, data={"packing": True, "max_length": 40, "shuffle": False})
    cursor, packs = 0, []
    while cursor < len(lengths):
        (micro,), cursor = one.window(cursor)
        packs.append(micro.names)
        assert micro.cu[-1] == len(micro.id_T) <= 40
        assert int((micro.label_T == -100).sum()) == len(micro.names)
    assert packs[:4] == [["d0"], ["d1", "d2"], ["d3", "d4"], ["d5"]]


@pytest.mark.parametrize(("world", "micro", "accumulate"), [(1, 4, 1), (1, 1, 4), (2, 1, 2), (2, 2, 1), (4, 1, 1)])
def test_a_global_step_holds_the_same_documents_for_every_split(world: int, micro: int, accumulate: int) -> None:
    schedule = {"micro_batch": micro, "accumulate": accumulate}
    per_step = []
    cursors = [0] * world
    for _ in range(3):
        seen: Counter[tuple[str, int]] = Counter()
        for rank in range(world):
            micros, cursors[rank] = stream(list(range(10, 19)), rank, world, schedule=schedule).window(cursors[rank])
            for m in micros:
                seen.update((name, int(m.position_T[b - 1])) for name, b in zip(m.names, m.cu[1:], strict=True))
        per_step.append(seen)
    whole = stream(list(range(10, 19)), schedule={"micro_batch": 4})
    cursor = 0
    for seen in per_step:
        (one,), cursor = whole.window(cursor)
        assert seen == Counter(
            (name, int(one.position_T[b - 1])) for name, b in zip(one.names, one.cu[1:], strict=True)
        )


def test_offsets_follow_their_share() -> None:
    def jumps(share: float) -> int:
        micros, _ = stream([20] * 200, positions={"offset_share": share}, schedule={"micro_batch": 200}).window(0)
        return sum(int(micros[0].position_T[b - 1]) != 19 for b in micros[0].cu[1:])

    assert jumps(0) == 0
    assert jumps(1) > 190
    assert 70 < jumps(0.5) < 130


def test_unusable_documents_are_skipped_and_a_corpus_of_them_is_an_error() -> None:
    one = stream([3, 30, 1, 30], data={"min_length": 10}, schedule={"micro_batch": 4})
    assert Counter(names(one.window(0)[0])) == {"d1": 2, "d3": 2}
    with pytest.raises(UserError, match=r"data\.min_length=10"):
        stream([3, 4], data={"min_length": 10}).window(0)


def test_cursors_after_a_change_of_ranks_skip_nothing_twice() -> None:
    assert [resumed_cursor([5, 4], rank, 2) for rank in range(2)] == [5, 4]
    assert [resumed_cursor([5, 4], rank, 3) for rank in range(3)] == [3, 3, 3]


def test_anchors_are_drawn_for_each_document_where_asked() -> None:
    """0 to the setting, as the position where the offset begins shows."""
    one = stream([9], positions={"random_anchors": True, "anchors": 4})
    starts = Counter()
    for index in range(300):
        position = one.positions(9, 0, 0, index)
        assert torch.equal(position, one.positions(9, 0, 0, index))
        jumps = (position.diff(prepend=torch.tensor([-1])) > 1).nonzero().flatten().tolist()
        assert len(jumps) <= 1
        starts.update(jumps)
    assert set(starts) == {0, 1, 2, 3, 4}
    assert min(starts.values()) > 30
    fixed = stream([9])
    assert all(int(fixed.positions(9, 0, 0, index)[3]) == 3 for index in range(50))


def test_a_target_that_finds_documents_by_position_0_must_have_one() -> None:
    """FlashAttention in transformers; a drawn number of anchors may be 0."""
    flash = {"path": "unused", "attn": "flash_attention_2"}
    for positions in ({"anchors": 0}, {"random_anchors": True}):
        with pytest.raises(UserError, match="anchors of 1 or more in every document"):
            settings(target=flash, positions=positions)
        settings(target=flash, positions={**positions, "offset_share": 0.0})
    settings(target=flash)
