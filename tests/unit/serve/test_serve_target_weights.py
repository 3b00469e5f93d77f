"""What a draft is lent of a quantised target: a plain head in place, a quantised one dequantised once, or a refusal.

Legend: V vocabulary, E hidden size.
"""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.layers import vocab_parallel_embedding
from sglang.srt.layers.logits_processor import LogitsProcessor
from sglang.srt.layers.quantization.base_config import QuantizeMethodBase
from sglang.srt.layers.quantization.fp8 import Fp8Config
from sglang.srt.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from tiny import tiny_draft, tiny_eagle3, tiny_target
from torch import nn

from longdraft.draft_models.checkpoint import save_draft
from longdraft.errors import UserError
from longdraft.serve.build_drafter import build_drafter
from longdraft.serve.drafters.eagle3 import Eagle3Drafter
from longdraft.serve.drafters.longspec import LongSpecDrafter
from longdraft.serve.drafters.lookup import LookupDrafter
from longdraft.serve.settings import ServeSettings
from longdraft.serve.target_weights import ROWS, TargetWeights, dequantised


class Grouped(QuantizeMethodBase):
    """Four bits with a scale and a zero for every group of inputs, laid out as no draft could guess (AWQ's arithmetic)."""

    GROUP = 16

    def __init__(self) -> None:
        self.calls = 0

    def create_weights(self, layer: nn.Module, *args: Any, **kwargs: Any) -> None: ...

    def quantise(self, layer: nn.Module, weight_VE: torch.Tensor) -> torch.Tensor:
        """Give a layer quantised weights; what they stand for."""
        groups = weight_VE.unflatten(1, (-1, self.GROUP))
        low, high = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
        scale = (high - low) / 15
        codes = ((groups - low) / scale).round().to(torch.uint8)
        layer.qweight = nn.Parameter(codes.flip(0), requires_grad=False)
        layer.scales = nn.Parameter(scale.flip(0), requires_grad=False)
        layer.zeros = nn.Parameter(low.flip(0), requires_grad=False)
        return (codes * scale + low).flatten(1)

    def apply(self, layer: nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        self.calls += 1
        weight = (layer.qweight * layer.scales + layer.zeros).flip(0).flatten(1)
        return nn.functional.linear(x, weight.to(x.dtype), bias)


def quantised(weight_VE: torch.Tensor) -> tuple[nn.Module, torch.Tensor]:
    head = nn.Module()
    head.quant_method = Grouped()
    return head, head.quant_method.quantise(head, weight_VE)


def model(embedding: Any, head: Any) -> Any:
    processor = LogitsProcessor.__new__(LogitsProcessor)  # SGLang's product with a head, plain or quantised
    nn.Module.__init__(processor)
    processor.use_fp32_lm_head = False
    return SimpleNamespace(model=SimpleNamespace(embed_tokens=embedding), lm_head=head, logits_processor=processor)


def plain(weight: torch.Tensor) -> nn.Module:
    made = nn.Module()
    made.weight = nn.Parameter(weight, requires_grad=False)
    return made


@pytest.mark.parametrize("size", [ROWS - 16, ROWS, ROWS + 64])
def test_a_quantised_head_is_what_its_product_multiplies_by(size: int) -> None:
    head, want = quantised(torch.randn(50, size))
    target = model(None, head)
    torch.testing.assert_close(dequantised(target, size, torch.float32), want)
    half = dequantised(target, size, torch.bfloat16)
    assert half.dtype == torch.bfloat16 and half.is_contiguous()
    torch.testing.assert_close(half, want.bfloat16())


def test_a_head_is_dequantised_once_and_anew_in_place_when_weights_change() -> None:
    """A CUDA graph of the draft goes on reading the same memory."""
    head, want = quantised(torch.randn(50, 64))
    weights = TargetWeights(model(plain(torch.randn(50, 64)), head), torch.float32)
    weights.renew()
    assert head.quant_method.calls == 0, "nobody has asked for it"
    first = weights.head_VE
    assert weights.head_VE is first and head.quant_method.calls == 1
    torch.testing.assert_close(first, want)
    want = head.quant_method.quantise(head, torch.randn(50, 64))
    weights.renew()
    assert weights.head_VE is first and head.quant_method.calls == 2
    torch.testing.assert_close(first, want)


@pytest.mark.parametrize("tied", [True, False])
def test_plain_weights_are_lent_in_place(tied: bool) -> None:
    embedding = plain(torch.randn(50, 64, dtype=torch.bfloat16))
    head = embedding if tied else plain(torch.randn(50, 64, dtype=torch.bfloat16))
    weights = TargetWeights(model(embedding, head), torch.bfloat16)
    assert weights.embedding_VE is embedding.weight and weights.head_VE is head.weight


def test_a_head_packed_for_matrix_units_is_unpacked() -> None:
    """Its numbers lie in another order under the same shape."""
    right = torch.randn(48, 64)
    head = plain(right.flip(1).contiguous())
    head.use_intel_amx_backend = True
    target = model(plain(right), head)
    target.logits_processor = SimpleNamespace(_compute_lm_head=lambda x, layer: x @ layer.weight.flip(1).t())
    weights = TargetWeights(target, torch.float32)
    torch.testing.assert_close(weights.head_VE, right)


def test_a_quantised_embedding_is_refused() -> None:
    embedding, _ = quantised(torch.randn(50, 64))
    with pytest.raises(UserError, match=r"embedding is quantised \(Grouped\).*serve without --draft"):
        TargetWeights(model(embedding, embedding), torch.float32).embedding_VE  # noqa: B018


@pytest.mark.parametrize("block", [None, [128, 128]])
def test_a_float8_target_of_sglang_keeps_embedding_and_head_plain(
    block: list[int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By tensor and by block: its layers are quantised, these two are not."""
    alone = SimpleNamespace(tp_rank=0, tp_size=1, attn_tp_rank=0, attn_tp_size=1)
    monkeypatch.setattr(vocab_parallel_embedding, "get_parallel", lambda: alone)
    config = Fp8Config(is_checkpoint_fp8_serialized=True, weight_block_size=block)
    more = {"quant_config": config, "params_dtype": torch.bfloat16}
    embedding = VocabParallelEmbedding(288, 64, **more)
    head = ParallelLMHead(288, 64, **more)
    weights = TargetWeights(model(embedding, head), torch.bfloat16)
    assert weights.embedding_VE is embedding.weight and weights.head_VE is head.weight
    assert weights.head_VE.dtype == torch.bfloat16 and weights.head_VE.shape == (320, 64)


@pytest.mark.parametrize("kind", ["longspec", "eagle3", "lookup"])
def test_drafts_of_a_target_whose_head_is_quantised(kind: str, tmp_path: Path) -> None:
    """LongSpec proposes by the dequantised head; the others have no use for it and leave it as it is."""
    target = tiny_target("llama", num_hidden_layers=5)
    head, want = quantised(target.head_VE.detach())
    weights = TargetWeights(model(plain(target.embedding_VE.detach()), head), torch.float32)
    args = SimpleNamespace(speculative_draft_model_path=None, speculative_num_steps=3, max_running_requests=4)
    if kind != "lookup":
        draft = tiny_draft(target) if kind == "longspec" else tiny_eagle3(target, draft_vocab_size=100)
        save_draft(draft, tmp_path / "draft", "tiny")
        args.speculative_draft_model_path = str(tmp_path / "draft")
    config = target.model.config
    served = SimpleNamespace(hf_text_config=config, context_len=config.max_position_embeddings)
    runner = SimpleNamespace(model_config=served, dtype=torch.float32)
    drafter = build_drafter(args, ServeSettings(), runner, weights)
    assert type(drafter) is {"longspec": LongSpecDrafter, "eagle3": Eagle3Drafter, "lookup": LookupDrafter}[kind]
    assert head.quant_method.calls == (1 if kind == "longspec" else 0)
    if isinstance(drafter, LongSpecDrafter):
        torch.testing.assert_close(drafter.draft.head_VE, want)
        assert drafter.draft.head_VE.data_ptr() == weights.head_VE.data_ptr()
    drafter.bind_target(weights)  # a flush
    assert head.quant_method.calls == (1 if kind == "longspec" else 0)


def test_configs_of_quantised_targets_make_the_same_spec() -> None:
    """A draft of the plain target serves the quantised one: what is compared says nothing of the format."""
    target = tiny_target("qwen3")
    before = target.spec
    config = target.model.config
    for method in ({"quant_method": "fp8"}, {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True}):
        again = type(config)(**{**json.loads(config.to_json_string()), "quantization_config": method})
        assert type(before).from_config(again).hash == before.hash
