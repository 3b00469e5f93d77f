"""The LONGDRAFT worker: what SGLang's scheduler calls.

Legend: B requests, V vocabulary.
"""

import logging
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.managers.schedule_batch import ScheduleBatch
from sglang.srt.managers.utils import GenerationBatchResult
from sglang.srt.speculative.base_spec_worker import BaseSpecWorker

from longdraft.serve.attention_backend import LongDraftAttention
from longdraft.serve.build_drafter import build_drafter
from longdraft.serve.cache_format import cache_scales, verify_backend
from longdraft.serve.decode_step import gave_up
from longdraft.serve.make_step import make_step
from longdraft.serve.measure_costs import measured_costs
from longdraft.serve.metrics import make_metrics
from longdraft.serve.observer import Observer
from longdraft.serve.ranks import RanksDiffer, server_ranks
from longdraft.serve.settings import read_environment
from longdraft.serve.shape_costs import CostTable
from longdraft.serve.simulate import simulated
from longdraft.serve.slot_mover import SlotMover
from longdraft.serve.spec_inputs import DraftInput
from longdraft.serve.target_graphs import TargetGraphs
from longdraft.serve.target_layers import check_layers
from longdraft.serve.target_weights import TargetWeights
from longdraft.serve.tree_shape import candidates
from longdraft.serve.tree_step import TreeStep
from longdraft.serve.view_step import ViewStep
from longdraft.serve.views.cycle_plan import rooms
from longdraft.serve.views.setup import keep_views, token_bytes

logger = logging.getLogger(__name__)


