"""The frozen target's capture: the last layer's cache as serving sees it, anchors kept, documents apart, nothing trained."""

import itertools

import pytest
import torch
from tiny import tiny_draft, tiny_model, tiny_target
from transformers import DynamicCache

from longdraft.errors import UserError
from longdraft.train.config import ObjectiveSettings, TargetSettings
from longdraft.train.objective import longspec_loss
from longdraft.train.positions import anchor_offset_positions
from longdraft.train.samples import Packed
from longdraft.train.target import FrozenTarget, load_target, load_tokenizer, padded_batches

FAMILIES = ("llama", "qwen2", "qwen3")


def ids_of(length: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 256, (length,), generator=torch.Generator().manual_seed(seed))


def capture(target: FrozenTarget, ids: torch.Tensor, position: torch.Tensor, cu: list[int]) -> tuple[torch.Tensor, ...]:
    seen = target.capture(ids, position, cu, hidden=True)
    assert seen.hidden_TE is not None
    return seen.k_TKD, seen.v_TKD, seen.hidden_TE


@pytest.mark.parametrize("family", FAMILIES)
def test_capture_is_the_last_layer_of_a_full_cache(family: str) -> None:
    target, ids = tiny_target(family, num_hidden_layers=3), ids_of(40)
    keys, values, hidden = capture(target, ids, torch.arange(40), [0, 40])
    cache = DynamicCache()
    with torch.no_grad():
        out = target.model(ids[None], past_key_values=cache, output_hidden_states=True)
    last = cache.layers[-1]
    torch.testing.assert_close(keys, last.keys[0].transpose(0, 1))
    torch.testing.assert_close(values, last.values[0].transpose(0, 1))
    torch.testing.assert_close(hidden @ target.head_VE.t(), out.logits[0])


@pytest.mark.parametrize("attn", ["packed", "sdpa", "eager"])
@pytest.mark.parametrize("family", FAMILIES)
def test_anchors_stay_visible_behind_an_offset(family: str, attn: str) -> None:
    """transformers reads a position jump as a new document unless a cache is passed; then token 0 would change nothing."""
    model = tiny_target(family).model
    if attn != "packed":
        model.set_attn_implementation(attn)
    target = FrozenTarget(model, family, packed=attn == "packed")
    ids, position = ids_of(12), torch.tensor([0, 1, *range(7, 17)])
    changed = ids.clone()
    changed[0] = (changed[0] + 1) % 256
    before, after = (capture(target, x, position, [0, 12])[2] for x in (ids, changed))
    assert ((before - after).abs().amax(-1) > 1e-3).all()
    with torch.no_grad():  # and the trap is real: without a cache the jump cuts token 0 off
        cut = [
            target.model.base_model(x[None], position_ids=position[None], use_cache=False)[0][0] for x in (ids, changed)
        ]
    assert torch.equal(cut[0][2:], cut[1][2:])


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_documents_never_see_each_other(family: str) -> None:
    target, lengths = tiny_target(family), [9, 30, 1, 28, 10]
    cu = [0, *torch.tensor(lengths).cumsum(0).tolist()]
    ids, position = ids_of(cu[-1]), torch.cat([anchor_offset_positions(n, 2, 500, n) for n in lengths])
    packed = capture(target, ids, position, cu)
    for a, b in itertools.pairwise(cu):
        alone = capture(target, ids[a:b], position[a:b], [0, b - a])
        for one, many in zip(alone, packed, strict=True):
            torch.testing.assert_close(one, many[a:b], rtol=1e-4, atol=1e-5)


def test_padded_batches_hold_every_document_once_within_the_budget() -> None:
    cu = [0, 5, 5, 105, 205, 210, 300, 1300]
    batches = padded_batches(cu, 256)
    assert sorted(d for batch in batches for d in batch) == [(a, b) for a, b in itertools.pairwise(cu) if b > a]
    for batch in batches:
        padded = len(batch) * max(b - a for a, b in batch)
        assert len(batch) == 1 or (padded <= 256 and padded <= 1.25 * sum(b - a for a, b in batch))
    assert any(len(batch) > 1 for batch in batches)


@pytest.mark.parametrize("family", ["llama", "qwen2"])
@pytest.mark.parametrize("objective", ["ce", "kl"])
def test_no_gradient_reaches_the_target_and_tied_weights_stay(family: str, objective: str) -> None:
    """Invariant D9, for separate and for tied heads."""
    target = tiny_target(family)
    draft = tiny_draft(target, window=8)
    before = {name: weight.clone() for name, weight in target.model.state_dict().items()}
    ids = ids_of(20)
    batch = Packed(ids, torch.arange(20), torch.cat([ids[1:], torch.tensor([-100])]), [0, 20], ["a"])
    optimizer = torch.optim.SGD(draft.parameters(), lr=0.1)
    for _ in range(2):
        longspec_loss(draft, target, batch, 1, ObjectiveSettings(name=objective)).loss.backward()
        assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in draft.parameters())
        optimizer.step()
    assert all(weight.grad is None for weight in target.model.parameters())
    assert all(torch.equal(before[name], weight) for name, weight in target.model.state_dict().items())
    assert torch.equal(draft.head_VE, target.head_VE)


def test_a_folder_and_memory_give_the_same_target(tmp_path) -> None:  # type: ignore[no-untyped-def]
    folder = tiny_model("qwen3", tmp_path / "q")
    loaded = load_target(TargetSettings(path=str(folder)), torch.device("cpu"))
    built = load_target(TargetSettings(path="tiny-random:qwen3"), torch.device("cpu"))
    assert loaded.spec == built.spec
    assert all(torch.equal(a, b) for a, b in zip(loaded.model.parameters(), built.model.parameters(), strict=True))
    text = "größe 12\n<|end|>"
    tokenizer = load_tokenizer(TargetSettings(path=str(folder)))
    assert tokenizer(text).input_ids == load_tokenizer(TargetSettings(path="tiny-random:qwen3"))(text).input_ids


@pytest.mark.parametrize("path", ["tiny-random:gpt", "/nowhere/at/all"])
def test_a_target_that_is_not_there_is_a_users_error(path: str) -> None:
    with pytest.raises(UserError, match=r"target\.path="):
        load_target(TargetSettings(path=path), torch.device("cpu"))
