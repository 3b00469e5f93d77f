"""A cache of fixed size for rows of equal length, the attention that reads it, and a decoding step that a CUDA graph repeats.

A step of a small model is a thousand kernels of a few microseconds; launched one by one they cost ten times their work. So the
step's shapes never change: it writes at a place that a tensor holds and reads as many keys as another tensor says.

Legend: B rows, W width of the cache, Q query tokens, H query heads, K key/value heads, D head size, V vocabulary.
"""

from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, Cache
from transformers.cache_utils import CacheLayerMixin

ATTENTION = "longdraft_rows"
WARM_UPS = 2


class _RowsLayer(CacheLayerMixin):
    """Keys and values ``[B, W, K, D]``. The first pass fills the front; later ones write one token at ``at``."""

    is_sliding = False

    def __init__(self, width: int, at: torch.Tensor) -> None:
        super().__init__()
        self.width, self.at = width, at

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        rows, heads, _, size = key_states.shape
        self.keys, self.values = (x.new_zeros(rows, self.width, heads, size) for x in (key_states, value_states))
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        first = not self.is_initialized
        if first:
            self.lazy_initialization(key_states, value_states)
        assert self.keys is not None and self.values is not None
        if first:
            tokens = key_states.shape[2]
            self.keys[:, :tokens], self.values[:, :tokens] = key_states.transpose(1, 2), value_states.transpose(1, 2)
            return key_states, value_states
        self.keys.index_copy_(1, self.at, key_states.transpose(1, 2))
        self.values.index_copy_(1, self.at, value_states.transpose(1, 2))
        return self.keys.transpose(1, 2), self.values.transpose(1, 2)

    def keep(self, row_B: torch.Tensor) -> None:
        assert self.keys is not None and self.values is not None
        self.keys, self.values = self.keys[row_B], self.values[row_B]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.width, 0

    def get_seq_length(self) -> int:
        return 0  # positions are always given

    def get_max_cache_shape(self) -> int:
        return self.width


class RowsCache(Cache):
    """The cache of a batch; ``at`` is int64 ``[1]``, where the next token goes."""

    def __init__(self, num_layers: int, width: int, device: torch.device) -> None:
        self.at = torch.zeros(1, dtype=torch.int64, device=device)
        super().__init__(layers=[_RowsLayer(width, self.at) for _ in range(num_layers)])

    def keep(self, row_B: torch.Tensor) -> None:
        """Leave only some rows."""
        for layer in self.layers:
            assert isinstance(layer, _RowsLayer)
            layer.keep(row_B)


def rows_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    filled: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention: causal over a first pass, or one query a row over the first ``filled`` keys of its buffer.

    Args:
        query: ``[B, H, Q, D]``.
        key, value: ``[B, K, Q, D]`` of a first pass, else the buffers ``[B, K, W, D]``.
        filled: int32 ``[B]`` keys of each row; None in a first pass.
    """
    if filled is None:
        out = scaled_dot_product_attention(query, key, value, scale=scaling, is_causal=True, enable_gqa=True)
        return out.transpose(1, 2).contiguous(), None
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    attend = _flash_row if query.is_cuda and query.dtype in (torch.bfloat16, torch.float16) else _dense_row
    return attend(query[:, :, 0], key.transpose(1, 2), value.transpose(1, 2), filled, scale)[:, None], None


def _dense_row(
    q_BHD: torch.Tensor, k_BWKD: torch.Tensor, v_BWKD: torch.Tensor, filled_B: torch.Tensor, scale: float
) -> torch.Tensor:
    heads = k_BWKD.shape[2]
    score = torch.einsum("bkgd,bwkd->bkgw", q_BHD.unflatten(1, (heads, -1)), k_BWKD) * scale
    place = torch.arange(k_BWKD.shape[1], device=q_BHD.device)
    score = score.masked_fill(place >= filled_B[:, None, None, None], float("-inf"))
    return torch.einsum("bkgw,bwkd->bkgd", score.softmax(-1), v_BWKD).flatten(1, 2)


def _flash_row(
    q_BHD: torch.Tensor, k_BWKD: torch.Tensor, v_BWKD: torch.Tensor, filled_B: torch.Tensor, scale: float
) -> torch.Tensor:
    """FlashAttention with a length a row: the buffers are one packed sequence of rows of width W."""
    rows, width = k_BWKD.shape[:2]
    each = torch.arange(rows + 1, dtype=torch.int32, device=q_BHD.device)
    out: torch.Tensor = torch.ops.aten._flash_attention_forward(
        q_BHD, k_BWKD.flatten(0, 1), v_BWKD.flatten(0, 1), each, each * width, 1, width, 0.0, False, False,
        scale=scale, seqused_k=filled_B,
    )[0]  # fmt: skip
    return out


AttentionInterface.register(ATTENTION, rows_attention)


class Step:
    """One token for every row: a CUDA graph on a GPU, a plain pass elsewhere."""

    def __init__(self, model: Any, cache: RowsCache, rows: int) -> None:
        device = model.device
        self.model, self.cache = model, cache
        self.id_B1 = torch.zeros(rows, 1, dtype=torch.int64, device=device)
        self.filled_B = torch.zeros(rows, dtype=torch.int32, device=device)
        self.graph: Any = None
        self.logits_BV: torch.Tensor | None = None

    def __call__(self, id_B1: torch.Tensor, at: int) -> torch.Tensor:
        """Logits ``[B, V]`` behind the tokens that stand at place ``at``."""
        self.id_B1.copy_(id_B1)
        self.cache.at.fill_(at)
        self.filled_B.fill_(at + 1)
        if self.id_B1.device.type != "cuda":
            return self._run()
        if self.graph is None:
            self._capture()
        self.graph.replay()
        assert self.logits_BV is not None
        return self.logits_BV

    def _capture(self) -> None:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(WARM_UPS):  # writes the same token at the same place
                self._run()
        torch.cuda.current_stream().wait_stream(stream)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.logits_BV = self._run()

    def _run(self) -> torch.Tensor:
        logits: torch.Tensor = self.model(
            input_ids=self.id_B1,
            position_ids=self.cache.at.expand(len(self.id_B1))[:, None],
            past_key_values=self.cache,
            use_cache=True,
            filled=self.filled_B,
        ).logits
        return logits[:, -1]
