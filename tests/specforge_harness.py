"""SpecForge's own EAGLE-3 training step on a CPU: ``python tests/specforge_harness.py FOLDER ...`` in a process of its own.

Its norms are compiled and its loss is a Triton kernel; with dynamo off and Triton's interpreter on, both switches set before the
first import, the installed package runs as it is. That is why this is a process and no function.

Legend: B samples, S tokens, E hidden size, V target vocabulary, N draft vocabulary, K steps of the training-time test.
"""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file


@dataclass
class SpecForgeStep:
    """What one call of its strategy gave: ``loss`` as trained, ``ploss_K`` before the weights 0.8^k, ``correct_K`` and
    ``rows_K`` of its accuracy, ``hidden_KBSE`` (before the final norm) and ``logits_KBSN`` of every step, ``grads`` by name."""

    loss: torch.Tensor
    ploss_K: torch.Tensor
    correct_K: torch.Tensor
    rows_K: torch.Tensor
    hidden_KBSE: torch.Tensor
    logits_KBSN: torch.Tensor
    grads: dict[str, torch.Tensor]


@dataclass
class SpecForgeCase:
    """What one call of its strategy is given.

    Attributes:
        config: a draft JSON, as its config loader reads it.
        weights: the draft's, with ``embed_tokens.weight``; loaded strictly.
        batch: ``input_ids``, ``loss_mask`` ``[B, S]``, ``hidden_state`` ``[B, S, 3 E]``, ``target`` ``[B, S, E]`` (its names
            behind its normaliser, nothing shifted yet) and ``head`` ``[V, E]``.
        steps: K.
    """

    config: dict[str, Any]
    weights: dict[str, torch.Tensor]
    batch: dict[str, torch.Tensor]
    steps: int


def specforge_steps(folder: Path, cases: dict[str, SpecForgeCase]) -> dict[str, SpecForgeStep]:
    """Run the installed package on each case, in one process; ``folder`` is for the exchange."""
    for name, case in cases.items():
        here = folder / name
        here.mkdir(parents=True)
        (here / "config.json").write_text(json.dumps(case.config))
        (here / "steps.json").write_text(json.dumps(case.steps))
        # Clones: a tied or lent tensor may be stored once only.
        save_file({k: v.detach().clone().contiguous() for k, v in case.weights.items()}, here / "draft.safetensors")
        save_file({k: v.detach().clone().contiguous() for k, v in case.batch.items()}, here / "batch.safetensors")
    environment = {**os.environ, "TORCHDYNAMO_DISABLE": "1", "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, __file__, *(str(folder / name) for name in cases)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return {name: _read(folder / name) for name in cases}


def _read(folder: Path) -> SpecForgeStep:
    out = load_file(folder / "out.safetensors")
    grads = {name.removeprefix("grad."): out.pop(name) for name in list(out) if name.startswith("grad.")}
    return SpecForgeStep(grads=grads, **out)


def run(folder: Path) -> None:
    from specforge.algorithms.eagle3.model import OnlineEagle3Model
    from specforge.modeling.auto import AutoDraftModel
    from specforge.modeling.target.target_head import TargetHead
    from specforge.runtime.contracts import TrainBatch
    from specforge.training.model_loading import load_draft_config_source
    from specforge.training.strategies.base import Eagle3TrainStrategy

    batch = load_file(folder / "batch.safetensors")
    config = load_draft_config_source(str(folder / "config.json"))
    draft = AutoDraftModel.from_config(config, torch_dtype=torch.float32, attention_backend="sdpa")
    draft.load_state_dict(load_file(folder / "draft.safetensors"), strict=True)
    draft.freeze_embedding()
    seen: dict[str, list[torch.Tensor]] = {"hidden": [], "logits": []}

    def watched(function: Any, name: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> torch.Tensor:
            out = function(*args, **kwargs)
            seen[name].append(out.detach().clone())  # its backward pass writes gradients over the logits
            return out

        return call

    draft.backbone = watched(draft.backbone, "hidden")
    draft.compute_logits = watched(draft.compute_logits, "logits")
    head = TargetHead(str(folder))  # its own loader casts to bfloat16; the sizes come from the same JSON
    head.fc.weight.data = batch.pop("head")
    steps = json.loads((folder / "steps.json").read_text())
    model = OnlineEagle3Model(draft, length=steps, attention_backend="sdpa")
    strategy = Eagle3TrainStrategy(model, target_head=head)
    batch["attention_mask"] = torch.ones_like(batch["loss_mask"])
    out = strategy.forward_loss(TrainBatch(["0"], "eagle3", batch, {"target_repr": "hidden_state"}))
    out.loss.backward()
    m = out.metrics
    result = {
        "loss": out.loss.detach(),
        "ploss_K": torch.stack(m["plosses"]),
        "correct_K": torch.stack(m["acc_corrects"]),
        "rows_K": torch.stack([torch.as_tensor(d) for d in m["acc_denoms"]]),
        "hidden_KBSE": torch.stack(seen["hidden"]),
        "logits_KBSN": torch.stack(seen["logits"]),
        **{f"grad.{name}": p.grad for name, p in draft.named_parameters() if p.grad is not None},
    }
    save_file({k: v.contiguous() for k, v in result.items()}, folder / "out.safetensors")


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        run(Path(argument))
