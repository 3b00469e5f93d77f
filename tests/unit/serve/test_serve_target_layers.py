"""Targets whose attention the verification does not compute are refused by what they have."""

from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from longdraft.errors import UserError
from longdraft.serve.target_layers import check_architecture, check_layers


class RadixAttention(nn.Module):
    """Named like SGLang's, with the fields that it sets."""

    def __init__(self, **changes: Any) -> None:
        super().__init__()
        plain = {
            "sliding_window_size": -1,
            "logit_cap": 0.0,
            "is_cross_attention": False,
            "qk_head_dim": 64,
            "v_head_dim": 64,
            "xai_temperature_len": -1,
        }
        self.__dict__.update({**plain, **changes})


def test_sglangs_own_layer_has_the_fields_that_are_checked() -> None:
    from sglang.srt.layers.radix_attention import RadixAttention as Theirs

    layer = Theirs(num_heads=4, head_dim=16, scaling=0.25, num_kv_heads=2, layer_id=0)
    check_layers(nn.Sequential(layer))
    layer.sliding_window_size = 512
    with pytest.raises(UserError, match="layer 0 has a sliding window"):
        check_layers(nn.Sequential(layer))


BAD: list[tuple[dict[str, Any], str]] = [
    ({"sliding_window_size": 128}, "a sliding window"),
    ({"logit_cap": 30.0}, "capped logits"),
    ({"is_cross_attention": True}, "cross-attention"),
    ({"v_head_dim": 32}, "unequal size"),
    ({"xai_temperature_len": 8}, "length-dependent"),
]


@pytest.mark.parametrize(("changes", "what"), BAD, ids=[what for _, what in BAD])
def test_a_layer_that_would_be_computed_wrong_is_named(changes: dict[str, Any], what: str) -> None:
    model = nn.Sequential(RadixAttention(), nn.Sequential(RadixAttention(**changes)))
    with pytest.raises(UserError, match=f"layer 1.0 has .*{what}.*without --speculative-algorithm"):
        check_layers(model)


def config(**changes: Any) -> SimpleNamespace:
    plain = {
        "attention_arch": SimpleNamespace(name="MHA"),
        "is_hybrid_swa": False,
        "is_encoder_decoder": False,
        "is_multimodal": False,
        "hf_config": SimpleNamespace(architectures=["OtherForCausalLM"]),
    }
    return SimpleNamespace(**{**plain, **changes})


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"attention_arch": SimpleNamespace(name="MLA")}, "MLA"),
        ({"is_hybrid_swa": True}, "sliding-window"),
        ({"is_encoder_decoder": True}, "encoder"),
        ({"is_multimodal": True}, "modalities"),
    ],
)
def test_an_architecture_that_would_be_served_wrong_is_refused_before_loading(
    changes: dict[str, Any], what: str
) -> None:
    check_architecture(config())
    with pytest.raises(UserError, match=rf"OtherForCausalLM has .*{what}"):
        check_architecture(config(**changes))
