"""How much memory a training has taken at most."""

import resource
import sys

import torch

GIB = 1 << 30


def peak_memory_gib(device: torch.device) -> float:
    """The most that this process had allocated on its GPU since it began or, on a CPU, held in memory; GiB."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / GIB
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / GIB
