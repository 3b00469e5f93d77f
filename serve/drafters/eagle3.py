"""The EAGLE-3 draft in the server: its state lies beside the target's cache, slot for slot.

**Where a row lives.** The draft's row t is made of the target's features of token t and the embedding of token t + 1, so its keys
and values depend on tokens 0 .. t + 1. They are kept in the cache slot of token *t + 1*, and the fused features of token t in
the slot of token t. Then everything in a slot depends on the tokens up to that slot's own and on nothing behind it, which is the
very condition under which SGLang shares slots between requests. So a prefix-cache hit brings the draft's rows with it; the first
row behind a shared prefix, whose token may differ from the one that followed there before, is made anew from the prefix's last
features; and no state belongs to a request: retraction, abort, chunked prefill and sessions need nothing. The slot of token 0
holds no row.

Every token that the target computes is written, also for requests that do not draft, since another one may share their prefix. Rows
of rejected drafts lie in slots that are written again before anything reads them.

Legend: B requests, T tokens, S cache slots, H query heads, K key/value heads, D head size, E hidden size, W page-list width.
"""

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from longdraft.draft_models.eagle3 import Eagle3Draft
from longdraft.draft_models.eagle3_chain import propose_eagle3_chain
from longdraft.draft_models.sparse_recipe import LayerHeads
from longdraft.draft_models.tree_steps import Eagle3TreeStep
from longdraft.kernels.plan import AttentionPlan
from longdraft.kernels.prefix_attention import prefix_attention
from longdraft.kernels.tree import Tree
from longdraft.serve.cache_format import Scales
from longdraft.serve.drafters.base import Computed, Drafter, DraftRequest, Lookahead, Pick
from longdraft.serve.drafters.inputs import GREEDY, LoopInputs
from longdraft.serve.drafters.looked import LookedFor, heads_that_look, wanted_heads
from longdraft.serve.drafters.running import Running
from longdraft.serve.drafters.trees import Eagle3Rows, TreeLoop
from longdraft.serve.graph_runner import CudaGraphRunner, make_runner
from longdraft.serve.ranks import ALONE, Ranks
from longdraft.serve.sampling.rows import RowParams
from longdraft.serve.target_weights import TargetWeights
from longdraft.serve.tree_shape import TreeShape

logger = logging.getLogger(__name__)


