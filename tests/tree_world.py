"""A made-up target that reads its text back from the cache, and a drafter of random trees over it, for tests of tree steps."""

import zlib
from types import SimpleNamespace
from typing import Any

import torch
from serve_fakes import BareRequest, PieceTokenizer
from sglang.srt.sampling.sampling_params import SamplingParams

from longdraft.draft_models.draft_tree import Frontier, TreeDraft
from longdraft.kernels.tree import Tree
from longdraft.kernels.tree_bits import unpack_bits
from longdraft.serve.drafters.base import Computed, Drafter, DraftRequest, Pick
from longdraft.serve.make_step import make_step
from longdraft.serve.observer import Observer
from longdraft.serve.sampling.rows import RowParams
from longdraft.serve.settings import ServeSettings
from longdraft.serve.tokens import Tokens
from longdraft.serve.tree_shape import TreeShape, candidates
from longdraft.serve.tree_step import TreeStep

VOCAB, COLUMNS, SLOTS = 8, 96, 400
SHAPES = ["3,4,4,2", "1,1,1", "2", "eagle2:4,3,12", "eagle2:2,3,3"]


def next_of(text: list[int]) -> int:
    return zlib.crc32(bytes(text)) % VOCAB


class Pool:
    """One layer whose keys are tokens and whose values are positions."""

    layer_num = 1

    def __init__(self) -> None:
        self.key, self.value = torch.full((SLOTS,), -1), torch.full((SLOTS,), -1)

    def get_key_buffer(self, layer: int) -> torch.Tensor:
        return self.key

    def get_value_buffer(self, layer: int) -> torch.Tensor:
        return self.value


class Target:
    """Chooses by what lies in the cache and on a node's path; a wrong slot, mask or position changes its tokens."""

    def __init__(self, table: torch.Tensor, features: bool = False) -> None:
        self.pool, self.table, self.features, self.fails = Pool(), table, features, False
        config = SimpleNamespace(vocab_size=VOCAB)
        self.model_runner = SimpleNamespace(model_config=config, device="cpu", token_to_kv_pool=self.pool)

    def forward_batch_generation(self, batch: None, forward_batch: Any, is_verify: bool) -> Any:
        fb, plan, bits = forward_batch, forward_batch.spec_info.plan, forward_batch.spec_info.bits_TW
        if self.fails and bits is not None:
            raise RuntimeError("kernel failed")
        self.pool.key[fb.out_cache_loc], self.pool.value[fb.out_cache_loc] = fb.input_ids, fb.positions
        logits = torch.zeros(len(fb.input_ids), VOCAB)
        for b, cached in enumerate(plan.lens):
            rows = plan.rows_of(b)
            count = rows.stop - rows.start
            mask = torch.ones(count, count).tril().bool() if bits is None else unpack_bits(bits[rows], count)
            slots = plan.slots(b, cached)
            assert self.pool.value[slots].tolist() == list(range(cached))
            text, ids = self.pool.key[slots].tolist(), fb.input_ids[rows]
            for t in range(count):
                path = ids[mask[t]].tolist()
                if path and (t == 0 or fb.out_cache_loc[rows][t]):  # else a place without a node
                    assert fb.positions[rows][t] == cached + len(path) - 1
                    logits[rows.start + t, next_of(text + path)] = 1
        hidden = fb.input_ids[:, None].float() if self.features else None
        return SimpleNamespace(logits_output=SimpleNamespace(next_token_logits=logits, hidden_states=hidden))


