"""The serving step of a LongSpec draft against the module: packed weights, rings read through page lists, kept tokens (D2)."""

from pathlib import Path
from typing import Any

import pytest
import torch
from chain_case import LENGTHS, SETTINGS, STEPS, TARGETS, WINDOW, Chains, make
from tiny import tiny_draft, tiny_target

from longdraft.draft_models.checkpoint import load_draft, save_draft
from longdraft.draft_models.fused_step import FusedStep
from longdraft.draft_models.packed_weights import packed

EXACT = {"rtol": 1e-9, "atol": 1e-10}  # float64: sums in another order and nothing else


@pytest.mark.parametrize(("family", "settings"), SETTINGS, ids=str)
@torch.no_grad()
def test_a_chain_is_the_modules_chain(family: str, settings: dict[str, Any]) -> None:
    """Logits of every step, tokens, and what the rings hold behind it, the last token included."""
    draft = make(family, settings, torch.float64)
    want, got = Chains(draft), Chains(draft)
    assert torch.equal(want.run(None), got.run(FusedStep(draft)))
    for a, b in zip(got.logits, want.logits, strict=True):
        torch.testing.assert_close(a, b, **EXACT)
    assert torch.equal(got.state.position, want.state.position)
    torch.testing.assert_close(got.state.k, want.state.k, **EXACT)
    torch.testing.assert_close(got.state.v, want.state.v, **EXACT)


@pytest.mark.parametrize("keep_last", [True, False])
def test_the_last_token_is_kept_where_that_is_asked_for(keep_last: bool) -> None:
    draft = make("llama", {}, torch.float64)
    for fused in (None, FusedStep(draft)):
        chains = Chains(draft)
        chains.run(fused, keep_last)
        newest = chains.state.position.amax(1)[chains.row_B]
        assert newest.tolist() == [length + STEPS - (not keep_last) for length in LENGTHS]


@pytest.mark.parametrize(("family", "settings"), SETTINGS, ids=str)
@pytest.mark.parametrize("lag", [1, 3])
@torch.no_grad()
def test_a_step_takes_any_attention_as_forward_does(family: str, settings: dict[str, Any], lag: int) -> None:
    """Trees bring their own: it gets rotated queries, keys and values."""
    draft = make(family, settings, torch.float64)
    fused = FusedStep(draft)
    ids, at = torch.tensor([3, 200, 3, 7]), torch.tensor([0, 12000, 5, 5])
    g, size = torch.Generator().manual_seed(1), draft.config.target.head_dim
    cross = torch.randn(2 * [draft.config.cross_heads * size], generator=g, dtype=torch.float64)
    newest = None
    if draft.newest is not None:
        keys, values = torch.randn(2, 4, 2 * draft.config.target.num_kv_heads, size, generator=g)
        newest = draft.read_newest(keys, values, at - 1)

    def self_attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        group = q.shape[1] // k.shape[1]
        return q.cos() * k.repeat_interleave(group, 1) + v.repeat_interleave(group, 1)

    def cross_attend(q: torch.Tensor) -> torch.Tensor:
        return (q.flatten(1) @ cross).view_as(q)

    args = ids, at, self_attend, cross_attend, newest, lag
    torch.testing.assert_close(fused(*args), draft(*args), **EXACT)


def test_another_activation_is_the_modules() -> None:
    target = tiny_target("llama", num_hidden_layers=4, hidden_act="gelu")
    draft = tiny_draft(target, window=WINDOW).double()
    draft.bind(target.embedding_VE, target.head_VE)
    want, got = Chains(draft), Chains(draft)
    assert torch.equal(want.run(None), got.run(FusedStep(draft)))
    torch.testing.assert_close(torch.stack(got.logits), torch.stack(want.logits), **EXACT)


def test_packed_parameters_are_views_of_one_matrix_and_stay_parameters() -> None:
    draft = make("qwen3", {"qkv_bias": True}, torch.float32)
    before = {name: p.detach().clone() for name, p in draft.named_parameters()}
    fused = FusedStep(draft)
    assert draft.state_dict().keys() >= before.keys()
    for name, p in draft.named_parameters():
        assert torch.equal(p, before[name]) and p.requires_grad
    attn = draft.self_attn
    with torch.no_grad():
        attn.k_proj.weight[1, 2] = 77.0
        attn.v_proj.bias[3] = 88.0
    q = attn.q_proj.out_features
    assert fused.qkv_CE[q + 1, 2] == 77 and fused.qkv_bias_C is not None
    assert fused.qkv_bias_C[q + attn.k_proj.out_features + 3] == 88
    assert draft.mlp.up_proj.weight.untyped_storage().nbytes() == fused.gate_up.nbytes, "nothing is held twice"
    again = FusedStep(draft)
    assert again.qkv_CE.data_ptr() == fused.qkv_CE.data_ptr(), "and nothing is packed twice"


def test_layers_that_only_lie_side_by_side_are_not_taken_for_packed() -> None:
    """Storages of their own, or the wrong order."""
    one, two = torch.nn.Linear(4, 3, bias=False), torch.nn.Linear(4, 2, bias=False)
    want = torch.cat([one.weight, two.weight]).detach()
    assert torch.equal(packed(one, two)[0], want)
    turned, _ = packed(two, one)
    assert torch.equal(turned, torch.cat([two.weight, one.weight]).detach())
    assert torch.equal(turned, torch.cat([want[3:], want[:3]]))


def test_a_packed_draft_is_stored_and_loaded_as_any_other(tmp_path: Path) -> None:
    draft = make("llama", {}, torch.float32)
    FusedStep(draft)
    save_draft(draft, tmp_path, "tiny")
    loaded = load_draft(tmp_path, TARGETS["llama"].spec)
    for (name, a), (_, b) in zip(draft.named_parameters(), loaded.named_parameters(), strict=True):
        assert torch.equal(a, b), name


def test_the_module_serves_where_there_is_no_card() -> None:
    assert FusedStep.of(make("llama", {}, torch.float32)) is None
