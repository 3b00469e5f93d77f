"""Finding the layers that a draft can copy from."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from longdraft import cli
from longdraft.train.induction import copy_share

IDS = torch.tensor([9, 9, 9, 9, 1, 2, 3, 4, 1, 2, 3, 4])  # behind four sinks a text that repeats itself
FIRST = 8


def model(*layers: torch.Tensor) -> Any:
    """Says the repeated text on, and attends as it is told, ``[H, L, L]`` a layer."""
    logits = torch.nn.functional.one_hot(torch.cat([IDS[5:], torch.tensor([1, 2, 3, 4, 1])]), 10).float()
    return lambda ids, **_: SimpleNamespace(logits=logits[None], attentions=[layer[None] for layer in layers])


def looking_back(distance: int) -> torch.Tensor:
    """Attention on the key so far behind, less of it than a sink and the row itself have."""
    mass = torch.full((len(IDS), len(IDS)), 0.01)
    row = torch.arange(len(IDS))
    mass[row, (row - distance).clamp_min(0)] = 0.2
    mass[:, 0], mass[row, row] = 0.5, 0.3
    return mass


def test_a_planted_head_is_found_whatever_sinks_and_the_row_itself_get() -> None:
    """Three back stands the token that followed the former occurrence of the row's own."""
    shares = copy_share(
        model(torch.stack([looking_back(1), looking_back(3)]), looking_back(2)[None].expand(2, -1, -1)), IDS, FIRST
    )
    assert shares.tolist() == [[0.0, 1.0], [0.0, 0.0]]


def test_the_command_names_layers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = tmp_path / "text.jsonl"
    text.write_text(json.dumps({"text": "so long and so forth, " * 20}) + "\n" + json.dumps({"text": "short"}) + "\n")
    words = ["induction", "--target.path", "tiny-random:llama", "--data.train", str(text), "--tokens", "100"]
    assert cli.main([*words, "--layers", "1"]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed[0].startswith("layer") and printed[-1] in ("draft.cross_layers=[0]", "draft.cross_layers=[1]")
    assert cli.main([*words[:-1], "9999"]) == 2
    assert "no document of tokens=9999: lower it" in capsys.readouterr().err
