"""The draft step's small kernels: twins against torch's modules, Triton kernels in the interpreter."""

import pytest
import torch
from interpreter import run_interpreted
from torch import nn
from torch.nn import functional as F

from longdraft.kernels.rotate import Into, rotate, rotate_heads
from longdraft.kernels.row_ops import add_norm, embed_norm, gated_silu


def test_the_triton_kernels_in_the_interpreter() -> None:
    run_interpreted("draft_step_cases.py")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_twins_are_the_modules_operations(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    norm = nn.RMSNorm(24, eps=1e-3, dtype=dtype)
    nn.init.normal_(norm.weight)
    table, ids = torch.randn(7, 24, dtype=dtype), torch.tensor([6, 0, 6])
    with torch.no_grad():
        h, x = embed_norm(ids, table, norm.weight, 1e-3)
        assert torch.equal(h, table[ids]) and torch.equal(x, norm(h))
        more, before, kept = torch.randn(3, 24, dtype=dtype), h.clone(), table.clone()
        assert torch.equal(add_norm(more, h, norm.weight, 1e-3), norm(before + more))
        assert torch.equal(h, before + more) and torch.equal(table, kept), "the stream changes, the table does not"
    gate, up = torch.randn(2, 3, 10, dtype=dtype)
    torch.testing.assert_close(gated_silu(torch.cat([gate, up], 1)), F.silu(gate) * up)


def test_keys_and_values_go_to_their_slots_and_nowhere_else() -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 7, 6)
    cos, sin = torch.randn(2, 2, 3)
    k, v = torch.full((2, 5, 2, 6), 9.0)
    q = rotate_heads(x.flatten(1), cos, sin, Into(k, v, torch.tensor([4, 1])))
    turned = rotate(x, cos, sin)
    assert torch.equal(q, turned[:, :3])
    assert torch.equal(k[[4, 1]], turned[:, 3:5]) and torch.equal(v[[4, 1]], x[:, 5:])
    assert (k[[0, 2, 3]] == 9).all() and (v[[0, 2, 3]] == 9).all()
    a, b = x[1, 2, 1], x[1, 2, 4]  # the second pair of a head of six
    assert q[1, 2, 4] == b * cos[1, 1] + a * sin[1, 1]
