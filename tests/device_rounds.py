"""Rounds on the device without SGLang: a made-up target, and the scheduler's loop with the host a round behind or not."""

from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import Any

import torch
from serve_fakes import BareRequest, PieceTokenizer
from sglang.srt.sampling.sampling_params import SamplingParams

from longdraft.serve.device_step import DeviceStep
from longdraft.serve.tokens import Tokens

VOCAB, STRIDE, COLUMNS, ROWS = 8, 5, 40, 6


def next_of(token: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
    """The target's choice: any fixed function of a token and its place, which is all that the device is told."""
    return (token * 5 + position * position * 3 + position // 4) % VOCAB


class MadeUpTarget:
    """Answers by :func:`next_of`, remembers what was written where; may fail."""

    def __init__(
        self,
        broken: Callable[[Any], bool] = lambda forward: False,
        vocab: int = VOCAB,
        device: str = "cpu",
        features: int = 0,
    ) -> None:
        self.broken, self.vocab = broken, vocab
        draw = torch.Generator().manual_seed(0)
        self.features_VA = torch.randn(vocab, features, generator=draw).to(device) if features else None
        self.place_S = torch.zeros(ROWS * COLUMNS + 1, 2, dtype=torch.int64, device=device)  # token, position by slot
        values_S = torch.zeros_like(self.place_S)
        pool = SimpleNamespace(
            layer_num=1, get_key_buffer=lambda layer: self.place_S, get_value_buffer=lambda layer: values_S
        )
        self.model_runner = SimpleNamespace(
            model_config=SimpleNamespace(vocab_size=vocab), device=device, token_to_kv_pool=pool
        )

    def forward_batch_generation(self, batch: None, forward_batch: Any, is_verify: bool) -> Any:
        if self.broken(forward_batch):
            raise RuntimeError("kernel failed")
        id_T, position_T = forward_batch.input_ids, forward_batch.positions
        self.place_S[forward_batch.out_cache_loc] = torch.stack([id_T, position_T], 1)
        logits_TV = torch.zeros(len(id_T), self.vocab, device=id_T.device)
        logits_TV.scatter_(1, next_of(id_T, position_T)[:, None], 1.0)
        hidden_TA = None if self.features_VA is None else self.features_VA[id_T]
        return SimpleNamespace(logits_output=SimpleNamespace(next_token_logits=logits_TV, hidden_states=hidden_TA))


TABLE = 1 + torch.arange(ROWS * COLUMNS, dtype=torch.int32).view(ROWS, COLUMNS)


class Server:
    """SGLang's loop over one step: a result is processed a round after it was launched, unless the step needs the host."""

    def __init__(
        self,
        step: DeviceStep,
        behind: bool,
        device: str = "cpu",
        guard: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        """Take the step.

        Args:
            step: serves.
            behind: whether the overlap schedule is on.
            device: of everything.
            guard: entered around every round that is launched.
        """
        self.step, self.behind, self.device, self.guard = step, behind, device, guard
        self.table = TABLE.to(device)
        self.length_R = torch.zeros(ROWS, dtype=torch.int64, device=device)
        self.queue: deque[Any] = deque()
        self.waited = 0

    def batch(self, reqs: list[BareRequest]) -> Any:
        row_B = torch.tensor([r.req_pool_idx for r in reqs], device=self.device)
        return SimpleNamespace(
            reqs=list(reqs), req_pool_indices=row_B, seq_lens=self.length_R[row_B], return_logprob=False, spec_algorithm=None,
            sampling_info=None, req_to_token_pool=SimpleNamespace(req_to_token=self.table),
        )  # fmt: skip

    def prefill(self, reqs: list[BareRequest]) -> None:
        for req in reqs:
            self.length_R[req.req_pool_idx] = len(Tokens(req))
        batch = self.batch(reqs)
        batch.seq_lens_cpu = batch.seq_lens.cpu()
        first_B = torch.stack(
            [next_of(torch.tensor(Tokens(r).newest), torch.tensor(len(Tokens(r)) - 1)) for r in reqs]
        ).to(self.device)
        self.step.remember(batch, first_B)
        self.step.prefilled(batch)
        for req, token in zip(reqs, first_B.tolist(), strict=True):
            req.gain([token])

    def process(self) -> None:
        reqs, result = self.queue.popleft()
        counts = result.accept_lens.tolist()
        self.step.processed([n - 1 for n in counts])
        for req, row, count in zip(reqs, result.next_token_ids.view(len(reqs), -1).tolist(), counts, strict=True):
            assert 1 <= count <= self.step.stride
            if not req.finished():
                req.gain(row[:count])

    def run(self, reqs: list[BareRequest], rounds: int = 80) -> None:
        self.prefill(reqs)
        for _ in range(rounds):
            live = [r for r in reqs if not r.finished()]
            if not live:
                while self.queue:
                    self.process()
                return
            batch = self.batch(live)
            if self.queue and (not self.behind or self.step.needs_host(batch)):
                self.process()
                self.waited += 1
            with self.guard():
                result = self.step.run(batch)
                last_B1 = result.accept_lens[:, None] - 1
                self.step.remember(batch, result.next_token_ids.view(len(live), -1).gather(1, last_B1)[:, 0])
                self.length_R[batch.req_pool_indices] = result.new_seq_lens
            if self.queue:
                self.process()
            self.queue.append((live, result))
            if not self.behind:
                self.process()
        raise AssertionError("a request never ended")


def make_request(rid: str, row: int, prompt: list[int], **params: Any) -> BareRequest:
    req = BareRequest(SamplingParams(**{"temperature": 0.0, **params}), PieceTokenizer("abcdefgh", eos=7), prompt)
    req.rid, req.req_pool_idx, req.kv_allocated_len, req.prefix_indices = rid, row, COLUMNS, torch.zeros(0)
    req.is_retracted = False
    return req


def plainly(req: BareRequest) -> list[int]:
    while not req.finished():
        token, place = torch.tensor(Tokens(req).newest), torch.tensor(len(Tokens(req)) - 1)
        req.gain([int(next_of(token, place))])
    return list(req.output_ids)
