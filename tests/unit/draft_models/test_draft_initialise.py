"""First weights from the target."""

import pytest
import torch
from tiny import tiny_draft, tiny_eagle3, tiny_target

from longdraft.draft_models.initialise import fit_to_hidden, initialise_eagle3_from_target, initialise_from_target

BLOCKS = {"self_attn", "self_norm", "mlp", "mlp_norm", "final_norm"}


@pytest.mark.parametrize(
    ("family", "settings", "blocks"),
    [
        ("llama", {}, BLOCKS - {"final_norm"}),
        ("llama", {"final_norm": True}, BLOCKS),
        ("qwen2", {"qkv_bias": True}, BLOCKS - {"final_norm"}),
        ("qwen2", {"qkv_bias": False}, BLOCKS - {"final_norm"}),
        ("llama", {"qkv_bias": True}, BLOCKS - {"final_norm"}),
        ("qwen3", {"final_norm": True}, {"mlp", "mlp_norm", "final_norm"}),
    ],
)
def test_what_is_copied(family: str, settings: dict[str, bool], blocks: set[str]) -> None:
    target = tiny_target(family)
    draft = tiny_draft(target, **settings)
    copied = initialise_from_target(draft, target.model)
    assert {name.split(".")[0] for name in copied} == blocks
    layer = target.model.model.layers[0]
    assert torch.equal(draft.mlp.down_proj.weight, layer.mlp.down_proj.weight)
    assert torch.equal(draft.self_attn.q_proj.weight, layer.self_attn.q_proj.weight) == ("self_attn" in blocks)
    assert not draft.cross_attn.o_proj.weight.any()


def test_the_drafts_hidden_rows_are_those_of_the_targets_first_layer() -> None:
    """With nothing from the cross-attention and a window over everything, the draft is that layer."""
    target = tiny_target("llama")
    draft = tiny_draft(target)
    initialise_from_target(draft, target.model)
    ids, position = torch.arange(20, 60), torch.arange(40)
    seen = target.capture(ids, position, [0, 40])
    got = draft.forward_packed(ids, position, seen.k_TKD, seen.v_TKD, [0, 40], 1)
    want = target.model.model(ids[None], output_hidden_states=True).hidden_states[1][0]
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


def test_the_targets_weights_are_copies() -> None:
    target = tiny_target("llama")
    draft = tiny_draft(target)
    initialise_from_target(draft, target.model)
    before = target.model.model.layers[0].mlp.up_proj.weight.clone()
    with torch.no_grad():
        draft.mlp.up_proj.weight.add_(1)
    assert torch.equal(target.model.model.layers[0].mlp.up_proj.weight, before)


@pytest.mark.parametrize("final_norm", [False, True])
def test_a_fit_finds_the_output_that_made_the_rows(final_norm: bool) -> None:
    """Rows of a second draft that differs in its MLP's output alone; the rows that are left out hold anything."""
    target = tiny_target("llama")
    draft, maker = (tiny_draft(target, final_norm=final_norm) for _ in range(2))
    with torch.no_grad():
        maker.mlp.down_proj.weight.normal_(std=0.3)
    ids, position = torch.randint(0, 288, (600,)), torch.arange(600)
    seen = target.capture(ids, position, [0, 600])
    inputs = (ids, position, seen.k_TKD, seen.v_TKD, [0, 600], 1)
    with torch.no_grad():
        rows = maker.forward_packed(*inputs)
        if final_norm:  # the fit aims at rows of root mean square 1 before the norm's weight: give it the unnormed ones
            assert draft.final_norm is not None and maker.final_norm is not None
            weight = maker.final_norm.weight
            maker.final_norm = None
            rows = maker.forward_packed(*inputs) * weight
    rows[:100] = 1e6
    fitted = fit_to_hidden(draft, [(lambda: draft.forward_packed(*inputs), rows, torch.arange(100, 600))])
    assert fitted == 500
    got, want = draft.mlp.down_proj.weight, maker.mlp.down_proj.weight
    assert (got - want).norm() < 0.25 * want.norm()  # ridge pulls it towards zero a little


def test_a_fit_without_rows_changes_nothing() -> None:
    draft = tiny_draft(tiny_target("llama"))
    before = draft.mlp.down_proj.weight.clone()
    assert fit_to_hidden(draft, []) == 0
    assert torch.equal(draft.mlp.down_proj.weight, before)


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_an_eagle3_draft_starts_with_the_targets_logits_for_its_tokens(family: str) -> None:
    """Also from a head that is tied to the embedding."""
    target = tiny_target(family, num_hidden_layers=4)
    draft = tiny_eagle3(target, draft_vocab_size=30)
    before = draft.fc.weight.clone()
    assert initialise_eagle3_from_target(draft, target.model) == ["norm.weight", "lm_head.weight"]
    rows = torch.randn(3, 64)
    expected = target.model.get_output_embeddings()(target.model.model.norm(rows))[:, draft.target_ids]
    torch.testing.assert_close(draft.draft_logits(draft.norm(rows)), expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(draft.fc.weight, before)
