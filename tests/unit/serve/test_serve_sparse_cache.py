"""Mode ``sparse``, and ``exact`` on such sets, over a real model's cache: what is read, whose attention chose it, what a refresh leaves
(U1, U2, U7, P6, V1).

The target of :mod:`test_serve_view_cache`: every verification is held against a twin in double precision.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from llama_on_pages import LlamaTarget
from test_serve_view_cache import CHAIN, LENGTHS, MODEL, NEW, PLAIN, KnownTextDrafter, serve

from longdraft.draft_models.sparse_recipe import LayerHeads, SparseRecipe
from longdraft.serve import stats
from longdraft.serve.drafters.base import Lookahead
from longdraft.serve.drafters.running import Running
from longdraft.serve.views.set_chooser import SetChooser
from longdraft.serve.views.token_set import SparseBudget, choose_tokens

LOSSY: dict[str, Any] = {"mode": "sparse", "allow_lossy": True, "sparse_tokens": 48}
FREE = 48 - 20  # beside sinks and window
LOOKED = 1  # layer of the target whose keys the draft looks among
HEADS = MODEL.config.num_attention_heads


class LookingDrafter(KnownTextDrafter):
    """Looks for what seeded queries look for in one layer of the target."""

    heads: tuple[int, ...] | None = None

    def queries(self, length: int) -> torch.Tensor:
        draw = torch.Generator().manual_seed(length)
        return 3 * torch.randn(CHAIN - 1, HEADS, MODEL.config.head_dim, generator=draw)

    def bind_pool(self, pool: Any, scales: Any) -> None:
        self.k_SKD = pool.get_key_buffer(LOOKED)

    def look_ahead(self, wanted: Sequence[LayerHeads] | None) -> int:
        self.heads = None if wanted is None else tuple(wanted[0].heads)
        return 1

    def lookahead(self, running: Running) -> list[Lookahead]:
        q_NHD = torch.cat([self.queries(n) for n in running.length_B.tolist()])
        return [Lookahead(q_NHD, self.k_SKD, MODEL.config.head_dim**-0.5, self.heads)]


class Expected:
    """Holds every choice of sets against the twin's queries and keys."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.target, self.drafter = LlamaTarget(MODEL), LookingDrafter()
        self.chosen, self.late, self.wrong = 0, 0, list[str]()
        choose = SetChooser.choose

        def checked(sets: SetChooser, running: Running, groups: Any, looks: bool, longest: int) -> torch.Tensor | None:
            missed_B = choose(sets, running, groups, looks, longest)
            assert looks and not sets.measures
            assert len(groups) == 1 and groups[0].where_B is None
            for b, (row, length) in enumerate(zip(running.row_B.tolist(), running.length_B.tolist(), strict=True)):
                self.one(sets, row, length, groups[0].budget, running.rids[b])
            return missed_B

        monkeypatch.setattr(SetChooser, "choose", checked)

    def one(self, sets: SetChooser, row: int, length: int, budget: SparseBudget, rid: str) -> None:
        twin, past = self.target.twin, sets.history
        [layer] = sets.tap.layers
        k_NKD, looked = twin.k[layer, row, :length], self.drafter.heads or tuple(range(HEADS))
        ahead_N = self._mass(self.drafter.queries(length).double(), twin.k[LOOKED, row, :length], looked)
        # A round in which a request may gain nothing leaves it the row of its newest token, which is not cached yet.
        wanted = []
        for newest in (length - 1, length):
            history_N = self._mass(twin.q[layer, row, newest][None], k_NKD, past.heads)
            want = choose_tokens(ahead_N[None].float(), history_N[None].float(), torch.tensor([length]), budget)
            wanted.append((int(want.start_B), want.column_BV[0, : int(want.count_B)].tolist()))
        views = sets.views
        got = int(views.start_R[row]), views.column_LRV[0, row, : int(views.count_LR[0, row])].tolist()
        self.chosen += 1
        self.late += got != wanted[0]
        if got not in wanted:
            self.wrong.append(f"{rid} at {length}: {got}, not {wanted[0]}")

    @staticmethod
    def _mass(q_RHD: torch.Tensor, k_NKD: torch.Tensor, heads: Sequence[int]) -> torch.Tensor:
        k_NHD = k_NKD.repeat_interleave(q_RHD.shape[1] // k_NKD.shape[1], 1)
        score_RHN = torch.einsum("rhd,nhd->rhn", q_RHD, k_NHD) * k_NKD.shape[-1] ** -0.5
        return torch.softmax(score_RHN, -1)[:, list(heads)].sum((0, 1))

    def serve(self, modes: list[str], behind: bool, **more: Any) -> list[Any]:
        reqs, target, _ = serve(modes, behind, drafter=self.drafter, target=self.target, **more)
        assert not target.wrong and not self.wrong
        assert self.chosen > 10 * len(modes)
        return reqs


@pytest.fixture
def expected(monkeypatch: pytest.MonkeyPatch) -> Expected:
    return Expected(monkeypatch)


@pytest.mark.parametrize("behind", [False, True])
def test_a_set_of_everything_is_plain_decoding(behind: bool) -> None:
    reqs, target, _ = serve(["sparse"] * 4, behind, **{**LOSSY, "sparse_tokens": 512})
    assert [list(r.output_ids) for r in reqs] == PLAIN
    assert not target.partial and not target.wrong


def test_a_set_of_more_tokens_than_a_context_takes_no_more_room() -> None:
    """Also beside requests of the same selector, for which sets are chosen in every round."""
    modes = ["sparse", "exact", "sparse", "exact"]
    reqs, target, _ = serve(modes, False, selector="dustin", **{**LOSSY, "sparse_tokens": 1 << 40})
    assert [list(r.output_ids) for r in reqs] == PLAIN and not target.wrong
    assert target.partial and target.step is not None
    assert target.step.views.column_LRV.shape[-1] <= target.step.views.columns


@pytest.mark.parametrize("lookahead", [0, None, FREE])
def test_sets_are_what_history_and_lookahead_say(expected: Expected, lookahead: int | None) -> None:
    """Every round of every request, by the queries of its last accepted token; half of the free tokens where nothing else is said."""
    reqs = expected.serve(["sparse"] * 4, lookahead is None, **LOSSY, sparse_lookahead=lookahead)
    assert not expected.late
    assert [len(r.output_ids) for r in reqs] == [NEW] * 4
    assert [list(r.output_ids) for r in reqs][:3] != PLAIN[:3], "sets on which nothing changes test nothing"
    for req, length in zip(reqs[:3], LENGTHS, strict=False):
        counters = stats.attached(req)
        assert counters is not None and counters.mode == "sparse"
        cycles = counters.cycles
        assert cycles.partial > 5 and cycles.approximate == NEW - 1 and cycles.full == cycles.refreshes == 0
        assert expected.target.step is not None and expected.target.step.exact_of(req) == length


@pytest.mark.parametrize("behind", [False, True])
def test_rounds_on_the_host_leave_a_history_too(expected: Expected, behind: bool) -> None:
    """One that needs its text on the host makes the others' rounds such; what they choose by afterwards is not a round old."""
    reqs = expected.serve(
        ["sparse", "full", "sparse"], behind, own={1: {"max_new_tokens": 12, "frequency_penalty": 0.1}}, **LOSSY
    )
    assert not expected.late
    assert [len(r.output_ids) for r in reqs] == [NEW, 12, NEW]


def test_a_recipe_names_layers_and_heads(expected: Expected, tmp_path: Path) -> None:
    target, draft = LayerHeads(layer=2, heads=[1, 3]), LayerHeads(layer=0, heads=[2])
    SparseRecipe(target=target, draft=[draft], lookahead=123, budget=512).save(path := tmp_path / "recipe.json")
    expected.serve(["sparse"] * 3, False, **LOSSY, sparse_recipe=str(path))
    sparse = expected.target.step.sparse if expected.target.step else None
    assert sparse is not None and sparse.budget == SparseBudget(48, 4, 16, round(123 / 492 * FREE))
    assert sparse.sets.tap.layers == (2,) and sparse.sets.history.heads == (1, 3) and expected.drafter.heads == (2,)


def test_sets_may_be_larger_than_views(expected: Expected) -> None:
    """And a request whose context outgrows its set reads one from then on."""
    reqs = expected.serve(["sparse"] * 4, False, **{**LOSSY, "sparse_tokens": 120})
    grown = [stats.attached(r) for r in reqs[:3]]
    assert [c is not None and c.cycles.full > 0 for c in grown] == [True, False, False]


@pytest.mark.parametrize("behind", [False, True])
def test_exact_on_sets_is_plain_decoding(expected: Expected, behind: bool) -> None:
    """V1, P8: although the view of every round depends on its drafts."""
    reqs = expected.serve(["exact"] * 4, behind, selector="dustin")
    assert [list(r.output_ids) for r in reqs] == PLAIN
    assert expected.target.partial > 20


@pytest.mark.parametrize("behind", [False, True])
def test_a_refresh_leaves_a_plain_prefills_keys(behind: bool) -> None:
    """P6: the check behind every step holds the cache up to each request's exact length against transformers'."""
    reqs, target, check = serve(["sparse"] * 4, behind, refresh_every=12, **LOSSY)
    assert not target.wrong
    for req, length in zip(reqs[:3], LENGTHS, strict=False):
        counters = stats.attached(req)
        assert counters is not None and counters.cycles.refreshes >= 2
        assert check.exact[req.req_pool_idx] > length + 12


@pytest.mark.parametrize("behind", [False, True])
def test_modes_share_a_batch_over_one_cache(behind: bool) -> None:
    modes = ["exact", "sparse", "partial", "full"]
    reqs, target, check = serve(modes, behind, **LOSSY)
    for req, mode, plain in zip(reqs, modes, PLAIN, strict=True):
        assert mode in ("partial", "sparse") or list(req.output_ids) == plain
    assert target.partial and not target.wrong and check.grown > 15
