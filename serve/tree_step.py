"""One scheduler step with drafted trees: grow, verify all nodes at once, keep the path of the target's own choices.

Legend: B requests, T places of a tree, D1 nodes of the deepest path.
"""

from dataclasses import replace
from functools import partial

import torch
from sglang.srt.managers.schedule_batch import ScheduleBatch
from sglang.srt.managers.utils import GenerationBatchResult

from longdraft.kernels.transfer import to_device
from longdraft.kernels.tree import Tree
from longdraft.kernels.tree_accept import Accepted, path_to, tree_accept
from longdraft.kernels.tree_bits import unpack_bits
from longdraft.serve import stats
from longdraft.serve.decode_step import DecodeStep
from longdraft.serve.drafters.base import DraftRequest
from longdraft.serve.emission import emitted, room
from longdraft.serve.sampling.rows import RowParams
from longdraft.serve.shape_choice import ShapeChoice
from longdraft.serve.simulate import simulated, simulated_acceptance
from longdraft.serve.slot_mover import SlotMover, move_slots
from longdraft.serve.tokens import Tokens
from longdraft.serve.tree_shape import TreeShape
from longdraft.serve.tree_verify import VerifiedTree, keep_paths, verify_tree
from longdraft.serve.verify import Verified, verify


class TreeStep(DecodeStep):
    """As :class:`DecodeStep`, with trees in place of chains; a step in which no request drafts is one of plain decoding."""

    choice: ShapeChoice
    mover: SlotMover | None = None  # where the target's verification is in graphs

    def _run(self, batch: ScheduleBatch) -> GenerationBatchResult:
        shape = self.choice.pick(len(batch.reqs))
        limits = self._limits(batch, shape)
        if self.choice.open:
            for counters in (stats.attach(req, self.settings.mode) for req in batch.reqs):
                counters.shapes[shape.name] += counters.mode != "off"
        params = RowParams.build(batch.reqs, [1] * len(limits), batch.seq_lens.device)
        with self.clock.phase("draft"):
            tree = self._agreed_tree(self._grow(batch, shape, limits, params))
        if tree is None:
            return super()._run(batch)
        try:
            seen = self.verified(batch, tree, shape, params)
        except Exception:
            self.ranks.failed("longdraft: a verification of trees failed, its requests go on without drafts")
            return super()._run(batch)
        seen = replace(seen, choice_BT=self.ranks.first("choices", seen.choice_BT)[0])
        with self.clock.phase("keep"):
            return self._keep_trees(batch, tree, seen, shape, limits)

    def _agreed_tree(self, tree: Tree | None) -> Tree | None:
        """Rank 0's trees."""
        if tree is None or self.ranks.size == 1:
            return tree
        given = tree.token_BT, tree.parent_BT, tree.depth_BT, tree.bits_BTW
        token_BT, parent_BT, depth_BT, bits_BTW = self.ranks.first("trees", *given)
        return Tree(token_BT, parent_BT, depth_BT, bits_BTW, tree.depth)

    def _propose(self, batch: ScheduleBatch) -> list[list[int]]:
        """No chains: where there is no tree, requests decode plainly."""
        return [[] for _ in batch.reqs]

    def _limits(self, batch: ScheduleBatch, shape: TreeShape) -> list[int]:
        """How deep each request's drafts are of use; 0 for one that does not draft."""
        limits = []
        for req in batch.reqs:
            cached = Tokens(req).cached
            fits = req.kv_allocated_len - cached >= shape.places and cached > 0
            drafting = self.mode_of(req) != "off" and fits and not req.finished()
            limits.append(max(0, min(shape.depth, room(req) - 1)) if drafting else 0)
        return limits

    def _grow(self, batch: ScheduleBatch, shape: TreeShape, limits: list[int], params: RowParams) -> Tree | None:
        """A tree of each request, the root alone for one that does not draft; None where none does, or where drafting fails."""
        if not any(limits):
            return None
        try:
            return self.grown(batch, shape, limits, params)
        except Exception:
            self.ranks.failed("longdraft: the drafter failed, its requests go on without drafts for this step")
            self.drafter.clear()
            for req, limit in zip(batch.reqs, limits, strict=True):
                if limit:
                    stats.attach(req, self.settings.mode).failures += 1
            return None

    def grown(self, batch: ScheduleBatch, shape: TreeShape, limits: list[int], params: RowParams) -> Tree:
        """The trees of a batch, not deeper than the limits."""
        table, requests = batch.req_to_token_pool.req_to_token, []
        for req, limit in zip(batch.reqs, limits, strict=True):
            tokens = Tokens(req)
            row = req.req_pool_idx or 0  # a finished request has none any more
            requests.append(DraftRequest(req.rid, tokens, table[row, : tokens.cached], limit))
        return self.drafter.propose_tree(requests, params, shape)

    def verified(self, batch: ScheduleBatch, tree: Tree, shape: TreeShape, params: RowParams) -> VerifiedTree:
        """The target's verification of a batch's trees, in a graph where one holds them."""
        captured = self._graph_width(len(batch.reqs), shape.places) is not None
        return verify_tree(self.target_worker, batch, tree, params, self.observer, shape.chain, captured, self.clock)

    def undrafted(self, batch: ScheduleBatch) -> Verified:
        """The target's verification of the newest tokens alone."""
        everyone = list(range(len(batch.reqs)))
        width = self._graph_width(len(everyone), 1)
        return verify(self.target_worker, batch, everyone, [[] for _ in everyone], self.observer, width)

    def _keep_trees(
        self, batch: ScheduleBatch, tree: Tree, seen: VerifiedTree, shape: TreeShape, limits: list[int]
    ) -> GenerationBatchResult:
        """Accept, return the runs, and leave the cache as plain decoding would."""
        paths, gained, drafted = self._accepted(tree, seen.choice_BT, limits)
        self.choice.learn(shape, limits, [len(path) - 1 for path in paths])
        runs = []
        for req, path, run, count in zip(batch.reqs, paths, gained, drafted, strict=True):
            run = emitted(req, run)
            runs.append(run)
            if req.finished():  # since this batch was made: what it would return is dropped
                continue
            counters = stats.attach(req, self.settings.mode)
            counters.count(count, min(len(path) - 1, len(run) - 1), Tokens(req).cached)
        paths = [path[: len(run)] for path, run in zip(paths, runs, strict=True)]
        keep_paths(batch, tree, seen, paths, partial(self._move, len(runs)), self.observer)
        for req, run, count in zip(batch.reqs, runs, drafted, strict=True):
            if count:
                self.drafter.committed(DraftRequest(req.rid, Tokens(req), req.prefix_indices, 0), run)
        places = tree.token_BT.shape[1]
        rows = [b * places + place for b, path in enumerate(paths) for place in path]
        cu = [0]
        for path in paths:
            cu.append(cu[-1] + len(path))
        row_P = torch.tensor(rows, device=batch.seq_lens.device)
        kept = Verified(seen.choice_BT.flatten()[row_P], seen.logits_NV[row_P], cu)
        return self._result(batch, runs, kept)

    def _move(self, requests: int, to_P: torch.Tensor, from_P: torch.Tensor) -> None:
        if self.mover is not None:
            self.mover.move(requests, to_P, from_P)
        else:
            move_slots(self.target_worker.model_runner.token_to_kv_pool, to_P, from_P)

    def _accepted(
        self, tree: Tree, choice_BT: torch.Tensor, limits: list[int]
    ) -> tuple[list[list[int]], list[list[int]], list[int]]:
        """Places of each kept path, the tokens gained (one for each place of it), and drafted nodes; read from the device at once."""
        forced, width = self.settings.simulate_accept_length, tree.depth + 1
        if simulated(forced):
            kept = forced_path(tree, choice_BT, simulated_acceptance(limits, forced, width))
        else:
            kept = tree_accept(tree, choice_BT)
        drafted_B1 = tree.valid_BT.sum(1, keepdim=True) - 1
        facts = torch.cat([kept.count_B[:, None], drafted_B1, kept.path_BD1, kept.token_BD1], 1).tolist()
        paths = [f[2 : 3 + f[0]] for f in facts]
        return paths, [f[2 + width : 3 + width + f[0]] for f in facts], [f[1] for f in facts]


def forced_path(tree: Tree, choice_BT: torch.Tensor, counts: list[int]) -> Accepted:
    """Forced acceptance, for timing: the first ``counts`` drafts of the path to each tree's deepest node."""
    depth_BT = torch.where(tree.valid_BT, tree.depth_BT, -1)
    deepest_B1 = depth_BT.argmax(1, keepdim=True)
    bits_B1W = tree.bits_BTW.gather(1, deepest_B1[..., None].expand(-1, -1, tree.bits_BTW.shape[2]))
    on_path_BT = unpack_bits(bits_B1W, tree.token_BT.shape[1])[:, 0]
    count_B1 = torch.minimum(to_device(counts, torch.int64, choice_BT.device)[:, None], depth_BT.gather(1, deepest_B1))
    last_B1 = (on_path_BT & (depth_BT == count_B1)).long().argmax(1, keepdim=True)
    kept = path_to(tree, last_B1, choice_BT)
    following_BD1 = torch.cat([kept.path_BD1[:, 1:], last_B1], 1)
    drafted = torch.arange(tree.depth + 1, device=choice_BT.device) < count_B1
    return replace(kept, token_BD1=torch.where(drafted, tree.token_BT.gather(1, following_BD1), kept.token_BD1))
