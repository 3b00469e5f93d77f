"""Batched decoding: every row is the target's own answer, whatever stands beside it; loops end early and change nothing."""

from typing import Any

import pytest
import torch
from tiny import tiny_target

from longdraft.draft_models.reference_decode import greedy_decode
from longdraft.draft_models.repetition import repeated_share, unlooped
from longdraft.schema import validate
from longdraft.train.generation.backends import TransformersBackend
from longdraft.train.generation.decoding import Row, decode_rows
from longdraft.train.generation.prompts import Prompt
from longdraft.train.generation.settings import GenerateSettings

NEW = 70


def prompts(lengths: list[int]) -> list[list[int]]:
    g = torch.Generator().manual_seed(5)
    return [torch.randint(0, 256, (n,), generator=g).tolist() for n in lengths]


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_rows_of_any_length_get_the_targets_own_answers(family: str) -> None:
    model = tiny_target(family).model
    rows = [Row(ids, []) for ids in prompts([9, 30, 9, 17, 41])] + [Row([7], [])] * (family == "qwen3")
    decode_rows(model, rows, NEW, [], lambda logits, *_: logits.argmax(-1), lambda _: False)
    for row in rows:
        assert row.answer == greedy_decode(model, row.prompt, NEW)


def test_rows_leave_at_their_stop_token() -> None:
    model = tiny_target("llama").model
    asked = prompts([12, 20, 33])
    whole = [greedy_decode(model, ids, NEW) for ids in asked]
    stops = [whole[0][3], whole[1][40]]
    rows = [Row(ids, []) for ids in asked]
    decode_rows(model, rows, NEW, stops, lambda logits, *_: logits.argmax(-1), lambda _: False)
    for row, answer in zip(rows, whole, strict=True):
        end = next((i + 1 for i, token in enumerate(answer) if token in stops), NEW)
        assert row.answer == answer[:end]


def backend(**changes: Any) -> TransformersBackend:
    sections = {"out": "x", "target": {"path": "tiny-random:llama"}, "prompts": {"sources": "x"}}
    settings = validate(GenerateSettings, sections | {"sampling": {"max_new_tokens": 120}} | changes)
    made = TransformersBackend(settings, torch.device("cpu"), [999])
    with torch.no_grad():  # four words: some answers loop soon, some late
        made.model.lm_head.weight[4:] = 0
    return made


@pytest.mark.parametrize("option", ["drop_repeats", "trim_repeats"])
def test_an_answer_that_ends_early_for_its_loop_comes_to_the_same(option: str) -> None:
    asked = [Prompt(ids, i, 0, "p", i) for i, ids in enumerate(prompts([8, 11, 14, 20, 25, 31]))]
    whole = backend().generate(asked)
    early = backend(**{option: 0.3}).generate(asked)
    assert any(len(a.ids) < len(b.ids) for a, b in zip(early, whole, strict=True)), (
        "no answer loops: choose other prompts"
    )
    for a, b in zip(early, whole, strict=True):
        if option == "drop_repeats":
            assert (repeated_share(a.ids) > 0.3) == (repeated_share(b.ids) > 0.3)
        else:
            assert a.ids[: unlooped(a.ids, 0.3)] == b.ids[: unlooped(b.ids, 0.3)]


def test_an_output_is_cut_before_the_step_that_loops() -> None:
    assert unlooped(list(range(100))) == 100
    assert unlooped([1, 2] * 50) == 0
    assert unlooped([*range(64), *[7] * 200], 0.3, 32) == 64
    assert unlooped([], 0.3) == 0
