"""Hooks into SGLang: request checks, one default it decides too early, and what its CPU path lacks.

Every hook is named here with its reason; :func:`install_hooks` checks that each target exists.
"""

import os
import pkgutil
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from sglang.srt.mem_cache.allocator.paged import alloc_extend_naive
from sglang.srt.plugins.hook_registry import HookRegistry, HookType
from sglang.srt.utils import get_num_new_pages
from torch.nn.functional import scaled_dot_product_attention

from longdraft.kernels.few_rows_linear import few_rows_linear
from longdraft.kernels.prefix_attention import gather_slots
from longdraft.serve.attention_backend import LongDraftAttention
from longdraft.serve.checks import exit_on_user_error
from longdraft.serve.draft_lm_checks import check_draft_folder
from longdraft.serve.request_checks import check_logprob_start, check_overrides, check_prompt, check_sampling_params
from longdraft.serve.spec_inputs import VerifyInput


def check_request(self: Any, vocab_size: int) -> None:
    """Wrong types become HTTP 400 in the front end; in the scheduler they would end the server."""
    check_sampling_params(self, vocab_size)


def check_logprobs(self: Any) -> None:
    """The same for a start of prompt logprobs that the scheduler asserts on."""
    check_logprob_start(self.logprob_start_len)


def check_ids(self: Any, obj: Any, input_text: Any, input_ids: Any, *args: Any, **kwargs: Any) -> None:
    """The same for a prompt's tokens, which SGLang has a check for and does not call; and embeddings in their place."""
    check_prompt(input_ids, self.model_config.vocab_size)
    if (self.server_args.speculative_algorithm or "").upper() == "LONGDRAFT":
        check_overrides(obj)


def early_arguments(self: Any, *args: Any, **kwargs: Any) -> None:
    """What SGLang looks at before it asks the algorithm: the branches (FlashAttention-3 is for chains) and the draft's config."""
    if (self.speculative_algorithm or "").upper() != "LONGDRAFT":
        return
    if self.speculative_eagle_topk is None:
        self.speculative_eagle_topk = 1
    if self.speculative_draft_model_path is not None:
        given = self.speculative_draft_model_path, self.trust_remote_code
        exit_on_user_error(lambda: check_draft_folder(*given))


def no_copy_kernels(self: Any) -> None:
    """The pool warms up a Triton copy kernel, which a CPU has no driver for; nothing here moves cache slots."""
    self._kv_copy_config = None


def pages_on_cpu(
    original: Any,
    self: Any,
    prefix_lens: torch.Tensor,
    prefix_lens_cpu: torch.Tensor,
    seq_lens: torch.Tensor,
    seq_lens_cpu: torch.Tensor,
    last_loc: torch.Tensor,
    extend_num_tokens: int,
    num_new_pages: int | None = None,
) -> torch.Tensor | None:
    """The allocator of pages asks a Triton kernel; its plain twin lies beside it, but does not look whether there is room."""
    if torch.device(self.device).type != "cpu":
        rest = (seq_lens, seq_lens_cpu, last_loc, extend_num_tokens, num_new_pages)
        given: torch.Tensor | None = original(self, prefix_lens, prefix_lens_cpu, *rest)
        return given
    needed = get_num_new_pages(seq_lens=seq_lens_cpu, page_size=self.page_size, prefix_lens=prefix_lens_cpu)
    if self.need_sort and needed > len(self.free_pages):
        self.merge_and_sort_free()
    if needed > len(self.free_pages):
        return None
    slots = torch.empty(extend_num_tokens, dtype=torch.int64)
    alloc_extend_naive(prefix_lens, seq_lens, last_loc, self.free_pages, slots, self.page_size, self.device)
    self.free_pages = self.free_pages[needed:]
    return slots