class TreeDrafter(Drafter):
    """Trees by noise and a rule that knows the target; notes what it is told."""

    def __init__(self, bonus: float, features: bool = False) -> None:
        self.bonus, self.told, self.cleared = bonus, [], 0
        self.computed: list[Computed] = []
        self.observed_layers = (1,) if features else None
        self.noise = torch.Generator().manual_seed(0)

    def propose(self, requests: list[DraftRequest], pick: Pick) -> list[list[int]]:
        raise AssertionError("a tree step drafts no chains")

    def propose_tree(self, requests: list[DraftRequest], params: RowParams, shape: TreeShape) -> Tree:
        paths = [[r.tokens.slice(0, len(r.tokens))] for r in requests]

        def step(nodes: Frontier) -> torch.Tensor:
            if nodes.depth:
                pairs = [
                    zip(t, p, strict=True)
                    for t, p in zip(nodes.token_BM.tolist(), nodes.parent_BM.tolist(), strict=True)
                ]
                paths[:] = [[[*old[p], t] for t, p in pair] for old, pair in zip(paths, pairs, strict=True)]
            logits = torch.randn(*nodes.token_BM.shape, VOCAB, generator=self.noise)
            for b, texts in enumerate(paths):
                for m, text in enumerate(texts):
                    logits[b, m, next_of(text)] += self.bonus
            return logits

        limit_B = torch.tensor([r.limit for r in requests])
        return shape.grow(TreeDraft(step, limit_B=limit_B), torch.tensor([r.tokens.newest for r in requests]))

    def observe(self, computed: Computed) -> None:
        self.computed.append(computed)

    def committed(self, request: DraftRequest, tokens: list[int]) -> None:
        self.told.append((request.rid, tokens))

    def forget(self, rid: str) -> None: ...

    def clear(self) -> None:
        self.cleared += 1


class World:
    """Requests in a page table over a shuffled pool, and SGLang's loop."""

    def __init__(self, shape: str, reqs: list[BareRequest], drafter: TreeDrafter, **changes: Any) -> None:
        order = 1 + torch.randperm(SLOTS - 1, generator=torch.Generator().manual_seed(1))
        self.table = order[: COLUMNS * 4].view(4, COLUMNS).int()
        self.target = Target(self.table, drafter.observed_layers is not None)
        shapes = candidates(shape, 3)
        stride = max(s.places for s in shapes)
        args = (self.target, drafter, Observer(drafter), ServeSettings(tree=shape, **changes), stride)
        step = make_step(shapes, *args)
        assert isinstance(step, TreeStep)
        self.step, self.reqs, self.drafter = step, reqs, drafter
        for row, req in enumerate(reqs):
            req.req_pool_idx = row
            slots = self.table[row, : Tokens(req).cached].long()
            self.target.pool.key[slots] = torch.tensor(Tokens(req).slice(0, Tokens(req).cached), dtype=torch.int64)
            self.target.pool.value[slots] = torch.arange(len(slots))

    def run(self, steps: int = 80) -> None:
        for _ in range(steps):
            live = [r for r in self.reqs if not r.finished()]
            if not live:
                return
            lens = torch.tensor([len(Tokens(r)) for r in live])
            batch: Any = SimpleNamespace(
                reqs=live, seq_lens=lens, return_logprob=False, spec_algorithm=None, sampling_info=None,
                req_pool_indices=torch.tensor([r.req_pool_idx for r in live]),
                req_to_token_pool=SimpleNamespace(req_to_token=self.table),
            )  # fmt: skip
            result = self.step.run(batch)
            rows = result.next_token_ids.view(len(live), -1).tolist()
            for req, row, count in zip(live, rows, result.accept_lens.tolist(), strict=True):
                req.gain(row[:count])
        raise AssertionError("a request never ended")


def make_request(rid: str, prompt: list[int], allocated: int = COLUMNS, **params: Any) -> BareRequest:
    req = BareRequest(SamplingParams(temperature=0.0, **params), PieceTokenizer("abcdefgh", eos=7), prompt)
    req.rid, req.kv_allocated_len, req.prefix_indices = rid, allocated, torch.zeros(0)
    return req


def fresh(**params: Any) -> list[BareRequest]:
    return [
        make_request("a", [1, 2, 3], max_new_tokens=40, ignore_eos=True, **params),
        make_request("b", [4], max_new_tokens=31, ignore_eos=True, **params),
        make_request("c", [5, 5], max_new_tokens=40, **params),
        make_request("d", [6, 1], max_new_tokens=33, ignore_eos=True, stop="ab", **params),
    ]


def plainly(req: BareRequest) -> list[int]:
    while not req.finished():
        req.gain([next_of(Tokens(req).slice(0, len(Tokens(req))))])
    return list(req.output_ids)


def tokens_of(world: World) -> list[list[int]]:
    return [list(r.output_ids) for r in world.reqs]
