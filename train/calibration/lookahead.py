"""What a draft looks for while it drafts along a known text: attention scores of its chains, for every kind of draft.

A chain that stands behind T committed tokens reads the tokens T, T + 1, ... of the text (teacher forced) and looks among the
committed ones, 0 .. T - 1, as a served one does (Dustin, section 4.1).

Legend: W chains, C steps of each, R rows (all chains' steps), N keys, T tokens of a pass, H query heads, K key/value heads, D head size,
E hidden size, F features.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch

from longdraft.draft_models.attention_rows import grouped_scores
from longdraft.draft_models.eagle3 import Eagle3Draft
from longdraft.draft_models.eagle3_chain import propose_eagle3_chain
from longdraft.draft_models.eagle3_config import rope_reach
from longdraft.draft_models.feature_state import FeatureState
from longdraft.draft_models.longspec import LongSpecDraft
from longdraft.kernels.packed_attention import packed_causal_attention
from longdraft.train.calibration.reading import Reading, See


class Lookahead(ABC):
    """A draft beside a target.

    ``layers`` are its layers by the numbers that serving gives them, ``heads`` query heads of each, ``reach`` positions that it has
    (None: as many as the target).
    """

    layers: list[int]
    heads: int
    reach: int | None = None
    aux_layers: Sequence[int] = ()  # of the target, whose outputs it reads

    @abstractmethod
    def look(self, text: Reading, starts: Sequence[int], steps: int, see: See) -> None:
        """Show the scores of chains.

        Args:
            text: read by the target up to the last chain's last token but one, at least.
            starts: T of each chain, ascending, 1 or more.
            steps: C.
            see: told for each layer its place in :attr:`layers` and scores ``[H, W, C, N]`` in float32, N the largest T; -inf where
                a chain has no key to look at.
        """


def only_committed(score_HWCN: torch.Tensor, starts: Sequence[int]) -> torch.Tensor:
    """The scores with -inf from each chain's T on, in place."""
    start_W = torch.tensor(starts, device=score_HWCN.device)
    key_N = torch.arange(score_HWCN.shape[-1], device=score_HWCN.device)
    return score_HWCN.masked_fill_(key_N >= start_W[:, None, None], float("-inf"))


class StandaloneLookahead(Lookahead):
    """A causal language model of its own, with the target's tokenizer; it reads the text itself."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.layers = list(range(model.config.num_hidden_layers))
        self.heads = model.config.num_attention_heads
        self.reach = model.config.max_position_embeddings

    def look(self, text: Reading, starts: Sequence[int], steps: int, see: See) -> None:
        begin, end, keys = starts[0], starts[-1] + steps, starts[-1]
        row_WC = torch.tensor(starts, device=self.model.device)[:, None] - begin
        row_WC = row_WC + torch.arange(steps, device=self.model.device)
        own = Reading(self.model)
        own.read(text.ids[:begin])
        own.look(text.ids[begin:end], lambda layer, s_HRN: see(layer, only_committed(s_HRN[:, row_WC, :keys], starts)))


class LongSpecLookahead(Lookahead):
    """Cross-attention over the target's cache. A query depends on the last tokens alone, and on the target's newest row."""

    def __init__(self, draft: LongSpecDraft) -> None:
        self.draft = draft
        self.layers = list(draft.config.cross_layers)
        self.heads = draft.config.cross_heads // len(self.layers)

    def look(self, text: Reading, starts: Sequence[int], steps: int, see: See) -> None:
        read = [text.cache.layers[layer] for layer in self.layers]
        keys, values = (
            torch.cat([getattr(layer, name)[0].transpose(0, 1) for layer in read], 1).to(self.dtype)
            for name in ("keys", "values")
        )
        q_WCHD = torch.stack([self._queries(text, starts, step, keys, values) for step in range(steps)], 1)
        q_HRD = q_WCHD.flatten(0, 1).transpose(0, 1)
        scale, count = self.draft.config.target.head_dim**-0.5, starts[-1]
        for place, layer in enumerate(read):
            q = q_HRD[place * self.heads : (place + 1) * self.heads]
            score_HRN = grouped_scores(q, layer.keys[0, :, :count], range(self.heads), scale)
            see(place, only_committed(score_HRN.unflatten(1, (len(starts), steps)), starts))

    @property
    def dtype(self) -> torch.dtype:
        return self.draft.self_attn.q_proj.weight.dtype

    @torch.no_grad()
    def _queries(
        self, text: Reading, starts: Sequence[int], step: int, k_NKD: torch.Tensor, v_NKD: torch.Tensor
    ) -> torch.Tensor:
        """Rotated queries ``[W, H, D]`` of one step of all chains, the layers' heads side by side: of rows at a lag of step + 1."""
        window, device = self.draft.config.settings.window, k_NKD.device
        begin, end = max(0, starts[0] + step - window + 1), starts[-1] + step + 1
        id_T = torch.tensor(text.ids[begin:end], device=device)
        at_T = torch.arange(begin, end, device=device)
        newest_T = (at_T - step - 1).clamp_min(0)
        newest_TF = self.draft.read_newest(k_NKD[newest_T], v_NKD[newest_T], newest_T)
        seen: list[torch.Tensor] = []

        def keep(q_THD: torch.Tensor) -> torch.Tensor:
            seen.append(q_THD)
            return torch.zeros_like(q_THD)  # what is attended to changes nothing of the query itself

        def self_attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            return packed_causal_attention(q, k, v, [0, len(id_T)], window)

        self.draft(id_T, at_T, self_attend, keep, newest_TF, step + 1)
        return seen[0][torch.tensor(starts, device=device) + step - begin]