def extend_attention(
    original: Any,
    self: Any,
    query: torch.Tensor,
    output: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    seq_lens: torch.Tensor,
    extend_prefix_lens: torch.Tensor,
    extend_seq_lens: torch.Tensor,
    encoder_lens: Any = None,
    scaling: float | None = None,
    enable_gqa: bool = False,
    causal: bool = True,
    is_cross_attn: bool = False,
    sliding_window_size: int | None = None,
) -> torch.Tensor:
    """Prefill attention of the new rows only: the stock CPU path attends from the whole context for every chunk."""
    if is_cross_attn or sliding_window_size is not None:  # some other model than LONGDRAFT serves, without it
        rest = (encoder_lens, scaling, enable_gqa, causal, is_cross_attn, sliding_window_size)
        rows = (req_to_token, req_pool_indices, seq_lens, extend_prefix_lens, extend_seq_lens)
        result: torch.Tensor = original(self, query, output, k_cache, v_cache, *rows, *rest)
        return result
    start = 0
    for row, length, prefix, width in zip(
        req_pool_indices.tolist(), seq_lens.tolist(), extend_prefix_lens.tolist(), extend_seq_lens.tolist(), strict=True
    ):
        slots = req_to_token[row, :length]
        q, k, v = (
            x.to(query.dtype).transpose(0, 1)[None]
            for x in (query[start : start + width], gather_slots(k_cache, slots), gather_slots(v_cache, slots))
        )
        mask = torch.arange(length)[None] <= torch.arange(prefix, prefix + width)[:, None]
        out = scaled_dot_product_attention(
            q, k, v, attn_mask=mask if causal else None, scale=scaling, enable_gqa=enable_gqa
        )
        output[start : start + width] = out[0].transpose(0, 1)
        start += width
    return output


