"""Rounds on the device over a made-up target: the same tokens with the host a round behind, and failures stay with their request."""

from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from serve_fakes import BareRequest, PieceTokenizer
from sglang.srt.sampling.sampling_params import SamplingParams

from longdraft.serve import stats
from longdraft.serve.device_step import DeviceStep
from longdraft.serve.drafters.base import Drafter, DraftRequest, Pick
from longdraft.serve.drafters.running import Running
from longdraft.serve.observer import Observer
from longdraft.serve.settings import ServeSettings
from longdraft.serve.tokens import Tokens

VOCAB, STRIDE, COLUMNS, ROWS = 8, 5, 40, 6


def next_of(token: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
    """The target's choice: any fixed function of a token and its place, which is all that the device is told."""
    return (token * 5 + position * position * 3 + position // 4) % VOCAB


class MadeUpTarget:
    """Answers by :func:`next_of`, remembers what was written where; may fail."""

    def __init__(self, broken: Callable[[Any], bool] = lambda forward: False) -> None:
        self.model_runner = SimpleNamespace(model_config=SimpleNamespace(vocab_size=VOCAB), device="cpu")
        self.broken = broken
        self.written: dict[int, tuple[int, int]] = {}  # slot -> token, position

    def forward_batch_generation(self, batch: None, forward_batch: Any, is_verify: bool) -> Any:
        if self.broken(forward_batch):
            raise RuntimeError("kernel failed")
        id_T, position_T = forward_batch.input_ids, forward_batch.positions
        for slot, fact in zip(
            forward_batch.out_cache_loc.tolist(), zip(id_T.tolist(), position_T.tolist(), strict=True), strict=True
        ):
            if slot:
                self.written[slot] = fact
        logits_TV = torch.nn.functional.one_hot(next_of(id_T, position_T), VOCAB).float()
        return SimpleNamespace(logits_output=SimpleNamespace(next_token_logits=logits_TV, hidden_states=None))


class DeviceDrafter(Drafter):
    """Drafts by a rule of token and position on the device, and on the host of what it is told there."""

    on_device = True

    def __init__(self, rule: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
        self.rule = rule
        self.known: set[str] = set()
        self.followed: list[tuple[str, int]] = []
        self.cleared = 0

    def chain(self, token_B: torch.Tensor, position_B: torch.Tensor) -> torch.Tensor:
        drafted = []
        for step in range(STRIDE - 1):
            token_B = self.rule(token_B, position_B + step)
            drafted.append(token_B)
        return torch.stack(drafted, 1)

    def follow(self, rid: str, tokens: Tokens, end: int) -> None:
        self.followed.append((rid, end))
        self.known.add(rid)

    def follows(self, rid: str) -> bool:
        return rid in self.known

    def propose_running(self, running: Running, pick: Pick) -> torch.Tensor:
        return self.chain(running.newest_B, running.length_B)

    def propose(self, requests: list[DraftRequest], pick: Pick) -> list[list[int]]:
        facts = torch.tensor([[r.tokens.newest, r.tokens.cached] for r in requests])
        drafted = self.chain(facts[:, 0], facts[:, 1]).tolist()
        return [ids[: r.limit] for ids, r in zip(drafted, requests, strict=True)]

    def committed(self, request: DraftRequest, tokens: list[int]) -> None: ...

    def forget(self, rid: str) -> None:
        self.known.discard(rid)

    def clear(self) -> None:
        self.cleared += 1
        self.known.clear()


RULES: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "oracle": next_of,
    "adversary": lambda token, position: (next_of(token, position) + 1) % VOCAB,
    "often right": lambda token, position: (next_of(token, position) + (position % 3 == 0)) % VOCAB,
    "outside the vocabulary": lambda token, position: torch.where(position % 2 == 0, 10**9, -5),
}
TABLE = 1 + torch.arange(ROWS * COLUMNS, dtype=torch.int32).view(ROWS, COLUMNS)


class Server:
    """SGLang's loop over one step: a result is processed a round after it was launched, unless the step needs the host."""

    def __init__(self, step: DeviceStep, behind: bool) -> None:
        self.step, self.behind = step, behind
        self.length_R = torch.zeros(ROWS, dtype=torch.int64)
        self.queue: deque[Any] = deque()
        self.waited = 0

    def batch(self, reqs: list[BareRequest]) -> Any:
        row_B = torch.tensor([r.req_pool_idx for r in reqs])
        return SimpleNamespace(
            reqs=list(reqs), req_pool_indices=row_B, seq_lens=self.length_R[row_B], return_logprob=False, spec_algorithm=None,
            sampling_info=None, req_to_token_pool=SimpleNamespace(req_to_token=TABLE),
        )  # fmt: skip

    def prefill(self, reqs: list[BareRequest]) -> None:
        for req in reqs:
            self.length_R[req.req_pool_idx] = len(Tokens(req))
        batch = self.batch(reqs)
        batch.seq_lens_cpu = batch.seq_lens
        first_B = torch.stack([next_of(torch.tensor(Tokens(r).newest), torch.tensor(len(Tokens(r)) - 1)) for r in reqs])
        self.step.remember(batch, first_B)
        self.step.prefilled(batch)
        for req, token in zip(reqs, first_B.tolist(), strict=True):
            req.gain([token])

    def process(self) -> None:
        reqs, result = self.queue.popleft()
        counts = result.accept_lens.tolist()
        self.step.processed([n - 1 for n in counts])
        for req, row, count in zip(reqs, result.next_token_ids.view(len(reqs), STRIDE).tolist(), counts, strict=True):
            assert 1 <= count <= STRIDE
            if not req.finished():
                req.gain(row[:count])

    def run(self, reqs: list[BareRequest], rounds: int = 80) -> None:
        self.prefill(reqs)
        for _ in range(rounds):
            live = [r for r in reqs if not r.finished()]
            if not live:
                return
            batch = self.batch(live)
            if self.queue and (not self.behind or self.step.needs_host(batch)):
                self.process()
                self.waited += 1
            result = self.step.run(batch)
            newest_B = result.next_token_ids.view(len(live), STRIDE).gather(1, result.accept_lens[:, None] - 1)[:, 0]
            self.step.remember(batch, newest_B)
            self.length_R[batch.req_pool_indices] = result.new_seq_lens
            if self.queue:
                self.process()
            self.queue.append((live, result))
            if not self.behind:
                self.process()
        raise AssertionError("a request never ended")


def make_request(rid: str, row: int, prompt: list[int], **params: Any) -> BareRequest:
    req = BareRequest(SamplingParams(temperature=0.0, **params), PieceTokenizer("abcdefgh", eos=7), prompt)
    req.rid, req.req_pool_idx, req.kv_allocated_len, req.prefix_indices = rid, row, COLUMNS, torch.zeros(0)
    req.is_retracted = False
    return req


def step_of(drafter: Drafter, target: MadeUpTarget | None = None, **changes: Any) -> DeviceStep:
    return DeviceStep(target or MadeUpTarget(), drafter, Observer(drafter), ServeSettings(**changes), STRIDE)


def plainly(req: BareRequest) -> list[int]:
    while not req.finished():
        token, place = torch.tensor(Tokens(req).newest), torch.tensor(len(Tokens(req)) - 1)
        req.gain([int(next_of(token, place))])
    return list(req.output_ids)


@settings(max_examples=25, deadline=None)
@given(
    prompts=st.lists(st.lists(st.integers(0, 7), min_size=1, max_size=5), min_size=1, max_size=4),
    lengths=st.lists(st.integers(1, 20), min_size=4, max_size=4),
    ignore_eos=st.booleans(),
    stops=st.sets(st.integers(0, 7), max_size=3),
    hosted=st.sampled_from([{}, {}, {"stop": "ba"}, {"frequency_penalty": 0.1}]),
)
@pytest.mark.parametrize("behind", [False, True])
@pytest.mark.parametrize("rule", RULES.values(), ids=RULES.keys())
def test_any_drafter_gives_the_targets_own_tokens(
    rule: Any,
    behind: bool,
    prompts: list[list[int]],
    lengths: list[int],
    ignore_eos: bool,
    stops: set[int],
    hosted: dict[str, Any],
) -> None:
    """V1, V5: requests that end by length, stop token or stop string at different times, with the host a round behind or not."""

    def fresh() -> list[BareRequest]:
        more = {"ignore_eos": ignore_eos, "stop_token_ids": stops or None}
        return [
            make_request(f"r{i}", i + 1, prompt, max_new_tokens=lengths[i], **more, **(hosted if i == 1 else {}))
            for i, prompt in enumerate(prompts)
        ]

    served, target = fresh(), MadeUpTarget()
    Server(step_of(DeviceDrafter(rule), target), behind).run(served)
    for req, alone in zip(served, fresh(), strict=True):
        assert list(req.output_ids) == plainly(alone)
        assert req.finished_reason.to_json() == alone.finished_reason.to_json()
        counts = stats.attach(req, "full").accept
        assert counts.accepted + counts.verifications == len(req.output_ids) - 1, "all but the prefill's token"
        text = list(Tokens(req).slice(0, len(Tokens(req))))
        for place in range(len(req.origin_input_ids), len(text) - 1):
            assert target.written[int(TABLE[req.req_pool_idx, place])] == (text[place], place)


@pytest.mark.parametrize("behind", [False, True])
def test_an_oracle_gains_the_whole_stride_and_is_counted_as_on_the_host(behind: bool) -> None:
    req = make_request("r", 1, [1], max_new_tokens=21, ignore_eos=True)
    server = Server(step_of(DeviceDrafter(next_of)), behind)
    server.run([req])
    counts = stats.attach(req, "?")
    assert (counts.rounds, counts.accept.drafted, counts.accept.tau) == (4, 16, STRIDE)
    assert server.waited == 0, "nothing here needs the host"


@pytest.mark.parametrize("behind", [False, True])
def test_mode_off_drafts_nothing(behind: bool) -> None:
    drafter = DeviceDrafter(next_of)
    off = make_request("off", 1, [1], max_new_tokens=6, ignore_eos=True, custom_params={"longdraft": {"mode": "off"}})
    on = make_request("on", 2, [1], max_new_tokens=6, ignore_eos=True)
    Server(step_of(drafter), behind).run([off, on])
    assert list(off.output_ids) == list(on.output_ids)
    assert [rid for rid, _ in drafter.followed] == ["on"]
    assert stats.attach(off, "?").accept.drafted == 0 < stats.attach(on, "?").accept.accepted


def test_a_full_row_of_the_page_table_ends_the_drafts() -> None:
    """A draft without a slot would be written over someone else's."""
    target = MadeUpTarget()
    req = make_request("r", 1, [1] * (COLUMNS - 8), max_new_tokens=8, ignore_eos=True)
    Server(step_of(DeviceDrafter(next_of), target), True).run([req])
    others = set(TABLE.flatten().tolist()) - set(TABLE[1].tolist())
    assert not others & set(target.written)


@pytest.mark.parametrize("behind", [False, True])
def test_a_drafter_that_fails_costs_speed_only_and_is_told_anew(behind: bool) -> None:
    class Failing(DeviceDrafter):
        def propose_running(self, running: Running, pick: Pick) -> torch.Tensor:
            if len(self.followed) < 3:
                raise RuntimeError("draft failed")
            return super().propose_running(running, pick)

    drafter = Failing(next_of)
    req = make_request("r", 1, [1, 2], max_new_tokens=12, ignore_eos=True)
    server = Server(step_of(drafter), behind)
    server.run([req])
    assert list(req.output_ids) == plainly(make_request("x", 2, [1, 2], max_new_tokens=12, ignore_eos=True))
    assert drafter.followed == [("r", 2), ("r", 3), ("r", 4)], "each time with all that the target has computed"
    assert drafter.cleared == stats.attach(req, "?").failures == 2


def test_a_request_that_the_drafter_cannot_follow_goes_on() -> None:
    class Lost(DeviceDrafter):
        def follow(self, rid: str, tokens: Tokens, end: int) -> None:
            raise RuntimeError("no memory")

    req = make_request("r", 1, [1, 2], max_new_tokens=12, ignore_eos=True)
    Server(step_of(Lost(RULES["often right"])), True).run([req])
    assert list(req.output_ids) == plainly(make_request("x", 2, [1, 2], max_new_tokens=12, ignore_eos=True))


@pytest.mark.parametrize("behind", [False, True])
def test_a_verification_that_fails_is_repeated_one_by_one(behind: bool) -> None:
    """Alone and without drafts; a request for which even that fails ends with an error, and no other one."""
    bad_row = 2
    target = MadeUpTarget(lambda forward: len(forward.rids) > 1 or forward.req_pool_indices.tolist() == [bad_row])
    reqs = [make_request(rid, row, [row], max_new_tokens=6, ignore_eos=True) for rid, row in (("a", 1), ("bad", 2))]
    Server(step_of(DeviceDrafter(next_of), target), behind).run(reqs)
    good, bad = reqs
    assert list(good.output_ids) == plainly(make_request("x", 1, [1], max_new_tokens=6, ignore_eos=True))
    assert bad.finished_reason.to_json()["type"] == "abort"


@pytest.mark.parametrize("length", [1, 3, 5, 9])
def test_forced_acceptance_is_the_hosts(monkeypatch: pytest.MonkeyPatch, length: int) -> None:
    monkeypatch.setenv("SGLANG_SIMULATE_ACC_LEN", str(length))
    req = make_request("r", 1, [1], max_new_tokens=31, ignore_eos=True)
    Server(step_of(DeviceDrafter(lambda token, position: torch.full_like(token, 3))), True).run([req])
    counts, gained = stats.attach(req, "?"), min(length, STRIDE)
    assert counts.rounds == 30 // gained
    assert list(req.output_ids).count(3) >= counts.rounds * (gained - 1), "the drafts stand in for the target's tokens"
