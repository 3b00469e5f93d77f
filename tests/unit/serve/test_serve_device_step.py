"""Rounds on the device over a made-up target: the same tokens with the host a round behind, and failures stay with their request."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from device_rounds import COLUMNS, STRIDE, TABLE, VOCAB, MadeUpTarget, Server, make_request, next_of, plainly
from hypothesis import given, settings
from hypothesis import strategies as st
from serve_fakes import BareRequest

from longdraft.kernels.tree import NO_NODE, Tree
from longdraft.serve import stats
from longdraft.serve.drafters.base import Drafter, DraftRequest, Pick
from longdraft.serve.drafters.running import Running
from longdraft.serve.make_step import make_step
from longdraft.serve.observer import Observer
from longdraft.serve.settings import ServeSettings
from longdraft.serve.tokens import Tokens
from longdraft.serve.tree_shape import TreeShape, chain_shape, parse_tree
from longdraft.serve.worker import LongDraftWorker


class DeviceDrafter(Drafter):
    """Drafts by a rule of token and position on the device, and on the host of what it is told there."""

    on_device = True

    def __init__(self, rule: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
        self.rule = rule
        self.known: set[str] = set()
        self.followed: list[tuple[str, int]] = []
        self.kept: dict[str, dict[int, int]] = {}
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

    def settle(self, rid: str, end: int) -> None:
        self.known.discard(rid)

    def follows(self, rid: str) -> bool:
        return rid in self.known

    def propose_running(self, running: Running, pick: Pick) -> torch.Tensor:
        return self.chain(running.newest_B, running.length_B)

    def propose_trees_running(self, running: Running, limit_B: torch.Tensor, params: Any, shape: TreeShape) -> Tree:
        """The chain's nodes, each behind a sibling that is one off."""
        batch, depth = len(running.rids), shape.depth
        right_BD = self.chain(running.newest_B, running.length_B)[:, :depth]
        token_BT = torch.cat(
            [running.newest_B[:, None], torch.stack([(right_BD + 1) % VOCAB, right_BD], 2).flatten(1)], 1
        )
        depth_T = torch.tensor([0, *(d for d in range(1, depth + 1) for _ in range(2))])
        parent_T = torch.tensor([-1, *(max(0, 2 * d - 2) for d in range(1, depth + 1) for _ in range(2))])
        parent_BT = torch.where(depth_T > limit_B[:, None], NO_NODE, parent_T)
        return Tree.build(token_BT.clamp(0, VOCAB - 1), parent_BT, depth_T.expand(batch, -1), depth)

    def keep(self, running: Running, id_BN: torch.Tensor, count_B: torch.Tensor) -> None:
        for rid, start, ids, count in zip(
            running.rids, running.length_B.tolist(), id_BN.tolist(), count_B.tolist(), strict=True
        ):
            self.kept.setdefault(rid, {}).update({start + j: ids[j] for j in range(count)})

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


def step_of(drafter: Drafter, target: MadeUpTarget | None = None, tree: str = "chain", **changes: Any) -> Any:
    shape = parse_tree(tree)
    stride = STRIDE if shape is None else shape.places
    return make_step(
        [] if shape is None else [shape],
        target or MadeUpTarget(),
        drafter,
        Observer(drafter),
        ServeSettings(**changes),
        stride,
    )


