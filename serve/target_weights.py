"""What the target lends to a draft: its embedding and its head, as plain matrices.

Of several ranks SGLang gives each some rows of both. Of the embedding every rank keeps a whole copy, taken once: a step reads one row
a request, which costs less than any sum over the ranks, and an EAGLE-3 draft embeds whole prompts. Of the head every rank multiplies by its
own rows, and the logits are put together; or, where the draft's rows are so few that this pays less than it costs, by all of them.

Legend: V vocabulary with its padding, E hidden size, R rows of an identity, N rows of the head that a draft uses.
"""

import logging
from collections.abc import Callable
from typing import Any

import torch

from longdraft.draft_models.shares import Share
from longdraft.errors import UserError
from longdraft.serve.ranks import ALONE, Ranks

logger = logging.getLogger(__name__)
ROWS = 256

Joining = Callable[[torch.Tensor], torch.Tensor]


class TargetWeights:
    """The target's embedding and head, in place where they are plain; a quantised head is dequantised once, when first asked for."""

    def __init__(self, model: Any, dtype: torch.dtype, ranks: Ranks = ALONE) -> None:
        """Take the target.

        Args:
            model: SGLang's, weights loaded.
            dtype: that it computes in.
            ranks: that it is divided among.
        """
        self.model, self.dtype, self.ranks = model, dtype, ranks
        self._dequantised_VE: torch.Tensor | None = None
        self._whole_VE: torch.Tensor | None = None  # the embedding, of several ranks

    @property
    def embedding_VE(self) -> torch.Tensor:
        """In place; of several ranks a copy of the whole.

        Raises:
            UserError: a quantised one.
        """
        module = self.model.model.embed_tokens
        weight_VE = _plain(module)
        if weight_VE is None:
            raise UserError(
                f"the target's embedding is quantised ({type(module.quant_method).__name__}), which a draft cannot read: take a "
                "checkpoint whose embedding is not, or serve without --draft"
            )
        if self.ranks.size == 1 or getattr(module, "tp_size", 1) == 1:
            return weight_VE
        if self._whole_VE is None:
            self._whole_VE = self.ranks.joined(weight_VE.detach(), 0)
            logger.info(
                "longdraft: the draft keeps a whole copy of the target's embedding (%.2f GiB)",
                self._whole_VE.nbytes / 2**30,
            )
        return self._whole_VE

    @property
    def head_VE(self) -> torch.Tensor:
        """In place, or the dequantised copy; of several ranks this one's rows."""
        weight_VE = _plain(self.model.lm_head)
        if weight_VE is not None:
            return weight_VE
        if self._dequantised_VE is None:
            self._dequantised_VE = dequantised(self.model, self.embedding_VE.shape[1], self.dtype)
            count = self._dequantised_VE.nbytes / 2**30
            logger.info(
                "longdraft: the target's head is quantised or packed, the draft keeps it as a plain matrix (%.2f GiB)",
                count,
            )
        return self._dequantised_VE

    @torch.no_grad()
    def head_rows(self, id_N: torch.Tensor | None, vocab: int, share: Share) -> tuple[torch.Tensor, Joining]:
        """Of several ranks: this one's rows of the head that a draft uses, and what puts the logits of all ranks together.

        Args:
            id_N: int64 ids of the rows, ascending; None: all.
            vocab: tokens of the target, without padding.
            share: this rank's, which says whether the rows are divided.

        Returns:
            Rows ``[N', E]``, and a function from their logits ``[..., N']`` to those of all rows.
        """
        own_VE, count = self.head_VE.detach(), vocab if id_N is None else len(id_N)
        divided = share.pays(count * own_VE.shape[1] * own_VE.itemsize)
        if id_N is None:
            row_NE = own_VE if divided else self.ranks.joined(own_VE, 0)[:vocab].clone()
        else:
            each = -(-count // share.size)
            row_NE = own_VE.new_zeros(each if divided else count, own_VE.shape[1])
            for rank, part_N in enumerate(id_N.to(own_VE.device).split(each)):  # no rank need hold all of them
                part_NE = self._gathered(part_N, own_VE)
                if rank == share.rank or not divided:
                    at = 0 if divided else rank * each
                    row_NE[at : at + len(part_NE)] = part_NE
        return row_NE, (lambda logits: share.joined(logits)[..., :count]) if divided else (lambda logits: logits)

    def _gathered(self, id_N: torch.Tensor, own_VE: torch.Tensor) -> torch.Tensor:
        """Rows of the head, each from the rank that has it."""
        first = self.ranks.rank * len(own_VE)
        mine_N1 = ((id_N >= first) & (id_N < first + len(own_VE)))[:, None]
        return self.ranks.total(own_VE[(id_N - first).clamp(0, len(own_VE) - 1)].where(mine_N1, 0))

    def renew(self) -> None:
        """The target has new weights: write the copies, if there are any, anew in their place."""
        if self._dequantised_VE is not None:
            dequantised(self.model, self._dequantised_VE.shape[1], self.dtype, self._dequantised_VE)
        if self._whole_VE is not None:
            weight_VE = _plain(self.model.model.embed_tokens)
            assert weight_VE is not None
            self._whole_VE.copy_(self.ranks.joined(weight_VE.detach(), 0))


def _plain(module: Any) -> torch.Tensor | None:
    """The matrix of an embedding or a head; None where it is quantised, or packed for a CPU's matrix units."""
    weight = getattr(module, "weight", None)
    packed = getattr(module, "use_intel_amx_backend", False)
    if not isinstance(weight, torch.Tensor) or not weight.is_floating_point() or weight.itemsize == 1 or packed:
        return None
    return weight


@torch.no_grad()
def dequantised(model: Any, size: int, dtype: torch.dtype, out_VE: torch.Tensor | None = None) -> torch.Tensor:
    """The matrix that the head multiplies by, whatever its format: SGLang's own product of the identity with it.

    Args:
        model: SGLang's.
        size: of its head's input.
        dtype: of the product.
        out_VE: where to write; None makes it.
    """
    head = model.lm_head
    device = next(head.parameters()).device
    for start in range(0, size, ROWS):
        rows = torch.arange(start, min(start + ROWS, size), device=device)
        unit_RE = torch.nn.functional.one_hot(rows, size).to(dtype)
        column_RV = model.logits_processor._compute_lm_head(unit_RE, head)
        if out_VE is None:
            out_VE = torch.empty(column_RV.shape[1], size, dtype=dtype, device=device)
        out_VE[:, rows] = column_RV.t().to(dtype)
    assert out_VE is not None
    return out_VE
