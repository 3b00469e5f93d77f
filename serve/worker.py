"""The LONGDRAFT worker: draft, verify on the whole cache, return what plain decoding would have returned.

Legend: B requests, T new tokens of all requests, V vocabulary, S cache slots.
"""

import logging
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.layers.utils.logprob import compute_spec_v2_logprobs
from sglang.srt.managers.schedule_batch import FINISH_ABORT, ScheduleBatch
from sglang.srt.managers.utils import GenerationBatchResult
from sglang.srt.speculative.base_spec_worker import BaseSpecWorker

from longdraft.draft_models.acceptance import accepted_drafts
from longdraft.serve import stats
from longdraft.serve.attention_backend import LongDraftAttention
from longdraft.serve.build_drafter import build_drafter
from longdraft.serve.drafters.base import DraftRequest
from longdraft.serve.drafters.longspec import LongSpecDrafter
from longdraft.serve.emission import emitted, room
from longdraft.serve.sampling.rows import RowParams
from longdraft.serve.sampling.target_choice import target_choice
from longdraft.serve.settings import read_environment, request_settings
from longdraft.serve.simulate import forced_acceptance
from longdraft.serve.spec_inputs import DraftInput
from longdraft.serve.tokens import Tokens
from longdraft.serve.verify import Verification, verify_chains

logger = logging.getLogger(__name__)


