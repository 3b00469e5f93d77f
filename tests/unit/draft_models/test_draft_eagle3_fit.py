"""A least-squares start of an EAGLE-3 draft: on text that a linear rule made, the first step is that rule.

Legend: T packed rows, N rows, E hidden size, A features.
"""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from tiny import tiny_eagle3, tiny_target

from longdraft.draft_models.eagle3 import Eagle3Draft
from longdraft.draft_models.eagle3_fit import Eagle3FitBatch, fit_eagle3
from longdraft.draft_models.eagle3_ttt import forward_ttt

TARGET = tiny_target("llama", num_hidden_layers=4)
HIDDEN = TARGET.spec.hidden_size
CU = [0, 150, 151, 400]
SCALES = 10 ** torch.linspace(-1, 2, 3 * HIDDEN)  # a target's features differ as much


def rule(draft: Eagle3Draft, rank: int, seed: int) -> tuple[Eagle3FitBatch, torch.Tensor]:
    """Text whose target rows are linear in features and the next token's embedding, and rows ``[N, E]`` of the norm's input."""
    g = torch.Generator().manual_seed(seed)
    fixed = torch.Generator().manual_seed(1)
    by_feature = torch.randn(HIDDEN, 3 * HIDDEN, generator=fixed) / SCALES / (3 * HIDDEN) ** 0.5
    by_token = (
        torch.randn(HIDDEN, rank, generator=fixed) @ torch.randn(rank, HIDDEN, generator=fixed) / (rank * HIDDEN) ** 0.5
    )
    aux, ids = torch.randn(400, 3 * HIDDEN, generator=g) * SCALES, torch.randint(288, (400,), generator=g)
    position = torch.cat([torch.arange(b - a) for a, b in pairwise(CU)])
    rows = torch.tensor([row for row in range(400) if row + 1 not in CU and row % 3])
    with torch.no_grad():
        token = draft.midlayer.input_layernorm(draft.embed(ids[rows + 1]))
        want = (
            draft.features(aux[rows]) @ by_feature.t() + token @ by_token.t()
            if draft.fc_norm is None
            else token @ by_token.t()
        )
        hidden = torch.full((400, HIDDEN), 1e6)  # what no row asks for
        hidden[rows + 1] = want * draft.norm.weight
    return Eagle3FitBatch(aux, ids, position, CU, rows, hidden), want


def first_step(draft: Eagle3Draft, text: Eagle3FitBatch) -> torch.Tensor:
    with torch.no_grad():
        (out,) = forward_ttt(draft, text.aux_TA, text.id_T, text.position_T, text.cu, text.row_N, 1)
    return out.normed_NE


@pytest.mark.parametrize(
    "settings",
    [
        {"head_dim": 32},
        {"num_heads": 8, "num_kv_heads": 4, "head_dim": 32},
        {"fc_norm": True, "head_dim": 32},
        {"num_heads": 4, "num_kv_heads": 1},
    ],
    ids=["plain", "more values than hidden rows", "fc_norm", "one key head"],
)
def test_a_linear_rule_is_found_and_holds_on_other_text(settings: dict[str, Any]) -> None:
    draft = tiny_eagle3(TARGET, **settings)
    rank = min(draft.config.num_kv_heads * draft.config.head_dim, HIDDEN)
    texts = [rule(draft, rank, seed)[0] for seed in range(2, 12)]
    calls = list[int]()

    def batches() -> list[Eagle3FitBatch]:
        calls.append(1)
        return texts

    assert fit_eagle3(draft, batches) == sum(len(text.row_N) for text in texts)
    assert len(calls) == 2
    other, want = rule(draft, rank, 99)
    with torch.no_grad():
        expected = draft.norm(want)
    error = (first_step(draft, other) - expected).norm() / expected.norm()
    assert error < 0.35, f"relative error {error:.2f}"  # small heads tell tokens apart a little


def test_normed_features_come_to_one_scale() -> None:
    """A feature that is always large, as targets have, moves as much as any other when its weights do."""
    draft = tiny_eagle3(TARGET, fc_norm=True)
    text, _ = rule(draft, 8, 2)
    fit_eagle3(draft, lambda: [text])
    with torch.no_grad():
        size = draft.features(text.aux_TA[text.row_N]).square().mean(0)
    torch.testing.assert_close(size, torch.ones_like(size), rtol=1e-3, atol=1e-3)


def test_a_row_reads_itself_and_no_other_token() -> None:
    """Another token far before a row moves its output by little, its own token by much."""
    draft = tiny_eagle3(TARGET)
    text, _ = rule(draft, 16, 2)
    fit_eagle3(draft, lambda: [text])
    before = first_step(draft, text)
    last = text.row_N[-1]

    def moved(token: int) -> float:
        ids = text.id_T.clone()
        ids[token] = (ids[token] + 100) % 288
        changed = Eagle3FitBatch(text.aux_TA, ids, text.position_T, CU, text.row_N, text.hidden_TE)
        return float((first_step(draft, changed)[-1] - before[-1]).norm())

    assert moved(int(last) + 1) > 10 * max(moved(token) for token in (152, 200, 300))


def test_without_rows_nothing_changes() -> None:
    draft = tiny_eagle3(TARGET)
    text, _ = rule(draft, 8, 2)
    empty = Eagle3FitBatch(text.aux_TA, text.id_T, text.position_T, CU, text.row_N[:0], text.hidden_TE)
    nothing: Callable[[], list[Eagle3FitBatch]] = list
    before = {name: weight.clone() for name, weight in draft.state_dict().items()}
    assert fit_eagle3(draft, nothing) == 0 and fit_eagle3(draft, lambda: [empty]) == 0
    assert all(torch.equal(weight, before[name]) for name, weight in draft.state_dict().items())


def test_the_same_text_gives_the_same_bits_whatever_was_drawn_before() -> None:
    drafts = [tiny_eagle3(TARGET) for _ in range(2)]
    for seed, draft in enumerate(drafts):
        text, _ = rule(draft, 8, 2)
        torch.manual_seed(seed)
        fit_eagle3(draft, lambda text=text: [text])  # type: ignore[misc]
    one, other = (draft.state_dict() for draft in drafts)
    assert all(torch.equal(one[name], other[name]) for name in one)
