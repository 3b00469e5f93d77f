"""A causal language model as a draft: SGLang's own code of it, with a cache of its own in the slots of the target's.

Legend: T new tokens of all requests, V vocabulary.
"""

from typing import Any

import torch
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.managers.schedule_batch import ScheduleBatch
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch, ForwardMode
from sglang.srt.model_executor.forward_context import ForwardContext, forward_context
from sglang.srt.model_executor.model_runner import ModelRunner

from longdraft.kernels.plan import AttentionPlan
from longdraft.serve.attention_backend import LongDraftAttention
from longdraft.serve.cache_format import attention_layers, cache_scales, verify_backend
from longdraft.serve.drafters.chain_tap import ChainTap
from longdraft.serve.spec_inputs import VerifyInput
from longdraft.serve.target_layers import check_layers


class DraftLM:
    """SGLang's second model runner, as its algorithm STANDALONE has one, sharing the page table and the allocator of slots.

    So a token's keys and values lie at the same slot in both caches, and whoever shares one shares the other. Prefills run in
    SGLang's own attention backend; steps of a chain run in ours, over page lists.
    """

    def __init__(self, server_args: Any, target: Any, attention: str) -> None:
        """Load the weights, before SGLang sizes its cache pool.

        Args:
            server_args: SGLang's arguments; the folder and the format of the weights are among them.
            target: the target's model runner.
            attention: the setting of that name.

        Raises:
            UserError: attention layers that our backend does not compute.
        """
        folder = server_args.speculative_draft_model_path
        self.runner = ModelRunner(
            model_config=ModelConfig.from_server_args(server_args, model_path=folder, is_draft_model=True),
            mem_fraction_static=server_args.mem_fraction_static,
            gpu_id=target.gpu_id,
            tp_rank=target.tp_rank,
            tp_size=target.tp_size,
            moe_ep_rank=target.moe_ep_rank,
            moe_ep_size=target.moe_ep_size,
            pp_rank=target.pp_rank,
            pp_size=target.pp_size,
            nccl_port=target.dist_port,
            dp_rank=target.dp_rank,
            attn_cp_rank=target.attn_cp_rank,
            moe_dp_rank=target.moe_dp_rank,
            server_args=server_args,
            is_draft_worker=True,
        )
        self.rank, self.ranks = target.tp_rank, target.tp_size  # each has a share of the heads
        model, kept, backends = self.runner.model, self.runner.kv_cache_dtype, server_args.get_attention_backends()
        check_layers(model, "draft")
        self.scales = cache_scales(model, kept, backends, "draft")
        self.prefix_backend = verify_backend(attention, kept, backends[1], server_args.device)
        self.vocab: int = self.runner.model_config.vocab_size
        self.layers = [layer for _, layer in attention_layers(model)]
        sizes = [layer.tp_k_head_num * (layer.head_dim + layer.v_head_dim) for layer in self.layers]
        self.bytes_per_slot = sum(sizes) * kept.itemsize
        self.dtype: torch.dtype = self.runner.dtype
        self.device = torch.device(self.runner.device)
        self.bytes_per_step = sum(p.nbytes for p in model.parameters())
        self.tap = ChainTap()
        self.backend: LongDraftAttention | None = None

    def take_pools(self, memory: Any, rows: Any, allocator: Any) -> None:
        """Make the cache: as many slots as the target's.

        Args:
            memory: SGLang's sizes of the target's pools.
            rows: its page table's pool.
            allocator: of its slots.
        """
        self.runner.req_to_token_pool, self.runner.token_to_kv_pool_allocator = rows, allocator
        self.runner.alloc_memory_pool(memory)

    def attach(self) -> None:
        """Make the attention backends, once the pools exist."""
        self.runner.init_attention_backends()
        pool = self.runner.token_to_kv_pool
        self.backend = LongDraftAttention(self.runner.attn_backend, pool, self.prefix_backend, scales=self.scales)
        self.backend.tap = self.tap

    def keys(self, layer: int) -> torch.Tensor:
        """A layer's cached keys, by slot."""
        return self.runner.token_to_kv_pool.get_key_buffer(layer)

    def prefill(self, batch: ScheduleBatch) -> None:
        """Compute what the target has just computed: a prefill or a chunk of one, into the same slots."""
        forward = ForwardBatch.init_new(batch, self.runner)
        forward.return_logprob = False
        stock, ids = self.runner.attn_backend, forward.input_ids.clamp_max(self.vocab - 1)
        with forward_context(ForwardContext(attn_backend=stock)):
            stock.init_forward_metadata(forward)
            self.runner.model.forward(ids, forward.positions, forward)

    def blank(self, slot_T: torch.Tensor) -> None:
        """Slots whose tokens could not be computed: zeros are hardly attended to, and add nothing."""
        pool = self.runner.token_to_kv_pool
        for layer in range(pool.start_layer, pool.start_layer + pool.layer_num):
            pool.get_key_buffer(layer)[slot_T] = 0
            pool.get_value_buffer(layer)[slot_T] = 0

    def logits(
        self, id_T: torch.Tensor, position_T: torch.Tensor, slot_T: torch.Tensor, plan: AttentionPlan
    ) -> torch.Tensor:
        """Logits behind new tokens ``[T, V]``, whose keys and values are written; nothing waits for the device.

        Args:
            id_T, position_T, slot_T: int64 tokens of the draft's vocabulary, their positions and cache slots.
            plan: what they read, causally among themselves.
        """
        assert self.backend is not None, "attach() first"
        forward = ForwardBatch(
            forward_mode=ForwardMode.TARGET_VERIFY,
            batch_size=len(plan),
            input_ids=id_T,
            req_pool_indices=torch.zeros_like(plan.lens_B),
            seq_lens=plan.lens_B,
            seq_lens_sum=0,
            orig_seq_lens=plan.lens_B,
            out_cache_loc=slot_T,
            positions=position_T,
            spec_algorithm=self.runner.spec_algorithm,
            spec_info=VerifyInput(plan),
            capture_hidden_mode=CaptureHiddenMode.NULL,
        )
        with forward_context(ForwardContext(attn_backend=self.backend)):
            logits_TV: torch.Tensor = self.runner.model.forward(id_T, position_T, forward).next_token_logits
        return logits_TV
