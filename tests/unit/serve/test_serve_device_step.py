"""Rounds on the device over a made-up target: the same tokens with the host a round behind, and failures stay with their request."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from device_rounds import COLUMNS, STRIDE, TABLE, VOCAB, MadeUpTarget, Server, make_request, next_of, plainly
from hypothesis import given, settings
from hypothesis import strategies as st
from serve_fakes import BareRequest

from longdraft.serve import stats
from longdraft.serve.device_step import DeviceStep
from longdraft.serve.drafters.base import Drafter, DraftRequest, Pick
from longdraft.serve.drafters.running import Running
from longdraft.serve.observer import Observer
from longdraft.serve.settings import ServeSettings
from longdraft.serve.tokens import Tokens


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


def step_of(drafter: Drafter, target: MadeUpTarget | None = None, **changes: Any) -> DeviceStep:
    return DeviceStep(target or MadeUpTarget(), drafter, Observer(drafter), ServeSettings(**changes), STRIDE)


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
            assert target.place_S[TABLE[req.req_pool_idx, place]].tolist() == [text[place], place]


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
    target.place_S[TABLE[1]] = target.place_S[0] = 0
    assert not target.place_S.any(), "nothing but the request's own slots was written"


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
    counts = stats.attach(req, "?")
    assert drafter.cleared == counts.failures == 2
    assert counts.accept.drafted == counts.accept.accepted > 0, "what was not drafted is not counted"


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
