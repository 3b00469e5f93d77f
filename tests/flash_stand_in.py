"""The packed attention's path of a GPU in 16 bit on a CPU in any dtype: ``from flash_stand_in import flash_in_torch``."""

from typing import Any

import pytest
import torch
from flash_twin import FlashTwin

from longdraft.kernels import packed_attention, span_flash


class RecordingTwin(FlashTwin):
    """The twin of the kernel; keeps offsets, longest and reach of every forward call, and counts the backward ones."""

    def __init__(self) -> None:
        super().__init__(padded=False)
        self.given = list[tuple[list[int], int, int | None]]()
        self.launches = 0

    def forward(self, *args: Any) -> tuple[torch.Tensor, ...]:
        q, k, v, sequences, left, _ = args
        assert all(x.stride(-1) == 1 for x in (q, k, v)) and len(q) == len(k) == len(v)
        assert sequences.cum_q.device == q.device
        cum = sequences.cum_q.tolist()
        assert cum == sequences.cum_k.tolist() and cum[0] == 0 and cum[-1] == len(q)
        assert max(sequences.cum_q.diff().tolist()) == sequences.longest_q == sequences.longest_k
        self.given.append((cum, sequences.longest_q, left))
        return super().forward(*args)

    def backward(self, *args: Any) -> tuple[torch.Tensor, ...]:
        assert args[0].is_contiguous() and args[4].shape == args[1].shape
        self.launches += 1
        return super().backward(*args)


def flash_in_torch(patch: pytest.MonkeyPatch) -> RecordingTwin:
    """From now on packed attention takes the path of a GPU in 16 bit."""
    twin = RecordingTwin()
    packed_attention._offsets.cache_clear()
    patch.setattr(packed_attention, "takes_flash", lambda q_THD: True)
    patch.setattr(span_flash, "flash_varlen_forward", twin.forward)
    patch.setattr(span_flash, "flash_varlen_backward", twin.backward)
    return twin
