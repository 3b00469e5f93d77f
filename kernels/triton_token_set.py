# mypy: allow-untyped-defs, allow-untyped-decorators, allow-incomplete-defs
"""Our Triton kernels of :func:`longdraft.kernels.token_set.token_set`: Equation 6 in two launches.

The first gives, for each source and piece of a row, the candidates: as many of the largest as a set could take from there. What the
draft chooses leaves room for as many fewer of the target's, so its candidates suffice though some of them go to the draft. The second
has one program a request. The draft's choice is a cut: a number and, of columns with that very score, the last one taken; so whether
a candidate of the target's is chosen already follows from its draft score alone.

Legend: B requests, N columns of a cache or, in the kernels, of a piece, R candidates that a piece gives, V columns of a list.
"""

import torch
import triton
import triton.language as tl

from longdraft.kernels.token_set import piece_for
from longdraft.kernels.top_set import LAST
from longdraft.kernels.triton_top_set import LOWEST, _keys, _members


@triton.jit
def _first_of_window(length, tokens, window):
    """Where all columns from there on are read; 0 where the budget holds the whole context."""
    return tl.where(length <= tokens, 0, length - window)


@triton.jit(do_not_specialize=["columns"])
def _candidate_kernel(
    draft_ptr, target_ptr, length_ptr, key_ptr, index_ptr, columns, draft_row, target_row, pieces, room,
    TOKENS: tl.constexpr, SINKS: tl.constexpr, WINDOW: tl.constexpr, N: tl.constexpr, ROOM: tl.constexpr,
):  # fmt: skip
    """The largest ``room`` of one piece of one source, ascending, and what makes up the room."""
    piece = tl.program_id(0)
    b = tl.program_id(1).to(tl.int64)
    source = tl.program_id(2)
    at = piece * N + tl.arange(0, N)
    end = _first_of_window(tl.load(length_ptr + b).to(tl.int32), TOKENS, WINDOW)
    free = (at >= SINKS) & (at < tl.minimum(end, columns))
    if source == 0:
        key = _keys(tl.load(draft_ptr + b * draft_row + at, mask=free, other=0.0))
    else:
        key = _keys(tl.load(target_ptr + b * target_row + at, mask=free, other=0.0))
    key = tl.where(free, key, LOWEST)
    taken, place, number, _ = _members(key, room)
    result = ((b * 2 + source) * pieces + piece) * room
    k = tl.arange(0, ROOM)
    behind = (k >= number) & (k < room)
    tl.store(key_ptr + result + place, key, mask=taken)
    tl.store(key_ptr + result + k, tl.full([ROOM], LOWEST, tl.int32), mask=behind)
    tl.store(index_ptr + result + place, at, mask=taken)
    tl.store(index_ptr + result + k, tl.zeros([ROOM], tl.int32), mask=behind)