@settings(max_examples=25, deadline=None)
@given(
    prompts=st.lists(st.lists(st.integers(0, 7), min_size=1, max_size=5), min_size=1, max_size=4),
    lengths=st.lists(st.integers(1, 20), min_size=4, max_size=4),
    ignore_eos=st.booleans(),
    stops=st.sets(st.integers(0, 7), max_size=3),
    hosted=st.sampled_from([{}, {}, {"stop": "ba"}, {"frequency_penalty": 0.1}]),
)
@pytest.mark.parametrize("tree", ["chain", "2,2,2"])
@pytest.mark.parametrize("behind", [False, True])
@pytest.mark.parametrize("rule", RULES.values(), ids=RULES.keys())
def test_any_drafter_gives_the_targets_own_tokens(
    rule: Any,
    behind: bool,
    tree: str,
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

    served, target, drafter = fresh(), MadeUpTarget(), DeviceDrafter(rule)
    Server(step_of(drafter, target, tree), behind).run(served)
    for req, alone in zip(served, fresh(), strict=True):
        assert list(req.output_ids) == plainly(alone)
        assert req.finished_reason.to_json() == alone.finished_reason.to_json()
        counts = stats.attach(req, "full").accept
        assert counts.accepted + counts.verifications == len(req.output_ids) - 1, "all but the prefill's token"
        text = list(Tokens(req).slice(0, len(Tokens(req))))
        for place in range(len(req.origin_input_ids), len(text) - 1):
            assert target.place_S[TABLE[req.req_pool_idx, place]].tolist() == [text[place], place]
        for place, token in drafter.kept.get(req.rid, {}).items():
            assert place >= len(text) or text[place] == token, "the drafter hears of what the target has computed"


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


@pytest.mark.parametrize("tree", ["chain", "2,2,2"])
def test_a_full_row_of_the_page_table_ends_the_drafts(tree: str) -> None:
    """A draft without a slot would be written over someone else's."""
    target = MadeUpTarget()
    req = make_request("r", 1, [1] * (COLUMNS - 8), max_new_tokens=8, ignore_eos=True)
    Server(step_of(DeviceDrafter(next_of), target, tree), True).run([req])
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


@pytest.mark.parametrize("tree", ["chain", "2,2,2"])
@pytest.mark.parametrize("behind", [False, True])
def test_a_verification_that_fails_is_repeated_one_by_one(behind: bool, tree: str) -> None:
    """Alone and without drafts; a request for which even that fails ends with an error, and no other one."""
    bad_row = 2
    target = MadeUpTarget(lambda forward: len(forward.rids) > 1 or forward.req_pool_indices.tolist() == [bad_row])
    reqs = [make_request(rid, row, [row], max_new_tokens=6, ignore_eos=True) for rid, row in (("a", 1), ("bad", 2))]
    Server(step_of(DeviceDrafter(next_of), target, tree), behind).run(reqs)
    good, bad = reqs
    assert list(good.output_ids) == plainly(make_request("x", 1, [1], max_new_tokens=6, ignore_eos=True))
    assert bad.finished_reason.to_json()["type"] == "abort"
    forgotten: list[str] = []
    step = SimpleNamespace(exact_of=lambda req: None)
    drafter = SimpleNamespace(forget=forgotten.append, handed_back=lambda rid, count: count)
    worker: Any = SimpleNamespace(drafter=drafter, step=step, metrics=None)
    for req in reqs:
        req.kv_committed_len, req.cache_protected_len = 7, 1
        assert not hasattr(req, "skip_radix_cache_insert"), "a chunk of a prefill is kept without it"
        LongDraftWorker.prepare_for_kv_cache_release(worker, req)
    assert forgotten == ["a", "bad"] and [req.kv_committed_len for req in reqs] == [7, 7]
    skipped = [getattr(req, "skip_radix_cache_insert", False) for req in reqs]
    assert skipped == [False, True], "keys that were never written are not shared with later requests"


def test_logits_of_requests_that_were_verified_one_by_one_are_their_own() -> None:
    """A graph writes every request's to the same place."""

    class Replayed(MadeUpTarget):
        written = torch.zeros(STRIDE, VOCAB)

        def forward_batch_generation(self, *given: Any, **more: Any) -> Any:
            result = super().forward_batch_generation(*given, **more)
            out = self.written[: len(result.logits_output.next_token_logits)]
            result.logits_output.next_token_logits = out.copy_(result.logits_output.next_token_logits)
            return result

    step = step_of(DeviceDrafter(next_of), Replayed(lambda forward: len(forward.rids) > 1))
    returned, agreed = step._returned, []

    def seen_by(batch: Any, running: Any, gained: Any, seen: Any) -> Any:
        agreed.append((seen.logits_TV.argmax(-1) == seen.choice_T).all())
        return returned(batch, running, gained, seen)

    step._returned = seen_by
    reqs = [make_request(rid, row, [row], max_new_tokens=6, ignore_eos=True) for rid, row in (("a", 1), ("b", 2))]
    Server(step, False).run(reqs)
    assert reqs[0].output_ids != reqs[1].output_ids and len(agreed) > 3 and all(agreed)


@pytest.mark.parametrize(("tree", "point"), [("chain", "_accept"), ("2,2,2", "_keep_running"), ("2,2,2", "_launch")])
@pytest.mark.parametrize("behind", [False, True])
def test_a_step_that_fails_behind_its_verification_ends_its_requests_alone(behind: bool, tree: str, point: str) -> None:
    step = step_of(DeviceDrafter(next_of), None, tree)
    work, calls = getattr(step, point), []

    def planted(*given: Any) -> Any:
        result = work(*given)
        calls.append(point)
        if len(calls) == 2:
            raise torch.OutOfMemoryError("planted")
        return result

    setattr(step, point, planted)
    server = Server(step, behind)
    doomed = [make_request(rid, row, [row], max_new_tokens=30, ignore_eos=True) for rid, row in (("a", 1), ("b", 2))]
    server.run(doomed)
    assert all(r.finished_reason.to_json()["type"] == "abort" for r in doomed) and len(calls) == 2
    later = make_request("c", 3, [1], max_new_tokens=6, ignore_eos=True)
    server.run([later])
    assert list(later.output_ids) == plainly(make_request("x", 1, [1], max_new_tokens=6, ignore_eos=True))
    assert not step.launched


def test_stop_tokens_outside_of_the_vocabulary_stop_nothing_and_cost_nothing() -> None:
    req = make_request("r", 1, [1], max_new_tokens=6, ignore_eos=False, stop_token_ids=[-(10**30), -1, 10**30, 1 << 63])
    req.sampling_params.stop_token_ids |= set(range(VOCAB, 10**5))
    step = step_of(DeviceDrafter(next_of))
    Server(step, True).run([req])
    assert list(req.output_ids) == plainly(make_request("x", 2, [1], max_new_tokens=6))
    assert step.roster.stop_BS.tolist() == [[7]], "they take no room in a round"


@pytest.mark.parametrize("behind", [False, True])
def test_a_request_that_a_round_on_the_host_did_not_draft_for_is_followed_anew(behind: bool) -> None:
    """Such a round shows the drafter nothing, so that what it holds is behind."""
    drafter, plain = DeviceDrafter(next_of), chain_shape(0)
    step = make_step([plain], MadeUpTarget(), drafter, Observer(drafter), ServeSettings(), STRIDE)
    stays = make_request("stays", 1, [1], max_new_tokens=9, ignore_eos=True)
    leaves = make_request("leaves", 2, [2], max_new_tokens=4, ignore_eos=True, stop="hgfedcba")
    Server(step, behind).run([stays, leaves])
    assert [end for rid, end in drafter.followed if rid == "stays"] == [1, 4 + behind], (
        "as it came, and when the other one had left"
    )


@pytest.mark.parametrize("tree", ["chain", "2,2,2"])
@pytest.mark.parametrize("length", [1, 3, 4, 9])
def test_forced_acceptance_is_the_hosts(monkeypatch: pytest.MonkeyPatch, length: int, tree: str) -> None:
    monkeypatch.setenv("SGLANG_SIMULATE_ACC_LEN", str(length))
    req = make_request("r", 1, [1], max_new_tokens=31, ignore_eos=True)
    Server(step_of(DeviceDrafter(lambda token, position: torch.full_like(token, 3)), None, tree), True).run([req])
    counts, gained = stats.attach(req, "?"), min(length, STRIDE if tree == "chain" else 4)
    assert counts.rounds == -(-30 // gained)
    assert list(req.output_ids).count(3) >= counts.rounds * (gained - 2) - 2, (
        "the drafts stand in for the target's tokens"
    )


@pytest.mark.parametrize("host_lengths", [False, True])
def test_a_plan_outside_of_graphs_has_the_hosts_lengths_where_attention_plans_there(host_lengths: bool) -> None:
    """FlashInfer and the torch twin cannot serve a plan whose lengths the device alone knows."""
    on_meta = torch.zeros(2, dtype=torch.int64, device="meta")  # stands for a card: nothing of it can be read
    running = Running(("a", "b"), on_meta, TABLE.to("meta"), torch.tensor([3, 9]), on_meta, host_lengths)
    assert running.reads_lengths is host_lengths
    at_home = Running(("a", "b"), torch.tensor([1, 2]), TABLE, torch.tensor([3, 9]), torch.tensor([5, 6]), host_lengths)
    plan = at_home.plan(12, 4)
    assert plan.host_lens == [3, 9] and plan.pages_BW.shape == (2, 16)
    assert plan.pages_BW[:, :12].tolist() == TABLE[1:3, :12].tolist()
    one = at_home.only(1)
    assert (one.rids, one.length_B.tolist(), one.host_lengths) == (("b",), [9], host_lengths)
