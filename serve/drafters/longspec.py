"""The LongSpec draft in the server: a ring of self-attention state, the target's cache read in place.

Legend: B requests, W page-list width, H query heads, K key/value heads, D head size.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from longdraft.draft_models.chain import propose_chain
from longdraft.draft_models.fused_step import FusedStep
from longdraft.draft_models.longspec import LongSpecDraft
from longdraft.draft_models.shares import Share
from longdraft.draft_models.sparse_recipe import LayerHeads
from longdraft.draft_models.tree_steps import LongSpecTreeStep
from longdraft.draft_models.window_state import WindowState
from longdraft.kernels.plan import AttentionPlan
from longdraft.kernels.row_ops import best_id
from longdraft.kernels.transfer import to_device
from longdraft.kernels.tree import Tree
from longdraft.serve.cache_format import UNSCALED, Scales
from longdraft.serve.drafters.base import Drafter, DraftRequest, Lookahead, Pick
from longdraft.serve.drafters.cross_attention import Cache, newest_rows, read_layers
from longdraft.serve.drafters.inputs import GREEDY, LoopInputs
from longdraft.serve.drafters.lend import lend
from longdraft.serve.drafters.looked import LookedFor, heads_that_look, own_heads, wanted_heads
from longdraft.serve.drafters.running import Running
from longdraft.serve.drafters.trees import TreeLoop, longspec_step
from longdraft.serve.graph_runner import CudaGraphRunner, make_runner
from longdraft.serve.ranks import ALONE, Ranks
from longdraft.serve.sampling.rows import RowParams
from longdraft.serve.target_weights import TargetWeights
from longdraft.serve.tokens import Tokens
from longdraft.serve.tree_shape import TreeShape

ON_DEVICE = -1  # in place of the number of tokens that a ring holds: all that the device's batch holds


class LongSpecDrafter(Drafter):
    """Chain drafts. Rings are rebuilt from the last ids whenever what they hold is not exactly the request's tokens.

    All steps of a chain are one function over static buffers, always of full length, which a :class:`GraphRunner` replays. It
    leaves every drafted token in the ring, so that whatever the target keeps of them is there already.
    """

    on_device = True

    def __init__(
        self,
        draft: LongSpecDraft,
        max_requests: int,
        steps: int,
        context: int,
        sinks: int,
        attention: str | None,
        ahead: int = 0,
        ranks: Ranks = ALONE,
        share: Share | None = None,
    ) -> None:
        """Take the draft.

        Args:
            draft: bound to its target.
            max_requests: at once.
            steps: of a chain.
            context: cached tokens that the draft reads at most.
            sinks: leading tokens among them.
            attention: backend.
            ahead: tokens that may be drafted behind the last one that is certain, beside the chain.
            ranks: that serve together.
            share: this one's of the draft, which has been divided, where they are several.
        """
        self.ranks, self.share = ranks, share
        self.draft, self.steps, self.max_requests = draft, steps, max_requests
        self.context, self.sinks = context, min(sinks, context)
        self.attention = attention
        # FlashInfer plans on the host, which does not know what a ring holds.
        self.ring_attention = None if attention == "flashinfer" else attention
        self.fused = FusedStep.of(draft)
        self.state = WindowState(draft, max_requests + 1, ahead + steps)  # the last ring is for a batch's padding
        self.inputs = LoopInputs(max_requests, context, steps, self.state.k.device, idle_row=max_requests)
        self.bytes_per_step = sum(p.nbytes for p in draft.parameters()) + draft.drafting_head_NE.nbytes
        self.plan: AttentionPlan | None = None
        self.looked: LookedFor | None = None
        self.looking: list[tuple[int, tuple[int, ...]]] = []  # layers and heads that look ahead
        self.layers: list[Cache] = []  # those that the draft reads
        self.rows: dict[str, int] = {}
        self.held: dict[str, int] = {}  # tokens that a request's ring holds
        self.running_rows: tuple[int, ...] = ()  # of the latest batch that the device alone knew
        self.running_row_B = torch.zeros(0, dtype=torch.int64)
        self.trees = TreeLoop(draft, self.inputs, self._tree_step)
        self.use_graphs([])

    def use_graphs(self, sizes: Sequence[int], shapes: Sequence[TreeShape] = ()) -> None:
        sizes = [n for n in sizes if n <= self.max_requests]
        self.runner = make_runner(self._loop, sizes, self.state.k.device)
        if isinstance(self.runner, CudaGraphRunner) and not shapes:
            self.runner.capture(GREEDY)
        self.trees.use_graphs(sizes, shapes)

    def bind_cache(self, *layers: Cache) -> None:
        """The layers that the draft reads, in place."""
        self.layers = list(layers)

    def bind_pool(self, pool: Any, scales: Mapping[int, Scales]) -> None:
        self.bind_cache(
            *(
                Cache(pool.get_key_buffer(i), pool.get_value_buffer(i), scales.get(i, UNSCALED))
                for i in self.draft.config.cross_layers
            )
        )

    def bind_target(self, weights: TargetWeights) -> None:
        lend(self.draft, weights, self.share)
        self.runner.forget()
        self.trees.runner.forget()

    def propose(self, requests: list[DraftRequest], pick: Pick) -> list[list[int]]:
        assert self.layers, "bind_cache() first"
        rows = self._rows_of(requests)
        pages = [self._view(r.pages) for r in requests]
        size = self.runner.padded(len(requests))
        roots, positions = [r.tokens.newest for r in requests], [r.tokens.cached for r in requests]
        variant = self.inputs.fill(rows, roots, positions, pages, pick, size)
        # Without graphs the host's lengths are worth having: a CPU reads runs of slots in place.
        self.plan = (
            None
            if self.runner.sizes
            else AttentionPlan.build(self.inputs.pages_BW[:size], [len(p) for p in pages], [1] * size)
        )
        self.runner.run(len(requests), variant)
        drafted = self.inputs.drafted_BK[: len(requests)].tolist()
        return [ids[: r.limit] for r, ids in zip(requests, drafted, strict=True)]

    def follow(self, rid: str, tokens: Tokens, end: int) -> None:
        row = self._row_of(rid, {rid})
        self.state.rebuild(row, tokens.slice(max(0, end - self.state.window), end), end)
        self.held[rid] = ON_DEVICE

    def follows(self, rid: str) -> bool:
        return self.held.get(rid) == ON_DEVICE

    def settle(self, rid: str, end: int) -> None:
        if self.follows(rid):
            self.held[rid] = end

    def propose_running(self, running: Running, pick: Pick) -> torch.Tensor:
        assert self.layers, "bind_cache() first"
        row_B, view = self._rows_running(running), running.read(self.sinks, self.context - self.sinks)
        count = len(row_B)
        size = self.runner.padded(count)
        variant = self.inputs.take(row_B, running, view, pick, size)
        self.plan = None
        if not self.runner.sizes and running.reads_lengths:
            self.plan = AttentionPlan.build(view[0], view[1].tolist(), [1] * size)
        self.runner.run(count, variant)
        return self.inputs.drafted_BK[:count].clone()

    def look_ahead(self, wanted: Sequence[LayerHeads] | None) -> int:
        config, weight = self.draft.config, self.draft.self_attn.q_proj.weight
        found = wanted_heads(wanted, *heads_that_look(config))
        self.looking = [(layer, own_heads(heads, self._own_heads())) for layer, heads in found]
        given = self.max_requests, self.steps, self.draft.cross_attn.query_heads, config.target.head_dim
        self.looked = LookedFor(*given, weight.dtype, weight.device) if self.looking else None
        return len(self.looking)

    def _own_heads(self) -> range:
        """This rank's query heads of a layer that the draft reads."""
        t, group = self.draft.config.target, self.draft.config.cross_group
        every = range(t.num_kv_heads * group)
        return every if self.share is None else self.share.heads(len(every), t.num_kv_heads)[0]

    def lookahead(self, running: Running) -> list[Lookahead]:
        """Cross-attention's queries over the target's own cache."""
        if self.looked is None:
            return []
        found, order = [], self.draft.config.cross_layers
        each = self.draft.cross_attn.query_heads // len(order)
        for layer, heads in self.looking:
            at, cache = order.index(layer), self.layers[order.index(layer)]
            q_NHD = self.looked.queries(len(running.row_B), slice(at * each, (at + 1) * each))
            found.append(Lookahead(q_NHD, cache.k_SKD, q_NHD.shape[-1] ** -0.5, heads, cache.scales[0]))
        return found

    def _rows_running(self, running: Running) -> torch.Tensor:
        """Ring of each request, the idle one for a request that has none."""
        for rid in running.rids:
            if rid in self.rows:
                self.rows[rid] = self.rows.pop(rid)  # the first of the rows is the one not used for longest
        rows = tuple(self.rows.get(rid, self.max_requests) for rid in running.rids)
        if rows != self.running_rows:
            self.running_rows, self.running_row_B = rows, to_device(rows, torch.int64, self.state.k.device)
        return self.running_row_B

    def propose_trees_running(
        self, running: Running, limit_B: torch.Tensor, params: RowParams, shape: TreeShape
    ) -> Tree:
        assert self.layers, "bind_cache() first"
        view = running.view(0, self.sinks, self.context - self.sinks)
        return self.trees.run_running(self._rows_running(running), running, view, limit_B, params, shape)

    def keep(self, running: Running, id_BN: torch.Tensor, count_B: torch.Tensor) -> None:
        offset_N = torch.arange(id_BN.shape[1], device=id_BN.device)
        row_BN = torch.where(offset_N < count_B[:, None], self._rows_running(running)[:, None], self.max_requests)
        self.state.store(row_BN.flatten(), id_BN.flatten(), (running.length_B[:, None] + offset_N).flatten())

    def propose_tree(self, requests: list[DraftRequest], params: RowParams, shape: TreeShape) -> Tree:
        assert self.layers, "bind_cache() first"
        drafting = [r for r in requests if r.limit]
        row_of = dict(zip((r.rid for r in drafting), self._rows_of(drafting), strict=True))
        rows = [row_of.get(r.rid, self.max_requests) for r in requests]
        return self.trees.run(requests, rows, [self._view(r.pages) for r in requests], params, shape)

    def _tree_step(self, size: int, shape: TreeShape) -> LongSpecTreeStep:
        assert self.layers, "bind_cache() first"
        given = self.state, self.inputs, size, self.layers, shape.runs, self.attention, self.fused
        return longspec_step(*given, self.ranks)

    def _loop(self, size: int, variant: Any) -> None:
        """All steps of ``size`` chains, from and to :attr:`inputs`."""
        given = self.inputs
        plan = self.plan or AttentionPlan.on_device(
            given.pages_BW[:size], given.lens_B[:size], given.cu_B1[: size + 1], list(range(size + 1))
        )

        steps = iter(range(self.steps))

        def cross_attend(q_BHD: torch.Tensor) -> torch.Tensor:
            if self.looked is not None:
                self.looked.keep(next(steps), q_BHD)
            return read_layers(q_BHD, self.layers, plan, self.attention)

        row_B, root_B, position_B = given.ids_3B[:, :size]
        # An argmax over the draft's own rows of the head is the whole vocabulary's: they stand in the order of their ids.
        ranked = self.draft.target_ids if variant == GREEDY else None

        def choose(logits_BV: torch.Tensor, at_B: torch.Tensor, step: int) -> torch.Tensor:
            return given.pick(logits_BV, at_B, variant) if ranked is None else best_id(logits_BV, ranked)

        # Every drafted token enters the ring, the last one too; refused ones are replaced before anything sees them.
        given.drafted_BK[:size] = propose_chain(
            self.state,
            row_B,
            root_B,
            position_B,
            self.steps,
            cross_attend,
            choose,
            self.draft.logits if ranked is None else self.draft.draft_logits,
            newest_rows(self.draft, self.layers, given.pages_BW[:size], given.lens_B[:size], position_B, self.ranks),
            self.fused,
            self.ring_attention,
            keep_last=True,
        )

    def _rows_of(self, requests: list[DraftRequest]) -> list[int]:
        present = {r.rid for r in requests}
        for request in requests:
            end = request.tokens.cached
            row = self._row_of(request.rid, present)
            if self.held.get(request.rid) not in (end, ON_DEVICE):
                self.state.rebuild(row, request.tokens.slice(max(0, end - self.state.window), end), end)
            self.held[request.rid] = end
        return [self.rows[r.rid] for r in requests]

    def _row_of(self, rid: str, present: set[str]) -> int:
        if rid not in self.rows:
            self.rows[rid] = self._free_row(present)
        return self.rows[rid]

    def _free_row(self, present: set[str]) -> int:
        taken = set(self.rows.values())
        for row in range(self.max_requests):
            if row not in taken:
                return row
        stale = next(rid for rid in self.rows if rid not in present)
        row = self.rows[stale]
        self.forget(stale)
        return row

    def _view(self, pages: torch.Tensor) -> torch.Tensor:
        """Sinks and the most recent tokens, at most ``context`` of them."""
        recent = self.context - self.sinks
        return pages if len(pages) <= self.context else torch.cat([pages[: self.sinks], pages[len(pages) - recent :]])

    def committed(self, request: DraftRequest, tokens: list[int]) -> None:
        if self.held.get(request.rid) != request.tokens.cached:
            return
        start = request.tokens.cached
        ids = [request.tokens.newest, *tokens[:-1]]
        position = torch.arange(start, start + len(ids), device=self.state.k.device)
        row = torch.full_like(position, self.rows[request.rid])
        self.state.store(row, torch.tensor(ids, device=position.device), position)
        self.held[request.rid] = start + len(ids)

    def forget(self, rid: str) -> None:
        self.rows.pop(rid, None)
        self.held.pop(rid, None)

    def clear(self) -> None:
        self.rows.clear()
        self.held.clear()
