"""Tree attention: the Triton kernels in the interpreter and as a card would get them, and the twin against float64."""

from pathlib import Path

import pytest
import torch
from built_kernel import build_for_h100, spilled_bytes
from interpreter import run_interpreted
from tree_case import check, make_tree_case, merged_reference, other_part

from longdraft.kernels import triton_merge, triton_tree
from longdraft.kernels.tree_attention import tree_attention
from longdraft.kernels.tree_bits import WORD

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def test_the_triton_kernels_in_the_interpreter() -> None:
    run_interpreted("tree_attention_cases.py")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("masks", ["trees", "any"])
def test_the_twin_equals_float64(masks: str, dtype: torch.dtype) -> None:
    """A1, A3, A7: more keys than a word has bits, empty requests, rows that read nothing."""
    case = make_tree_case([3, 0, 70, 1], heads=6, dtype=dtype, masks=masks)
    args = case.q, case.k, case.v, case.plan, case.scale, case.bits
    check(tree_attention(*args), case.expected(), dtype)
    onto = other_part(case)
    check(tree_attention(*args, onto=onto), merged_reference(case.expected(), onto), dtype)


def test_the_rows_of_one_depth_read_the_tree_so_far() -> None:
    """Fewer rows than keys, as a draft has them; the same rows among all of the tree's give the same."""
    case = make_tree_case([20])
    depth = torch.tensor([7, 11, 12, 19])
    few = make_tree_case([4], keys=[20], masks="any")
    few.q, few.k, few.v, few.masks = case.q[depth], case.k, case.v, [case.masks[0][depth]]
    got = tree_attention(few.q, few.k, few.v, few.plan, few.scale, few.bits, few.cu_keys_B1)
    whole = tree_attention(case.q, case.k, case.v, case.plan, case.scale, case.bits)
    for a, b in zip(got, whole, strict=True):
        torch.testing.assert_close(a, b[depth])


def test_float64_stays_float64() -> None:
    case = make_tree_case([6], dtype=torch.float64)
    out, lse = tree_attention(case.q, case.k, case.v, case.plan, case.scale, case.bits)
    torch.testing.assert_close((out, lse), case.expected())


@pytest.mark.parametrize("bits", [True, False], ids=["bits", "chain"])
@pytest.mark.parametrize(
    ("size", "number", "batch", "rows"),
    [(128, "bf16", 16, 69), (128, "bf16", 1, 69), (64, "fp16", 16, 6), (256, "bf16", 16, 69), (128, "fp32", 16, 69)],
)
def test_built_for_an_h100_nothing_spills_and_the_loop_reads_ahead(
    size: int, number: str, batch: int, rows: int, bits: bool, tmp_path: Path
) -> None:
    packed, element = rows * 4, 4 if number == "fp32" else 2
    rows_M, keys_N = triton_tree.tile_for(batch * 8, packed, size, element, 132)
    fixed = {"KV_HEADS": 8, "GROUP": 4, "SIZE": size, "D": size, "BITS": bits, "ONTO": True, "WORD": WORD}
    kinds = {f"{name}_ptr": f"*{number}" for name in ("q", "k", "v", "part", "out")}
    kinds |= dict.fromkeys(("cu_rows_ptr", "cu_keys_ptr"), "*i32") | dict.fromkeys(("part_lse_ptr", "lse_ptr"), "*fp32")
    kinds |= {"bits_ptr": "*i64" if bits else "*i32", "scale": "fp32"}
    odd = {"bits_row", "part_lse_row", "part_lse_head"}
    built = build_for_h100(triton_tree._tree_kernel, fixed | {"M": rows_M, "N": keys_N}, kinds, odd, num_warps=4, num_stages=2)  # fmt: skip
    assert built.asm["ttgir"].count("async_copy_global_to_local") >= 2, "keys and values are copied past the registers"
    assert spilled_bytes(built, tmp_path) == 0
    assert 2 * built.metadata.shared <= 227 << 10, "two programs a multiprocessor"


@pytest.mark.parametrize(("parts", "size"), [(2, 128), (4, 96)])
def test_built_for_an_h100_a_merge_reads_in_vectors(parts: int, size: int, tmp_path: Path) -> None:
    wide = 128
    fixed = {"PARTS": parts, "SIZE": size, "M": triton_merge.ELEMENTS // wide, "D": wide}
    kinds = {"out_ptr": "*bf16", "into_ptr": "*bf16", "lse_ptr": "*fp32", "into_lse_ptr": "*fp32"}
    odd = {"count", "heads", "lse_part", "lse_row", "lse_head"}
    built = build_for_h100(triton_merge._merge_kernel, fixed, kinds, odd, num_warps=4)
    assert built.asm["ptx"].count("ld.global.v4") >= parts
    assert spilled_bytes(built, tmp_path) == 0
