"""What the target lends to a draft: its embedding and its head, as plain matrices.

Legend: V vocabulary with its padding, E hidden size, R rows of an identity.
"""

import logging
from typing import Any

import torch

from longdraft.errors import UserError

logger = logging.getLogger(__name__)
ROWS = 256


class TargetWeights:
    """The target's embedding and head, in place where they are plain; a quantised head is dequantised once, when first asked for."""

    def __init__(self, model: Any, dtype: torch.dtype) -> None:
        """Take the target.

        Args:
            model: SGLang's, weights loaded.
            dtype: that it computes in.
        """
        self.model, self.dtype = model, dtype
        self._dequantised_VE: torch.Tensor | None = None

    @property
    def embedding_VE(self) -> torch.Tensor:
        """In place.

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
        return weight_VE

    @property
    def head_VE(self) -> torch.Tensor:
        """In place, or the dequantised copy."""
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

    def renew(self) -> None:
        """The target has new weights: write the dequantised copy, if there is one, anew in its place."""
        if self._dequantised_VE is not None:
            dequantised(self.model, self._dequantised_VE.shape[1], self.dtype, self._dequantised_VE)


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
