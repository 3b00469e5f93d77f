# mypy: allow-untyped-defs, allow-untyped-decorators, allow-incomplete-defs
"""Our Triton kernels of sets of largest entries: a program holds a piece of a row in registers and finds its cut.

The cut is the largest number that ``count`` entries reach. Floats, read as integers whose order is theirs, have 32 bits, and a pass
over registers decides one of them; no entry is moved before all is known, nothing is sorted by value, and one running sum over the
piece gives each member its place. A row longer than one program holds is cut in pieces first, from each of which as many candidates
come as could be chosen from it alone, then in pieces of candidates.

Legend: B rows (requests), N entries of a row or, in the kernels, of a piece, R candidates that a piece gives, K entries that a set has
room for, V columns of a list.
"""

import torch
import triton
import triton.language as tl

from longdraft.kernels.top_set import LAST, PIECE

LOWEST = tl.constexpr(-2147483648)  # of what is not to be taken


@triton.jit
def _keys(x):
    """Integers in the order of the numbers; NaN and -inf are the least number, and zeros of both signs are one."""
    x = x.to(tl.float32)
    x = tl.maximum(tl.where(x == x, x, float("-inf")), -3.4028234663852886e38)
    bits = tl.where(x == 0, 0.0, x).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _members(key, count):
    """Which entries are the ``count`` largest, of equal ones the first; their places in order, their number, and the cut."""
    lowest = tl.full([], LOWEST, tl.int32)
    # Bits of the cut from the highest on, the sign first: set where enough entries still reach it.
    cut = tl.where(tl.sum((key >= 0).to(tl.int32), 0) >= count, 0, lowest)
    for i in range(31):
        higher = cut | (1 << (30 - i))
        cut = tl.where(tl.sum((key >= higher).to(tl.int32), 0) >= count, higher, cut)
    above = key > cut
    equal = (key == cut) & (key > lowest)
    # One running sum of both: a piece has less than 2^15 entries.
    both = (equal.to(tl.int32) << 16) | above.to(tl.int32)
    before = tl.cumsum(both, 0) - both
    every = tl.sum(both, 0)
    wanted = tl.minimum(count - (every & 0xFFFF), every >> 16)  # of those that equal the cut, the first ones
    taken = above | (equal & ((before >> 16) < wanted))
    place = (before & 0xFFFF) + tl.minimum(before >> 16, wanted)
    return taken, place, (every & 0xFFFF) + wanted, cut


@triton.jit(do_not_specialize=["entries", "none"])
def _cut_kernel(
    score_ptr, index_ptr, count_ptr, end_ptr, key_ptr, out_ptr, entries, none, score_row, pieces, room,
    N: tl.constexpr, ROOM: tl.constexpr, FORCED: tl.constexpr, FIRST: tl.constexpr, FINAL: tl.constexpr,
):  # fmt: skip
    """Members of one piece in ascending order. FIRST: entries are scores, not keys with their indices. FINAL: write no keys."""
    piece = tl.program_id(0)
    b = tl.program_id(1).to(tl.int64)
    at = piece * N + tl.arange(0, N)
    if FIRST:
        key = _keys(tl.load(score_ptr + b * score_row + at, mask=at < entries, other=0.0))
        key = tl.where(at < FORCED, 0x7FFFFFFF, key)
        key = tl.where((at < tl.load(end_ptr + b)) & (at < entries), key, LOWEST)
        index = at
    else:
        key = tl.load(score_ptr + b * score_row + at, mask=at < entries, other=LOWEST)
        index = tl.load(index_ptr + b * score_row + at, mask=at < entries, other=0)
    taken, place, number, _ = _members(key, tl.load(count_ptr + b).to(tl.int32))
    result = (b * pieces + piece) * room
    taken = taken & (place < room)
    k = tl.arange(0, ROOM)
    behind = (k >= number) & (k < room)
    tl.store(out_ptr + result + place, index, mask=taken)
    tl.store(out_ptr + result + k, tl.zeros([ROOM], tl.int32) + none, mask=behind)
    if not FINAL:
        tl.store(key_ptr + result + place, key, mask=taken)
        tl.store(key_ptr + result + k, tl.full([ROOM], LOWEST, tl.int32), mask=behind)


def triton_top_set(
    score_BN: torch.Tensor, count_B: torch.Tensor, end_B: torch.Tensor, room: int, forced: int
) -> torch.Tensor:
    """:func:`longdraft.kernels.top_set.top_set` in Triton; of rows of more than LAST at most half a PIECE."""
    batch, entries = score_BN.shape
    assert entries <= LAST or room <= PIECE // 2
    count_B, end_B = count_B.contiguous(), end_B.contiguous()
    found_BN = score_BN if score_BN.stride(1) == 1 else score_BN.contiguous()
    none, index_BN, key_BN = entries, end_B, end_B  # the last two are read from the second time on
    first = True
    while True:
        entries = found_BN.shape[1]
        # One of three sizes, so that a growing row does not have kernels built again and again.
        size = next((n for n in (LAST // 16, LAST // 4, LAST) if entries <= n), PIECE)
        pieces = max(triton.cdiv(entries, size), 1)
        key_BN = found_BN if pieces == 1 else torch.empty(batch, pieces * room, dtype=torch.int32, device=end_B.device)
        out_BN = torch.empty(batch, pieces * room, dtype=torch.int32, device=end_B.device)
        if batch and room:
            _cut_kernel[pieces, batch](
                found_BN, index_BN, count_B, end_B, key_BN, out_BN, entries, none, found_BN.stride(0), pieces, room,
                N=size, ROOM=triton.next_power_of_2(room), FORCED=forced if first else 0, FIRST=first,
                FINAL=pieces == 1, num_warps=max(size // 512, 1),
            )  # fmt: skip
        if pieces == 1:
            return out_BN
        first, found_BN, index_BN = False, key_BN, out_BN
