"""SGLang's extend kernel is called as it wants to be: it gives the hybrid's output (run by test_bench_prefix_attention.py)."""

import torch
from attention_case import make_case

from longdraft.bench.sglang_verify import SglangVerify


def test_it_is_a_causal_verification() -> None:
    case = make_case([70, 5, 0], [3, 6, 2], heads=4, kv_heads=2, size=16, dtype=torch.float16)
    verify = SglangVerify.build(case.plan, case.k, case.v)
    out = verify(case.q, case.k_cache.nan_to_num(), case.v_cache.nan_to_num(), case.scale)
    torch.testing.assert_close(out.double(), case.expected(causal=True), rtol=4e-3, atol=3e-3)
