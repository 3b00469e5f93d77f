"""What the reference decoder asks of a draft, whatever its kind: follow the target's passes, propose, forget what was refused.

Legend: M tokens, A features.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import DynamicCache

from longdraft.draft_models.aux_features import AuxFeatures, aux_features
from longdraft.draft_models.chain import propose_chain
from longdraft.draft_models.draft_view import ViewReader
from longdraft.draft_models.eagle3 import Eagle3Draft
from longdraft.draft_models.feature_state import FeatureState, propose_from_features
from longdraft.draft_models.kinds import AnyDraft
from longdraft.draft_models.longspec import LongSpecDraft
from longdraft.draft_models.window_state import WindowState
from longdraft.errors import UserError
from longdraft.kernels.view_attention import View


class Drafting(ABC):
    """One request's drafting beside a transformers target."""

    @abstractmethod
    def commit(self, id_M: torch.Tensor) -> None:
        """Take over the first ``M`` tokens of the target's latest pass; they follow what was committed before."""

    @abstractmethod
    def propose(self, root: torch.Tensor, cache: DynamicCache, steps: int) -> torch.Tensor:
        """Draft ``[steps]`` ids behind the root, the newest token ``[1]``, which the target has not run over.

        Args:
            root: its id.
            cache: the target's, of all tokens before the root.
            steps: how many.
        """


class LongSpecDrafting(Drafting):
    """Rings of the last ids, and the layers that the draft reads of the target's cache, whole or through a view."""

    def __init__(self, draft: LongSpecDraft, steps: int, view: View | None) -> None:
        self.draft, self.length = draft, 0
        self.state = WindowState(draft, 1, steps)
        self.reader = ViewReader(view, draft.config.target.head_dim**-0.5)
        self.row = torch.zeros(1, dtype=torch.long, device=self.state.k.device)

    def commit(self, id_M: torch.Tensor) -> None:
        end = self.length + len(id_M)
        if len(id_M) >= self.state.window:
            self.state.rebuild(0, id_M.tolist(), end)
        else:
            at = torch.arange(self.length, end, device=id_M.device)
            self.state.store(self.row.expand(len(id_M)), id_M, at)
        self.reader.committed(len(id_M) - 1)
        self.length = end

    def propose(self, root: torch.Tensor, cache: DynamicCache, steps: int) -> torch.Tensor:
        read = [cache.layers[layer] for layer in self.draft.config.cross_layers]
        dtype = self.draft.self_attn.q_proj.weight.dtype
        keys, values = (
            torch.cat([getattr(layer, name)[0].transpose(0, 1) for layer in read], 1).to(dtype)
            for name in ("keys", "values")
        )
        at = torch.tensor([self.length], device=root.device)
        newest_BF = self.draft.read_newest(keys[-1:], values[-1:], at - 1)
        cross_attend = self.reader.begin(keys, values)
        return propose_chain(self.state, self.row, root, at, steps, cross_attend, newest_BF=newest_BF)[0]


class Eagle3Drafting(Drafting):
    """Features of three layers, kept by hooks on the target."""

    def __init__(self, draft: Eagle3Draft, steps: int, tokens: int, seen: AuxFeatures) -> None:
        self.state, self.seen = FeatureState(draft, 1, tokens + steps, steps), seen
        self.row = torch.zeros(1, dtype=torch.long, device=self.state.k.device)

    def commit(self, id_M: torch.Tensor) -> None:
        self.state.extend(0, id_M, self.seen.take()[0, : len(id_M)])

    def propose(self, root: torch.Tensor, cache: DynamicCache, steps: int) -> torch.Tensor:
        return propose_from_features(self.state, self.row, root, steps)[0]


@contextmanager
def drafting(target: Any, draft: AnyDraft, tokens: int, steps: int, view: View | None = None) -> Iterator[Drafting]:
    """Drafting for one request; while it is open the target's passes are watched where the draft needs that.

    Args:
        target: a transformers causal language model.
        draft: bound to the target.
        tokens: most tokens that the request will have.
        steps: drafted tokens a verification.
        view: what a LongSpec draft reads of the target's cache; None is all of it.

    Raises:
        UserError: a view for a draft that does not read the target's cache.
    """
    if isinstance(draft, LongSpecDraft):
        yield LongSpecDrafting(draft, steps, view)
        return
    if view is not None:
        raise UserError(
            "a view is what a LongSpec draft reads of the target's cache, an EAGLE-3 draft reads none of it: leave the view out"
        )
    with aux_features(target, draft.config.aux_layers) as seen:
        yield Eagle3Drafting(draft, steps, tokens, seen)
