"""Decode steps over a made-up target: every drafter gives the target's own tokens, and failures stay with their request."""

import zlib
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from serve_fakes import BareRequest, PieceTokenizer
from sglang.srt.sampling.sampling_params import SamplingParams

from longdraft.serve import decode_step, simulate, stats
from longdraft.serve.decode_step import DecodeStep
from longdraft.serve.drafters.base import Drafter, DraftRequest, Pick
from longdraft.serve.observer import Observer
from longdraft.serve.settings import ServeSettings
from longdraft.serve.tokens import Tokens
from longdraft.serve.verify import Verified

VOCAB, STRIDE = 8, 5


def next_of(text: list[int]) -> int:
    """The target's choice: any fixed function of the whole text."""
    return zlib.crc32(bytes(text)) % VOCAB


class ScriptedDrafter(Drafter):
    """Drafts by a rule of the text so far; remembers what it is told."""

    def __init__(self, rule: Callable[[list[int], int], int]) -> None:
        self.rule = rule
        self.told: list[tuple[str, list[int]]] = []
        self.cleared = 0

    def propose(self, requests: list[DraftRequest], pick: Pick) -> list[list[int]]:
        out = []
        for request in requests:
            text, drafts = request.tokens.slice(0, len(request.tokens)), []
            for depth in range(request.limit):
                drafts.append(self.rule(text + drafts, depth))
            out.append(drafts)
        return out

    def committed(self, request: DraftRequest, tokens: list[int]) -> None:
        self.told.append((request.rid, tokens))

    def forget(self, rid: str) -> None: ...

    def clear(self) -> None:
        self.cleared += 1


def make_request(rid: str, prompt: list[int], **params: Any) -> BareRequest:
    req = BareRequest(SamplingParams(temperature=0.0, **params), PieceTokenizer("abcdefgh", eos=7), prompt)
    req.rid, req.req_pool_idx, req.kv_allocated_len, req.prefix_indices = rid, 0, 1 << 20, torch.zeros(0)
    return req


def batch_of(reqs: list[BareRequest]) -> Any:
    return SimpleNamespace(
        reqs=reqs,
        seq_lens=torch.tensor([len(Tokens(r)) for r in reqs]),
        return_logprob=False,
        req_to_token_pool=SimpleNamespace(req_to_token=torch.zeros(1, 4096, dtype=torch.int32)),
    )


def made_up_verify(broken: Callable[[Any, list[list[int]]], bool] = lambda reqs, drafts: False) -> Any:
    def verify(
        target_worker: Any, batch: Any, members: list[int], drafts: list[list[int]], observer: Observer, *_: Any
    ) -> Verified:
        reqs = [batch.reqs[i] for i in members]
        if broken(reqs, drafts):
            raise RuntimeError("kernel failed")
        choices, cu = [], [0]
        for req, drafted in zip(reqs, drafts, strict=True):
            text = Tokens(req).slice(0, len(Tokens(req)))
            choices += [next_of(text + drafted[:j]) for j in range(len(drafted) + 1)]
            cu.append(len(choices))
        return Verified(torch.tensor(choices), torch.zeros(len(choices), VOCAB), cu)

    return verify


def step_of(drafter: Drafter, **changes: Any) -> DecodeStep:
    worker = SimpleNamespace(model_runner=SimpleNamespace(model_config=SimpleNamespace(vocab_size=VOCAB), device="cpu"))
    return DecodeStep(worker, drafter, Observer(drafter), ServeSettings(**changes), STRIDE)


def serve(step: DecodeStep, reqs: list[BareRequest], limit: int = 60) -> None:
    """SGLang's loop: run the batch, hand out the runs, drop what finished."""
    for _ in range(limit):
        live = [r for r in reqs if not r.finished()]
        if not live:
            return
        result = step.run(batch_of(live))
        assert result.next_token_ids.shape == (len(live) * STRIDE,)
        rows = result.next_token_ids.view(len(live), STRIDE).tolist()
        assert (result.new_seq_lens - result.accept_lens).tolist() == [len(Tokens(r)) for r in live]
        for req, row, count in zip(live, rows, result.accept_lens.tolist(), strict=True):
            assert 1 <= count <= STRIDE
            req.gain(row[:count])
    raise AssertionError("a request never ended")


def plainly(req: BareRequest) -> list[int]:
    while not req.finished():
        req.gain([next_of(Tokens(req).slice(0, len(Tokens(req))))])
    return list(req.output_ids)


