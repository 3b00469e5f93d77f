"""Rounds of trees that never wait for the device: growing, verification, acceptance and the move of the kept path are launched.

Legend: B requests, T places of a tree, D1 nodes of the deepest path.
"""

from typing import Any

import torch
from sglang.srt.managers.schedule_batch import ScheduleBatch
from sglang.srt.managers.utils import GenerationBatchResult

from longdraft.kernels.tree import Tree
from longdraft.kernels.tree_accept import Accepted, tree_accept
from longdraft.serve import stats
from longdraft.serve.device_step import DeviceStep, Gained
from longdraft.serve.device_verify import choose_running, forward_of
from longdraft.serve.drafters.base import Computed
from longdraft.serve.drafters.running import Running
from longdraft.serve.roster import Roster
from longdraft.serve.simulate import simulated, simulated_acceptance
from longdraft.serve.tree_shape import TreeShape
from longdraft.serve.tree_step import TreeStep, forced_path
from longdraft.serve.tree_verify import VerifiedTree
from longdraft.serve.verify import Verified


class DeviceTreeStep(DeviceStep, TreeStep):
    """As :class:`DeviceStep`, with trees; what needs the host takes :class:`TreeStep`'s rounds.

    Where there is a choice of shapes, what a round kept is learned from when the scheduler comes to it.
    """

    def _round(self, batch: ScheduleBatch, roster: Roster, running: Running) -> GenerationBatchResult:
        shape = self.choice.pick(len(roster.reqs))
        limit_B = self._depths(roster, running, shape)
        with self.clock.phase("draft"):
            tree = self._agreed_tree(self._grow_running(roster, running, shape, limit_B))
        try:
            seen = None if tree is None else self._verify_trees(batch, roster, running, tree, shape)
        except Exception:
            self.ranks.failed("longdraft: a verification of trees failed, its requests go on without drafts")
            seen = None
        if tree is None or seen is None:
            none = self._no_drafts(len(roster.reqs), running)
            result = self._chains(batch, roster, running, none, (shape, torch.stack([none.limit_B] * 2)))
            self._tell(running, running.newest_B[:, None], torch.ones_like(running.length_B))
            return result
        with self.clock.phase("keep"):
            kept = self._kept_paths(tree, seen.choice_BT)
            gained = Gained(kept.token_BD1, roster.returned(kept.token_BD1, kept.count_B), kept.path_BD1)
            self._launch(roster, tree.valid_BT.sum(1) - 1, (shape, torch.stack([limit_B, kept.count_B])))
            self._keep_running(running, tree, seen, gained)
            return self._returned(batch, running, gained, Verified(seen.choice_BT.flatten(), seen.logits_NV, []))

    def _learn(self, reqs: list[Any], more: Any, gained: list[int]) -> None:
        shape, facts_2B = more
        limits, kept = facts_2B.tolist()
        there = [not (req.finished() or req.is_retracted) for req in reqs]
        self.choice.learn(shape, [n * here for n, here in zip(limits, there, strict=True)], kept)
        if self.choice.open:
            for req in (req for req, here in zip(reqs, there, strict=True) if here):
                counters = stats.attach(req, self.settings.mode)
                counters.shapes[shape.name] += counters.mode != "off"

    def _depths(self, roster: Roster, running: Running, shape: TreeShape) -> torch.Tensor:
        """How deep each request's drafts are of use, int64 ``[B]``; 0 where there is no slot for every place."""
        fits_B = running.length_B + shape.places <= self.columns
        return (roster.end_B - 2 - running.length_B).clamp(0, shape.depth) * roster.drafts_B * fits_B

    def _grow_running(self, roster: Roster, running: Running, shape: TreeShape, limit_B: torch.Tensor) -> Tree | None:
        if not roster.drafting or not shape.depth:
            return None
        try:
            return self.drafter.propose_trees_running(running, limit_B, roster.params, shape)
        except Exception:
            self._failed(roster)
            return None

    def _verify_trees(
        self, batch: ScheduleBatch, roster: Roster, running: Running, tree: Tree, shape: TreeShape
    ) -> VerifiedTree:
        """The twin of :func:`longdraft.serve.tree_verify.verify_tree`."""
        with self.clock.phase("verify"):
            reqs, width = roster.reqs, tree.token_BT.shape[1]
            column_T = torch.arange(width, device=running.length_B.device)
            column_BT = (running.length_B[:, None] + column_T).clamp_max(self.columns - 1)
            slot_BT = running.table_RW[running.row_B[:, None], column_BT].long() * tree.valid_BT
            position_BT = torch.where(tree.valid_BT, tree.position_BT(running.length_B), running.length_B[:, None])
            captured = self._graph_width(len(reqs), width) is not None
            bits_TW = None if shape.chain else tree.bits_BTW.flatten(0, 1)
            new = tree.token_BT, position_BT, slot_BT
            forward = forward_of(batch, reqs, running, new, self.observer, captured, bits_TW)
            result = self.target_worker.forward_batch_generation(batch=None, forward_batch=forward, is_verify=True)
            aux_NA = self.observer.take(result.logits_output)
        with self.clock.phase("sampling"):
            logits_NV = result.logits_output.next_token_logits
            choice_N, logits_NV = choose_running(logits_NV, reqs, roster.params, position_BT)
        return VerifiedTree(choice_N.view(-1, width), logits_NV, aux_NA, slot_BT)

    def _kept_paths(self, tree: Tree, choice_BT: torch.Tensor) -> Accepted:
        forced = self.settings.simulate_accept_length
        if not simulated(forced):
            kept = tree_accept(tree, choice_BT)
        else:
            counts = simulated_acceptance([tree.depth] * len(choice_BT), forced, tree.depth + 1)
            kept = forced_path(tree, choice_BT, counts)
        return Accepted(*self.ranks.first("tokens", kept.path_BD1, kept.count_B, kept.next_B, kept.token_BD1))

    def _keep_running(self, running: Running, tree: Tree, seen: VerifiedTree, gained: Gained) -> None:
        """Move the kept nodes' keys and values to where a chain would have written them, and show them to the drafter.

        What stands behind a request's kept nodes goes from slot 0 to slot 0, which nobody owns.
        """
        offset_D1 = torch.arange(gained.place_BN.shape[1], device=running.length_B.device)
        kept_BD1 = offset_D1 < gained.count_B[:, None]
        position_BD1 = running.length_B[:, None] + torch.minimum(offset_D1, gained.count_B[:, None] - 1)
        row_B1 = running.row_B[:, None]
        slot_BD1 = running.table_RW[row_B1, position_BD1].long() * kept_BD1
        from_BD1 = seen.slot_BT.gather(1, gained.place_BN) * kept_BD1
        self._move(len(row_B1), slot_BD1.flatten(), from_BD1.flatten())
        id_BD1 = tree.token_BT.gather(1, gained.place_BN)
        if seen.aux_NA is not None:
            before_BD1 = running.table_RW[row_B1, (position_BD1 - 1).clamp_min(0)].long()
            first_B1 = torch.arange(len(row_B1), device=row_B1.device)[:, None] * tree.token_BT.shape[1]
            aux_PA = seen.aux_NA[(first_B1 + gained.place_BN).flatten()]
            id_P, position_P, slot_P, before_P = (x.flatten() for x in (id_BD1, position_BD1, slot_BD1, before_BD1))
            self.observer.tell(Computed(id_P, position_P, slot_P, before_P, aux_PA))
        self._tell(running, id_BD1, gained.count_B)

    def _tell(self, running: Running, id_BN: torch.Tensor, count_B: torch.Tensor) -> None:
        try:
            self.drafter.keep(running, id_BN, count_B)
        except Exception:
            self.ranks.failed("longdraft: the drafter could not follow a round, it starts anew")
            self.drafter.clear()
