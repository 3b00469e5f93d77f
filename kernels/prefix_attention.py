"""Attention of a few query rows a request over a page list of cached keys, with log-sum-exp.

Legend: B requests, T query rows of all requests, S cache slots, H query heads, K key/value heads, D head size.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch

from longdraft.errors import UserError
from longdraft.kernels.dense_attention import dense_attention
from longdraft.kernels.fa3 import fa3_prefix_attention, fa3_prefix_output
from longdraft.kernels.flashinfer_prefix import flashinfer_prefix_attention
from longdraft.kernels.merge import merge_attention
from longdraft.kernels.plan import AttentionPlan, consecutive_runs
from longdraft.kernels.prefix_fit import unfit_fa3, unfit_flashinfer, unfit_triton

PrefixResult = tuple[torch.Tensor, torch.Tensor]


def gather_slots(cache_SKD: torch.Tensor, slots_N: torch.Tensor) -> torch.Tensor:
    """Rows of the cache in page-list order, ``[N, K, D]``; a view where they lie so on a CPU."""
    runs = consecutive_runs(slots_N, most=1)
    return cache_SKD[slots_N.long()] if runs is None else cache_SKD[runs[0]]


def torch_prefix_attention(
    q_THD: torch.Tensor,
    k_SKD: torch.Tensor,
    v_SKD: torch.Tensor,
    plan: AttentionPlan,
    scale: float,
    kv_scales: tuple[float, float] = (1.0, 1.0),
) -> PrefixResult:
    """The torch twin of :func:`prefix_attention`."""
    parts = []
    for b, (length, runs) in enumerate(zip(plan.lens, plan.runs, strict=True)):
        q, dtype = q_THD[plan.rows_of(b)], q_THD.dtype
        pieces = [
            dense_attention(q, k_SKD[at].to(dtype), v_SKD[at].to(dtype), scale * kv_scales[0])
            for at in runs or (plan.slots(b, length),)
        ]
        outs, lses = zip(*pieces, strict=True)
        parts.append(pieces[0] if len(pieces) == 1 else merge_attention(torch.stack(outs), torch.stack(lses)))
    out_THD = torch.cat([out for out, _ in parts])
    return out_THD if kv_scales[1] == 1.0 else out_THD * kv_scales[1], torch.cat([lse for _, lse in parts])


def _triton_prefix_attention(
    q_THD: torch.Tensor,
    k_SKD: torch.Tensor,
    v_SKD: torch.Tensor,
    plan: AttentionPlan,
    scale: float,
    kv_scales: tuple[float, float] = (1.0, 1.0),
) -> PrefixResult:
    from longdraft.kernels.triton_prefix import triton_prefix_attention  # no Triton, no harm

    return triton_prefix_attention(q_THD, k_SKD, v_SKD, plan, scale, kv_scales)


class Backend(NamedTuple):
    """One implementation: ``unfit`` gives the reason why it cannot serve a call, None if it can."""

    attend: Callable[..., PrefixResult]
    unfit: Callable[[torch.Tensor, torch.Tensor, AttentionPlan], str | None]


BACKENDS: dict[str, Backend] = {  # the fastest first
    "fa3": Backend(fa3_prefix_attention, unfit_fa3),
    "flashinfer": Backend(flashinfer_prefix_attention, unfit_flashinfer),
    "triton": Backend(_triton_prefix_attention, unfit_triton),
    "torch": Backend(torch_prefix_attention, lambda q, k, plan: None),
}


def checked_backend(name: str | None, q_THD: torch.Tensor, k_SKD: torch.Tensor, plan: AttentionPlan) -> str:
    """The named backend or, for None, the fastest there is for these queries, this cache and this plan (on a CPU the twin).

    Raises:
        UserError: a backend that is unknown or cannot serve this.
    """
    if name is None:
        if not q_THD.is_cuda:
            return "torch"  # Triton's interpreter is for tests
        return next(name for name, backend in BACKENDS.items() if backend.unfit(q_THD, k_SKD, plan) is None)
    if name not in BACKENDS:
        raise UserError(f"attention={name!r} is unknown: write one of {', '.join(BACKENDS)}")
    if reason := BACKENDS[name].unfit(q_THD, k_SKD, plan):
        raise UserError(f"attention={name!r} cannot serve this batch, {reason}: take another, or auto")
    return name


def prefix_attention(
    q_THD: torch.Tensor,
    k_SKD: torch.Tensor,
    v_SKD: torch.Tensor,
    plan: AttentionPlan,
    scale: float,
    backend: str | None = None,
    kv_scales: tuple[float, float] = (1.0, 1.0),
) -> PrefixResult:
    """Non-causal attention over the slots that a page list names (the prefix part of LongSpec, section 3.3).

    Args:
        q_THD: queries, bfloat16, float16 or float32 (the torch twin: float64 too).
        k_SKD, v_SKD: one layer's cache, of the queries' dtype or float8 (e4m3); keys carry their rotation, so the order of
            slots does not matter.
        plan: page lists and row offsets; every row of request b sees its first ``plan.lens[b]`` slots, and no other slot,
            whatever it holds, has any influence. Nothing waits for the device (but the torch twin, and FlashInfer's plan).
        scale: factor of the scores.
        backend: ``"fa3"``, ``"flashinfer"``, ``"triton"`` or ``"torch"``; None takes the fastest that is there.
        kv_scales: what keys and values in the cache are to be multiplied by, for float8.

    Returns:
        ``(out_THD, lse_TH)``: output in the queries' dtype and the natural log-sum-exp, float32 or wider; zeros and
        -inf where a prefix is empty.

    Raises:
        UserError: a backend that is unknown or cannot serve this call.
    """
    attend = BACKENDS[checked_backend(backend, q_THD, k_SKD, plan)].attend
    return attend(q_THD, k_SKD, v_SKD, plan, scale, kv_scales)


def prefix_output(
    q_THD: torch.Tensor,
    k_SKD: torch.Tensor,
    v_SKD: torch.Tensor,
    plan: AttentionPlan,
    scale: float,
    backend: str | None = None,
    kv_scales: tuple[float, float] = (1.0, 1.0),
) -> torch.Tensor:
    """The output of :func:`prefix_attention`, for those who merge nothing: FA3's log-sum-exp costs three launches more."""
    name = checked_backend(backend, q_THD, k_SKD, plan)
    if name == "fa3":
        return fa3_prefix_output(q_THD, k_SKD, v_SKD, plan, scale, kv_scales)
    return BACKENDS[name].attend(q_THD, k_SKD, v_SKD, plan, scale, kv_scales)[0]
