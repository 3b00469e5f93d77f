"""Which implementation of the prefix part can serve what: each function gives the reason why it cannot, None if it can.

Legend: T query rows of all requests, S cache slots, H query heads, K key/value heads, D head size.
"""

from functools import cache
from importlib.util import find_spec

import torch

from longdraft.kernels.fa3 import fa3_available
from longdraft.kernels.flashinfer_prefix import flashinfer_available
from longdraft.kernels.plan import AttentionPlan

HALF = (torch.bfloat16, torch.float16)
FLOAT8 = torch.float8_e4m3fn


def unfit_fa3(q_THD: torch.Tensor, k_SKD: torch.Tensor, plan: AttentionPlan) -> str | None:
    """FlashAttention-3 of SGLang."""
    if not (q_THD.is_cuda and fa3_available()):
        return "it needs a Hopper card and sgl_kernel with FlashAttention-3"
    return _dtype(q_THD, k_SKD, HALF) or _size(q_THD, 8)


def unfit_flashinfer(q_THD: torch.Tensor, k_SKD: torch.Tensor, plan: AttentionPlan) -> str | None:
    """FlashInfer."""
    if not (q_THD.is_cuda and flashinfer_available()):
        return "it needs a GPU and flashinfer"
    if q_THD.shape[-1] not in (64, 128, 256):
        return f"it takes heads of 64, 128 or 256, these have {q_THD.shape[-1]}"
    if plan.host_lens is None:
        return "it plans on the host, which does not know this batch's lengths (a CUDA graph)"
    return _dtype(q_THD, k_SKD, HALF)


def unfit_triton(q_THD: torch.Tensor, k_SKD: torch.Tensor, plan: AttentionPlan) -> str | None:
    """Our own kernel, on a card or in Triton's interpreter."""
    card = torch.cuda.get_device_capability(q_THD.device) if q_THD.is_cuda else (99, 0)
    if not triton_runs() or card < (8, 0):
        return "it needs Triton and a GPU of compute capability 8.0 or newer"
    if k_SKD.dtype == FLOAT8 and card < (8, 9):
        return f"a cache of {FLOAT8} needs compute capability 8.9 or newer"
    return _dtype(q_THD, k_SKD, (*HALF, torch.float32)) or _size(q_THD, 1)


@cache
def triton_runs() -> bool:
    """Whether there is Triton and a GPU, or its interpreter in a GPU's place."""
    if find_spec("triton") is None:
        return False
    import triton

    return bool(triton.knobs.runtime.interpret) or torch.cuda.is_available()


def _dtype(q_THD: torch.Tensor, k_SKD: torch.Tensor, queries: tuple[torch.dtype, ...]) -> str | None:
    if q_THD.dtype not in queries:
        return f"it takes queries of {' or '.join(map(str, queries))}, these are {q_THD.dtype}"
    if k_SKD.dtype not in (q_THD.dtype, FLOAT8):
        return f"it takes a cache of the queries' {q_THD.dtype} or of {FLOAT8}, this one is {k_SKD.dtype}"
    return None


def _size(q_THD: torch.Tensor, step: int) -> str | None:
    size = q_THD.shape[-1]
    return (
        None if size <= 256 and size % step == 0 else f"it takes heads of up to 256 in steps of {step}, not of {size}"
    )
