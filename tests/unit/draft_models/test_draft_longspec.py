"""The draft module: what it owns, what it borrows, and what each option adds (D9)."""

import pytest
import torch
from tiny import tiny_draft, tiny_target

from longdraft.draft_models.longspec import LongSpecDraft
from longdraft.train.target import FrozenTarget

LINEARS = [
    f"{block}.{name}.weight"
    for block, names in (
        ("self_attn", ("q_proj", "k_proj", "v_proj", "o_proj")),
        ("cross_attn", ("q_proj", "o_proj")),
        ("mlp", ("gate_proj", "up_proj", "down_proj")),
    )
    for name in names
]
NORMS = ["self_norm.weight", "cross_norm.weight", "mlp_norm.weight"]


def run(draft: LongSpecDraft, target: FrozenTarget, lag: int = 1) -> torch.Tensor:
    ids = torch.arange(20, 32)
    seen = target.capture(ids, torch.arange(12), [0, 12])
    return draft.forward_packed(ids, torch.arange(12), seen.k_TKD, seen.v_TKD, [0, 12], lag)


def test_a_checkpoint_holds_the_drafts_weights_and_none_of_the_targets() -> None:
    """Cross-attention has no key and value weights: it reads the target's cache as it is."""
    target = tiny_target("llama")
    assert sorted(tiny_draft(target).state_dict()) == sorted(LINEARS + NORMS)
    sizes = {tuple(w.shape) for w in tiny_draft(target).parameters()}
    assert (target.spec.vocab_size, target.spec.hidden_size) not in sizes


@pytest.mark.parametrize(
    ("settings", "added"),
    [
        ({"final_norm": True}, ["final_norm.weight"]),
        ({"cross_q_norm": True}, ["cross_attn.q_norm.weight"]),
        (
            {"qkv_bias": True},
            ["self_attn.q_proj.bias", "self_attn.k_proj.bias", "self_attn.v_proj.bias", "cross_attn.q_proj.bias"],
        ),
    ],
    ids=["final_norm", "cross_q_norm", "qkv_bias"],
)
def test_an_option_adds_its_weights_and_changes_the_output(settings: dict[str, bool], added: list[str]) -> None:
    target = tiny_target("llama")
    plain, changed = tiny_draft(target), tiny_draft(target, **settings)
    assert sorted(changed.state_dict().keys() - plain.state_dict().keys()) == sorted(added)
    changed.load_state_dict(plain.state_dict(), strict=False)
    assert not torch.allclose(run(plain, target), run(changed, target), atol=1e-3)


@pytest.mark.parametrize(("family", "normed"), [("llama", False), ("qwen2", False), ("qwen3", True)])
def test_cross_queries_are_normed_as_the_target_norms_its_own(family: str, normed: bool) -> None:
    target = tiny_target(family)
    assert (tiny_draft(target).cross_attn.q_norm is not None) is normed
    assert tiny_draft(target, cross_q_norm=not normed).config.cross_q_norm is not normed


def test_with_final_norm_hidden_rows_are_normed_before_the_head() -> None:
    target = tiny_target("llama")
    draft = tiny_draft(target, final_norm=True)
    assert draft.final_norm is not None
    torch.nn.init.ones_(draft.final_norm.weight)
    hidden = run(draft, target)
    torch.testing.assert_close(hidden.square().mean(-1), torch.ones(12), rtol=1e-3, atol=1e-3)


def test_embedding_and_head_are_borrowed_without_gradient() -> None:
    """D9: no parameter of the target is reachable from the draft's, not even through a loss."""
    target = tiny_target("llama")
    draft = tiny_draft(target)
    lent = [p for p in target.model.parameters() if p.dim() == 2]
    assert not {id(p) for p in draft.parameters()} & {id(p) for p in lent}
    draft.logits(run(draft, target)).square().sum().backward()
    assert all(p.grad is None for p in target.model.parameters())
    assert all(p.grad is not None for p in draft.parameters()), "every weight of the draft takes part"


def test_binding_the_wrong_sizes_is_refused() -> None:
    target = tiny_target("llama")
    draft = tiny_draft(target)
    good = torch.zeros(288, 64)
    for embedding, head, name in ((torch.zeros(288, 65), good, "embedding"), (good, torch.zeros(287, 64), "head")):
        with pytest.raises(ValueError, match=rf"{name} is .* the draft's target has \(288, 64\)"):
            draft.bind(embedding, head)


def test_a_padded_head_never_scores_ids_past_the_vocabulary() -> None:
    """Servers pad the vocabulary; a drafted id past it would be no token."""
    target = tiny_target("llama")
    draft = tiny_draft(target)
    hidden = run(draft, target)
    before = draft.logits(hidden)
    padded = torch.cat([target.head_VE, torch.full((8, 64), 100.0)])
    draft.bind(torch.cat([target.embedding_VE, torch.full((8, 64), 100.0)]), padded)
    assert torch.equal(draft.logits(hidden), before)


def test_an_unbound_draft_says_so() -> None:
    draft = LongSpecDraft(tiny_draft(tiny_target("llama")).config)
    with pytest.raises(AssertionError, match="bind"):
        draft.embed(torch.tensor([1]))
    with pytest.raises(AssertionError, match="bind"):
        draft.logits(torch.zeros(1, 64))


def test_keys_and_values_depend_on_token_and_position_alone() -> None:
    """The state that serving rebuilds: no context enters it."""
    target = tiny_target("qwen2")
    draft = tiny_draft(target, qkv_bias=True)
    k, v = draft.self_kv(torch.tensor([5, 9, 5]), torch.tensor([3, 4, 3]))
    assert torch.equal(k[0], k[2])
    assert torch.equal(v[0], v[2])
    k2, v2 = draft.self_kv(torch.tensor([5]), torch.tensor([8]))
    assert not torch.allclose(k[0], k2[0])
    torch.testing.assert_close(v[0], v2[0])
