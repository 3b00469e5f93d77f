"""One rank's share of a draft that several ranks serve together: whole heads of an attention, columns of an MLP, rows of a head.

What a LongSpec draft reads of the target, keys and values, lies by heads on the ranks already. To bring it together would move a
request's view, 8 MiB of an 8B target's, between cards in every round; to add up the outputs moves a few rows. So cross-attention is
always shared by heads, and costs one sum a step.

Everything else depends on bytes. A shared block spares each rank its reading, and costs one more collective, which takes as long as
reading :data:`COLLECTIVE_BYTES`. An 8B target's MLP (336 MiB) and whole head (1 GiB) are shared between two ranks, the draft's
self-attention (80 MiB) is not; of a 70B target all of them are. A draft that is small is the same on every rank.

Legend: T rows, E hidden size, C columns of a projection, F inner size of an MLP, N rows of a head, D head size.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.functional import linear, pad

from longdraft.draft_models.eagle3 import Eagle3Draft
from longdraft.draft_models.eagle3 import Mlp as Eagle3Mlp
from longdraft.draft_models.kinds import AnyDraft
from longdraft.draft_models.longspec import LongSpecDraft
from longdraft.draft_models.longspec import Mlp as LongSpecMlp
from longdraft.errors import UserError

Collective = Callable[[torch.Tensor], torch.Tensor]

COLLECTIVE_BYTES = 64 << 20  # 15 microseconds between two cards of a host, at 4.3 TB/s


@dataclass(frozen=True)
class Share:
    """Which share is this rank's.

    Attributes:
        rank, size: this one's number, from 0, and how many there are.
        total: the sum over the ranks.
        joined: the ranks' tensors side by side in the last dimension.
        least: bytes of reading that a collective must spare a rank.
    """

    rank: int
    size: int
    total: Collective
    joined: Collective
    least: int = COLLECTIVE_BYTES

    def pays(self, nbytes: int) -> bool:
        """Whether to share a block of so many bytes."""
        return nbytes * (self.size - 1) // self.size >= self.least

    def part(self, count: int) -> range:
        """This rank's of ``count`` things; the last ranks may have fewer, or none."""
        each = -(-count // self.size)
        return range(min(self.rank * each, count), min((self.rank + 1) * each, count))

    def heads(self, heads: int, kv_heads: int) -> tuple[range, range]:
        """This rank's query heads and the key/value heads that they read, as SGLang divides them: where there are more ranks than key/value
        heads, several ranks have the same one, and each some of its query heads.

        Raises:
            UserError: heads that cannot be divided so.
        """
        if heads % self.size or (kv_heads % self.size and self.size % kv_heads):
            raise UserError(
                f"{heads} query heads and {kv_heads} key/value heads cannot be divided among {self.size} ranks: use another --tp-size"
            )
        each, own = heads // self.size, max(1, kv_heads // self.size)
        first = self.rank * kv_heads // self.size
        return range(self.rank * each, (self.rank + 1) * each), range(first, first + own)


class Summed(nn.Linear):
    """A linear layer without bias of whose inputs each rank has some; the outputs are added up."""

    def __init__(self, layer: nn.Linear, column_C: torch.Tensor, total: Collective) -> None:
        assert layer.bias is None
        super().__init__(len(column_C), layer.out_features, bias=False, device="meta")
        self.weight = nn.Parameter(layer.weight.detach()[:, column_C].clone(), requires_grad=False)
        self.total: Collective = total

    def forward(self, x_TC: torch.Tensor) -> torch.Tensor:
        return self.total(linear(x_TC, self.weight))


class Joined(nn.Linear):
    """A linear layer without bias of whose outputs each rank computes some; all ranks get all of them."""

    def __init__(self, layer: nn.Linear, share: Share) -> None:
        assert layer.bias is None
        super().__init__(layer.in_features, layer.out_features, bias=False, device="meta")
        self.joined: Collective = share.joined
        self.weight = nn.Parameter(own_rows(layer.weight.detach(), share), requires_grad=False)

    def forward(self, x_TE: torch.Tensor) -> torch.Tensor:
        return self.joined(linear(x_TE, self.weight))[..., : self.out_features]


def own_rows(row_NE: torch.Tensor, share: Share) -> torch.Tensor:
    """This rank's rows, copied; zeros fill up what the last ranks lack."""
    own, each = share.part(len(row_NE)), -(-len(row_NE) // share.size)
    return pad(row_NE[own.start : own.stop], (0, 0, 0, each - len(own))).clone()


def split(draft: AnyDraft, share: Share) -> list[str]:
    """Leave a draft this rank's share of its weights, in place; its head is lent or its own, and shared apart if lent.

    Returns:
        Names of what is shared now.

    Raises:
        UserError: heads that cannot be divided among so many ranks.
    """
    done = _split_longspec(draft, share) if isinstance(draft, LongSpecDraft) else _split_eagle3(draft, share)
    layer = draft if isinstance(draft, LongSpecDraft) else draft.midlayer
    if _split_mlp(layer.mlp, share):
        done.append("MLP")
    return done


def _split_longspec(draft: LongSpecDraft, share: Share) -> list[str]:
    t, config = draft.config.target, draft.config
    own = share.heads(t.num_heads, t.num_kv_heads)[1]
    cross, width = draft.cross_attn, t.head_dim
    query = cross_heads(share, len(config.cross_layers), t.num_kv_heads, config.cross_group)
    column_C = _columns(query, width, cross.q_proj.weight.device)
    _keep_rows(cross.q_proj, column_C)
    if cross.newest_q_proj is not None:
        _keep_rows(cross.newest_q_proj, column_C)
    cross.o_proj = Summed(cross.o_proj, column_C, share.total)
    attn = draft.self_attn
    if not share.pays(sum(p.nbytes for p in attn.parameters())):
        return ["cross-attention"]
    query_C, own_C = (
        _columns(heads, width, column_C.device) for heads in (share.heads(t.num_heads, t.num_kv_heads)[0], own)
    )
    _keep_rows(attn.q_proj, query_C)
    _keep_rows(attn.k_proj, own_C)
    _keep_rows(attn.v_proj, own_C)
    attn.o_proj = Summed(attn.o_proj, query_C, share.total)
    return ["cross-attention", "self-attention"]


def cross_heads(share: Share, layers: int, kv_heads: int, group: int) -> list[int]:
    """This rank's query heads of a cross-attention over several layers, ``group`` for each key head, those of the first layer first.

    Raises:
        UserError: as of :meth:`Share.heads`.
    """
    own, _ = share.heads(kv_heads * group, kv_heads)
    return [layer * kv_heads * group + head for layer in range(layers) for head in own]


def _split_eagle3(draft: Eagle3Draft, share: Share) -> list[str]:
    """Its attention reads rows of its own, the same on all ranks."""
    if not share.pays(draft.lm_head.weight.nbytes):
        return []
    draft.lm_head = Joined(draft.lm_head, share)
    return ["head"]


def _split_mlp(mlp: LongSpecMlp | Eagle3Mlp, share: Share) -> bool:
    gate, up, down = mlp.gate_proj, mlp.up_proj, mlp.down_proj
    size = len(gate.weight)
    if size % share.size or not share.pays(sum(p.nbytes for p in mlp.parameters())):
        return False
    own = share.part(size)
    own_F = torch.arange(own.start, own.stop, device=gate.weight.device)
    _keep_rows(gate, own_F)
    _keep_rows(up, own_F)
    mlp.down_proj = Summed(down, own_F, share.total)
    return True


def _columns(heads: range | list[int], width: int, device: torch.device) -> torch.Tensor:
    """Where the numbers of some heads stand in a projection."""
    first_H1 = torch.tensor(list(heads), device=device)[:, None] * width
    return (first_H1 + torch.arange(width, device=device)).flatten()


def _keep_rows(layer: nn.Linear, row_C: torch.Tensor) -> None:
    layer.weight = nn.Parameter(layer.weight.detach()[row_C].clone(), requires_grad=False)
    if layer.bias is not None:
        layer.bias = nn.Parameter(layer.bias.detach()[row_C].clone(), requires_grad=False)
    layer.out_features = len(row_C)
