"""A frozen target that one GPU cannot hold, spread over the ranks by ZeRO-3: each layer is gathered while it runs.

All ranks run every forward pass together, so a rank with fewer passes goes through empty ones with the others.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from longdraft.draft_models.target import TargetSpec
from longdraft.train.config import TargetSettings
from longdraft.train.engines.group import Group
from longdraft.train.engines.zero_engine import start_library
from longdraft.train.target import LAST, PACKED, Capture, FrozenTarget, Wanted, load_config, load_model, resolve_dtype
from longdraft.train.tiny_random import PREFIX


def inference_config(dtype: torch.dtype) -> dict[str, Any]:
    """DeepSpeed's configuration of a model that is only run."""
    return {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": dtype == torch.bfloat16},
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 100000},
        "steps_per_print": 1 << 31,
    }


class ShardedTarget(FrozenTarget):
    """Layers and embedding are spread; a whole copy of embedding and head stays on every rank, since the draft borrows them."""

    def __init__(self, model: Any, name: str, max_batch_tokens: int, packed: bool, group: Group, library: Any) -> None:
        super().__init__(model, name, max_batch_tokens, packed)
        self.group = group
        embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
        self._embedding_VE = whole(library, embedding, group.device)
        whole_head = self._embedding_VE if head is embedding else whole(library, head, group.device)
        # The head is no part of what ZeRO-3 runs (the base model): logits are made from the copy.
        model.get_output_embeddings().weight = nn.Parameter(whole_head, requires_grad=False)
        self.engine = library.initialize(
            model=model.base_model, config=inference_config(model.dtype), dist_init_required=False
        )[0]

    @property
    def device(self) -> torch.device:
        return self.group.device

    @property
    def embedding_VE(self) -> torch.Tensor:
        return self._embedding_VE

    @torch.no_grad()
    def capture(
        self,
        id_T: torch.Tensor,
        position_T: torch.Tensor,
        cu: Sequence[int],
        hidden: bool = False,
        aux: Sequence[int] = (),
        kv_layers: Sequence[int] = LAST,
        q_layers: Sequence[int] = (),
    ) -> Capture:
        """As :meth:`FrozenTarget.capture`; collective."""
        seen = super().capture(id_T, position_T, cu, hidden, aux, kv_layers, q_layers)
        own = self.passes(cu)
        for _ in range(max(self.group.gather(own)) - own):
            nothing_BL = id_T.new_zeros(1, 1)
            self.run(nothing_BL, nothing_BL, Wanted())
        return seen


def whole(library: Any, weight: Any, device: torch.device) -> torch.Tensor:
    """A copy on the device of a weight that may be spread over the ranks, or still lie where a model in memory was made."""
    with library.zero.GatheredParameters([weight], enabled=hasattr(weight, "ds_id")):
        copy: torch.Tensor = weight.detach().to(device, copy=True)
    return copy


def load_sharded(settings: TargetSettings, group: Group) -> ShardedTarget:
    """Load the target so that no rank ever holds more than a share of it and one layer.

    Raises:
        UserError: as :func:`longdraft.train.target.load_target`.
    """
    TargetSpec.from_config(load_config(settings))
    library = start_library(group)
    dtype = resolve_dtype(settings.dtype, group.device)
    if settings.path.startswith(PREFIX):  # made in memory: spread afterwards
        model = load_model(settings, dtype)
    else:
        from transformers.integrations import HfDeepSpeedConfig

        spreading = HfDeepSpeedConfig(inference_config(dtype))  # while it lives, from_pretrained spreads what it reads
        model = load_model(settings, dtype)
        del spreading
    return ShardedTarget(model, settings.path, settings.max_batch_tokens, settings.attn == PACKED, group, library)