class Eagle3Lookahead(Lookahead):
    """The layer's attention over its own rows. Its row t stands for token t + 1, as serving stores it, and none for token 0."""

    def __init__(self, draft: Eagle3Draft) -> None:
        self.draft, self.aux_layers = draft, draft.config.aux_layers
        self.layers, self.heads = [0], draft.config.num_heads
        self.reach = min(rope_reach(draft.config.rope) or draft.config.max_position, draft.config.max_position)

    @torch.no_grad()
    def look(self, text: Reading, starts: Sequence[int], steps: int, see: See) -> None:
        id_L, keys = torch.tensor(text.ids[: starts[-1] + steps], device=text.model.device), starts[-1]
        feature_NE = self.draft.fuse(text.aux_LA[:keys])
        x_NW = self.draft.attention_input(id_L[1:keys], feature_NE[:-1])
        k_KND = self.draft.key_value(x_NW, torch.arange(keys - 1, device=id_L.device))[0].transpose(0, 1)
        state, done, queries = FeatureState(self.draft, 1, len(id_L), steps), 0, []
        for start in starts:
            if start > done:
                state.extend(0, id_L[done:start], text.aux_LA[done:start])
                done = start
            queries.append(self._chain(state, id_L[start : start + steps]))
        q_HRD = torch.cat(queries).transpose(0, 1)
        score_HRN = grouped_scores(q_HRD, k_KND, range(self.heads), self.draft.config.head_dim**-0.5)
        score_HRN = torch.nn.functional.pad(score_HRN, (1, 0), value=float("-inf"))
        see(0, only_committed(score_HRN.unflatten(1, (len(starts), steps)), starts))

    def _chain(self, state: FeatureState, id_C: torch.Tensor) -> torch.Tensor:
        """Run one chain along the text; its queries ``[C, H, D]``."""
        row, steps, seen = torch.zeros(1, dtype=torch.int64, device=id_C.device), len(id_C), []

        def attend(step: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            seen.append(q[0])
            return state.attend(row, state.length - 1 + step, q, k, v)

        def teacher(logits_BV: torch.Tensor, position_B: torch.Tensor, step: int) -> torch.Tensor:
            return id_C[min(step + 1, steps - 1)][None]

        propose_eagle3_chain(self.draft, state.feature, id_C[:1], state.length, steps, attend, teacher)
        return torch.stack(seen)
