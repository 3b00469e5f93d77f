"""Modes ``exact`` and ``partial`` over a real model's cache: which slots are read, what a refresh leaves, what is chosen (P3, P6, V1).

Every verification is held against a twin in double precision that attends to the view's positions; behind every step the cache
up to each request's exact length is held against transformers' own forward of the same tokens.
"""

import random
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import pytest
import torch
from device_rounds import make_request
from llama_on_pages import COLUMNS, TABLE, LlamaTarget, PagedServer
from test_serve_device_step import DeviceDrafter
from transformers import DynamicCache

from longdraft.draft_models.reference_decode import greedy_decode
from longdraft.serve import stats
from longdraft.serve.drafters.nothing import NothingDrafter
from longdraft.serve.drafters.running import Running
from longdraft.serve.make_step import make_step
from longdraft.serve.observer import Observer
from longdraft.serve.settings import VIEWED, ServeSettings
from longdraft.serve.view_step import ViewStep
from longdraft.serve.views.choose import choose_columns
from longdraft.serve.views.setup import keep_views
from longdraft.train.tiny_random import tiny_random_model

PENDING, CHAIN, NEW = 10, 5, 36
LENGTHS = (70, 150, 233, 8)  # a view of 64 tokens of each, and of one everything
MODEL: Any = tiny_random_model("llama:3")
PROMPTS = [random.Random(n).choices(range(256), k=n) for n in LENGTHS]
PLAIN = [greedy_decode(MODEL, prompt, NEW) for prompt in PROMPTS]
TEXTS = {f"r{i}": [*p, *said] for i, (p, said) in enumerate(zip(PROMPTS, PLAIN, strict=True))}


class KnownTextDrafter(DeviceDrafter):
    """Drafts plain decoding's own text, one token in six of it wrong."""

    def __init__(self) -> None:
        super().__init__(lambda token, position: token)

    def propose_running(self, running: Running, pick: Any) -> torch.Tensor:
        rows = []
        for rid, length in zip(running.rids, running.length_B.tolist(), strict=True):
            text = TEXTS[rid]
            rows.append(
                [(text[min(at, len(text) - 1)] + (at % 6 == 0)) % 256 for at in range(length + 1, length + CHAIN)]
            )
        return torch.tensor(rows)


class CacheCheck:
    """Holds cache and views against plain forwards, whenever a request's exact length has grown.

    Attributes:
        grown: how often that was behind a verification.
        stale: the largest difference of a pending token's keys from those of a plain forward.
    """

    def __init__(self, step: ViewStep, target: LlamaTarget, viewed: dict[int, bool]) -> None:
        """Take each row, and whether views are chosen for it."""
        self.step, self.target, self.grown, self.stale = step, target, 0, 0.0
        self.exact, self.viewed = dict.fromkeys(viewed, 0), viewed

    def __call__(self) -> None:
        assert not self.target.wrong
        for row, before in self.exact.items():
            exact = int(self.step.views.exact_R[row])
            assert exact >= before
            if exact == before:
                continue
            self.exact[row] = exact
            self.grown += before > 0
            self._cache(row, exact)
            if self.step.chooser.selector.name == "mass" and self.viewed[row]:
                self._view(row, exact, before)

    def plain(self, row: int, count: int) -> DynamicCache:
        cache = DynamicCache()
        with torch.no_grad():
            MODEL(self.target.twin.id_RP[row, :count][None], past_key_values=cache)
        return cache

    def _cache(self, row: int, exact: int) -> None:
        """P6: leading tokens have a plain prefill's keys and values."""
        pool, slots = self.target.pool, TABLE[row, :exact].long()
        for layer, want in enumerate(self.plain(row, exact).layers):
            for got, own in ((pool.k[layer], want.keys), (pool.v[layer], want.values)):  # type: ignore[union-attr]
                torch.testing.assert_close(got[slots], own[0].transpose(0, 1), rtol=1e-5, atol=1e-5)

    def note_pending(self, row: int, length: int) -> None:
        slots = TABLE[row, self.exact[row] : length].long()
        for layer, want in enumerate(self.plain(row, length).layers):
            apart = self.target.pool.k[layer][slots] - want.keys[0].transpose(0, 1)[self.exact[row] :]  # type: ignore[union-attr]
            self.stale = max(self.stale, float(apart.abs().max()) if len(slots) else 0.0)

    def _view(self, row: int, exact: int, before: int) -> None:
        """The columns are those of most attention by the last tokens, as the twin's queries and keys say."""
        views, chooser = self.step.views, self.step.chooser
        first = self.target.start_R[row] if before else 0  # a forward of fewer tokens gives its first again
        queries = [max(first, exact - back) for back in range(chooser.tap.rows, 0, -1)]
        groups = [[layer] for layer in chooser.tap.layers] if chooser.by_layer else [chooser.tap.layers]
        for at, layers in enumerate(groups):
            score_N = self.target.twin.mass(row, queries, layers, exact, chooser.budget.block)
            want = choose_columns(score_N[None], torch.tensor([exact]), chooser.budget)
            count = int(want.count_B)
            assert int(views.count_LR[at, row]) == count and int(views.start_R[row]) == int(want.start_B)
            assert views.column_LRV[at, row, :count].tolist() == want.column_BV[0, :count].tolist()


