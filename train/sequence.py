"""Sequence parallel training of a LongSpec draft: all ranks train on one sample, each on its rows, so that a document may be longer than
what one GPU holds.

Of a layer of the target each rank computes its own rows, and reads the keys and values of all rows, which the ranks put together; those
of the layers that the draft reads stay. The target is frozen, so no gradient crosses ranks there. Of the draft's self-attention
keys and values are functions of a token and its position alone: a rank computes those of its window's tokens before its first row
anew, and again nothing crosses. So the ranks' losses and gradients add up to those of one process.

Rows are divided as they come. The last rank's attend to more keys than the first's: of 128K tokens a target's attention is a quarter
of its work, so that two ranks wait an eighth for the second.

Legend: T tokens of a sample with its padding, R of a rank's rows, N of what it runs the draft on (its rows behind a window's), K
key/value heads of all layers read, D head size, E hidden size, F features of a cached row.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface

from longdraft.draft_models.longspec import LongSpecDraft
from longdraft.errors import UserError
from longdraft.kernels.chain_attention import ChainRows, chain_attention
from longdraft.kernels.linear_cross_entropy import IGNORED
from longdraft.kernels.packed_attention import packed_causal_attention
from longdraft.train.config import ObjectiveSettings, TrainSettings
from longdraft.train.objective import SummedLoss, summed_loss
from longdraft.train.packed_target import no_mask, under_attention
from longdraft.train.samples import Packed
from longdraft.train.target import PACKED, Capture, FrozenTarget, Wanted

NAME = "longdraft_shared"
Whole = Callable[[torch.Tensor], torch.Tensor]  # of equal parts of all ranks, one behind the other


@dataclass(frozen=True)
class SampleShare:
    """One rank's rows of a sample.

    Attributes:
        sample: whole, filled up so that all ranks have as many rows; the filling is a document that nobody is asked about.
        rank, world: which share, of how many.
        whole: puts rows of all ranks together.
    """

    sample: Packed
    rank: int
    world: int
    whole: Whole

    @cached_property
    def rows(self) -> range:
        """This rank's."""
        each = len(self.sample.id_T) // self.world
        return range(self.rank * each, (self.rank + 1) * each)

    def lead(self, window: int) -> int:
        """Tokens before the first row that its self-attention sees: they are of its document, and no more than a window has."""
        first = self.rows.start
        start = max(a for a in self.sample.cu[:-1] if a <= first)
        return min(first - start, window - 1)

    @property
    def label_R(self) -> torch.Tensor:
        """What the data has behind these rows."""
        return self.sample.label_T[self.rows.start : self.rows.stop]

    @cached_property
    def attending(self) -> ChainRows:
        """These rows as queries of the target's attention."""
        row_R = torch.arange(self.rows.start, self.rows.stop, device=self.sample.id_T.device)
        return ChainRows.build(row_R, self.sample.cu)


def share_of(sample: Packed, rank: int, world: int, whole: Whole) -> SampleShare:
    """A rank's share of a sample, on the device that the sample is on."""
    missing = -len(sample.id_T) % world
    if missing:
        id_T, position_T = (torch.nn.functional.pad(x, (0, missing)) for x in (sample.id_T, sample.position_T))
        label_T = torch.nn.functional.pad(sample.label_T, (0, missing), value=IGNORED)
        cu = [*sample.cu, len(id_T)]
        sample = Packed(id_T, position_T, label_T, cu, sample.names, [], sample.capture)
    return SampleShare(sample, rank, world, whole)


def check_sequence(settings: TrainSettings, packed: bool = True) -> None:
    """Refuse what is not divided.

    Args:
        settings: of a run.
        packed: whether the target, loaded, runs packed.

    Raises:
        UserError: another draft, views, stored features, or a target that runs in padded batches.
    """
    reasons = {
        f"draft.arch={settings.draft.arch}": settings.draft.arch != "longspec",
        f"views.share={settings.views.share}": settings.views.share > 0,
        f"data.features={settings.data.features}": settings.data.features is not None,
        f"target.attn={settings.target.attn}": settings.target.attn != PACKED,
        f"target.path={settings.target.path}, whose attention is its own code,": not packed,
    }
    for setting, unfit in reasons.items():
        if unfit:
            raise UserError(
                f"engine.sequence=true divides samples of LongSpec drafts that read whole caches of a packed target, which {setting} is "
                "not: leave one of them out"
            )


