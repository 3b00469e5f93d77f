"""Queries of a chain's steps, kept while they are drafted, for scoring a whole context with them.

Legend: B requests, S steps of a chain, N query rows (those of the first request first), H query heads, D head size.
"""

from collections.abc import Mapping, Sequence

import torch

from longdraft.draft_models.config import LongSpecConfig
from longdraft.draft_models.kinds import AnyConfig
from longdraft.draft_models.sparse_recipe import LayerHeads
from longdraft.errors import UserError


class LookedFor:
    """What the latest chains looked for. One buffer of a fixed address: a CUDA graph may have drafted."""

    def __init__(
        self, most: int, steps: int, heads: int, size: int, dtype: torch.dtype, device: torch.device | str
    ) -> None:
        """Allocate for up to ``most`` requests."""
        self.q_BSHD = torch.zeros(most, steps, heads, size, dtype=dtype, device=device)

    def keep(self, step: int, q_BHD: torch.Tensor) -> None:
        """A step has these queries."""
        self.q_BSHD[: len(q_BHD), step] = q_BHD

    def queries(self, count: int, heads: slice = slice(None)) -> torch.Tensor:
        """``[N, H, D]`` of the first ``count`` requests."""
        return self.q_BSHD[:count, :, heads].flatten(0, 1)


def heads_that_look(config: AnyConfig) -> tuple[str, dict[int, int]]:
    """What a draft is called, and how many query heads each layer has that can look ahead.

    A LongSpec draft's are the target's layers that it reads; an EAGLE-3 draft has one, number 0, and none where it reads a window:
    it has learned to look at nothing outside.
    """
    if isinstance(config, LongSpecConfig):
        each = config.cross_heads // len(config.cross_layers)
        return "the LongSpec draft (layers of the target that it reads)", dict.fromkeys(config.cross_layers, each)
    return "the EAGLE-3 draft", {0: config.num_heads} if config.settings.window is None else {}


def own_heads(heads: Sequence[int], own: range) -> tuple[int, ...]:
    """Of some query heads those that a rank has, as it numbers them."""
    return tuple(head - own.start for head in heads if head in own)


def wanted_heads(
    wanted: Sequence[LayerHeads] | None, what: str, have: Mapping[int, int]
) -> list[tuple[int, tuple[int, ...]]]:
    """Layers and heads to look ahead with.

    Args:
        wanted: of a calibration; None: all.
        what, have: of :func:`heads_that_look`.

    Raises:
        UserError: a layer or a head that the draft has not.
    """
    if wanted is None:
        return [(layer, tuple(range(heads))) for layer, heads in have.items()]
    for each in wanted:
        if each.layer not in have:
            raise UserError(
                f"sparse_recipe: draft layer {each.layer} is none of {what}'s ({', '.join(map(str, have)) or 'it has none'}): "
                "calibrate with this draft"
            )
        if max(each.heads) >= have[each.layer]:
            raise UserError(
                f"sparse_recipe: draft layer {each.layer} has {have[each.layer]} query heads in {what}, not head "
                f"{max(each.heads)}: calibrate with this draft"
            )
    return [(each.layer, tuple(each.heads)) for each in wanted]
