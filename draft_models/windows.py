"""Sliding-window conventions. Ours counts the keys a token sees, itself included; libraries differ."""


def to_flash(window: int) -> tuple[int, int]:
    """FlashAttention's ``window_size``: keys to the left of self, keys to the right."""
    return window - 1, 0


def from_flash(window_size: tuple[int, int]) -> int:
    """Ours from FlashAttention's pair. LongSpec's released ``(512, -1)`` under a causal mask is 513."""
    return window_size[0] + 1


def to_transformers(window: int) -> int:
    """transformers' ``sliding_window`` counts self."""
    return window


def to_sglang(window: int) -> int:
    """SGLang's ``sliding_window_size`` counts the keys before self."""
    return window - 1
