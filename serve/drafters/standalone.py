"""A causal language model as the draft in the server: chains over a cache of its own, slot for slot beside the target's.

**What its cache holds.** The draft computes every prefill that the target computes. A chain behind the newest token, at position n,
writes the keys and values of positions n .. n + K - 1; what the target keeps of it is right there, what it refuses is written again
by the next chain before anything reads it. One token can be missing: where all K drafts were kept, the last of them, which no
step has read. So a chain's first step runs over two tokens, the last cached one and the newest. It costs no forward, and it repairs
nothing else: a token is never missing longer than until the next chain. The last token of an ended request may be missing still, so
a request hands back all but that (:meth:`StandaloneDrafter.handed_back`); a prefix from SGLang's cache is therefore whole in both caches.

Legend: B requests, K drafted tokens, N = K + 1 tokens that a chain writes, R rows of SGLang's page table, W page-list width,
V vocabulary.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from sglang.srt.managers.schedule_batch import ScheduleBatch

from longdraft.draft_models.sparse_recipe import LayerHeads
from longdraft.kernels.plan import AttentionPlan
from longdraft.kernels.transfer import to_device
from longdraft.serve.cache_format import UNSCALED, Scales
from longdraft.serve.draft_lm import DraftLM
from longdraft.serve.drafters.base import Drafter, DraftRequest, Lookahead, Pick
from longdraft.serve.drafters.inputs import GREEDY, LoopInputs
from longdraft.serve.drafters.latest_tokens import LatestTokens
from longdraft.serve.drafters.looked import own_heads, wanted_heads
from longdraft.serve.drafters.running import Running
from longdraft.serve.graph_runner import CudaGraphRunner, make_runner
from longdraft.serve.tokens import Tokens
from longdraft.serve.tree_shape import TreeShape


class StandaloneDrafter(Drafter):
    """Chain drafts. All steps of a chain are one function over static buffers, which a :class:`GraphRunner` replays.

    A chain reads at most ``context`` cached tokens, the first ``sinks`` and the most recent, or what was chosen for the request.
    """

    on_device = True

    def __init__(
        self, model: DraftLM, vocab: int, max_requests: int, steps: int, context: int, sinks: int, ahead: int = 0
    ) -> None:
        """Take the draft.

        Args:
            model: weights loaded.
            vocab: of the target; no id beyond it is proposed.
            max_requests: at once.
            steps: of a chain.
            context: cached tokens that a chain reads at most.
            sinks: leading tokens among them.
            ahead: tokens that may be drafted behind the last one that is certain, beside the chain.
        """
        self.model, self.vocab = model, min(vocab, model.vocab)
        self.max_requests, self.steps = max_requests, steps
        self.context, self.sinks = context, min(sinks, context)
        self.remembered = ahead + 2 * (steps + 1)
        self.bytes_per_slot, self.bytes_per_step = model.bytes_per_slot, model.bytes_per_step
        self.host_lens: list[int] | None = None
        self.owner: dict[int, str] = {}  # request of a row
        self.rows: dict[str, int] = {}
        # Tokens of a request whose keys and values are all there; None: all that the target has, but perhaps the last.
        self.whole: dict[str, int | None] = {}
        self.followed: set[str] = set()
        self.wanted: list[
            tuple[Any, tuple[int, ...] | None]
        ] = []  # layers whose queries are kept, with the heads that count
        self.bound = False

    def take_pools(self, memory: Any, rows: Any, allocator: Any) -> None:
        self.model.take_pools(memory, rows, allocator)
        self.allocate(rows.req_to_token)

    def bind_pool(self, pool: Any, scales: Mapping[int, Scales]) -> None:
        self.model.attach()
        self.use_graphs([])
        self.bound = True

    def allocate(self, table_RW: torch.Tensor) -> None:
        """Buffers for SGLang's page table."""
        self.table_RW, device = table_RW, table_RW.device
        count = self.steps + 1
        self.latest = LatestTokens(len(table_RW), self.remembered, device)
        self.inputs = LoopInputs(self.max_requests, self.context + count, self.steps, device, 0)
        self.slot_BN = torch.zeros(self.max_requests, count, dtype=torch.int64, device=device)

    def use_graphs(self, sizes: Sequence[int], shapes: Sequence[TreeShape] = ()) -> None:
        sizes = [n for n in sizes if n <= self.max_requests]
        self.runner = make_runner(self._loop, sizes, self.table_RW.device)
        if isinstance(self.runner, CudaGraphRunner):
            self.runner.capture(GREEDY)

    def look_ahead(self, wanted: Sequence[LayerHeads] | None) -> int:
        """Without a calibration one layer looks ahead, two thirds up: all of them would cost as much as they are many."""
        have, rank = {layer.layer_id: layer for layer in self.model.layers}, self.model.rank
        if wanted is None:
            default = self.model.layers[len(have) * 2 // 3]
            self.wanted = [(default, tuple(range(default.tp_q_head_num)))]
        else:
            heads = {number: layer.tp_q_head_num * self.model.ranks for number, layer in have.items()}
            for number, chosen in wanted_heads(wanted, "the draft", heads):
                layer, each = have[number], have[number].tp_q_head_num
                self.wanted.append((layer, own_heads(chosen, range(rank * each, (rank + 1) * each))))
        for layer, _ in self.wanted:
            shape = self.max_requests, self.steps, layer.tp_q_head_num, layer.head_dim
            self.model.tap.keep(layer.layer_id, shape, self.model.dtype, self.model.device)
        return len(self.wanted)

    def lookahead(self, running: Running) -> list[Lookahead]:
        count, scales = len(running.row_B), self.model.scales
        return [
            Lookahead(
                self.model.tap.kept[layer.layer_id][:count].flatten(0, 1),
                self.model.keys(layer.layer_id),
                layer.scaling,
                heads,
                scales.get(layer.layer_id, UNSCALED)[0],
            )
            for layer, heads in self.wanted
        ]

    def prefilled(self, batch: ScheduleBatch) -> None:
        for req, end in zip(batch.reqs, batch.seq_lens_cpu.tolist(), strict=True):
            row = int(req.req_pool_idx)
            if (before := self.owner.get(row)) not in (None, req.rid):
                self.forget(before)
            self.owner[row], self.rows[req.rid], self.whole[req.rid] = req.rid, row, end
            self.followed.discard(req.rid)
        self.model.prefill(batch)

    def unobserved(self, slot_T: torch.Tensor) -> None:
        self.model.blank(slot_T)

    def propose(self, requests: list[DraftRequest], pick: Pick) -> list[list[int]]:
        facts = []
        for r in requests:
            end = r.tokens.cached
            self._catch_up(r.rid, end)
            facts.append((self.rows[r.rid], end, r.tokens.newest, *r.tokens.slice(end - 1, end)))
        row_B, length_B, newest_B, last_B = to_device(facts, torch.int64, self.table_RW.device).t()
        self.latest.write(row_B, length_B - 1, last_B[:, None])
        running = Running(tuple(r.rid for r in requests), row_B, self.table_RW, length_B, newest_B, host_lengths=True)
        drafted = self.propose_running(running, pick).tolist()
        return [ids[: r.limit] for r, ids in zip(requests, drafted, strict=True)]

    def propose_running(self, running: Running, pick: Pick) -> torch.Tensor:
        assert self.bound, "bind_pool() first"
        given, count = self.inputs, len(running.row_B)
        size = self.runner.padded(count)
        last_B, known_B = self.latest.read(running.row_B, running.length_B - 1)
        slot_BN = self._slots(running)
        pages_BW, lens_B = running.read(self.sinks, self.context - self.sinks)
        lens_B = (lens_B - 1).clamp_min(0)  # the last cached token is one of the chain's own
        offset_N = torch.arange(self.steps + 1, device=lens_B.device)
        pages_BW = torch.nn.functional.pad(pages_BW, (0, self.steps + 1))
        pages_BW.scatter_(1, lens_B[:, None].long() + offset_N, slot_BN.int())
        variant = given.take(last_B, running, (pages_BW, lens_B), pick, size)
        self.slot_BN[:count] = slot_BN
        self.slot_BN[:count, 0] *= known_B  # what is not known is not written: slot 0 is nobody's
        self.slot_BN[count:size] = 0
        hosted = running.reads_lengths and not self.runner.sizes
        self.host_lens = lens_B.tolist() if hosted else None
        self.runner.run(count, variant)
        drafted_BK = given.drafted_BK[:count].clone()
        self.latest.write(running.row_B, running.length_B, torch.cat([running.newest_B[:, None], drafted_BK], 1))
        return drafted_BK

    def _slots(self, running: Running) -> torch.Tensor:
        """Where a chain writes, from the last cached token on, int64 ``[B, N]``; 0, which is nobody's, behind the page table's end."""
        columns = running.table_RW.shape[1]
        at_BN = running.length_B[:, None] - 1 + torch.arange(self.steps + 1, device=running.row_B.device)
        slot_BN = running.table_RW[running.row_B[:, None], at_BN.clamp(0, columns - 1)].long()
        return slot_BN * ((at_BN >= 0) & (at_BN < columns))

    def _loop(self, size: int, variant: Any) -> None:
        """All steps of ``size`` chains, from and to :attr:`inputs`."""
        given, slot_BN = self.inputs, self.slot_BN[:size]
        last_B, root_B, position_B = given.ids_3B[:, :size]
        id_BM = torch.stack([last_B, root_B], 1).clamp_max(self.model.vocab - 1)
        at_BM = torch.stack([(position_B - 1).clamp_min(0), position_B], 1)
        before = 0
        for step in range(self.steps):
            width = id_BM.shape[1]
            self.model.tap.begin(step, size)
            here_BM = slot_BN[:, before : before + width]
            logits_TV = self.model.logits(
                id_BM.flatten(), at_BM.flatten(), here_BM.flatten(), self._plan(size, before, width)
            )
            logits_BV = logits_TV.view(size, width, -1)[:, -1, : self.vocab]
            chosen_B = given.pick(logits_BV, at_BM[:, -1], variant)
            given.drafted_BK[:size, step] = chosen_B
            before += width
            id_BM, at_BM = chosen_B[:, None], at_BM[:, -1:] + 1

    def _plan(self, size: int, before: int, width: int) -> AttentionPlan:
        """What ``width`` new tokens of each chain read behind ``before`` of its own; by the host's lengths where a CPU reads in place."""
        pages_BW, lens_B = self.inputs.pages_BW[:size], self.inputs.lens_B[:size] + before
        if self.host_lens is not None:
            return AttentionPlan.build(pages_BW, [n + before for n in self.host_lens], [width] * size)
        rows = list(range(0, (size + 1) * width, width))
        return AttentionPlan.on_device(pages_BW, lens_B, self.inputs.cu_B1[: size + 1] * width, rows)

    def _catch_up(self, rid: str, end: int) -> None:
        """A chain runs behind ``end`` tokens: one that is missing before them is computed now, more of them stay missing."""
        until = self.whole.get(rid, 0)
        if until is not None and until >= end - 1:
            self.whole[rid] = None

    def follow(self, rid: str, tokens: Tokens, end: int) -> None:
        self._catch_up(rid, end)
        row_B, position_B, id_B = to_device(
            [(self.rows[rid], end - 1, *tokens.slice(end - 1, end))], torch.int64, self.table_RW.device
        ).t()
        self.latest.write(row_B, position_B, id_B[:, None])
        self.followed.add(rid)

    def follows(self, rid: str) -> bool:
        return rid in self.followed

    def settle(self, rid: str, end: int) -> None:
        if rid in self.whole and self.whole[rid] is None:
            self.whole[rid] = end - 1
        self.followed.discard(rid)

    def handed_back(self, rid: str, count: int) -> int:
        until = self.whole.get(rid, 0)
        return count - 1 if until is None else min(count, until)

    def committed(self, request: DraftRequest, tokens: list[int]) -> None:
        """Kept drafts lie where they belong."""

    def forget(self, rid: str) -> None:
        row = self.rows.pop(rid, None)
        if row is not None and self.owner.get(row) == rid:
            del self.owner[row]
        self.whole.pop(rid, None)
        self.followed.discard(rid)

    def clear(self) -> None:
        self.whole.clear()
        self.followed.clear()
