"""The target over documents side by side: what each document alone gives, for every family, and nothing left behind."""

import itertools
from typing import Any

import pytest
import torch
from flash_stand_in import flash_in_torch
from tiny import tiny_target
from transformers import AutoModelForCausalLM, MistralConfig, Qwen2MoeConfig, Qwen3MoeConfig

from longdraft.train import packed_target
from longdraft.train.config import TargetSettings
from longdraft.train.packed_target import can_pack, packed_attention, spans
from longdraft.train.positions import anchor_offset_positions
from longdraft.train.target import Capture, FrozenTarget, load_target

LENGTHS = [9, 1, 30, 0, 28, 2]
CU = [0, *itertools.accumulate(LENGTHS)]
AUX = (0, 1, 2)


def ids_of(length: int) -> torch.Tensor:
    return torch.randint(0, 256, (length,), generator=torch.Generator().manual_seed(0))


def positions() -> torch.Tensor:
    return torch.cat([anchor_offset_positions(n, 2, 500, n) for n in LENGTHS])


def alone(target: FrozenTarget, ids: torch.Tensor, position: torch.Tensor, cu: list[int]) -> dict[str, torch.Tensor]:
    """Every document on its own through transformers' attention."""
    plain = FrozenTarget(target.model, target.name, packed=False)
    assert not plain.packed
    parts = [
        plain.capture(ids[a:b], position[a:b], [0, b - a], hidden=True, aux=AUX).tensors
        for a, b in itertools.pairwise(cu)
    ]
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def check(seen: Capture, want: dict[str, torch.Tensor], share: float = 1e-6) -> None:
    assert seen.tensors.keys() == want.keys() == {"k", "v", "hidden", "aux"}
    for name, rows in want.items():
        assert seen.tensors[name].is_contiguous()
        scale = float(rows.abs().max().clamp_min(1))
        assert float((seen.tensors[name] - rows).abs().max()) <= share * scale, name


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_documents_side_by_side_give_what_each_alone_gives(family: str, tied: bool) -> None:
    """In float32 within 1e-6 of the largest figure, behind anchors and offsets, short and empty documents among them."""
    target = tiny_target(family, num_hidden_layers=3, tie_word_embeddings=tied)
    assert target.packed
    ids, position = ids_of(CU[-1]), positions()
    check(target.capture(ids, position, CU, hidden=True, aux=AUX), alone(target, ids, position, CU))
    assert target.model.config._attn_implementation == "sdpa", "generation goes on with what it had"


@pytest.mark.parametrize("limit", [1, 12, 40, 69])
def test_passes_of_any_size_give_the_same(limit: int) -> None:
    target = tiny_target("llama", num_hidden_layers=3)
    target.max_batch_tokens = limit
    ids, position = ids_of(CU[-1]), positions()
    check(target.capture(ids, position, CU, hidden=True, aux=AUX), alone(target, ids, position, CU))
    assert target.passes(CU) == {1: 5, 12: 4, 40: 2, 69: 2}[limit]


def test_a_sliding_layer_sees_its_window() -> None:
    """Of Qwen2 the first layers may slide; the last one, which a draft reads, may not."""
    kinds = ["sliding_attention", "sliding_attention", "full_attention"]
    changes: dict[str, Any] = {"use_sliding_window": True, "sliding_window": 5, "layer_types": kinds}
    target = tiny_target("qwen2", num_hidden_layers=3, **changes)
    ids, position = ids_of(CU[-1]), positions()
    want = alone(target, ids, position, CU)
    check(target.capture(ids, position, CU, hidden=True, aux=AUX), want)
    full = tiny_target("qwen2", num_hidden_layers=3)
    assert not torch.allclose(full.capture(ids, position, CU).k_TKD, want["k"], atol=1e-3), "the window shows"


@pytest.mark.parametrize(
    ("kind", "own"),
    [
        (MistralConfig, {"sliding_window": None}),
        (Qwen2MoeConfig, {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}),
        (Qwen3MoeConfig, {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 16}),
    ],
)
def test_the_other_families_pack_too(kind: Any, own: dict[str, Any]) -> None:
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
    torch.manual_seed(0)
    config = kind(vocab_size=256, num_hidden_layers=3, initializer_range=0.08, **shape, **own)
    target = FrozenTarget(AutoModelForCausalLM.from_config(config, dtype=torch.float32), "t")
    assert target.packed
    ids, position = ids_of(CU[-1]), positions()
    # Experts multiply the rows that came to them, so a row's sums are made in another order beside other documents.
    check(target.capture(ids, position, CU, hidden=True, aux=AUX), alone(target, ids, position, CU), 5e-6)


def test_all_layers_take_one_kernel_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """The path of a GPU in 16 bit, over torch's twin in the place of FlashAttention's."""
    target = tiny_target("qwen3", num_hidden_layers=3)
    ids, position = ids_of(CU[-1]), positions()
    want = alone(target, ids, position, CU)
    twin = flash_in_torch(monkeypatch)
    check(target.capture(ids, position, CU, hidden=True, aux=AUX), want)
    assert twin.given == [([0, 9, 10, 40, 68, 70], 30, None)] * 3


def test_no_documents_give_no_rows() -> None:
    nothing = torch.zeros(0, dtype=torch.int64)
    for cu in ([0], [0, 0]):
        seen = tiny_target().capture(nothing, nothing, cu, hidden=True, aux=(0,)).tensors
        assert {name: tuple(rows.shape) for name, rows in seen.items()} == {
            "k": (0, 2, 16),
            "v": (0, 2, 16),
            "hidden": (0, 64),
            "aux": (0, 64),
        }


def test_the_name_is_in_force_for_the_pass_alone() -> None:
    """Also of a pass that fails."""
    target = tiny_target()
    config = target.model.config
    with packed_attention(target.model):
        assert config._attn_implementation == packed_target.NAME
    with pytest.raises(IndexError):
        target.capture(torch.tensor([1, 1 << 20]), torch.arange(2), [0, 2])
    assert config._attn_implementation == "sdpa"


def test_an_attention_of_the_users_choice_runs_padded() -> None:
    device = torch.device("cpu")
    auto, sdpa, eager = (
        load_target(TargetSettings(path="tiny-random:llama", **own), device)
        for own in ({}, {"attn": "sdpa"}, {"attn": "eager"})
    )
    assert [t.packed for t in (auto, sdpa, eager)] == [True, False, False]
    assert [t.model.config._attn_implementation for t in (auto, sdpa, eager)] == ["sdpa", "sdpa", "eager"]
    ids, position = ids_of(CU[-1]), positions()
    packed, *padded = (t.capture(ids, position, CU, hidden=True, aux=(0, 1)) for t in (auto, sdpa, eager))
    for seen in padded:
        for name, rows in packed.tensors.items():
            torch.testing.assert_close(seen.tensors[name], rows, rtol=1e-4, atol=1e-4)


def test_code_that_came_with_the_weights_runs_padded() -> None:
    model = tiny_target().model

    class Own(type(model)):  # type: ignore[misc]
        pass

    assert can_pack(model)
    model.__class__ = Own
    assert not can_pack(model)


def test_spans_end_where_documents_end() -> None:
    assert spans([0, 5, 5, 105, 205, 210], 110) == [[0, 5, 5, 105], [105, 205, 210]]
    assert spans([0, 300, 310], 100) == [[0, 300], [300, 310]]
    assert spans([0, 0, 4], 100) == [[0, 4]]
    assert spans([0], 9) == spans([0, 0], 9) == []