class Eagle3Drafter(Drafter):
    """Chain drafts over the draft's own keys and values, read through the target's page lists.

    A chain's rows live in ``steps`` scratch slots a request behind the pool's, so that a step is one attention call over one
    list. A draft without a window reads at most ``context`` rows, the first ``sinks`` and the most recent.
    """

    on_device = True

    def __init__(
        self,
        draft: Eagle3Draft,
        max_requests: int,
        steps: int,
        context: int,
        sinks: int,
        attention: str | None,
        ranks: Ranks = ALONE,
    ) -> None:
        self.ranks = ranks
        config, own = draft.config, draft.config.settings
        self.draft, self.max_requests, self.steps = draft, max_requests, steps
        self.attention = attention
        self.observed_layers = config.aux_layers
        self.sinks = min(sinks if own.window is None else own.sinks, context - 1)
        self.window = min(own.window or context, context - self.sinks)
        self.row_shape = (config.num_kv_heads, config.head_dim)
        per_slot = 2 * config.num_kv_heads * config.head_dim + config.target.hidden_size
        self.bytes_per_slot = per_slot * draft.dtype.itemsize
        self.bytes_per_step = sum(p.nbytes for p in draft.parameters())
        self.host_lens: list[int] | None = None
        self.looked: LookedFor | None = None
        self.heads: tuple[int, ...] = ()  # that look ahead
        self.bound = False

    def bind_pool(self, pool: Any, scales: Mapping[int, Scales]) -> None:
        self.allocate(pool.get_key_buffer(0).shape[0], pool.get_key_buffer(0).device)

    def allocate(self, slots: int, device: torch.device | str) -> None:
        """Buffers for a pool of ``slots``; zeros attend to nothing and add nothing."""
        dtype, scratch = self.draft.dtype, self.max_requests * self.steps
        self.k_SKD = torch.zeros(slots + scratch, *self.row_shape, dtype=dtype, device=device)
        self.v_SKD = torch.zeros_like(self.k_SKD)
        self.hidden_SE = torch.zeros(slots, self.draft.config.target.hidden_size, dtype=dtype, device=device)
        self.scratch = torch.arange(slots, slots + scratch, device=device).view(self.max_requests, self.steps)
        self.inputs = LoopInputs(self.max_requests, self.sinks + self.window, self.steps, self.k_SKD.device, 0)
        self.before_BE = torch.zeros(self.max_requests, self.hidden_SE.shape[1], dtype=dtype, device=device)
        self.trees = TreeLoop(self.draft, self.inputs, self._tree_step)
        self.bound = True
        self.use_graphs([])

    def use_graphs(self, sizes: Sequence[int], shapes: Sequence[TreeShape] = ()) -> None:
        sizes = [n for n in sizes if n <= self.max_requests]
        self.runner = make_runner(self._loop, sizes, self.k_SKD.device)
        if isinstance(self.runner, CudaGraphRunner) and not shapes:
            self.runner.capture(GREEDY)
        self.trees.use_graphs(sizes, shapes)

    @torch.no_grad()
    def observe(self, computed: Computed) -> None:
        self.hidden_SE[computed.slot_T] = self.draft.fuse(computed.aux_TA)
        x_TW = self.draft.attention_input(computed.id_T, self.hidden_SE[computed.before_T])
        self.k_SKD[computed.slot_T], self.v_SKD[computed.slot_T] = self.draft.key_value(x_TW, computed.position_T - 1)

    def unobserved(self, slot_T: torch.Tensor) -> None:
        for buffer in (self.hidden_SE, self.k_SKD, self.v_SKD):
            buffer[slot_T] = 0

    def propose(self, requests: list[DraftRequest], pick: Pick) -> list[list[int]]:
        assert self.bound, "bind_pool() first"
        able = [r for r in requests if len(r.pages)]  # nothing is known before the first token is computed
        drafted = iter(self._chains(able, pick) if able else [])
        return [next(drafted)[: r.limit] if len(r.pages) else [] for r in requests]

    def _chains(self, requests: list[DraftRequest], pick: Pick) -> list[list[int]]:
        size = self.runner.padded(len(requests))
        pages = [self._rows(r) for r in requests]
        roots, positions = [r.tokens.newest for r in requests], [r.tokens.cached for r in requests]
        variant = self.inputs.fill([0] * len(requests), roots, positions, pages, pick, size)
        self._fill_before(requests, size)
        self.host_lens = None if self.runner.sizes else [len(p) for p in pages]
        self.runner.run(len(requests), variant)
        found: list[list[int]] = self.inputs.drafted_BK[: len(requests)].tolist()
        return found

    def propose_running(self, running: Running, pick: Pick) -> torch.Tensor:
        assert self.bound, "bind_pool() first"
        count, view = len(running.row_B), running.view(1, self.sinks, self.window)
        size = self.runner.padded(count)
        variant = self.inputs.take(torch.zeros_like(running.row_B), running, view, pick, size)
        self.before_BE[:count] = self.hidden_SE[running.last_slot()]
        self.before_BE[count:size] = 0
        self.host_lens = view[1].tolist() if running.reads_lengths and not self.runner.sizes else None
        self.runner.run(count, variant)
        return self.inputs.drafted_BK[:count].clone()

    def look_ahead(self, wanted: Sequence[LayerHeads] | None) -> int:
        """Its one layer, number 0. A draft with a window has learned to look at nothing else, and has no lookahead."""
        config, weight = self.draft.config, self.draft.midlayer.self_attn.q_proj.weight
        if config.settings.window is not None and wanted is None:
            logger.warning(
                "longdraft: the EAGLE-3 draft reads a window of %d tokens, so it looks ahead at nothing outside: the target's "
                "history alone chooses what is read",
                config.settings.window,
            )
        found = wanted_heads(wanted, *heads_that_look(config))
        if found:
            # Every rank has all of its rows, so each scores with some of the heads, and the scores are added up.
            self.heads = found[0][1][self.ranks.rank :: self.ranks.size]
            self.looked = LookedFor(
                self.max_requests, self.steps, config.num_heads, config.head_dim, self.draft.dtype, weight.device
            )
        return len(found)

    def lookahead(self, running: Running) -> list[Lookahead]:
        """Its own queries over its own rows; the key in a token's slot stands for that token and the one before it."""
        if self.looked is None:
            return []
        q_NHD = self.looked.queries(len(running.row_B))
        return [Lookahead(q_NHD, self.k_SKD, self.draft.config.head_dim**-0.5, self.heads, first=1)]

    def propose_trees_running(
        self, running: Running, limit_B: torch.Tensor, params: RowParams, shape: TreeShape
    ) -> Tree:
        assert self.bound, "bind_pool() first"
        count, size = len(running.row_B), self.trees.runner.padded(len(running.row_B))
        self.before_BE[:count] = self.hidden_SE[running.last_slot()]
        self.before_BE[count:size] = 0
        view = running.view(1, self.sinks, self.window)
        return self.trees.run_running(torch.zeros_like(running.row_B), running, view, limit_B, params, shape)

    def propose_tree(self, requests: list[DraftRequest], params: RowParams, shape: TreeShape) -> Tree:
        assert self.bound, "bind_pool() first"
        self._fill_before(requests, self.trees.runner.padded(len(requests)))
        pages = [self._rows(r) for r in requests]
        return self.trees.run(requests, [0] * len(requests), pages, params, shape)

    def _rows(self, request: DraftRequest) -> torch.Tensor:
        """Rows 0 .. n - 2 of the text, in the slots of tokens 1 .. n - 1: the first and the last, where not all are read."""
        rows = request.pages[1:]
        whole = len(rows) <= self.sinks + self.window
        return rows if whole else torch.cat([rows[: self.sinks], rows[len(rows) - self.window :]])

    def _fill_before(self, requests: list[DraftRequest], size: int) -> None:
        """Features of the token before each root; of a request without any, which does not draft, those of slot 0."""
        nothing = self.inputs.lens_B.new_zeros(())
        last_B = torch.stack([r.pages[-1] if len(r.pages) else nothing for r in requests]).long()
        self.before_BE[: len(requests)] = self.hidden_SE[last_B]
        self.before_BE[len(requests) : size] = 0

    def _tree_step(self, size: int, shape: TreeShape) -> Eagle3TreeStep:
        given, cache = self.inputs, (self.k_SKD, self.v_SKD)
        rows = Eagle3Rows(cache, given.pages_BW[:size], given.lens_B[:size], self.window, self.sinks, self.attention)
        return Eagle3TreeStep(self.draft, self.before_BE[:size], given.ids_3B[2, :size], rows, shape.runs)

    def _loop(self, size: int, variant: Any) -> None:
        """All steps of ``size`` chains, from and to :attr:`inputs`.

        The list of what a step sees is a ring behind the sinks: while there is room a step's row goes behind the last, then in
        place of the oldest of the window. The order of rows does not matter to the attention.
        """
        given, scratch_BK = self.inputs, self.scratch[:size]
        most, every = self.sinks + self.window, torch.arange(size, device=self.k_SKD.device)
        scale = self.draft.config.head_dim**-0.5
        pages_BW = given.pages_BW[:size].clone()  # the inputs stay what they are: a graph's work is run more than once

        def attend(step: int, q_BHD: torch.Tensor, k_BKD: torch.Tensor, v_BKD: torch.Tensor) -> torch.Tensor:
            if self.looked is not None:
                self.looked.keep(step, q_BHD)
            self.k_SKD[scratch_BK[:, step]], self.v_SKD[scratch_BK[:, step]] = k_BKD, v_BKD
            last_B = given.lens_B[:size].long() + step  # where the row would go if the list had no end
            at_B = torch.where(last_B < most, last_B, self.sinks + (last_B - most) % self.window)
            pages_BW[every, at_B] = scratch_BK[:, step].int()
            plan = self._plan(pages_BW, (last_B + 1).clamp_max(most).int(), step)
            return prefix_attention(q_BHD, self.k_SKD, self.v_SKD, plan, scale, self.attention)[0]

        _, root_B, position_B = given.ids_3B[:, :size]
        given.drafted_BK[:size] = propose_eagle3_chain(
            self.draft,
            self.before_BE[:size],
            root_B,
            position_B,
            self.steps,
            attend,
            lambda logits, at, step: given.pick(logits, at, variant),
        )

    def _plan(self, pages_BW: torch.Tensor, lens_B: torch.Tensor, step: int) -> AttentionPlan:
        """A step's plan; without graphs by the host's lengths, since a CPU reads runs of slots in place."""
        size = len(lens_B)
        if self.host_lens is None:
            return AttentionPlan.on_device(pages_BW, lens_B, self.inputs.cu_B1[: size + 1], list(range(size + 1)))
        most = self.sinks + self.window
        return AttentionPlan.build(pages_BW, [min(n + step + 1, most) for n in self.host_lens], [1] * size)

    def bind_target(self, weights: TargetWeights) -> None:
        self.draft.bind(weights.embedding_VE)
        if self.bound:
            self.runner.forget()
            self.trees.runner.forget()

    def committed(self, request: DraftRequest, tokens: list[int]) -> None:
        """Observed as the target computes them."""

    def forget(self, rid: str) -> None:
        """Nothing belongs to a request."""

    def clear(self) -> None:
        """Every slot is written before it is read again."""