def _attend(
    module: torch.nn.Module,
    q_1HRD: torch.Tensor,
    k_1KRD: torch.Tensor,
    v_1KRD: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    sample_share: SampleShare,
    scaling: float,
    sliding_window: int | None = None,
    dropout: float = 0.0,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """What transformers calls in the place of its own attention: this rank's queries over the keys of all ranks."""
    assert attention_mask is None and dropout == 0.0 and len(q_1HRD) == 1
    assert math.isclose(scaling, q_1HRD.shape[-1] ** -0.5)
    q, k, v = (x[0].transpose(0, 1) for x in (q_1HRD, k_1KRD, v_1KRD))
    k, v = (sample_share.whole(x.contiguous()) for x in (k, v))
    return chain_attention(q, k, v, (), (), sample_share.attending, scaling, sliding_window)[None], None


AttentionInterface.register(NAME, _attend)
AttentionMaskInterface.register(NAME, no_mask)


@torch.no_grad()
def capture_share(target: FrozenTarget, share: SampleShare, hidden: bool, kv_layers: Sequence[int]) -> Capture:
    """As :meth:`FrozenTarget.capture`; keys and values of all rows, hidden rows of the share alone. Collective."""
    rows, sample = slice(share.rows.start, share.rows.stop), share.sample
    with under_attention(target.model, NAME):
        wanted = Wanted(kv_layers=tuple(kv_layers))
        seen = target.run(sample.id_T[None, rows], sample.position_T[None, rows], wanted, sample_share=share)
    found = {name: share.whole(seen[name][0].contiguous()) for name in ("k", "v")}
    return Capture(found | ({"hidden": seen["hidden"][0]} if hidden else {}))


def shared_loss(
    draft: LongSpecDraft, target: FrozenTarget, share: SampleShare, lag: int, settings: ObjectiveSettings
) -> SummedLoss:
    """A rank's part of :func:`longdraft.train.objective.longspec_loss`; the parts of all ranks add up to it. Collective."""
    seen = capture_share(target, share, settings.name != "ce", draft.config.cross_layers)
    hidden_RE = forward_rows(draft, share, seen.k_TKD, seen.v_TKD, lag)
    return summed_loss(draft, hidden_RE, share.label_R, seen.hidden_TE, settings)


def forward_rows(
    draft: LongSpecDraft, share: SampleShare, k_TKD: torch.Tensor, v_TKD: torch.Tensor, lag: int
) -> torch.Tensor:
    """What :meth:`LongSpecDraft.forward_packed` computes of the share's rows, ``[R, E]``.

    Args:
        draft: bound.
        share: of a sample.
        k_TKD, v_TKD: the cache of all rows.
        lag: row t sees the target's keys 0 .. t - lag of its document.
    """
    sample, window = share.sample, draft.config.settings.window
    lead = share.lead(window)
    first, last = share.rows.start - lead, share.rows.stop
    inner = [at for at in sample.cu if first < at < last]
    cu = [0, *(at - first for at in inner), last - first]
    row_N, key_N = lagged(sample.cu, first, last, lag, sample.id_T.device)
    rows = ChainRows.build(key_N, sample.cu)
    k_TKD, v_TKD = k_TKD.detach(), v_TKD.detach()
    newest_NF = None
    if draft.newest is not None:
        read_NF = draft.read_newest(k_TKD[key_N], v_TKD[key_N], sample.position_T[key_N])
        assert read_NF is not None
        newest_NF = read_NF.new_zeros(last - first, read_NF.shape[1]).index_copy(0, row_N, read_NF)

    def cross(q_NHD: torch.Tensor) -> torch.Tensor:
        keys, values = k_TKD.to(q_NHD.dtype), v_TKD.to(q_NHD.dtype)
        seen = chain_attention(q_NHD.index_select(0, row_N), keys, values, (), (), rows, q_NHD.shape[-1] ** -0.5)
        return torch.zeros_like(q_NHD).index_copy(0, row_N, seen)

    hidden_NE = draft(
        sample.id_T[first:last],
        sample.position_T[first:last],
        lambda q, k, v: packed_causal_attention(q, k, v, cu, window),
        cross,
        newest_NF,
        lag,
    )
    return hidden_NE[lead:]


def lagged(cu: list[int], first: int, last: int, lag: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Of rows ``first .. last`` of packed documents those that see a key, counted from the first, and the newest key of each."""
    seeing = [range(max(a + lag, first), min(b, last)) for a, b in pairwise(cu)]
    parts = [torch.arange(r.start, r.stop) for r in seeing if len(r)]
    row_N = torch.cat(parts).to(device) if parts else torch.zeros(0, dtype=torch.int64, device=device)
    return row_N - first, row_N - lag