RULES: dict[str, Callable[[list[int], int], int]] = {
    "oracle": lambda text, depth: next_of(text),
    "adversary": lambda text, depth: (next_of(text) + 1) % VOCAB,
    "right twice": lambda text, depth: (next_of(text) + (depth > 1)) % VOCAB,
    "constant": lambda text, depth: 3,
    "outside the vocabulary": lambda text, depth: 10**9 if depth % 2 else -5,
}


@settings(max_examples=25, deadline=None)
@given(
    prompts=st.lists(st.lists(st.integers(0, 7), min_size=1, max_size=5), min_size=1, max_size=4),
    lengths=st.lists(st.integers(1, 20), min_size=4, max_size=4),
    ignore_eos=st.booleans(),
    stop=st.one_of(st.none(), st.text("abc", min_size=1, max_size=2)),
)
@pytest.mark.parametrize("rule", RULES.values(), ids=RULES.keys())
def test_any_drafter_gives_the_targets_own_tokens(
    rule: Callable[[list[int], int], int],
    prompts: list[list[int]],
    lengths: list[int],
    ignore_eos: bool,
    stop: str | None,
) -> None:
    """V1, V7, V8: batches of requests that end by length, token or string at different times."""

    def fresh() -> list[BareRequest]:
        return [
            make_request(f"r{i}", prompt, max_new_tokens=lengths[i], ignore_eos=ignore_eos, stop=stop)
            for i, prompt in enumerate(prompts)
        ]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decode_step, "verify", made_up_verify())
        served = fresh()
        serve(step_of(ScriptedDrafter(rule)), served)
    for req, alone in zip(served, fresh(), strict=True):
        assert list(req.output_ids) == plainly(alone)
        assert req.finished_reason.to_json() == alone.finished_reason.to_json()
        counts = stats.attach(req, "full").accept
        assert counts.accepted + counts.verifications == len(req.output_ids), (
            "V5: drafts kept and one more a verification"
        )


def run_one(monkeypatch: pytest.MonkeyPatch, drafter: Drafter, req: BareRequest, **changes: Any) -> stats.RequestStats:
    monkeypatch.setattr(decode_step, "verify", made_up_verify())
    serve(step_of(drafter, **changes), [req])
    return stats.attach(req, "?")


def test_an_oracle_gains_the_whole_stride(monkeypatch: pytest.MonkeyPatch) -> None:
    req = make_request("r", [1], max_new_tokens=20, ignore_eos=True)
    counts = run_one(monkeypatch, ScriptedDrafter(RULES["oracle"]), req)
    assert counts.rounds == 4
    assert counts.accept.tau == STRIDE


def test_mode_off_drafts_nothing_by_default_or_by_request(monkeypatch: pytest.MonkeyPatch) -> None:
    off = {"longdraft": {"mode": "off"}}
    for params, changes in (({}, {"mode": "off"}), ({"custom_params": off}, {})):
        drafter = ScriptedDrafter(RULES["oracle"])
        counts = run_one(
            monkeypatch, drafter, make_request("r", [1], max_new_tokens=6, ignore_eos=True, **params), **changes
        )
        assert counts.summary()["mode"] == "off"
        assert (counts.accept.drafted, counts.accept.tau, drafter.told) == (0, 1.0, [])
    req = make_request("r", [1], max_new_tokens=6, ignore_eos=True, custom_params={"longdraft": {"mode": "full"}})
    assert run_one(monkeypatch, ScriptedDrafter(RULES["oracle"]), req, mode="off").accept.drafted > 0


def test_drafts_stop_at_the_reserved_slots_and_at_the_length(monkeypatch: pytest.MonkeyPatch) -> None:
    """A draft without a slot would be written over someone else's."""
    limits: list[int] = []

    class Watching(ScriptedDrafter):
        def propose(self, requests: list[DraftRequest], pick: Pick) -> list[list[int]]:
            limits.extend(r.limit for r in requests)
            return super().propose(requests, pick)

    monkeypatch.setattr(decode_step, "verify", made_up_verify())
    step = step_of(Watching(RULES["adversary"]))
    req = make_request("r", [1, 2, 3], max_new_tokens=3, ignore_eos=True)
    step.run(batch_of([req]))
    req.kv_allocated_len = 4  # the newest token is number 3 and has its own slot; one more is left
    step.run(batch_of([req]))
    req.kv_allocated_len = 3
    step.run(batch_of([req]))
    assert limits == [2, 1]


def test_the_drafter_hears_of_exactly_what_was_returned(monkeypatch: pytest.MonkeyPatch) -> None:
    drafter = ScriptedDrafter(RULES["right twice"])
    req = make_request("r", [1], max_new_tokens=11)
    run_one(monkeypatch, drafter, req)
    told = [t for rid, run in drafter.told for t in run]
    assert told == list(req.output_ids)[: len(told)]
    assert {rid for rid, _ in drafter.told} == {"r"}


