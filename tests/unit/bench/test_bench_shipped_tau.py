"""What is taken of known answers, and how prompts' counts become τ on both sides."""

import json
from pathlib import Path

from longdraft.bench.shipped_tau import NEW_TOKENS, Row, figures, prompts

VARIED = list(range(NEW_TOKENS))
LOOPING = [1, 2, 3, 4] * (NEW_TOKENS // 4)


def test_prompts_are_the_first_of_each_length_whose_answer_is_whole_and_does_not_loop(tmp_path: Path) -> None:
    answers = [(5, VARIED), (5, LOOPING), (5, VARIED[:-1]), (9, VARIED), (5, VARIED), (5, VARIED), (9, VARIED)]
    lines = [
        json.dumps({"input_ids": [7] * length + answer, "supervised_from": length, "source": f"d#{i}"})
        for i, (length, answer) in enumerate(answers)
    ]
    path = tmp_path / "held.jsonl"
    path.write_text("\n".join(lines) + "\n")
    taken = list(prompts(path, 2))
    assert [(length, source) for length, source, _ in taken] == [(5, "d#0"), (9, "d#3"), (5, "d#4"), (9, "d#6")]
    assert all(ids == [7] * length for length, _, ids in taken)


def test_figures_sum_tokens_and_verifications_of_a_draft_and_length_without_loops() -> None:
    def row(draft: str, length: int, gained: int, reference: int, served: int, looping: bool = False) -> Row:
        return Row(draft, length, "d", gained, reference, served, True, looping)

    rows = [
        row("a", 5, 100, 40, 50),
        row("a", 5, 60, 40, 30),
        row("a", 5, 90, 1, 1, True),
        row("b", 9, 30, 10, 10),
        row("b", 5, 30, 10, 10, True),
    ]
    got = figures(rows)
    assert got == {
        "a_5_answers": 2,
        "a_5_tau_reference": 2.0,
        "a_5_tau_served": 2.0,
        "b_9_answers": 1,
        "b_9_tau_reference": 3.0,
        "b_9_tau_served": 3.0,
    }
