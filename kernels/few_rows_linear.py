"""``x @ W.T`` for the few rows of a verification on a CPU.

Legend: M rows, I input size, O output size.
"""

import torch
from torch.nn.functional import linear

MOST_ROWS = 8


def few_rows_linear(x_MI: torch.Tensor, weight_OI: torch.Tensor, bias_O: torch.Tensor | None = None) -> torch.Tensor:
    """``torch.nn.functional.linear``, computed as ``(W @ x.T).T`` for 2 to 8 float32 rows on a CPU.

    One row is a matrix-vector product, bound by reading the weights. The matrix product that a CPU's library runs for a few
    rows packs the weights first, which made three rows cost 2.2 times one; with the weights on the left it does not (1.0 to 1.3
    times). Every other case is left to torch.

    Args:
        x_MI: inputs, any leading dimensions.
        weight_OI, bias_O: a linear layer's parameters.

    Returns:
        ``[..., O]``, contiguous.
    """
    rows = x_MI.numel() // max(1, x_MI.shape[-1])
    plain = x_MI.device.type == "cpu" and x_MI.dtype == weight_OI.dtype == torch.float32
    if not plain or not 2 <= rows <= MOST_ROWS:
        return linear(x_MI, weight_OI, bias_O)
    out_MO = torch.mm(weight_OI, x_MI.reshape(rows, -1).t()).t().contiguous()
    if bias_O is not None:
        out_MO += bias_O
    return out_MO.view(*x_MI.shape[:-1], weight_OI.shape[0])
