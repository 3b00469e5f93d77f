"""Prefix attention: the twin against float64, which backend serves what, and how the libraries are called.

Legend: B requests, T query rows, S cache slots, H query heads, K key/value heads, D head size.
"""

import math
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from interpreter import run_interpreted
from prefix_case import PrefixCase, make_prefix_case

from longdraft.errors import UserError
from longdraft.kernels import fa3, flashinfer_prefix, prefix_attention, prefix_fit, triton_prefix
from longdraft.kernels.plan import AttentionPlan
from longdraft.kernels.prefix_attention import BACKENDS, checked_backend
from longdraft.kernels.triton_prefix import Tile, tile_for

FP8 = torch.float8_e4m3fn
LENS, ROWS = [0, 17, 16, 1, 0, 70], [3, 1, 6, 0, 1, 2]


def attend(case: PrefixCase, backend: str | None) -> tuple[torch.Tensor, torch.Tensor]:
    return prefix_attention.prefix_attention(
        case.q, case.k, case.v, case.plan, case.scale, backend, kv_scales=case.kv_scales
    )


def test_the_triton_kernel_in_the_interpreter() -> None:
    run_interpreted("prefix_attention_cases.py")


@pytest.mark.parametrize("page_size", [1, 5, 16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_the_twin_equals_float64(dtype: torch.dtype, page_size: int) -> None:
    """A1, A3, A7, A8: empty prefixes and requests, partly filled last pages, poison in every slot that is not listed."""
    case = make_prefix_case(LENS, ROWS, dtype=dtype, page_size=page_size, heads=6)
    case.check(*attend(case, None))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_the_twin_reads_float8_with_its_scales(dtype: torch.dtype) -> None:
    case = make_prefix_case(LENS, ROWS, dtype=dtype, cache=FP8, kv_scales=(0.5, 3.0), page_size=16)
    case.check(*attend(case, "torch"))


def test_a_page_of_16_is_16_slots_in_a_row() -> None:
    """A8: the same slots as pages of one."""
    case = make_prefix_case([45, 7], [2, 3], page_size=16)
    width = max(map(len, case.slots))
    single = torch.tensor([s + [0] * (width - len(s)) for s in case.slots])
    plain = AttentionPlan.build(single, [45, 7], [2, 3])
    assert [case.plan.slots(b, n).tolist() for b, n in enumerate([45, 7])] == case.slots
    assert case.plan.runs == plain.runs
    again = BACKENDS["torch"].attend(case.q, case.k, case.v, plain, case.scale)
    for got, want in zip(attend(case, "torch"), again, strict=True):
        assert torch.equal(got, want)


def test_a_plan_on_the_device_reads_its_lengths_when_they_are_asked_for() -> None:
    case = make_prefix_case([9, 4], [1, 2])
    plan = AttentionPlan.on_device(
        case.plan.pages_BW, torch.zeros(2, dtype=torch.int32), case.plan.cu_rows_B1, case.plan.cu_rows
    )
    assert plan.lens == [0, 0] and plan.max_rows == 2 and len(plan) == 2
    plan.lens_B.copy_(torch.tensor([9, 4]))
    case.check(*BACKENDS["torch"].attend(case.q, case.k, case.v, plan, case.scale))


@pytest.mark.parametrize(
    ("backend", "words"),
    [("fa3", "Hopper"), ("flashinfer", "a GPU and flashinfer"), ("triton", "needs Triton and a GPU")],
)
def test_a_backend_that_is_not_there_is_refused_with_the_reason(backend: str, words: str) -> None:
    case = make_prefix_case([9], [2], dtype=torch.bfloat16)
    with pytest.raises(UserError, match=f"attention='{backend}' cannot serve this batch, .*{words}.*or auto"):
        attend(case, backend)
    with pytest.raises(UserError, match="attention='fa4' is unknown: write one of fa3, flashinfer, triton, torch"):
        attend(case, "fa4")


def choices(monkeypatch: pytest.MonkeyPatch, there: set[str], capability: tuple[int, int]) -> Any:
    """What would be chosen on a card with these libraries, by queries' dtype, cache's dtype, head size and plan."""
    for name in ("fa3", "flashinfer"):
        monkeypatch.setattr(prefix_fit, f"{name}_available", lambda name=name: name in there)
    monkeypatch.setattr(prefix_fit, "triton_runs", lambda: "triton" in there)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)

    def choose(q: torch.dtype, k: torch.dtype, size: int = 128, lens: list[int] | None = None, name: Any = None) -> str:
        queries = SimpleNamespace(dtype=q, shape=(1, 1, size), is_cuda=True, device=torch.device("cuda"))
        return checked_backend(name, queries, SimpleNamespace(dtype=k), SimpleNamespace(host_lens=lens))  # type: ignore[arg-type]

    return choose


def test_the_first_backend_that_can_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    b, h, f = torch.bfloat16, torch.float16, torch.float32
    choose = choices(monkeypatch, {"fa3", "flashinfer", "triton"}, (9, 0))
    assert [choose(b, b), choose(h, h), choose(b, FP8), choose(b, b, 96)] == ["fa3"] * 4
    assert [choose(f, f), choose(b, b, 20), choose(h, h, 250)] == ["triton"] * 3, (
        "FA3 takes half precision and steps of 8"
    )
    assert [choose(b, h), choose(b, f), choose(torch.float64, torch.float64), choose(b, b, 264)] == ["torch"] * 4
    choose = choices(monkeypatch, {"flashinfer", "triton"}, (8, 0))
    assert choose(b, b, 128, [5]) == "flashinfer"
    assert choose(b, b, 96, [5]) == choose(f, f, 128, [5]) == "triton"
    assert choose(b, b) == "triton", "FlashInfer cannot plan for lengths that only the device knows"
    choose = choices(monkeypatch, {"triton"}, (8, 6))
    assert [choose(b, b), choose(b, FP8)] == ["triton", "torch"], "Ampere has no float8"
    assert choices(monkeypatch, {"triton"}, (7, 5))(b, b) == "torch"
    choose = choices(monkeypatch, {"flashinfer", "triton"}, (9, 0))
    with pytest.raises(UserError, match="CUDA graph"):
        choose(b, b, name="flashinfer")
    with pytest.raises(UserError, match=r"takes a cache of the queries' torch.bfloat16 or of torch.float8_e4m3fn"):
        choose(b, h, name="triton")


def compiled(rows: int, cache: str, page_size: int) -> tuple[Any, Tile]:
    """The first kernel, built for an H100 as it would be for 8 key/value heads of 128 with 4 query heads each."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    tile, kernel = tile_for(rows * 4, 128, 1 if cache == "fp8e4nv" else 2), triton_prefix._pieces_kernel
    fixed = {
        "KV_HEADS": 8, "GROUP": 4, "SIZE": 128, "PAGE": page_size, "TILES": 1, "BATCH": 16, "M": tile.rows, "N": tile.keys,
        "D": 128, "EIGHT": cache == "fp8e4nv", "WAVE": 132 * tile.resident, "WAVES": tile.waves, "FULL": triton_prefix.FULL,
    }  # fmt: skip
    kinds = {"q_ptr": "*bf16", "k_ptr": f"*{cache}", "v_ptr": f"*{cache}", "scale": "fp32"}
    kinds |= dict.fromkeys(("pages_ptr", "lens_ptr", "cu_ptr"), "*i32")
    kinds |= dict.fromkeys(("part_ptr", "top_ptr", "sum_ptr"), "*fp32")
    signature = {name: "constexpr" if name in fixed else kinds.get(name, "i32") for name in kernel.arg_names}
    aligned = {
        (i,): [["tt.divisibility", 16]]
        for i, name in enumerate(kernel.arg_names)
        if signature[name] != "constexpr" and name not in ("scale", "batch", "pages_row")
    }
    constants = {(i,): fixed[name] for i, name in enumerate(kernel.arg_names) if name in fixed}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=aligned)
    options = {"num_warps": tile.warps, "num_stages": tile.stages}
    return compile(source, target=GPUTarget("cuda", 90, 32), options=options), tile


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize(
    ("rows", "cache", "blocks"), [(1, "bf16", 2), (6, "bf16", 2), (6, "fp8e4nv", 3), (16, "bf16", 2), (128, "bf16", 2)]
)
def test_built_for_an_h100_the_loop_reads_ahead_and_programs_fit(
    rows: int, cache: str, blocks: int, page_size: int
) -> None:
    """A load that waits for a load would keep a single block of keys in flight, and halve the bandwidth that is reached."""
    built, tile = compiled(rows, cache, page_size)
    loops = built.asm["ttgir"].split("scf.for ")
    assert len(loops) == 2
    copies = loops[1].split("scf.yield")[0].count("async_copy_global_to_local")
    assert copies >= 2, "keys and values are copied past the registers"
    assert f"memdesc<{blocks}x{tile.keys}x128x" in loops[0]
    assert built.metadata.shared * tile.resident <= 227 << 10


def stand_in(monkeypatch: pytest.MonkeyPatch, name: str, **members: Any) -> None:
    module = ModuleType(name)
    vars(module).update(members)
    monkeypatch.setitem(sys.modules, name, module)


@pytest.mark.parametrize("cache", [None, FP8], ids=str)
def test_fa3_is_called_with_pages_scales_and_its_log_sum_exp_is_turned(
    cache: torch.dtype | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against a stand-in that does with the arguments what the kernel's documentation says."""
    case = make_prefix_case([17, 0], [2, 1], dtype=torch.bfloat16, cache=cache, page_size=16, kv_scales=(0.5, 3.0))
    if cache is None:
        case.kv_scales = (1.0, 1.0)
    case.k, case.v = (torch.cat([x, x[:5]]) for x in (case.k, case.v))  # slots behind the last whole page

    def kernel(*, q: Any, k_cache: Any, v_cache: Any, page_table: Any, cache_seqlens: Any, cu_seqlens_q: Any,
               max_seqlen_q: int, softmax_scale: float, causal: bool, return_softmax_lse: bool) -> Any:  # fmt: skip
        assert q.dtype == k_cache.dtype and max_seqlen_q == 2 and not causal
        assert k_cache.shape[1:] == (16, 2, 16)
        if cache is not None:
            assert torch.equal(q.float(), case.q.to(FP8).float()), "rounded as SGLang rounds them"
            q = q.bfloat16()
        plan = AttentionPlan.build(page_table, cache_seqlens.tolist(), cu_seqlens_q.diff().tolist(), 16)
        k, v = k_cache.flatten(0, 1), v_cache.flatten(0, 1)
        out, lse = BACKENDS["torch"].attend(q, k, v, plan, softmax_scale)
        return (out, lse.t().masked_fill(lse.t().isneginf(), math.inf), None) if return_softmax_lse else out

    stand_in(monkeypatch, "sgl_kernel", flash_attn=None)
    stand_in(monkeypatch, "sgl_kernel.flash_attn", flash_attn_with_kvcache=kernel)
    found = fa3.fa3_prefix_attention(case.q, case.k, case.v, case.plan, case.scale, case.kv_scales)
    case.check(*found, looser=1.0 if cache is None else 5.0)  # float8 queries have four bits
    alone = fa3.fa3_prefix_output(case.q, case.k, case.v, case.plan, case.scale, case.kv_scales)
    assert torch.equal(alone, found[0])


def test_flashinfer_is_planned_once_a_batch_and_its_log_sum_exp_is_natural(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []

    class Wrapper:
        def __init__(self, workspace: torch.Tensor, layout: str) -> None:
            assert layout == "NHD"
            self.planned = 0
            made.append(self)

        def plan(self, rows: Any, begins: Any, pages: Any, last: Any, heads: int, kv_heads: int, size: int, page_size: int, *,
                 causal: bool, sm_scale: float, q_data_type: Any, kv_data_type: Any) -> None:  # fmt: skip
            assert all(x.dtype == torch.int32 for x in (rows, begins, pages, last)) and not causal
            self.planned += 1
            counts = begins.diff()
            lens = ((counts - 1).clamp_min(0) * page_size + last).tolist()
            listed = torch.nn.utils.rnn.pad_sequence(list(pages.split(counts.tolist())), batch_first=True)
            self.batch = AttentionPlan.build(listed, lens, rows.diff().tolist(), page_size)
            self.scale = sm_scale

        def run(self, q: Any, paged: Any, *, v_scale: float, return_lse: bool) -> Any:
            k, v = (x.flatten(0, 1) for x in paged)
            out, lse = BACKENDS["torch"].attend(q, k, v, self.batch, self.scale, (1.0, v_scale))
            lse = lse / math.log(2)
            for b, length in enumerate(self.batch.lens):
                if not length:  # what the kernel leaves there is not relied on
                    out[self.batch.rows_of(b)], lse[self.batch.rows_of(b)] = 7.0, -5e4
            return out, lse

    stand_in(monkeypatch, "flashinfer", BatchPrefillWithPagedKVCacheWrapper=Wrapper)
    monkeypatch.setattr(flashinfer_prefix, "_planned", {})
    monkeypatch.setattr(flashinfer_prefix, "_workspace", lambda device: torch.empty(0))
    for seed in range(2):  # the second batch has a plan of its own, and the first one's wrapper
        case = make_prefix_case(LENS, ROWS, dtype=torch.bfloat16, page_size=16, seed=seed)
        for _ in range(3):  # layers
            case.check(*flashinfer_prefix.flashinfer_prefix_attention(case.q, case.k, case.v, case.plan, case.scale))
        assert len(made) == 1 and made[0].planned == seed + 1
    empty = make_prefix_case([0, 0], [1, 1], dtype=torch.bfloat16)
    empty.check(*flashinfer_prefix.flashinfer_prefix_attention(empty.q, empty.k, empty.v, empty.plan, empty.scale))
    assert made[0].planned == 2, "nothing to plan"


def test_the_last_page_of_a_request() -> None:
    assert flashinfer_prefix.page_counts([0, 1, 15, 16, 17, 32], 16) == ([0, 1, 1, 1, 2, 2], [0, 1, 15, 16, 1, 16])
    assert flashinfer_prefix.page_counts([0, 1, 5], 1) == ([0, 1, 5], [0, 1, 1])