@triton.jit(do_not_specialize=["columns"])
def _choice_kernel(
    draft_ptr, target_ptr, length_ptr, key_ptr, index_ptr, list_ptr, count_ptr, start_ptr, columns, draft_row, target_row,
    candidates, room,
    TOKENS: tl.constexpr, SINKS: tl.constexpr, WINDOW: tl.constexpr, AHEAD: tl.constexpr, N: tl.constexpr, V: tl.constexpr,
):  # fmt: skip
    """One request's set from its candidates of both sources."""
    b = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, N)
    start = _first_of_window(tl.load(length_ptr + b), TOKENS, WINDOW)
    inside = at < candidates
    draft_at = b * 2 * candidates + at
    # A source without a positive score is none: the other one's candidates take its place. Read when they are needed, they
    # leave registers for one source at a time.
    has_draft = tl.max(tl.load(key_ptr + draft_at, mask=inside, other=LOWEST), 0) > 0
    has_target = tl.max(tl.load(key_ptr + draft_at + candidates, mask=inside, other=LOWEST), 0) > 0
    ahead_at = draft_at + tl.where(has_draft, 0, candidates)
    rest_at = draft_at + tl.where(has_target, candidates, 0)

    ahead_key = tl.load(key_ptr + ahead_at, mask=inside, other=LOWEST)
    ahead, ahead_place, ahead_number, cut = _members(ahead_key, AHEAD)
    ahead_index = tl.load(index_ptr + ahead_at, mask=ahead, other=0)
    last = tl.max(tl.where(ahead & (ahead_key == cut), ahead_index, -1), 0)
    # Sinks, the draft's and the target's columns behind one another; other threads sort them.
    sinks = tl.minimum(start, tl.minimum(columns, SINKS)).to(tl.int32)
    own_list = list_ptr + b * (SINKS + room)
    v = tl.arange(0, V)
    tl.store(own_list + v, v, mask=v < sinks)
    tl.store(own_list + sinks + ahead_place, ahead_index, mask=ahead)

    rest_key = tl.load(key_ptr + rest_at, mask=inside, other=LOWEST)
    rest_index = tl.load(index_ptr + rest_at, mask=inside, other=0)
    there = rest_key > LOWEST
    own = tl.load(draft_ptr + b * draft_row + rest_index, mask=there & has_draft, other=0.0).to(tl.float32)
    other = tl.load(target_ptr + b * target_row + rest_index, mask=there & (has_draft == 0), other=0.0).to(tl.float32)
    score_key = _keys(tl.where(has_draft, own, other))
    chosen = (score_key > cut) | ((score_key == cut) & (rest_index <= last))
    rest, rest_place, rest_number, _ = _members(tl.where(chosen, LOWEST, rest_key), room - AHEAD)
    tl.store(own_list + sinks + ahead_number + rest_place, rest_index, mask=rest)
    tl.debug_barrier()
    count = sinks + ahead_number + rest_number
    column = tl.sort(tl.load(own_list + v, mask=v < count, other=0x7FFFFFFF))
    tl.debug_barrier()
    tl.store(own_list + v, tl.where(v < count, column, 0), mask=v < SINKS + room)
    tl.store(count_ptr + b, count)
    tl.store(start_ptr + b, start)


def triton_token_set(
    draft_BN: torch.Tensor,
    target_BN: torch.Tensor,
    length_B: torch.Tensor,
    tokens: int,
    sinks: int,
    window: int,
    lookahead: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """:func:`longdraft.kernels.token_set.token_set` in Triton, where :func:`longdraft.kernels.token_set.piece_for` has a piece."""
    batch, columns = target_BN.shape
    room, device = tokens - sinks - window, target_BN.device
    size = piece_for(columns, room)
    assert size
    draft_BN, target_BN = (x if x.stride(1) == 1 else x.contiguous() for x in (draft_BN, target_BN))
    length_B = length_B.contiguous()
    pieces = triton.cdiv(columns, size)
    key_B2R, index_B2R = (torch.empty(batch, 2, pieces * room, dtype=torch.int32, device=device) for _ in range(2))
    column_BV = torch.empty(batch, sinks + room, dtype=torch.int32, device=device)
    count_B = torch.empty(batch, dtype=torch.int32, device=device)
    start_B = torch.empty(batch, dtype=torch.int64, device=device)
    if batch:
        budget = {"TOKENS": tokens, "SINKS": sinks, "WINDOW": window}
        rows = draft_BN.stride(0), target_BN.stride(0)
        _candidate_kernel[pieces, batch, 2](
            draft_BN, target_BN, length_B, key_B2R, index_B2R, columns, *rows, pieces, room,
            **budget, N=size, ROOM=triton.next_power_of_2(room), num_warps=max(size // 512, 1),
        )  # fmt: skip
        last = size if pieces * room <= size else LAST
        _choice_kernel[(batch,)](
            draft_BN, target_BN, length_B, key_B2R, index_B2R, column_BV, count_B, start_B, columns, *rows,
            pieces * room, room, **budget, AHEAD=lookahead, N=last, V=triton.next_power_of_2(sinks + room),
            num_warps=max(last // 512, 1),
        )  # fmt: skip
    return column_BV, count_B, start_B
