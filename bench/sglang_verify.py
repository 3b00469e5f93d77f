"""SGLang's own verification in Triton (its extend kernel): what our prefix part is compared with on cards without FA3.

It walks the prefix of a request serially, once for each query head, and takes in the new tokens too, which are few.

Legend: B requests, T new tokens of all requests, S cache slots, H query heads, K key/value heads, D head size.
"""

from dataclasses import dataclass
from itertools import accumulate

import torch

from longdraft.kernels.plan import AttentionPlan


@dataclass(frozen=True)
class SglangVerify:
    """A chain's verification of one layer over page lists of single slots; new keys and values are none of the cache's."""

    plan: AttentionPlan
    k_TKD: torch.Tensor
    v_TKD: torch.Tensor
    begins_B1: torch.Tensor
    slots_N: torch.Tensor

    @staticmethod
    def build(plan: AttentionPlan, k_TKD: torch.Tensor, v_TKD: torch.Tensor) -> "SglangVerify":
        """Lay the page lists out as the kernel wants them: behind one another."""
        begins = torch.tensor([0, *accumulate(plan.lens)], dtype=torch.int32, device=k_TKD.device)
        slots_N = torch.cat([plan.slots(b, n) for b, n in enumerate(plan.lens)])
        return SglangVerify(plan, k_TKD, v_TKD, begins, slots_N)

    def __call__(self, q_THD: torch.Tensor, k_SKD: torch.Tensor, v_SKD: torch.Tensor, scale: float) -> torch.Tensor:
        """Output ``[T, H, D]``."""
        from sglang.srt.layers.attention.triton_ops.extend_attention import extend_attention_fwd

        out_THD = torch.empty_like(q_THD)
        extend_attention_fwd(
            q_THD,
            self.k_TKD,
            self.v_TKD,
            out_THD,
            k_SKD,
            v_SKD,
            self.plan.cu_rows_B1,
            self.begins_B1,
            self.slots_N,
            None,
            True,
            None,
            self.plan.max_rows,
            1.0,
            1.0,
            scale,
        )
        return out_THD