def serve(
    modes: list[str],
    behind: bool,
    selector: str = "mass",
    drafter: Any = None,
    target: LlamaTarget | None = None,
    own: Mapping[int, dict[str, Any]] = MappingProxyType({}),
    **more: Any,
) -> tuple[list[Any], LlamaTarget, CacheCheck]:
    """Answers to the prompts in these modes, all in one batch; ``own`` are sampling parameters of single requests."""
    target, drafter = target or LlamaTarget(MODEL), drafter or KnownTextDrafter()
    given = ServeSettings(
        **{"mode": "exact", "rounds": 2, "confirm_floor": 0.0, "pending": PENDING, "view_selector": selector,
           "view_tokens": 64, "view_sinks": 16, "view_recent": 16, "allow_lossy": more.get("mode") == "partial", **more}
    )  # fmt: skip
    chain = 1 if given.self_draft else CHAIN
    step = make_step([], target, drafter, Observer(drafter), given, chain + PENDING, viewed=True)
    assert isinstance(step, ViewStep)
    if given.sets:
        recipe = given.recipe()
        drafter.look_ahead(None if recipe is None else recipe.draft)
    drafter.bind_pool(target.pool, {})
    keep_views(step, given, target.model_runner, drafter, len(modes), {})
    target.step, check = step, CacheCheck(step, target, {i + 1: m in VIEWED - {"sparse"} for i, m in enumerate(modes)})
    reqs = [
        make_request(
            f"r{i}",
            i + 1,
            PROMPTS[i],
            **{
                "max_new_tokens": NEW,
                "ignore_eos": True,
                "custom_params": {"longdraft": {"mode": mode}},
                **own.get(i, {}),
            },
        )
        for i, mode in enumerate(modes)
    ]
    for req in reqs:
        req.kv_allocated_len = COLUMNS
    server = PagedServer(step, target, behind, check)
    if not behind and given.mode == "partial":
        process = server.process

        def processed() -> None:
            process()
            for req in reqs:
                if not req.finished():
                    check.note_pending(req.req_pool_idx, int(server.length_R[req.req_pool_idx]))

        server.process = processed  # type: ignore[method-assign]
    server.run(reqs)
    return reqs, target, check


@pytest.mark.parametrize("selector", ["mass", "quest", "specpv", "snapkv", "streaming", "worst"])
def test_exact_is_plain_decoding_over_any_view(selector: str) -> None:
    reqs, target, check = serve(["exact"] * 4, selector == "quest", selector)
    assert [list(r.output_ids) for r in reqs] == PLAIN
    assert target.partial > 20 and check.grown > 20


def test_rounds_that_read_everything_are_confirmed_whole() -> None:
    """P1: as long as nothing is left out, what the next round starts from is what the last verification would have chosen."""
    reqs, target, _ = serve(["exact"] * 4, False, view_tokens=512)
    for req in reqs:
        counters = stats.attached(req)
        assert counters is not None and counters.cycles.confirmed == counters.cycles.proposed > 15
    assert not target.partial


def test_the_target_drafts_for_itself_over_its_pages() -> None:
    reqs, target, check = serve(["exact"] * 3, False, drafter=NothingDrafter(), self_draft=True, rounds=4)
    assert [list(r.output_ids) for r in reqs] == PLAIN[:3]
    assert target.partial > 20 and check.grown > 15


@pytest.mark.parametrize("mode", ["exact", "partial"])
def test_every_layer_reads_its_own_list(mode: str) -> None:
    reqs, target, check = serve([mode] * 3, mode == "exact", mode=mode, view_lists="layers")
    assert mode == "partial" or [list(r.output_ids) for r in reqs] == PLAIN[:3]
    columns_LRV = check.step.views.column_LRV
    assert len(columns_LRV) == len(target.layers) and not torch.equal(columns_LRV[0, 3], columns_LRV[1, 3])
    assert target.partial > 20 and check.grown >= 6


@pytest.mark.parametrize("mode", ["exact", "partial"])
def test_beside_one_that_reads_everything_all_layers_read_the_last_ones_list(mode: str) -> None:
    read: set[tuple[bool, bool]] = (
        set()
    )  # whether each layer has a list of its own in a round, and whether it holds everything
    seen = LlamaTarget.seen

    def noted(self: LlamaTarget, row: int, length: int, read_L: list[int]) -> list[list[int]]:
        read.add((len(read_L) > 1, set(read_L) == {length}))
        return seen(self, row, length, read_L)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LlamaTarget, "seen", noted)
        reqs, _, check = serve([mode, mode, "full"], False, mode=mode, view_lists="layers")
    assert {(False, True), (False, False)} <= read
    assert mode == "partial" or [list(r.output_ids) for r in reqs] == PLAIN[:3]
    assert list(reqs[2].output_ids) == PLAIN[2] and check.grown >= 4


@pytest.mark.parametrize("behind", [False, True])
def test_a_refresh_leaves_a_plain_prefills_keys(behind: bool) -> None:
    """P6: and what is pending differs from them until then."""
    reqs, target, check = serve(["partial"] * 4, behind, mode="partial")
    assert [len(r.output_ids) for r in reqs] == [NEW] * 4
    for req in reqs:
        counters = stats.attached(req)
        assert counters is not None and counters.cycles.full >= 2
        said = target.twin.id_RP[req.req_pool_idx, : check.exact[req.req_pool_idx]].tolist()
        assert said == [*req.origin_input_ids, *req.output_ids][: len(said)]
        exact = target.step.exact_of(req) if target.step else None
        assert exact is not None and exact <= check.exact[req.req_pool_idx]
    assert target.partial > 20 and check.grown >= 8
    assert behind or check.stale > 1e-2, "views on which no key changes test nothing"
    assert [list(r.output_ids) for r in reqs][:3] != PLAIN[:3]


@pytest.mark.parametrize("behind", [False, True])
def test_modes_share_a_batch_over_one_cache(behind: bool) -> None:
    modes = ["exact", "partial", "off", "full"]
    reqs, target, check = serve(modes, behind, mode="partial")
    for req, mode, plain in zip(reqs, modes, PLAIN, strict=True):
        assert mode == "partial" or list(req.output_ids) == plain
    assert target.partial and check.grown > 15