class FailingDrafter(ScriptedDrafter):
    def propose(self, requests: list[DraftRequest], pick: Pick) -> list[list[int]]:
        raise RuntimeError("draft failed")


def test_a_drafter_that_fails_costs_speed_only(monkeypatch: pytest.MonkeyPatch) -> None:
    drafter = FailingDrafter(RULES["oracle"])
    req = make_request("r", [1], max_new_tokens=5, ignore_eos=True)
    counts = run_one(monkeypatch, drafter, req)
    assert list(req.output_ids) == plainly(make_request("r", [1], max_new_tokens=5, ignore_eos=True))
    assert drafter.cleared == counts.failures > 0


def test_a_verification_that_fails_is_repeated_one_by_one_without_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_step, "verify", made_up_verify(lambda reqs, drafts: any(drafts)))
    reqs = [make_request(rid, [n], max_new_tokens=6, ignore_eos=True) for rid, n in (("a", 1), ("b", 2))]
    serve(step_of(ScriptedDrafter(RULES["oracle"])), reqs)
    for req, n in zip(reqs, (1, 2), strict=True):
        assert list(req.output_ids) == plainly(make_request("x", [n], max_new_tokens=6, ignore_eos=True))


def test_a_request_that_cannot_be_verified_ends_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_step, "verify", made_up_verify(lambda reqs, drafts: any(r.rid == "bad" for r in reqs)))
    good, bad = (make_request(rid, [1], max_new_tokens=6, ignore_eos=True) for rid in ("good", "bad"))
    serve(step_of(ScriptedDrafter(RULES["oracle"])), [good, bad])
    assert list(good.output_ids) == plainly(make_request("x", [1], max_new_tokens=6, ignore_eos=True))
    ended = bad.finished_reason.to_json()
    assert ended["type"] == "abort"
    assert "could not verify this request" in ended["message"]


def test_a_step_that_fails_behind_its_verification_ends_its_requests_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_step, "verify", made_up_verify())
    step, kept = step_of(ScriptedDrafter(lambda text, depth: next_of(text))), []

    def planted(*given: Any) -> Any:
        kept.append(given)
        if len(kept) == 2:
            raise torch.OutOfMemoryError("planted")
        return keep(*given)

    keep, step._keep = step._keep, planted  # type: ignore[method-assign]
    doomed = [make_request(rid, [3], max_new_tokens=30, ignore_eos=True) for rid in "ab"]
    serve(step, doomed)
    assert all(r.finished_reason.to_json()["type"] == "abort" for r in doomed) and len(kept) == 2
    later = make_request("c", [1], max_new_tokens=6, ignore_eos=True)
    serve(step, [later])
    assert list(later.output_ids) == plainly(make_request("x", [1], max_new_tokens=6, ignore_eos=True))


def test_simulated_acceptance_forces_the_length_and_the_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """For timing with random weights: the drafts stand in for the target's tokens."""
    req = make_request("r", [1], max_new_tokens=120, ignore_eos=True)
    counts = run_one(monkeypatch, ScriptedDrafter(RULES["constant"]), req, simulate_accept_length=3.0)
    assert 2.0 < counts.accept.tau < 4.0
    assert list(req.output_ids).count(3) > 60


@pytest.mark.parametrize("length", [1, 3, 5, 9])
def test_sglangs_variable_gives_every_step_of_a_batch_its_length(monkeypatch: pytest.MonkeyPatch, length: int) -> None:
    """As stock: a whole number is exact, more than the chain holds is the chain, bonus in."""
    monkeypatch.setenv("SGLANG_SIMULATE_ACC_LEN", str(length))
    monkeypatch.setattr(decode_step, "verify", made_up_verify())
    reqs = [make_request(rid, [1], max_new_tokens=50, ignore_eos=True) for rid in "ab"]
    result = step_of(ScriptedDrafter(RULES["adversary"])).run(batch_of(reqs))
    assert result.accept_lens.tolist() == [min(length, STRIDE)] * 2


def test_a_fraction_is_one_draw_for_the_whole_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_SIMULATE_ACC_LEN", "2.5")
    torch.manual_seed(0)
    drawn = [simulate.simulated_acceptance([4, 4, 1], None, STRIDE) for _ in range(200)]
    assert {tuple(kept) for kept in drawn} == {(1, 1, 1), (2, 2, 1)}
    assert 0.4 < sum(kept[0] == 2 for kept in drawn) / 200 < 0.6
    assert simulate.simulated_acceptance([4], 5.0, STRIDE) == [4], "our setting goes first"
