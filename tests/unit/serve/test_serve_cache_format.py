"""Float8 caches: a verification and a draft read what SGLang's own backend has written, with its scales or without.

Legend: T new tokens, S slots, H query heads, K key/value heads, D head size.
"""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from serve_fakes import SAMPLING, row_params
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.quantization.fp8 import Fp8Config
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.mem_cache.memory_pool import KVWriteLoc, MHATokenToKVPool
from test_serve_longspec_drafter import DRAFT, PAGES, SEEN, SLOTS, STEPS, make, request
from torch import nn

from longdraft.errors import UserError
from longdraft.kernels.dense_attention import dense_attention
from longdraft.kernels.plan import AttentionPlan
from longdraft.serve.attention_backend import LongDraftAttention
from longdraft.serve.cache_format import FLOAT8, cache_scales, verify_backend
from longdraft.serve.drafters.longspec import LongSpecDrafter
from longdraft.serve.slot_mover import move_slots
from longdraft.serve.spec_inputs import VerifyInput
from longdraft.serve.target_layers import check_layers

SCALES = (0.5, 2.5)


def pool(layers: int = 2, dtype: torch.dtype = FLOAT8, slots: int = 63) -> MHATokenToKVPool:
    return MHATokenToKVPool(slots, 1, dtype, 2, 16, layers, "cpu", False)


def layer(number: int, scales: tuple[float, float] | None) -> RadixAttention:
    """As SGLang makes it for a checkpoint in float8, with or without scales of the cache."""
    made = RadixAttention(4, 16, 0.25, 2, number, quant_config=Fp8Config(is_checkpoint_fp8_serialized=True))
    if scales is not None:
        made.k_scale.data.fill_(scales[0])
        made.v_scale.data.fill_(scales[1])
    made.quant_method.process_weights_after_loading(made)
    return made


def test_a_float8_checkpoint_without_scales_of_the_cache_is_like_any_other() -> None:
    """Every layer of such a target has scales, all of them one."""
    model = nn.Sequential(layer(0, None), layer(1, None))
    check_layers(model)
    for dtype in (torch.bfloat16, FLOAT8):
        for backend in ("fa3", "flashinfer", "triton", "torch_native"):
            assert cache_scales(model, dtype, [backend] * 2) == {}


def test_scales_of_a_checkpoint_are_those_that_the_backend_applies() -> None:
    model = nn.Sequential(layer(0, None), layer(1, SCALES))
    assert cache_scales(model, FLOAT8, ["fa3", "triton"]) == {1: SCALES}
    assert cache_scales(model, FLOAT8, ["torch_native"] * 2) == {}
    assert cache_scales(model, torch.bfloat16, ["fa3", "fa3"]) == {}
    assert cache_scales(nn.Linear(2, 2), FLOAT8, ["fa3", "fa3"]) == {}


@pytest.mark.parametrize("backends", [["fa3", "triton"], ["flashinfer", "flashinfer"]])
def test_scales_that_a_backend_would_apply_to_a_cache_in_16_bit_are_refused(backends: list[str]) -> None:
    model = nn.Sequential(layer(0, SCALES))
    with pytest.raises(UserError, match=rf"layer 0 has scales .*{backends[1]} .*: use --kv-cache-dtype fp8_e4m3"):
        cache_scales(model, torch.bfloat16, backends)


def test_a_verification_rounds_its_queries_only_where_the_server_does() -> None:
    assert verify_backend("auto", FLOAT8, "triton", "cuda") == "triton"
    assert verify_backend("auto", FLOAT8, "flashinfer", "cuda") == "triton"
    assert verify_backend("auto", FLOAT8, "fa3", "cuda") is None
    assert verify_backend("auto", torch.bfloat16, "triton", "cuda") is None
    assert verify_backend("auto", FLOAT8, "torch_native", "cpu") is None
    assert verify_backend("fa3", FLOAT8, "triton", "cuda") == "fa3"


class _Stock(AttentionBackend):
    """Never asked."""


