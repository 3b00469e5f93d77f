"""Which entries of a row are its largest, as a set in ascending order: what a KV view holds.

A set needs no sorting by value. Its members are those above some value and the first of those that equal it.

Legend: B rows (requests), N entries (columns of a cache, or blocks of them), K entries that a set has room for.
"""

import torch

from longdraft.kernels.stable_topk import stable_topk

LARGEST = torch.finfo(torch.float32).max
PIECE = 4096  # entries of a program of the kernel, where a row takes several: 16 for each of 256 threads
LAST = 8192  # that one program holds at most, 16 for each of 512 threads


def torch_top_set(
    score_BN: torch.Tensor, count_B: torch.Tensor, end_B: torch.Tensor, room: int, forced: int
) -> torch.Tensor:
    """The torch twin of :func:`top_set`."""
    entries = score_BN.shape[1]
    at_N = torch.arange(entries, device=score_BN.device)
    key_BN = score_BN.float().nan_to_num(-LARGEST, float("inf"), -LARGEST)
    key_BN = torch.where(at_N < forced, float("inf"), key_BN).masked_fill(at_N >= end_B[:, None], float("-inf"))
    _, index_BK = stable_topk(key_BN, min(room, entries))
    taken_BK = torch.arange(index_BK.shape[1], device=score_BN.device) < torch.minimum(count_B, end_B)[:, None]
    # What is not taken sorts behind what is.
    index_BK = torch.where(taken_BK, index_BK, entries).sort(-1).values
    return torch.nn.functional.pad(index_BK, (0, room - index_BK.shape[1]), value=entries).int()


def top_set(
    score_BN: torch.Tensor,
    count_B: torch.Tensor,
    end_B: torch.Tensor,
    room: int,
    forced: int = 0,
    backend: str | None = None,
) -> torch.Tensor:
    """The ``count_B`` largest of each row's first ``end_B`` entries, ascending; of equal ones the first. No wait for the device.

    Args:
        score_BN: float32 or narrower; NaN and -inf rank last, +inf before all numbers.
        count_B: int64 entries to take; no more are taken than there are.
        end_B: int64 entries of each row that may be taken, from the first on; more than N are N.
        room: K, at least the largest count.
        forced: first entries of a row that come before all others, whatever their scores.
        backend: ``"triton"`` or ``"torch"``; None takes the first on a GPU, but for sets of thousands from long rows.

    Returns:
        int32 ``index_BK``; N behind the members of a set.
    """
    if backend is None:
        fast = score_BN.is_cuda and (score_BN.shape[1] <= LAST or room <= PIECE // 2)
        backend = "triton" if fast else "torch"
    if backend == "torch":
        return torch_top_set(score_BN, count_B, end_B, room, forced)
    from longdraft.kernels.triton_top_set import triton_top_set  # no Triton, no harm

    return triton_top_set(score_BN, count_B, end_B, room, forced)
