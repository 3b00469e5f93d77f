"""Tree attention: the Triton kernel in the interpreter, its twin against float64, and what is refused."""

import pytest
import torch
from interpreter import run_interpreted
from tree_case import check, make_tree_case, merged_reference, other_part

from longdraft.kernels.tree_attention import tree_attention

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