@pytest.mark.parametrize("scales", [None, SCALES])
def test_a_chain_reads_what_plain_decoding_would_read_one_by_one(scales: tuple[float, float] | None) -> None:
    """Each token of a chain sees the prefix and the tokens before it as the cache keeps them, itself too."""
    torch.manual_seed(0)
    attend, made = layer(1, scales), pool()
    table, cached, width = torch.randperm(60)[None, :20].int() + 1, 15, 4
    q, k, v = torch.randn(width, 64), torch.randn(20, 2, 16), torch.randn(20, 2, 16)
    factors = {} if scales is None else {1: scales}
    prefix = KVWriteLoc(table[0, :cached].long())
    made.set_kv_buffer(attend, prefix, k[:cached].clone(), v[:cached].clone(), *(scales or ()))
    new = [x[cached : cached + width].flatten(1).clone() for x in (k, v)]
    batch = SimpleNamespace(
        forward_mode=SimpleNamespace(is_target_verify=lambda: True),
        spec_info=VerifyInput(AttentionPlan.build(table, [cached], [width])),
        out_cache_loc=table[0, cached : cached + width].long(),
    )
    ours = LongDraftAttention(_Stock(), made, "torch", scales=factors)
    out = ours.forward_extend(q, *new, attend, batch).view(width, 4, 16)
    assert torch.equal(new[0].view(width, 2, 16), k[cached : cached + width]), (
        "what the layer goes on with is not divided"
    )
    unit = scales or (1.0, 1.0)
    stored = [x.float() * f for x, f in zip((made.get_key_buffer(1), made.get_value_buffer(1)), unit, strict=True)]
    for row in range(width):  # what plain decoding computes, step by step, over the pool as it is now
        seen = table[0, : cached + row + 1].long()
        want, _ = dense_attention(q[row].view(1, 4, 16), stored[0][seen], stored[1][seen], attend.scaling)
        torch.testing.assert_close(out[row : row + 1], want, rtol=1e-5, atol=1e-6)
    assert not torch.equal(stored[0][table[0, 0]], k[0]), "rounding was meant to show"
    assert int(made.get_key_buffer(0).view(torch.uint8).sum()) == 0, "another layer was written"


@pytest.mark.parametrize("scales", [{}, {DRAFT.config.cross_layers[0]: (0.25, 2.0)}], ids=["unscaled", "scaled"])
def test_a_draft_reads_a_float8_pool_with_its_scales_and_keeps_its_queries(scales: dict[int, Any]) -> None:
    """It drafts what it would over the same numbers in its own format; without the scales it would not."""
    read = DRAFT.config.cross_layers[0]
    made = pool(read + 1, slots=SLOTS * 2 - 1)
    for rid, seen in SEEN.items():
        slots = KVWriteLoc(PAGES[rid].long())
        at = RadixAttention(4, 16, 0.25, 2, read)
        made.set_kv_buffer(at, slots, seen.k_TKD.clone(), seen.v_TKD.clone(), *scales.get(read, ()))
    drafter = LongSpecDrafter(DRAFT, 3, STEPS, 64, 4, "torch")
    drafter.bind_pool(made, scales)
    exact = make()
    factor = scales.get(read, (1.0, 1.0))
    for buffer, stored, f in zip(exact.layers[0][:2], (made.get_key_buffer(read), made.get_value_buffer(read)), factor, strict=True):  # fmt: skip
        buffer.copy_(stored.float() * f)
    asked = [request("a", 30), request("b", 12)]
    params = row_params("ab", SAMPLING[0])
    want = exact.propose(asked, params)
    assert drafter.propose(asked, params) == want
    if scales:
        wrong = LongSpecDrafter(DRAFT, 3, STEPS, 64, 4, "torch")
        wrong.bind_pool(made, {})
        assert wrong.propose(asked, params) != want


@pytest.mark.parametrize("dtype", [FLOAT8, torch.bfloat16])
def test_a_tree_s_kept_slots_move_bit_by_bit(dtype: torch.dtype) -> None:
    made = pool(2, dtype)
    for buffer in (*made.k_buffer, *made.v_buffer):
        buffer.view(torch.uint8).random_(0, 255)
    before = [buffer.clone() for buffer in (*made.k_buffer, *made.v_buffer)]
    to, source = torch.tensor([3, 4, 5]), torch.tensor([4, 9, 3])
    move_slots(made, to, source)
    for buffer, old in zip((*made.k_buffer, *made.v_buffer), before, strict=True):
        want = old.clone()
        want[to] = old[source]
        assert torch.equal(buffer.view(torch.uint8), want.view(torch.uint8))
