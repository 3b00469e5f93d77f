"""Which numbers of ranks the heads of a model can be divided among."""

from typing import Any

from longdraft.errors import UserError


def check_heads(size: int, config: Any, whose: str) -> None:
    """:func:`check_ranks` by a model's config of transformers."""
    heads: int = config.num_attention_heads
    check_ranks(size, heads, getattr(config, "num_key_value_heads", None) or heads, whose)


def check_ranks(size: int, heads: int, kv_heads: int, whose: str) -> None:
    """Every rank has as many heads as the others: whole key/value heads, or one that several ranks share.

    Args:
        size: ranks.
        heads, kv_heads: of a layer.
        whose: they are, for the message.

    Raises:
        UserError: heads that do not divide so.
    """

    def fits(ranks: int) -> bool:
        return heads % ranks == 0 and (kv_heads % ranks == 0 or ranks % kv_heads == 0)

    if not fits(size):
        able = ", ".join(str(n) for n in range(1, heads + 1) if fits(n))
        raise UserError(
            f"--tp-size {size} does not fit the {whose}, which has {heads} query heads and {kv_heads} key/value heads a layer: use one of {able}"
        )
