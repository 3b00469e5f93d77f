"""The set of columns that a sparse verification reads in all layers, from two scores of single columns (Dustin, Eq. 6).

Legend: B requests, N columns of a cache, V columns of a list.
"""

import torch

from longdraft.kernels.top_set import LARGEST, LAST, PIECE, top_set

Found = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def piece_for(columns: int, room: int) -> int:
    """Columns of a row that one program of the kernels looks at, for ``room`` candidates of each piece; 0: none is right.

    One of two sizes, so that a growing context does not have kernels built again and again.
    """
    return next((piece for piece in (PIECE, LAST) if columns and -(-columns // piece) * room <= LAST), 0)


def torch_token_set(
    draft_BN: torch.Tensor,
    target_BN: torch.Tensor,
    length_B: torch.Tensor,
    tokens: int,
    sinks: int,
    window: int,
    lookahead: int,
) -> Found:
    """The torch twin of :func:`token_set`."""
    columns, width = target_BN.shape[1], tokens - window
    start_B = torch.where(length_B <= tokens, 0, length_B - window)
    end_B = start_B.clamp(max=columns)
    at_N = torch.arange(columns, device=length_B.device)
    free_BN = (at_N >= sinks) & (at_N < end_B[:, None])
    has_draft_B1, has_target_B1 = (((x > 0) & free_BN).any(-1, keepdim=True) for x in (draft_BN, target_BN))
    draft_BN, target_BN = (
        torch.where(has_draft_B1, draft_BN, target_BN).float(),
        torch.where(has_target_B1, target_BN, draft_BN).float(),
    )
    # With the sinks before them, so that a list of both comes back.
    ahead = sinks + lookahead
    index_BV = top_set(draft_BN, end_B.clamp(max=ahead), end_B, ahead, sinks)
    # Whatever the target's scores are, what is already chosen comes before them. Behind a list stands N, a column that is
    # added here and never taken.
    target_BN = torch.nn.functional.pad(target_BN, (0, 1)).nan_to_num_(float("-inf"), LARGEST)
    target_BN = target_BN.scatter_(1, index_BV.long(), float("inf"))
    count_B = end_B.clamp(max=width)
    index_BV = top_set(target_BN, count_B, end_B, width, sinks)
    at_V = torch.arange(width, device=length_B.device)
    return index_BV.masked_fill(at_V >= count_B[:, None], 0), count_B.int(), start_B


def token_set(
    draft_BN: torch.Tensor,
    target_BN: torch.Tensor,
    length_B: torch.Tensor,
    tokens: int,
    sinks: int,
    window: int,
    lookahead: int,
    backend: str | None = None,
) -> Found:
    """Sinks, the ``lookahead`` best by the draft's scores and, of what is left, the best by the target's; then the window.

    Of equal scores the first column is taken; NaN and -inf rank last. A request whose draft scores are nowhere above zero,
    outside of sinks and window, has none: the target's take their place; and the other way round.

    Args:
        draft_BN: scores, float32 or narrower.
        target_BN: scores alike.
        length_B: int64 columns of each request; up to ``tokens`` of them are all read. There may be more scores.
        tokens: that are read of a longer context, more than sinks and window.
        sinks: first columns, always in.
        window: last columns, always in.
        lookahead: at most what ``tokens`` has beside both.
        backend: ``"triton"`` or ``"torch"``; None takes the first on a GPU, but for sets of thousands from long contexts.

    Returns:
        ``(column_BV, count_B, start_B)``: int32 lists without the window, V wide, ascending, zeros behind the int32 count; and the
        int64 first column of the window, 0 where everything is read.
    """
    args = draft_BN, target_BN, length_B, tokens, sinks, window, lookahead
    if backend is None:
        fast = target_BN.is_cuda and piece_for(target_BN.shape[1], tokens - sinks - window) > 0
        backend = "triton" if fast else "torch"
    if backend == "torch":
        return torch_token_set(*args)
    from longdraft.kernels.triton_token_set import triton_token_set  # no Triton, no harm

    return triton_token_set(*args)