class LongDraftWorker(BaseSpecWorker):
    """SGLang's speculative worker for ``LONGDRAFT``, mode ``full``, chains.

    SGLang runs it synchronously, so the requests' token lists are exact at every step and all per-request state is derived
    from them.
    """

    def __init__(self, server_args: Any, target_worker: Any, **_ranks: Any) -> None:
        self.settings = read_environment()
        self.server_args = server_args
        self._target_worker = target_worker
        self.runner = target_worker.model_runner
        self.steps: int = server_args.speculative_num_steps
        self.stride: int = server_args.speculative_num_draft_tokens
        self.prefix_backend = None if self.settings.attention == "auto" else self.settings.attention
        # The draft's memory is taken here, before SGLang sizes its cache pool.
        self.drafter = build_drafter(server_args, self.settings, self.runner)
        if self.settings.simulate_accept_length is not None:
            logger.warning("longdraft: acceptance is simulated, the text is wrong: for benchmarks only")

    @property
    def target_worker(self) -> Any:
        return self._target_worker

    @property
    def draft_worker(self) -> Any:
        # SGLang reads the draft's cache pool at start even where there is none.
        return SimpleNamespace(draft_runner=SimpleNamespace(token_to_kv_pool=None, model_config=None))

    def init_attention_backends(self) -> None:
        runner = self.runner
        runner.attn_backend = LongDraftAttention(runner.attn_backend, runner.token_to_kv_pool, self.prefix_backend)
        if isinstance(self.drafter, LongSpecDrafter):
            pool, last = runner.token_to_kv_pool, runner.model_config.num_hidden_layers - 1
            self.drafter.bind_cache(pool.get_key_buffer(last), pool.get_value_buffer(last))

    def clear_cache_pool(self) -> None:
        self.drafter.clear()

    def update_weights_from_disk(self, request: Any) -> tuple[bool, str]:
        """The target has new weights in place; what the draft remembers of its embeddings is stale."""
        self.drafter.clear()
        return True, "longdraft keeps its draft and forgets its state"

    def update_weights_from_ipc(self, request: Any) -> tuple[bool, str]:
        return self.update_weights_from_disk(request)

    def update_weights_from_tensor(self, request: Any) -> tuple[bool, str]:
        self.drafter.clear()
        result: tuple[bool, str] = self._target_worker.update_weights_from_tensor(request)
        return result

    def prepare_for_kv_cache_release(self, req: Any) -> None:
        self.drafter.forget(req.rid)

    def forward_batch_generation(self, batch: ScheduleBatch, on_publish: Any = None) -> GenerationBatchResult:
        if batch.forward_mode.is_extend():
            return self._prefill(batch)
        return self._decode(batch)

    def _prefill(self, batch: ScheduleBatch) -> GenerationBatchResult:
        """The target's prefill; the first token is chosen as every later one is."""
        if batch.is_prefill_only:
            result = self._target_worker.forward_batch_generation(batch)
        else:
            result = self._target_worker.forward_batch_generation(batch, is_verify=True)
            output, reqs = result.logits_output, batch.reqs
            position_B = batch.seq_lens.to(torch.int64) - 1
            choice_B, processed_BV = target_choice(output.next_token_logits, reqs, [[] for _ in reqs], position_B)
            result.next_token_ids = choice_B
            if batch.return_logprob:
                logprob_BV = torch.log_softmax(processed_BV / batch.sampling_info.temperatures, -1)
                self.runner.sampler._attach_logprobs_to_output(
                    output, logprob_BV, batch.top_logprobs_nums, batch.token_ids_logprobs, batch.sampling_info, choice_B
                )
        result.next_draft_input = DraftInput()
        result.new_seq_lens = batch.seq_lens
        return result

    def _decode(self, batch: ScheduleBatch) -> GenerationBatchResult:
        drafts = self._propose(batch)
        try:
            return self._verify(batch, drafts)
        except Exception:
            if not any(drafts):
                return self._isolate(batch)
            logger.exception("longdraft: verification failed, the batch goes on without drafts for this step")
            return self._decode_undrafted(batch)

    def _decode_undrafted(self, batch: ScheduleBatch) -> GenerationBatchResult:
        try:
            return self._verify(batch, [[] for _ in batch.reqs])
        except Exception:
            return self._isolate(batch)

    def _propose(self, batch: ScheduleBatch) -> list[list[int]]:
        """Draft tokens of each request; a drafter that fails costs its requests nothing but speed."""
        drafts: list[list[int]] = [[] for _ in batch.reqs]
        wanting = []
        for index, req in enumerate(batch.reqs):
            mode = request_settings(_own_params(req)).mode or self.settings.mode
            stats.attach(req, mode)
            tokens = Tokens(req)
            limit = min(self.steps, room(req) - 1, req.kv_allocated_len - tokens.cached - 1)
            if mode == "full" and limit > 0:
                pages = batch.req_to_token_pool.req_to_token[req.req_pool_idx, : tokens.cached]
                wanting.append((index, DraftRequest(req.rid, tokens, pages, limit)))
        if not wanting:
            return drafts
        requests = [request for _, request in wanting]
        params = RowParams.build([batch.reqs[index] for index, _ in wanting], [1] * len(wanting), batch.seq_lens.device)
        try:
            proposed = self.drafter.propose(requests, params.choose)
        except Exception:
            logger.exception("longdraft: the drafter failed, its requests go on without drafts for this step")
            self.drafter.clear()
            for index, _ in wanting:
                stats.attach(batch.reqs[index], "full").failures += 1
            return drafts
        vocab = self.runner.model_config.vocab_size
        for (index, _), ids in zip(wanting, proposed, strict=True):
            drafts[index] = [min(max(i, 0), vocab - 1) for i in ids]
        return drafts

    def _verify(self, batch: ScheduleBatch, drafts: list[list[int]]) -> GenerationBatchResult:
        tokens = [Tokens(r) for r in batch.reqs]
        chains = [[t.newest, *d] for t, d in zip(tokens, drafts, strict=True)]
        seen = verify_chains(self._target_worker, batch, chains, [t.cached for t in tokens])
        choice_T, processed_TV = target_choice(seen.logits_TV, batch.reqs, drafts, seen.position_T)
        kept, runs = self._accept(choice_T, drafts, seen.cu_rows)
        for index, (req, run) in enumerate(zip(batch.reqs, runs, strict=True)):
            runs[index] = run = emitted(req, run)
            counters = stats.attach(req, self.settings.mode)
            counters.rounds += 1
            counters.tokens += len(run)
            counters.accept.add(len(drafts[index]), min(kept[index], len(run) - 1) if len(run) <= kept[index] else kept[index])
            if drafts[index]:
                self.drafter.committed(DraftRequest(req.rid, tokens[index], req.prefix_indices, 0), run)
        return self._result(batch, runs, choice_T, processed_TV, seen)

    def _accept(self, choice_T: torch.Tensor, drafts: list[list[int]], cu: list[int]) -> tuple[list[int], list[list[int]]]:
        """Kept drafts and verified run of each request."""
        chosen = choice_T.tolist()
        choices = [chosen[a:b] for a, b in zip(cu, cu[1:], strict=False)]
        width = max(len(d) for d in drafts)
        if self.settings.simulate_accept_length is not None and width:
            kept = forced_acceptance([len(d) for d in drafts], self.settings.simulate_accept_length)
            return kept, [[*d[:k], c[k]] for d, k, c in zip(drafts, kept, choices, strict=True)]
        draft_BK = torch.tensor([d + [-1] * (width - len(d)) for d in drafts], dtype=torch.int64).view(len(drafts), width)
        choice_BK1 = torch.tensor([c + [-1] * (width + 1 - len(c)) for c in choices])
        kept = accepted_drafts(draft_BK, choice_BK1, torch.tensor([len(d) for d in drafts])).tolist()
        return kept, [c[: k + 1] for c, k in zip(choices, kept, strict=True)]

    def _result(
        self, batch: ScheduleBatch, runs: list[list[int]], choice_T: torch.Tensor, processed_TV: torch.Tensor, seen: Verification
    ) -> GenerationBatchResult:
        device = batch.seq_lens.device
        output = SimpleNamespace(
            next_token_logits=processed_TV,
            next_token_logprobs=None,
            next_token_top_logprobs_val=None,
            next_token_top_logprobs_idx=None,
            next_token_token_ids_logprobs_val=None,
            next_token_token_ids_logprobs_idx=None,
            input_token_logprobs=None,
            hidden_states=None,
            customized_info=None,
        )
        if batch.return_logprob:
            index = [[cu + min(j, end - cu - 1) for j in range(self.stride)] for cu, end in zip(seen.cu_rows, seen.cu_rows[1:], strict=False)]
            compute_spec_v2_logprobs(batch, output, choice_T, torch.tensor(index, device=device), self.stride - 1)
        lens_B = torch.tensor([len(r) for r in runs], device=device)
        padded = torch.tensor([r + [0] * (self.stride - len(r)) for r in runs], device=device)
        return GenerationBatchResult(
            logits_output=output,  # type: ignore[arg-type]
            next_token_ids=padded.view(-1),
            accept_lens=lens_B,
            new_seq_lens=batch.seq_lens + lens_B,
            speculative_num_draft_tokens=self.stride,
            next_draft_input=DraftInput(),  # type: ignore[arg-type]
            can_run_cuda_graph=False,
        )

    def _isolate(self, batch: ScheduleBatch) -> GenerationBatchResult:
        """Nothing worked for the whole batch: end its requests with an error instead of the server."""
        logger.exception("longdraft: plain verification failed, the batch's requests are aborted")
        for req in batch.reqs:
            req.to_finish = FINISH_ABORT("longdraft could not verify this request: see the server's log", 500, "InternalServerError")
        device = batch.seq_lens.device
        empty = Verification(torch.zeros(0, device=device), torch.zeros(0, device=device), [0] * (len(batch.reqs) + 1))
        batch.return_logprob = False
        runs = [[Tokens(r).newest] for r in batch.reqs]
        return self._result(batch, runs, torch.zeros(0), torch.zeros(0), empty)


def _own_params(req: Any) -> Any:
    """The request's ``custom_params`` without the entry that SGLang adds for itself."""
    params = req.sampling_params.custom_params
    return {k: v for k, v in params.items() if k != "__req__"} if isinstance(params, dict) else params
