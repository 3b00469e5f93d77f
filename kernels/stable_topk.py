"""The k largest of each row in one order whatever the device: by value, then by place.

Legend: R rows, N entries, k results.
"""

import torch

LOW = (1 << 32) - 1


def stable_topk(score_RN: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The k largest entries of each row, largest first; of equal ones the first in the row.

    ``torch.topk`` takes any of equal entries. Half-precision logits tie often, and eager steps, graphs and the ranks of one
    server must grow the same tree; so the place is made part of what is compared.

    Args:
        score_RN: float32, no NaN; leading dimensions may be any, a row has less than 2^32 entries.
        k: at most N.

    Returns:
        ``(score_Rk, index_Rk)``, float32 and int64.
    """
    count = score_RN.shape[-1]
    if k > count:
        raise ValueError(f"the {k} largest of {count} entries: ask for {count} or fewer")
    assert score_RN.dtype == torch.float32
    # Bits of a float, the lower ones turned for negative numbers, are integers in the order of the floats. Adding zero
    # turns -0 into 0.
    bits_RN = (score_RN + 0.0).view(torch.int32)
    key_RN = bits_RN.bitwise_xor((bits_RN >> 31).bitwise_and_(0x7FFFFFFF)).long()
    key_RN = key_RN.bitwise_left_shift_(32).bitwise_or_(LOW - torch.arange(count, device=score_RN.device))
    index_Rk = LOW - (key_RN.topk(k, dim=-1).values & LOW)
    return score_RN.gather(-1, index_Rk), index_Rk
