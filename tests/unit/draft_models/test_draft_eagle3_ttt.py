"""The training-time test equals an explicit decode loop from every row, sparse rows equal dense ones, gradients included."""

from itertools import pairwise
from typing import Any

import pytest
import torch
from tiny import tiny_eagle3, tiny_target

from longdraft.draft_models.eagle3 import Eagle3Draft
from longdraft.draft_models.eagle3_ttt import forward_ttt, reference_ttt

TARGET = tiny_target("llama", num_hidden_layers=5)
CU, STEPS = [0, 9, 11, 12, 24], 4
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {"draft_vocab_size": 40},
    "window": {"window": 5},
    "window of fewer keys than steps": {"window": 2, "sinks": 3},
    "window and sinks": {"window": 4, "sinks": 2, "fc_norm": True, "norm_output": True},
    "one key head": {"num_kv_heads": 1, "rope": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8}},
}  # fmt: skip


def sample(dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Features, ids, positions of the packed documents; one of them jumps, as Anchor-Offset positions do."""
    torch.manual_seed(5)
    position = torch.cat([torch.arange(b - a) for a, b in pairwise(CU)])
    position[16:24] += 3
    return torch.randn(24, 192, dtype=dtype), torch.randint(288, (24,)), position


def double(name: str) -> Eagle3Draft:
    draft = tiny_eagle3(TARGET, **SETTINGS[name]).double()
    return draft.bind(TARGET.embedding_VE.double())


def loss(draft: Eagle3Draft, normed: torch.Tensor, step: int, row: torch.Tensor) -> torch.Tensor:
    """Some function of the logits that differs by row and step."""
    return (draft.draft_logits(normed).square().mean(-1) * torch.sin(row + 3.0 * step + 1)).sum()


def gradients(draft: Eagle3Draft, total: torch.Tensor, *more: torch.Tensor) -> dict[str, torch.Tensor]:
    named = dict(draft.named_parameters())
    return dict(zip([*named, "aux"], torch.autograd.grad(total, [*named.values(), *more]), strict=True))


@pytest.mark.parametrize("name", SETTINGS)
def test_every_row_and_step_is_the_decode_loops(name: str) -> None:
    draft = double(name)
    aux, ids, position = sample()
    aux.requires_grad_()
    rows = torch.arange(24)
    expected = torch.cat(
        [reference_ttt(draft, aux[a:b], ids[a:b], position[a:b], STEPS) for a, b in pairwise(CU)], dim=1
    )
    want, have = aux.new_zeros(()), aux.new_zeros(())
    for out in forward_ttt(draft, aux, ids, position, CU, rows, STEPS):
        exists = ~expected[out.step].isnan().any(-1)
        assert torch.equal(out.valid_N, exists)
        torch.testing.assert_close(out.normed_NE[exists], expected[out.step][exists], rtol=1e-9, atol=1e-9)
        assert torch.equal(out.teacher_N[exists], rows[exists] + 1 + out.step)
        want = want + loss(draft, expected[out.step][exists], out.step, rows[exists])
        have = have + loss(draft, out.normed_NE[out.valid_N], out.step, rows[exists])
    theirs, ours = gradients(draft, want, aux), gradients(draft, have, aux)
    for key, value in theirs.items():
        assert value.abs().max() > 0, f"{key} takes part"
        torch.testing.assert_close(ours[key], value, rtol=1e-8, atol=1e-10, msg=lambda text, key=key: f"{key}: {text}")


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("chosen", [[5, 6, 7], [0, 7, 9, 12, 13, 20, 23], [22]], ids=["span", "scattered", "one"])
def test_sparse_rows_are_the_dense_ones(name: str, chosen: list[int]) -> None:
    draft, (aux, ids, position) = double(name), sample()
    aux.requires_grad_()
    rows, everything = torch.tensor(chosen), torch.arange(24)
    sparse, dense = aux.new_zeros(()), aux.new_zeros(())
    pair = (forward_ttt(draft, aux, ids, position, CU, r, STEPS) for r in (rows, everything))
    for few, all_rows in zip(*pair, strict=True):
        torch.testing.assert_close(few.normed_NE, all_rows.normed_NE[rows], rtol=1e-10, atol=1e-10)
        assert torch.equal(few.valid_N, all_rows.valid_N[rows])
        assert torch.equal(few.teacher_N, all_rows.teacher_N[rows])
        kept = few.valid_N
        sparse = sparse + loss(draft, few.normed_NE[kept], few.step, rows[kept])
        dense = dense + loss(draft, all_rows.normed_NE[rows[kept]], few.step, rows[kept])
    theirs, ours = gradients(draft, dense, aux), gradients(draft, sparse, aux)
    for key, value in theirs.items():
        torch.testing.assert_close(ours[key], value, rtol=1e-8, atol=1e-10, msg=lambda text, key=key: f"{key}: {text}")


def test_recomputing_changes_no_bit() -> None:
    draft, (aux, ids, position) = double("window and sinks"), sample()
    found = []
    for recompute in (True, False):
        total = aux.new_zeros(())
        for out in forward_ttt(draft, aux, ids, position, CU, torch.arange(24), STEPS, recompute):
            total = total + out.normed_NE[out.valid_N].sum()
        found.append(torch.autograd.grad(total, list(draft.parameters())[:-1], allow_unused=True))
    for one, other in zip(*found, strict=True):
        assert (one is None and other is None) or torch.equal(one, other)


def test_what_is_kept_for_the_backward_pass_grows_with_the_rows_not_their_square() -> None:
    """Bytes that autograd holds, twice the length: about twice the bytes."""
    draft = tiny_eagle3(TARGET, draft_vocab_size=8)

    def kept(length: int) -> int:
        seen = dict[int, int]()

        def pack(x: torch.Tensor) -> torch.Tensor:
            seen[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
            return x

        ids, aux = torch.randint(288, (length,)), torch.randn(length, 192)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            held = list(forward_ttt(draft, aux, ids, torch.arange(length), [0, length], torch.arange(length), 3))
        del held
        return sum(seen.values())

    fixed = sum(p.numel() * 4 for p in draft.parameters()) + TARGET.embedding_VE.numel() * 4
    assert kept(1024) - fixed < 2.2 * (kept(512) - fixed)


def test_memory_is_kept_for_few_rows_only() -> None:
    """The steps' own tensors have the supervised rows alone."""
    draft, length = tiny_eagle3(TARGET), 400
    shapes = set[int]()
    draft.midlayer.mlp.register_forward_pre_hook(lambda _, args: shapes.add(len(args[0])))
    ids, rows = torch.randint(288, (length,)), torch.arange(390, 400)
    for out in forward_ttt(draft, torch.randn(length, 192), ids, torch.arange(length), [0, length], rows, 3):
        assert len(out.normed_NE) == 10
    assert shapes == {10}
