"""Small host values on their way to a device, without waiting for it.

A plain copy to a card waits until the card has done everything before it.
"""

from collections.abc import Sequence

import torch


def to_device(values: Sequence[object], dtype: torch.dtype, device: torch.device | str) -> torch.Tensor:
    """The values (numbers, or rows of numbers) as a tensor of ``device``; on a card by a copy from pinned memory that it makes in its turn."""
    host = torch.tensor(values, dtype=dtype)
    return host if torch.device(device).type == "cpu" else host.pin_memory().to(device, non_blocking=True)
