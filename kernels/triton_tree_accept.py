# mypy: allow-untyped-defs, allow-untyped-decorators, allow-incomplete-defs
"""The acceptance of trees in Triton: one program a request, no loop over depths, since a node's ancestors are bits.

Legend: B requests, T places of a tree, W words of bits, D edges of the deepest node, D1 = D + 1. In the kernel: N places, rounded
up to a power of two.
"""

import torch
import triton
import triton.language as tl

from longdraft.kernels.tree import Tree
from longdraft.kernels.tree_bits import WORD


@triton.jit(do_not_specialize=["count"])  # a tree of another size compiles nothing
def _accept_kernel(
    token_ptr, parent_ptr, depth_ptr, bits_ptr, choice_ptr, path_ptr, kept_ptr, next_ptr, gained_ptr, count, depth,
    N: tl.constexpr, W: tl.constexpr, D1: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, N)
    there = at < count
    row = b * count
    parent = tl.load(parent_ptr + row + at, mask=there, other=-2)
    token = tl.load(token_ptr + row + at, mask=there, other=0)
    deep = tl.load(depth_ptr + row + at, mask=there, other=0)
    has_parent = parent >= 0
    wanted = tl.load(choice_ptr + row + parent, mask=has_parent, other=-1)
    missed = ~((has_parent & (token == wanted)) | (parent == -1))
    # Bits are disjoint, so their sum is their union.
    one = tl.full([N], 1, tl.int64)
    kept = parent >= -1
    for word in tl.static_range(W):
        own = tl.where(at // 64 == word, one << (at % 64).to(tl.int64), 0)
        missing = tl.sum(tl.where(missed, own, 0), 0)
        bits = tl.load(bits_ptr + (row + at) * W + word, mask=there, other=0)
        kept = kept & ((bits & missing) == 0)
    rank = tl.where(kept, deep * N + (N - 1 - at), -1)
    best = tl.maximum(tl.max(rank, 0), N - 1)  # a row without a root ends at place 0
    last = N - 1 - best % N
    reached = best // N
    bonus = tl.load(choice_ptr + row + last)
    d = tl.arange(0, D1)
    wide = depth + 1
    out = b * wide + d
    tail = (d > reached) & (d < wide)
    tl.store(path_ptr + out, tl.zeros([D1], tl.int64) + last, mask=tail)
    tl.store(gained_ptr + out, tl.zeros([D1], tl.int64) + bonus, mask=tail)
    on_path = at == last
    for word in tl.static_range(W):
        bits = tl.load(bits_ptr + (row + last) * W + word)
        on_path = on_path | ((at // 64 == word) & (((bits >> (at % 64).to(tl.int64)) & 1) == 1))
    choice = tl.load(choice_ptr + row + at, mask=on_path, other=0)
    tl.store(path_ptr + b * wide + deep, at.to(tl.int64), mask=on_path)
    tl.store(gained_ptr + b * wide + deep, choice, mask=on_path)
    tl.store(kept_ptr + b, reached.to(tl.int64))
    tl.store(next_ptr + b, bonus)


def triton_tree_accept(
    tree: Tree, choice_BT: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """:func:`longdraft.kernels.tree_accept.tree_accept` in Triton: ``(path_BD1, count_B, next_B, token_BD1)``."""
    batch, count = choice_BT.shape
    columns = tree.token_BT, tree.parent_BT, tree.depth_BT, tree.bits_BTW, choice_BT
    token, parent, deep, bits, choice = (x.contiguous() for x in columns)
    assert choice.dtype == token.dtype == parent.dtype == deep.dtype == torch.int64
    path_BD1, gained_BD1 = choice.new_empty(2, batch, tree.depth + 1)
    count_B, next_B = choice.new_empty(2, batch)
    _accept_kernel[(batch,)](
        token, parent, deep, bits, choice, path_BD1, count_B, next_B, gained_BD1, count, tree.depth,
        N=max(16, triton.next_power_of_2(count)), W=tree.bits_BTW.shape[2], D1=triton.next_power_of_2(tree.depth + 1),
        num_warps=1 if count <= 2 * WORD else 4,
    )  # fmt: skip
    return path_BD1, count_B, next_B, gained_BD1
