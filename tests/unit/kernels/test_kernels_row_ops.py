"""The draft step's small kernels: twins against torch's modules, Triton kernels in the interpreter."""

from pathlib import Path
from typing import Any

import pytest
import torch
from built_kernel import build_for_h100, spilled_bytes
from interpreter import run_interpreted
from torch import nn
from torch.nn import functional as F

from longdraft.kernels.rotate import Into, rotate, rotate_heads
from longdraft.kernels.row_ops import add_norm, embed_norm, gated_silu
from longdraft.kernels.triton_ring_windows import _windows_kernel
from longdraft.kernels.triton_rotate import _rotate_kernel
from longdraft.kernels.triton_row_ops import _add_norm_kernel, _best_id_kernel, _embed_norm_kernel, _gated_silu_kernel


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


BUILT: list[tuple[Any, dict[str, int], dict[str, str], int]] = [
    (_embed_norm_kernel, {"SIZE": 4096, "E": 4096}, {"id_ptr": "*i64"}, 8),
    (_add_norm_kernel, {"SIZE": 4096, "E": 4096}, {}, 8),
    (_gated_silu_kernel, {"SIZE": 14336, "BLOCK": 1024}, {}, 4),
    (_best_id_kernel, {"NAMED": 1, "CHOICES": 8192}, {"id_ptr": "*i64", "out_ptr": "*i64"}, 16),
    (_best_id_kernel, {"NAMED": 0, "CHOICES": 8192}, {"logits_ptr": "*fp32", "id_ptr": "*i64", "out_ptr": "*i64"}, 16),
    (_rotate_kernel, {"HEADS": 32, "KV_HEADS": 8, "ANGLES": 64, "A": 64}, dict.fromkeys(("cos_ptr", "sin_ptr"), "*fp32") | {"slot_ptr": "*i32"}, 1),
    (_rotate_kernel, {"HEADS": 32, "KV_HEADS": 0, "ANGLES": 64, "A": 64}, dict.fromkeys(("cos_ptr", "sin_ptr"), "*fp32"), 1),
    (_windows_kernel, {"WINDOW": 512, "SIZE": 517, "W": 512}, dict.fromkeys(("row_ptr", "position_ptr", "first_ptr", "at_ptr"), "*i64") | dict.fromkeys(("pages_ptr", "lens_ptr"), "*i32"), 4),
]  # fmt: skip


@pytest.mark.parametrize(("kernel", "fixed", "kinds", "warps"), BUILT)
def test_llama_8bs_kernels_fit_an_h100(
    kernel: Any, fixed: dict[str, int], kinds: dict[str, str], warps: int, tmp_path: Path
) -> None:
    """Built without a card: no errors that the interpreter cannot see, and all in registers."""
    usual = {name: "*bf16" for name in kernel.arg_names if name.endswith("_ptr")} | {"eps": "fp32"}
    built = build_for_h100(kernel, fixed, usual | kinds, odd=set(), num_warps=warps)
    assert spilled_bytes(built, tmp_path) == 0
