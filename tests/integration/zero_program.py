"""What one torchrun launch does for the DeepSpeed tests: many short runs in the same processes, since each launch and import
costs seconds. The runs' folders are what the test looks at. ``zero_program.py FOLDER one|two|last [cuda]``
"""

import json
import os
import shutil
import sys
from pathlib import Path

import torch
from tiny import tiny_model

from longdraft.schema import load_settings
from longdraft.train.config import TrainSettings
from longdraft.train.engine_settings import EngineSettings
from longdraft.train.engines.group import Group
from longdraft.train.long_draft import main
from longdraft.train.loop import Run
from longdraft.train.recipe_files import find_config, resolve_data_paths

RECIPE = "recipes/smoke/longspec.yaml"
SHORT = ("schedule.max_steps=6", "schedule.save_every=3", "schedule.log_every=1", "evaluation.prompts=0")
DEVICE = sys.argv[3] if len(sys.argv) > 3 else "cpu"
EXACT = ("engine.dtype=float32", "target.dtype=float32")  # what auto is on a CPU
STAGES = ("zero1", "zero2", "zero3", "zero2_offload", "zero3_offload")


def overrides(folder: Path, name: str, engine: str) -> list[str]:
    chosen = [f"engine.name={'torch' if engine == 'torch' else 'deepspeed'}", f"engine.device={DEVICE}", *EXACT]
    if engine != "torch":
        chosen.append(f"engine.config=recipes/deepspeed/{engine}.yaml")
    return [*SHORT, f"run.output_dir={folder}", f"run.name={name}", *chosen]


def run(folder: Path, name: str, engine: str, *more: str, recipe: str = RECIPE) -> None:
    assert main(["--config", recipe, *overrides(folder, name, engine), *more]) == 0, name


def resume(folder: Path, former: str, name: str, engine: str, group: Group) -> None:
    """Go on from the middle of a former run, as another run of another engine perhaps."""
    if group.rank == 0:
        shutil.copytree(folder / former, folder / name, symlinks=True)
        shutil.rmtree(folder / name / "checkpoints" / "step-00000006")
    group.barrier()
    run(folder, name, engine)


def refuse_nan(folder: Path, engine: str) -> dict[str, object]:
    """The norm that a step with a gradient that is not finite reports, and whether it left the weights alone."""
    recipe = find_config(RECIPE)
    settings = load_settings(TrainSettings, recipe, overrides(folder, f"nan-{engine}", engine))
    resolve_data_paths(settings, recipe)
    group = Group(settings.engine)
    started = Run(settings, group, [])
    before = started.engine.weights()
    micros, _ = started.stream.window(0)
    for scale in (1.0, float("nan")):  # one bad micro-batch of the step's two, on one rank
        loss = started.engine.loss(micros[0], 1).loss
        started.engine.backward(loss * (scale if group.rank == group.world - 1 else 1.0))
    norm = started.engine.step(1e-2)
    after = started.engine.weights()
    same = all(torch.equal(before[name], after[name]) for name in before)
    started.engine.backward(started.engine.loss(micros[0], 2).loss)
    started.engine.backward(started.engine.loss(micros[0], 2).loss)
    good = started.engine.step(1e-2)
    moved = started.engine.weights()
    changed = group.rank != 0 or any(not torch.equal(before[name], moved[name]) for name in before)
    return {"norm": str(norm), "weights_left_alone": same, "next_norm": good, "next_step_moves": changed}


def two_ranks(folder: Path, group: Group) -> None:
    run(folder, "torch", "torch")
    for stage in STAGES:
        run(folder, stage, stage)
    for stage in STAGES:
        resume(folder, stage, f"{stage}-resumed", stage, group)
    resume(folder, "torch", "torch-to-zero3", "zero3", group)
    resume(folder, "zero2", "zero2-to-torch", "torch", group)
    for engine in ("torch", "zero1", "zero2", "zero3"):
        run(folder, f"{engine}-half", engine, "engine.dtype=bfloat16")
        resume(folder, "one", f"one-to-two-{engine}", engine, group)
    for engine in ("torch", "zero3"):  # one prompt: one rank evaluates while the other waits
        few = ("evaluation.prompts=1", "evaluation.new_tokens=8")
        run(folder, f"eagle3-{engine}", engine, *few, recipe="recipes/smoke/eagle3.yaml")
    # Small batches of the target, and unlike numbers of them: ranks must still gather its layers together.
    for path, name in (("tiny-random:llama", "memory"), (str(folder / "target"), "disk")):
        for shard in ("false", "true"):
            sizes = ("target.max_batch_tokens=300", "evaluation.prompts=3", "evaluation.new_tokens=8")
            run(folder, f"{name}-shard-{shard}", "zero3", f"target.path={path}", f"target.shard={shard}", *sizes)
    found = {engine: refuse_nan(folder, engine) for engine in STAGES}
    if group.rank == 0:
        (folder / "nan.json").write_text(json.dumps(found))
    group.barrier()


def main_of_test(folder: Path, part: str) -> None:
    close = Group.close
    Group.close = lambda self: None  # type: ignore[method-assign]  # DeepSpeed keeps the first group's handles
    group = Group(load_settings(EngineSettings, None, [f"device={DEVICE}"]))
    if part == "one":
        tiny_model("qwen3", folder / "target", tie_word_embeddings=False)
        run(folder, "one", "zero1")
    elif part == "two":
        two_ranks(folder, group)
    else:
        for engine in ("torch", "zero1", "zero2", "zero3"):
            resume(folder, "zero3", f"two-to-one-{engine}", engine, group)
    close(group)
    sys.stdout.flush()
    # A thread of gloo's that is still there when the interpreter ends makes C++ abort the process, rarely; all is written by now.
    os._exit(0)


if __name__ == "__main__":
    main_of_test(Path(sys.argv[1]), sys.argv[2])
