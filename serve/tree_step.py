"""One scheduler step with drafted trees: grow, verify all nodes at once, keep the path of the target's own choices.

Legend: B requests, T places of a tree, D1 nodes of the deepest path.
"""

import logging
from typing import Any

import torch
from sglang.srt.managers.schedule_batch import ScheduleBatch
from sglang.srt.managers.utils import GenerationBatchResult

from longdraft.kernels.tree import Tree
from longdraft.kernels.tree_accept import tree_accept
from longdraft.serve import stats
from longdraft.serve.decode_step import DecodeStep
from longdraft.serve.device_step import DeviceStep
from longdraft.serve.drafters.base import Drafter, DraftRequest
from longdraft.serve.emission import emitted, room
from longdraft.serve.sampling.rows import RowParams
from longdraft.serve.simulate import simulated, simulated_acceptance
from longdraft.serve.tokens import Tokens
from longdraft.serve.tree_shape import TreeShape
from longdraft.serve.tree_verify import VerifiedTree, keep_paths, verify_tree
from longdraft.serve.verify import Verified

logger = logging.getLogger(__name__)


class TreeStep(DecodeStep):
    """As :class:`DecodeStep`, with trees in place of chains; a step in which no request drafts is one of plain decoding."""

    shape: TreeShape

    def _run(self, batch: ScheduleBatch) -> GenerationBatchResult:
        with self.clock.phase("draft"):
            tree = self._grow(batch)
        if tree is None:
            return super()._run(batch)
        try:
            with self.clock.phase("verify"):
                captured = self._graph_width(len(batch.reqs), tree.token_BT.shape[1]) is not None
                seen = verify_tree(self.target_worker, batch, tree, self.observer, captured)
        except Exception:
            logger.exception("longdraft: a verification of trees failed, its requests go on without drafts")
            return super()._run(batch)
        with self.clock.phase("keep"):
            return self._keep_trees(batch, tree, seen)

    def _propose(self, batch: ScheduleBatch) -> list[list[int]]:
        """No chains: where there is no tree, requests decode plainly."""
        for req in batch.reqs:
            self.mode_of(req)
        return [[] for _ in batch.reqs]

    def _grow(self, batch: ScheduleBatch) -> Tree | None:
        """A tree of each request, the root alone for one that does not draft; None where none does, or where drafting fails."""
        limits, requests = [], []
        table = batch.req_to_token_pool.req_to_token
        for req in batch.reqs:
            tokens = Tokens(req)
            slots = req.kv_allocated_len - tokens.cached
            drafting = self.mode_of(req) == "full" and slots >= self.shape.places and tokens.cached > 0
            limits.append(max(0, min(self.shape.depth, room(req) - 1)) if drafting else 0)
            requests.append(DraftRequest(req.rid, tokens, table[req.req_pool_idx, : tokens.cached], limits[-1]))
        if not any(limits):
            return None
        try:
            params = RowParams.build(batch.reqs, [1] * len(requests), batch.seq_lens.device)
            return self.drafter.propose_tree(requests, params, self.shape)
        except Exception:
            logger.exception("longdraft: the drafter failed, its requests go on without drafts for this step")
            self.drafter.clear()
            for req, limit in zip(batch.reqs, limits, strict=True):
                if limit:
                    stats.attach(req, "full").failures += 1
            return None

    def _keep_trees(self, batch: ScheduleBatch, tree: Tree, seen: VerifiedTree) -> GenerationBatchResult:
        """Accept, return the runs, and leave the cache as plain decoding would."""
        paths, gained, drafted = self._accepted(tree, seen.choice_BT)
        runs = []
        for req, path, run, count in zip(batch.reqs, paths, gained, drafted, strict=True):
            run = emitted(req, run)
            counters = stats.attach(req, self.settings.mode)
            counters.accept.add(count, min(len(path) - 1, len(run) - 1))
            counters.rounds += 1
            runs.append(run)
        paths = [path[: len(run)] for path, run in zip(paths, runs, strict=True)]
        keep_paths(batch, self.target_worker.model_runner.token_to_kv_pool, tree, seen, paths, self.observer)
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

    def _accepted(self, tree: Tree, choice_BT: torch.Tensor) -> tuple[list[list[int]], list[list[int]], list[int]]:
        """Places of each kept path, the tokens gained (one for each place of it), and drafted nodes; read from the device at once."""
        if simulated(self.settings.simulate_accept_length):
            return self._simulated(tree, choice_BT)
        kept, width = tree_accept(tree, choice_BT), tree.depth + 1
        drafted_B1 = tree.valid_BT.sum(1, keepdim=True) - 1
        facts = torch.cat([kept.count_B[:, None], drafted_B1, kept.path_BD1, kept.token_BD1], 1).tolist()
        paths = [f[2 : 3 + f[0]] for f in facts]
        return paths, [f[2 + width : 3 + width + f[0]] for f in facts], [f[1] for f in facts]

    def _simulated(self, tree: Tree, choice_BT: torch.Tensor) -> tuple[list[list[int]], list[list[int]], list[int]]:
        """Forced acceptance, for timing: a prefix of the path to the deepest node."""
        parents, tokens, choices = tree.parent_BT.tolist(), tree.token_BT.tolist(), choice_BT.tolist()
        paths: list[list[int]] = []
        for depths, parent in zip(tree.depth_BT.where(tree.valid_BT, -1).tolist(), parents, strict=True):
            node, path = depths.index(max(depths)), []
            while node >= 0:
                path.append(node)
                node = parent[node]
            paths.append(path[::-1])
        most = [len(path) - 1 for path in paths]
        counts = simulated_acceptance(most, self.settings.simulate_accept_length, tree.depth + 1)
        paths = [path[: count + 1] for path, count in zip(paths, counts, strict=True)]
        gained = [
            [*(ids[place] for place in path[1:]), choice[path[-1]]]
            for path, ids, choice in zip(paths, tokens, choices, strict=True)
        ]
        return paths, gained, (tree.valid_BT.sum(1) - 1).tolist()


def make_step(shape: TreeShape | None, *args: Any) -> DecodeStep:
    """The step of a server that drafts in this shape."""
    if shape is None:
        drafter: Drafter = args[1]
        return DeviceStep(*args) if drafter.on_device else DecodeStep(*args)
    step = TreeStep(*args)
    step.shape = shape
    return step
