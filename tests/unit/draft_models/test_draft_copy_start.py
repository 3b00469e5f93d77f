"""Cross-attention that starts as the target's own."""

from functools import partial

import pytest
import torch
from tiny import tiny_draft, tiny_target

from longdraft.draft_models.copy_start import CopyBatch, chosen_heads, copy_shares, fit_queries
from longdraft.draft_models.initialise import fit_cross_output
from longdraft.draft_models.longspec import LongSpecDraft
from longdraft.draft_models.rope import Rotary
from longdraft.train.induction import copy_share
from longdraft.train.target import FrozenTarget

LAYERS, LENGTH = [0, 2], 60


def batch_of(target: FrozenTarget, draft: LongSpecDraft, cu: list[int], ids: torch.Tensor) -> CopyBatch:
    position = torch.cat([torch.arange(b - a) for a, b in zip(cu, cu[1:], strict=False)])
    seen = target.capture(ids, position, cu, hidden=True, kv_layers=LAYERS, q_layers=LAYERS)
    assert seen.hidden_TE is not None
    run = partial(draft.forward_packed, ids, position, seen.k_TKD, seen.v_TKD, cu, 1)
    return CopyBatch(run, ids, position, cu, seen.q_THD, seen.k_TKD, seen.hidden_TE, torch.arange(len(ids) - 1))


def drawn(length: int) -> torch.Tensor:
    return torch.randint(0, 256, (length,), generator=torch.Generator().manual_seed(length))


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@torch.no_grad()
def test_captured_queries_attend_as_the_target_does(family: str) -> None:
    """Rotated where they stand, over the captured keys: the probabilities that the target gives away itself."""
    target = tiny_target(family, num_hidden_layers=3)
    ids, position = drawn(LENGTH), torch.arange(LENGTH)
    seen = target.capture(ids, position, [0, LENGTH], kv_layers=LAYERS, q_layers=LAYERS)
    target.model.set_attn_implementation("eager")
    want = target.model(ids[None], output_attentions=True).attentions
    rotary, groups = Rotary(target.spec), target.spec.num_heads // target.spec.num_kv_heads
    q, k = rotary(seen.q_THD, position), seen.k_TKD.repeat_interleave(groups, 1)
    scores = torch.einsum("qhd,khd->hqk", q, k) * target.spec.head_dim**-0.5
    got = scores.masked_fill(position[None] > position[:, None], float("-inf")).softmax(-1)
    torch.testing.assert_close(got, torch.cat([want[i][0] for i in LAYERS]), rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_shares_are_those_that_the_command_measures() -> None:
    target = tiny_target("llama", num_hidden_layers=3)
    ids = drawn(24).repeat(4)  # a text that repeats itself has something to find
    batch = batch_of(target, tiny_draft(target, cross_layers=LAYERS), [0, len(ids)], ids)
    got = copy_shares([batch], target.head_VE, Rotary(target.spec), 1)
    target.model.set_attn_implementation("eager")
    want = copy_share(target.model, ids, len(ids) // 2)[LAYERS].flatten()
    torch.testing.assert_close(got, want)
    assert want.max() > 0


def test_documents_too_short_to_look_back_are_not_counted() -> None:
    target = tiny_target("llama", num_hidden_layers=3)
    batch = batch_of(target, tiny_draft(target, cross_layers=LAYERS), [0, 3, 6], drawn(6))
    assert not copy_shares([batch], target.head_VE, Rotary(target.spec), 1).numel()


def test_of_each_key_head_the_best_query_heads_are_chosen() -> None:
    share = torch.tensor([0.1, 0.5, 0.3, 0.2, 0.2, 0.9])
    assert chosen_heads(share, 3, 1).tolist() == [1, 5]
    assert sorted(chosen_heads(share, 3, 2).tolist()[:2]) == [1, 2]
    assert chosen_heads(share, 3, 3).tolist() == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("options", [{}, {"newest_lags": 2}, {"newest_lags": 2, "qkv_bias": True}])
@torch.no_grad()
def test_a_fit_finds_the_queries_of_a_draft_that_made_them(options: dict[str, object]) -> None:
    target = tiny_target("llama", num_hidden_layers=3)
    maker, draft = (tiny_draft(target, seed=3, cross_layers=LAYERS, cross_group=1, **options) for _ in range(2))
    draft.cross_attn.q_proj.weight.zero_()
    made = list[torch.Tensor]()
    ids = drawn(900)
    batch = batch_of(target, draft, [0, 400, 900], ids)
    query = maker.cross_attn.query
    maker.cross_attn.query = lambda *args: made.append(query(*args)) or made[-1]  # type: ignore[method-assign,func-returns-value]
    position = batch.position_T
    seen = target.capture(ids, position, batch.cu, kv_layers=LAYERS)
    maker.forward_packed(ids, position, seen.k_TKD, seen.v_TKD, batch.cu, 1)
    own = batch._replace(q_THD=made[0])
    assert fit_queries(draft, torch.arange(draft.config.cross_heads), [own]) == 899
    got = list[torch.Tensor]()
    draft.cross_attn.q_proj.register_forward_hook(lambda _, args, out: got.append(out))
    if draft.cross_attn.newest_q_proj is not None:
        draft.cross_attn.newest_q_proj.register_forward_hook(lambda _, args, out: got.append(out))
    batch.run()
    found = torch.stack(got).sum(0)
    assert (found - made[0].flatten(1)).norm() < 0.05 * made[0].norm()


@torch.no_grad()
def test_the_output_is_fitted_to_what_the_queries_find() -> None:
    target = tiny_target("llama", num_hidden_layers=3)
    draft = tiny_draft(target, seed=3, cross_layers=LAYERS)
    batch = batch_of(target, draft, [0, 500], drawn(500))
    draft.mlp.down_proj.weight.zero_()
    draft.cross_attn.o_proj.weight.normal_(std=0.3)
    rows = batch.run()
    want = draft.cross_attn.o_proj.weight.clone()
    fit_cross_output(draft, [(batch.run, rows, torch.arange(100, 500))])
    assert (draft.cross_attn.o_proj.weight - want).norm() < 0.3 * want.norm()
    assert (batch.run() - rows)[100:].norm() < 0.1 * rows[100:].norm()