class LongDraftWorker(BaseSpecWorker):
    """SGLang's speculative worker for ``LONGDRAFT``.

    Without SGLang's overlap schedule the requests' token lists are exact at every step. With it they may be a round behind, and
    what depends on them makes the scheduler wait (:meth:`needs_host`).
    """

    def __init__(self, server_args: Any, target_worker: Any, **_ranks: Any) -> None:
        settings = read_environment()
        self.ranks = server_ranks(settings.check_ranks)
        self._target_worker = target_worker
        self.runner = target_worker.model_runner
        check_layers(self.runner.model)
        kept, backends = self.runner.kv_cache_dtype, server_args.get_attention_backends()
        self.scales = cache_scales(self.runner.model, kept, backends)
        self.prefix_backend = verify_backend(settings.attention, kept, backends[1], server_args.device)
        # The draft's memory is taken here, before SGLang sizes its cache pool.
        self.weights = TargetWeights(self.runner.model, self.runner.dtype, self.ranks)
        self.drafter = build_drafter(server_args, settings, self.runner, self.weights, self.ranks)
        if settings.sets:
            recipe = settings.recipe()
            layers = self.drafter.look_ahead(None if recipe is None else recipe.draft)
            logger.info("longdraft: %d layers of the draft look ahead", layers)
        self.observer = Observer(self.drafter, self.ranks)
        self.observer.ask(self.runner.model)
        self._reserve()
        stride = server_args.speculative_num_draft_tokens
        self.shapes = candidates(settings.tree, server_args.speculative_num_steps)
        self.most, self.costs = server_args.max_running_requests, settings.tree_costs
        self.settings = settings
        self.step = make_step(
            *(self.shapes, target_worker, self.drafter, self.observer, settings, stride, self.ranks),
            viewed=settings.viewed,
        )
        self.metrics = None if self.ranks.rank else make_metrics(server_args, token_bytes(self.runner))
        if simulated(settings.simulate_accept_length):
            logger.warning("longdraft: acceptance is simulated, the text is wrong: for benchmarks only")

    def _reserve(self) -> None:
        """What the drafter keeps beside the cache, in layers of the cache: so SGLang leaves room for it."""
        config = self.runner.model_config
        layer = 2 * config.get_num_kv_heads(self.ranks.size) * config.head_dim * self.runner.kv_cache_dtype.itemsize
        self.runner.eagle_draft_num_layers = layers = -(-self.drafter.bytes_per_slot // layer)
        if layers:
            logger.info(
                "longdraft: the draft keeps %d bytes beside every cached token, room for %d layers of the target's cache is left",
                self.drafter.bytes_per_slot,
                layers,
            )

    @property
    def target_worker(self) -> Any:
        return self._target_worker

    @property
    def draft_worker(self) -> Any:
        # SGLang reads the draft's cache pool at start even where there is none.
        return SimpleNamespace(draft_runner=SimpleNamespace(token_to_kv_pool=None, model_config=None))

    def alloc_memory_pool(
        self, memory_pool_config: Any = None, req_to_token_pool: Any = None, token_to_kv_pool_allocator: Any = None
    ) -> None:
        self.drafter.take_pools(memory_pool_config, req_to_token_pool, token_to_kv_pool_allocator)

    def init_attention_backends(self) -> None:
        runner = self.runner
        table = runner.req_to_token_pool.req_to_token
        runner.attn_backend = LongDraftAttention(
            runner.attn_backend, runner.token_to_kv_pool, self.prefix_backend, table, self.scales
        )
        runner.attn_backend.captured_hidden = self.observer.capture
        runner.attn_backend.tree_widths = frozenset(shape.places for shape in self.shapes if not shape.chain)
        self.drafter.bind_pool(runner.token_to_kv_pool, self.scales)
        if isinstance(self.step, ViewStep):
            keep_views(self.step, self.settings, runner, self.drafter, self.most, self.scales)

    def init_cuda_graphs(self) -> None:
        """The draft's, at the sizes at which SGLang has just captured the target's verification; beside trees those of a round
        without drafts too, and of every shape among which there is a choice.
        """
        made = self.runner.decode_cuda_graph_runner
        if made is not None and hasattr(made, "capture_bs"):
            self.step.graphs = graphs = TargetGraphs(self.runner, made)
            widths = {1, *(shape.places for shape in self.shapes)} if self.shapes else set()
            if isinstance(self.step, ViewStep):
                widths |= {self.step.chain, *(self.step.chain + room for room in rooms(self.settings.pending))}
            for width in sorted(widths):
                graphs.add(width)
            if isinstance(self.step, ViewStep):
                graphs.add(self.step.chain, self.step.view_width, self.step.views.lists)
                if self.step.sparse is not None:
                    self.step.sparse.use_graphs(made.capture_bs, self.settings.mode)
                if self.settings.sparse:
                    graphs.add(self.step.chain, self.step.set_width, self.step.views.lists)
            self.drafter.use_graphs(made.capture_bs, [shape for shape in self.shapes if shape.depth])
            if isinstance(self.step, TreeStep):
                width = 1 + max(shape.depth for shape in self.shapes)
                self.step.mover = SlotMover(self.runner.token_to_kv_pool, made.capture_bs, width)
        if isinstance(self.step, TreeStep) and self.step.choice.open:
            self._price(self.step)

    def _price(self, step: TreeStep) -> None:
        """What each shape costs, given or measured (by rank 0's clock); where it cannot be measured, the last shape is drafted."""
        try:
            with torch.no_grad():
                step.choice.costs = self.ranks.word(
                    CostTable.load(self.costs, list(step.choice.shapes))
                    if self.costs is not None
                    else measured_costs(step, self.runner, self.most)
                )
            logger.info("longdraft: costs of a round by shape: %s", step.choice.costs.dump())
        except Exception:
            self.ranks.failed("longdraft: the shapes' costs could not be measured, nothing is chosen")

    def clear_cache_pool(self) -> None:
        self._start_anew()

    def _start_anew(self) -> None:
        """Forget every request; read the target's embedding and head again, which may be other tensors now."""
        self.drafter.clear()
        self.drafter.bind_target(self.weights)

    def update_weights_from_disk(self, request: Any) -> tuple[bool, str]:
        """The target has new weights in place; what the draft remembers of them is stale."""
        self.weights.renew()
        self._start_anew()
        return True, "longdraft keeps its draft and forgets its state"

    def update_weights_from_ipc(self, request: Any) -> tuple[bool, str]:
        return self.update_weights_from_disk(request)

    def update_weights_from_tensor(self, request: Any) -> tuple[bool, str]:
        result: tuple[bool, str] = self._target_worker.update_weights_from_tensor(request)
        self.weights.renew()
        self._start_anew()
        return result

    def prepare_for_kv_cache_release(self, req: Any) -> None:
        if self.metrics is not None:
            self.metrics.look(req)
        exact, count = self.step.exact_of(req), self.drafter.handed_back(req.rid, req.kv_committed_len)
        self.drafter.forget(req.rid)
        if exact is not None:  # what a view computed is approximate: no other request may find it
            count = min(count, exact)
        req.kv_committed_len = max(req.cache_protected_len, min(req.kv_committed_len, count))
        if gave_up(
            req
        ):  # its newest token's keys and values may never have been written: no other request may find them
            req.skip_radix_cache_insert = True

    def forward_batch_generation(self, batch: ScheduleBatch, on_publish: Any = None) -> GenerationBatchResult:
        if batch.return_logprob:
            self._mend_logprobs(batch)
        try:
            result = self._prefill(batch) if batch.forward_mode.is_extend() else self._decode(batch)
        except RanksDiffer as error:  # SGLang ends the server for an Exception alone
            raise RuntimeError(str(error)) from error
        if on_publish is not None:
            on_publish(result.new_seq_lens)
        return result

    def prefill_waits(self, waits: bool) -> None:
        """Whether a prefill waits for the running batch to end its step; asked before every batch."""
        self.step.prefill_waits(waits)

    def needs_host(self, batch: ScheduleBatch) -> bool:
        """Whether a round of the batch has to wait for the one before to be processed; asked under the overlap schedule."""
        return self.step.needs_host(batch)

    def _decode(self, batch: ScheduleBatch) -> GenerationBatchResult:
        result = self.step.run(batch)
        last_B1 = result.accept_lens[:, None] - 1
        self.step.remember(batch, result.next_token_ids.view(len(batch.reqs), -1).gather(1, last_B1)[:, 0])
        if self.metrics is not None:
            self.metrics.ran(batch.reqs)
        return result

    def on_verify_complete_cpu(self, num_correct_drafts_per_req: list[int], batch_size: int = 0) -> None:
        self.step.processed(num_correct_drafts_per_req)

    def _mend_logprobs(self, batch: ScheduleBatch) -> None:
        """What SGLang fails on: more top tokens than there are, and a batch of which only some requests name tokens."""
        vocab = self.runner.model_config.vocab_size
        batch.top_logprobs_nums = [min(count, vocab) for count in batch.top_logprobs_nums or []]
        if any(ids is not None for ids in batch.token_ids_logprobs or []):
            batch.token_ids_logprobs = [ids or [] for ids in batch.token_ids_logprobs or []]

    def _prefill(self, batch: ScheduleBatch) -> GenerationBatchResult:
        """The target's prefill; the first token is chosen as every later one is."""
        batch.capture_hidden_mode = self.observer.capture  # for this forward alone
        result = self._target_worker.forward_batch_generation(batch, is_verify=not batch.is_prefill_only)
        output, reqs = result.logits_output, batch.reqs
        self.observer.prefilled(batch, output)
        if not batch.is_prefill_only:
            for req in reqs:
                self.step.mode_of(req)  # a request that ends here still reports its counters
            position_B = batch.seq_lens.to(torch.int64) - 1
            choice_B, logits_BV = self.step.first_choice(output.next_token_logits, reqs, position_B)
            [choice_B] = self.ranks.first("first tokens", choice_B)
            result.next_token_ids = choice_B
            self.step.remember(batch, choice_B)
            self.step.prefilled(batch)
            if batch.return_logprob:
                logprob_BV = torch.log_softmax(logits_BV / batch.sampling_info.temperatures, -1)
                self.runner.sampler._attach_logprobs_to_output(
                    output, logprob_BV, batch.top_logprobs_nums, batch.token_ids_logprobs, batch.sampling_info, choice_B
                )
        result.next_draft_input = DraftInput()
        result.new_seq_lens = batch.seq_lens
        return result
