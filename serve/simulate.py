"""Forced acceptance for timing runs with random weights.

Our own setting draws independently for each request and position. ``SGLANG_SIMULATE_ACC_LEN``, with its
``SGLANG_SIMULATE_ACC_METHOD``, is honoured as stock SGLang does: one length a step for the whole batch, by SGLang's own draw.
"""

import random
from functools import cache

import torch
from sglang.srt.environ import envs
from sglang.srt.speculative.spec_utils import _sample_simulated_acc_len

_random = random.Random(0)


@cache
def hit_rate(length: float, steps: int) -> float:
    """Chance q of each draft for which a chain of ``steps`` gains ``length`` tokens on average, bonus in."""
    low, high = 0.0, 1.0
    for _ in range(60):
        q = (low + high) / 2
        if 1 + sum(q**i for i in range(1, steps + 1)) < length:
            low = q
        else:
            high = q
    return high


def forced_acceptance(drafted: list[int], length: float) -> list[int]:
    """Drafts that each request keeps."""
    kept = []
    for steps in drafted:
        rate, count = hit_rate(length, steps) if steps else 0.0, 0
        while count < steps and _random.random() < rate:
            count += 1
        kept.append(count)
    return kept


def forced_confirmations(gained_B: torch.Tensor, share: float | None) -> torch.Tensor:
    """How many of the tokens that each request gained on a view are confirmed: drawn for each request and position by itself.

    Args:
        gained_B: int64 tokens.
        share: chance of a token to be confirmed where all before it were; None: all are.
    """
    most = 128
    if share is None:
        return gained_B
    hit_BN = torch.rand(len(gained_B), most, device=gained_B.device) < share
    return torch.minimum(hit_BN.long().cumprod(1).sum(1), gained_B)


def simulated(setting: float | None) -> bool:
    """Whether acceptance is forced, by our setting or by SGLang's variable."""
    return setting is not None or envs.SGLANG_SIMULATE_ACC_LEN.get() > 0


def simulated_acceptance(drafted: list[int], setting: float | None, stride: int) -> list[int]:
    """Drafts that each request keeps, never more than it has.

    Args:
        drafted: drafts of each request.
        setting: our own forced length, which goes before SGLang's variable.
        stride: most tokens that a verification can return, bonus in.
    """
    if setting is not None:
        return forced_acceptance(drafted, setting)
    length = _sample_simulated_acc_len(
        envs.SGLANG_SIMULATE_ACC_LEN.get(), envs.SGLANG_SIMULATE_ACC_METHOD.get(), stride
    )
    return [min(steps, length - 1) for steps in drafted]
