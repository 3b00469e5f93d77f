"""Served on a card: targets in float8 and in AWQ's four bits, the latter with a plain head and with a quantised one.

Legend: I inputs of a layer, O outputs.
"""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from served_pair import SHAPE, differences, gaps, kept, prompts, server, up
from tiny import tiny_model
from tiny_draft import train_tiny_draft

from longdraft.errors import UserError

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.timeout(900),
]
GROUP = 128
ORDER = [0, 2, 4, 6, 1, 3, 5, 7]  # which of eight neighbouring outputs stands in which four bits
LIMIT = 0.3  # of log-probabilities that one rounding swaps


def packed(codes_IO: torch.Tensor) -> torch.Tensor:
    """Numbers of four bits, eight outputs an int32."""
    eights = codes_IO.to(torch.int64).unflatten(1, (-1, 8))
    word = sum(eights[..., column] << (4 * place) for place, column in enumerate(ORDER))
    assert isinstance(word, torch.Tensor)
    return torch.where(word >= 2**31, word - 2**32, word).to(torch.int32)


def four_bits(weight_OI: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """AWQ's tensors of a matrix, and the matrix that they stand for."""
    groups = weight_OI.float().t().unflatten(0, (-1, GROUP))  # groups, inputs of a group, outputs
    low, high = groups.amin(1, keepdim=True).clamp_max(0), groups.amax(1, keepdim=True).clamp_min(0)
    scale = ((high - low) / 15).half().float()
    zero = (-low / scale).round().clamp(0, 15)
    codes = (groups / scale + zero).round().clamp(0, 15)
    tensors = {
        "qweight": packed(codes.flatten(0, 1)),
        "qzeros": packed(zero[:, 0]),
        "scales": scale[:, 0].half(),
    }
    return tensors, ((codes - zero) * scale).flatten(0, 1).t().contiguous()


def write_awq(folder: Path, head: bool) -> tuple[Path, Path]:
    """A random target in AWQ's format, and what it stands for in float32."""
    exact = tiny_model("llama", folder / "exact", vocab_size=320, **SHAPE)
    weights, quantised = load_file(exact / "model.safetensors"), {}
    for name, weight in weights.items():
        if name.endswith("_proj.weight") or (head and name == "lm_head.weight"):
            tensors, weights[name] = four_bits(weight)
            quantised.update({name.replace("weight", kind): tensor for kind, tensor in tensors.items()})
        else:
            quantised[name] = weight.half()
    save_file(weights, exact / "model.safetensors", {"format": "pt"})
    out = folder / "awq"
    out.mkdir()
    for file in exact.iterdir():
        if file.suffix != ".safetensors":
            (out / file.name).write_bytes(file.read_bytes())
    config = json.loads((exact / "config.json").read_text())
    method = {
        "quant_method": "awq",
        "bits": 4,
        "group_size": GROUP,
        "zero_point": True,
        "version": "gemm",
        "lm_head": head,
    }
    (out / "config.json").write_text(json.dumps({**config, "quantization_config": method}))
    save_file({k: v.contiguous() for k, v in quantised.items()}, out / "model.safetensors", {"format": "pt"})
    return out, exact


@pytest.mark.parametrize("kind", ["fp8", "awq", "awq-head"])
def test_a_quantised_target_gives_its_own_tokens_and_keeps_drafts(kind: str, tmp_path: Path) -> None:
    if kind == "fp8":
        target = exact = tiny_model("llama", tmp_path / "target", vocab_size=320, **SHAPE)
        own = ["--quantization", "fp8"]
    else:
        (target, exact), own = write_awq(tmp_path, kind == "awq-head"), []
    draft = train_tiny_draft(exact, tmp_path / "draft", steps=60)
    plain = server(f"plain {kind}", target, tmp_path / "plain.log", own, False)
    more = [*own, "--speculative-draft-model-path", str(draft)]
    drafted = server(f"drafted {kind}", target, tmp_path / "drafted.log", more, True)
    try:
        plain.__enter__()
    except UserError as error:
        pytest.skip(f"SGLang itself does not serve {kind}: {error}")
    try:
        with up([drafted]):
            asked = prompts()
            parted = differences(plain, drafted, asked)
            said = f"{kind}, see {drafted.log}:\n" + "\n".join(parted)
            assert all(gap <= LIMIT for gap in gaps(parted)) and len(parted) <= len(asked) // 2, said
            assert kept(drafted, asked[:6]) > 0, f"{kind} keeps no draft"
    finally:
        plain.stop()
    dequantised = "the target's head is quantised or packed" in drafted.log.read_text(errors="replace")
    assert dequantised == (kind == "awq-head")