def linear_on_cpu(original: Any, self: Any, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> Any:
    """A verification has a few rows, and the CPU's product for a few rows costs more than twice that for one."""
    if x.device.type != "cpu" or getattr(layer, "use_intel_amx_backend", False):
        return original(self, layer, x, bias)
    return few_rows_linear(x, layer.weight, bias)


def head_on_cpu(
    original: Any, self: Any, hidden: torch.Tensor, head: torch.nn.Module, *args: Any, **kwargs: Any
) -> Any:
    """The same for the output head, where it is a plain float32 matrix."""
    weight = getattr(head, "weight", None)
    other = hasattr(head, "set_lora") or getattr(head, "use_intel_amx_backend", False)
    if other or not isinstance(weight, torch.Tensor) or not hidden.dtype == weight.dtype == torch.float32:
        return original(self, hidden, head, *args, **kwargs)
    return few_rows_linear(hidden, weight)


def mask_on_cpu(original: Any, *args: Any, **kwargs: Any) -> None:
    """xgrammar can mask logits on a CPU; SGLang's wrapper refuses to ask it."""
    logits: Any = kwargs.get("logits")
    if logits is None or logits.device.type != "cpu":
        original(*args, **kwargs)
        return
    import xgrammar

    xgrammar.apply_token_bitmask_inplace(logits, kwargs["vocab_mask"])


def waits_for_host(original: Any, self: Any, batch: Any) -> bool:
    """SGLang finishes the round before first where a grammar needs its tokens; here other things need them too.

    It asks before every batch, which is where we see whether a prefill could run but for the batch: what waits beside a full batch
    waits for requests to end, not for a step.
    """
    tell = getattr(self.model_worker, "prefill_waits", None)
    if tell is not None:
        tell(bool(self.chunked_req is not None or (self.waiting_queue and not self.running_batch.batch_is_full)))
    if original(self, batch):
        return True
    asks = getattr(self.model_worker, "needs_host", None)
    return bool(batch and batch.forward_mode.is_decode() and self.result_queue and asks is not None and asks(batch))


def no_nccl_on_cpu(original: Any, self: Any, group: Any, device: Any, *args: Any, **kwargs: Any) -> None:
    """Ranks on a CPU talk by gloo. SGLang leaves NCCL alone only where its library is not installed."""
    if torch.device(device).type != "cpu":
        original(self, group, device, *args, **kwargs)
        return
    self.rank, self.world_size, self.group = dist.get_rank(group), dist.get_world_size(group), group
    self.available, self.disabled = False, True


def captured_input(original: Any, self: Any, num_tokens: int) -> Any:
    """What SGLang captures a verification with is EAGLE's; ours has a plan and, for an EAGLE-3 draft, asks for hidden layers."""
    if not isinstance(self.attn_backend, LongDraftAttention):
        return original(self, num_tokens)
    return VerifyInput(None, self.attn_backend.captured_hidden)


def plain_in_float32(original: Any, self: Any, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """SGLang's kernels for cards know no float32, in which tokens are compared; its plain twins do."""
    return (self.forward_native if x.dtype == torch.float32 else partial(original, self))(x, *args, **kwargs)


def rotary_in_float32(
    original: Any, self: Any, positions: torch.Tensor, query: torch.Tensor, *args: Any, **kwargs: Any
) -> Any:
    """The same for the rotation, whose first argument is whole numbers."""
    plain = query.dtype == torch.float32
    return (self.forward_native if plain else partial(original, self))(positions, query, *args, **kwargs)


HOOKS: list[tuple[str, Any, HookType]] = [
    ("sglang.srt.managers.scheduler.Scheduler.is_disable_overlap_for_batch", waits_for_host, HookType.AROUND),
    ("sglang.srt.sampling.sampling_params.SamplingParams.verify", check_request, HookType.BEFORE),
    (
        "sglang.srt.managers.io_struct.GenerateReqInput.normalize_batch_and_arguments",
        check_logprobs,
        HookType.BEFORE,
    ),
    ("sglang.srt.managers.tokenizer_manager.TokenizerManager._create_tokenized_object", check_ids, HookType.BEFORE),
    ("sglang.srt.server_args.ServerArgs._handle_missing_default_values", early_arguments, HookType.BEFORE),
    (
        "sglang.srt.model_executor.runner.decode_cuda_graph_runner.DecodeCudaGraphRunner.get_spec_info",
        captured_input,
        HookType.AROUND,
    ),
    ("sglang.srt.layers.layernorm.RMSNorm.forward_cuda", plain_in_float32, HookType.AROUND),
    ("sglang.srt.layers.activation.SiluAndMul.forward_cuda", plain_in_float32, HookType.AROUND),
    ("sglang.srt.layers.rotary_embedding.base.RotaryEmbedding.forward_cuda", rotary_in_float32, HookType.AROUND),
]
CPU_HOOKS: list[tuple[str, Any, HookType]] = [
    ("sglang.srt.mem_cache.memory_pool.MHATokenToKVPool._init_kv_copy_and_warmup", no_copy_kernels, HookType.REPLACE),
    (
        "sglang.srt.mem_cache.allocator.paged.PagedTokenToKVPoolAllocator.alloc_extend",
        pages_on_cpu,
        HookType.AROUND,
    ),
    (
        "sglang.srt.layers.attention.torch_native_backend.TorchNativeAttnBackend._run_sdpa_forward_extend",
        extend_attention,
        HookType.AROUND,
    ),
    ("sglang.srt.layers.quantization.unquant.UnquantizedLinearMethod.apply", linear_on_cpu, HookType.AROUND),
    ("sglang.srt.layers.logits_processor.LogitsProcessor._compute_lm_head", head_on_cpu, HookType.AROUND),
    (
        "sglang.srt.distributed.device_communicators.pynccl.PyNcclCommunicator.__init__",
        no_nccl_on_cpu,
        HookType.AROUND,
    ),
    ("sglang.srt.constrained.xgrammar_backend.XGrammarGrammarBackend.apply_vocab_mask", mask_on_cpu, HookType.AROUND),
    ("sglang.srt.constrained.xgrammar_backend.XGrammarGrammar.apply_vocab_mask", mask_on_cpu, HookType.AROUND),
]


def install_hooks() -> None:
    """Register the hooks that this process needs.

    Raises:
        AttributeError, ImportError: a target that this SGLang does not have; SGLang itself would only log it.
    """
    on_cpu = os.environ.get("SGLANG_USE_CPU_ENGINE") == "1" or not torch.cuda.is_available()
    for target, hook, kind in HOOKS + (CPU_HOOKS if on_cpu else []):
        pkgutil.resolve_name(target)
        HookRegistry.register(target, hook, kind)
