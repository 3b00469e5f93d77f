"""longdraft bench ship_drafts --runs RUN_FOLDER ... [--data sources.json] [--generated NAME=provenance.json ...] [--out FOLDER]

Puts a finished draft beside the recipes: bfloat16 weights, a config that names the published target, and a log of every stage's
command, seed, data fingerprints and figures. Give one kind's stages in order; the last one's newest checkpoint is shipped. Of a run
that was copied from elsewhere, run.yaml, metrics.jsonl and draft/ are enough. Call it once a kind; ``--data`` is what ``bench
draft_corpus`` listed, ``--generated`` what ``longdraft generate`` told of its answers.
"""

import argparse
import json
import math
import os
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import yaml
from transformers import AutoConfig

from longdraft.draft_models.checkpoint import draft_config, load_draft, read_config, save_draft, training_facts
from longdraft.draft_models.kinds import KINDS
from longdraft.draft_models.target import TargetSpec
from longdraft.errors import UserError
from longdraft.train.recipe_files import shipped

TARGET = "HuggingFaceTB/SmolLM2-135M-Instruct"
SHAPES = "recipes/shapes/smollm2-135m-instruct"
ABSOLUTE = re.compile(r"(?:file://|(?<![\w.~/-])~|(?<![\w.~/-]))/(?:[\w.+@-]+/)*[\w.+@-]+")
HOMES = ("home", "Users")  # what follows is a person's name
OURS = ("runs", "data", "recipes")  # folders from which on a path means something elsewhere


def portable(value: Any) -> Any:
    """The same plain value with every absolute path cut to what means something on another machine."""
    if isinstance(value, dict):
        return {portable(key): portable(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [portable(inner) for inner in value]
    return ABSOLUTE.sub(lambda found: _cut(found[0]), value) if isinstance(value, str) else value


def _cut(path: str) -> str:
    parts = path.removeprefix("file://").removeprefix("~").split("/")
    named = len(parts) > (4 if parts[1] in HOMES else 3)
    last = len(parts) - (2 if "." in parts[-1] and named else 1)  # two files may differ by their folders alone
    begin = next((i for i, part in enumerate(parts) if part in OURS), last)
    return "/".join(parts[begin:])


def named_target(value: Any, path: str) -> Any:
    """The same plain value with the target's path replaced by its published name."""
    if isinstance(value, dict):
        return {key: named_target(inner, path) for key, inner in value.items()}
    if isinstance(value, list):
        return [named_target(inner, path) for inner in value]
    return re.sub(rf"(?<![\w/.-]){re.escape(path)}(?![\w/.-])", TARGET, value) if isinstance(value, str) else value


def newest_draft(run: Path) -> Path:
    """The draft of a run's newest checkpoint; the link to it may have been lost on the way here.

    Raises:
        UserError: no checkpoint.
    """
    found = [path.parent for path in sorted(run.glob("checkpoints/step-*/draft/config.json"))]
    found = found or [run / "draft"]
    if not (found[-1] / "config.json").is_file():
        raise UserError(
            f"run folder {str(run)!r} has no checkpoint and no draft: give a folder that longdraft train wrote"
        )
    return found[-1]


def stage_log(run: Path, steps: int) -> list[dict[str, Any]]:
    """A training run as log rows: first what was run (command, seed, data, versions, settings), then its figures.

    Args:
        run: the run's folder.
        steps: of the checkpoint that went on; figures of later ones are left out.

    Raises:
        UserError: a folder that is no run's, or a run that nobody knows the code of.
    """
    try:
        told = yaml.safe_load((run / "run.yaml").read_text())
        rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    except OSError as error:
        raise UserError(
            f"run folder {str(run)!r}: {error.filename} is missing: give a folder that longdraft train wrote"
        ) from None
    evaluated = run / "evaluations.jsonl"
    rows += [json.loads(line) for line in evaluated.read_text().splitlines()] if evaluated.exists() else []
    commit = told["commit"] or os.environ.get("LONGDRAFT_COMMIT")
    if not commit:
        raise UserError(
            f"{run / 'run.yaml'} has no commit, since git was not there: set LONGDRAFT_COMMIT to the code's"
        )
    again = [yaml.safe_load(path.read_text()) for path in sorted(run.glob("run-from-*.yaml"))]
    first = {
        "run": told["settings"]["run"]["name"],
        "command": _command(told),
        **({"resumed": [{"date": more["date"], "command": _command(more)} for more in again]} if again else {}),
        "seed": told["settings"]["run"]["seed"],
        "data": told["facts"]["data"]["train"],
        "date": told["date"],
        "commit": commit,
        "versions": told["versions"],
        "device": f"{told['facts']['ranks']} x {told['facts']['device']}",
        "settings": told["settings"],
    }
    figures = [row for row in rows if row["step"] <= steps]
    first = portable(named_target(first, told["settings"]["target"]["path"]))
    return [first, *sorted(figures, key=lambda row: (row["step"], "loss" not in row))]


def _command(told: dict[str, Any]) -> str:
    _, *words = told["command"].split(" ")
    return " ".join(["longdraft train", *words])


def data_list(listed: dict[str, Any]) -> dict[str, Any]:
    """Documents as ``HASH NAME`` by kind, the hash's first 16 digits: thousands of them have to be small."""
    out: dict[str, Any] = {"seed": listed["seed"], "hash": "sha256, 16 digits"}
    for part in ("train", "heldout"):
        kinds: dict[str, list[str]] = {}
        for entry in listed[part]:
            kinds.setdefault(entry["kind"], []).append(f"{entry['sha256'][:16]} {portable(entry['name'])}")
        out[part] = kinds
    return out


def generations(named: dict[str, Path]) -> str:
    """What ``longdraft generate`` told of each of its runs, with the target by its published name."""
    told = {name: json.loads(path.read_text()) for name, path in named.items()}
    short = {name: portable(named_target(one, one["settings"]["target"]["path"])) for name, one in told.items()}
    for one in short.values():
        one["target"]["name"] = TARGET
        one.pop("machine", None)  # a host's kernel says nothing of the answers
    return "{" + ",\n".join(f"{json.dumps(name)}: {json.dumps(one)}" for name, one in short.items()) + "}\n"


def published_spec(stored: dict[str, Any]) -> TargetSpec:
    """The published model's spec, if a draft's stored one is the same but for the rounding of its epsilon (GGUF has float32).

    Raises:
        UserError: a draft for another target.
    """
    want = TargetSpec.from_config(AutoConfig.from_pretrained(shipped(SHAPES)))
    found = TargetSpec(**stored)
    close = math.isclose(found.rms_norm_eps, want.rms_norm_eps, rel_tol=1e-6)
    if not close or replace(found, rms_norm_eps=want.rms_norm_eps) != want:
        raise UserError(f"the draft's target is {stored}, not {TARGET}: ship drafts of that target")
    return want


def ship(runs: list[Path], out: Path) -> Path:
    """Write one kind's draft and log; returns its folder.

    Raises:
        UserError: a run without a checkpoint, or for another target.
    """
    drafts = [newest_draft(run) for run in runs]
    source = drafts[-1]
    config = read_config(source)
    stored = config["longdraft"]["target"]["spec"]
    want, kind = published_spec(stored), config["longdraft"]["draft"]
    trained = load_draft(source, TargetSpec(**stored))
    settings = draft_config(config, TargetSpec(**stored), source).settings
    facts = [training_facts(read_config(folder), folder) for folder in drafts]
    lines = [
        json.dumps(row) + "\n" for run, fact in zip(runs, facts, strict=True) for row in stage_log(run, fact.steps)
    ]
    draft = KINDS[kind].build(KINDS[kind].configure(want, settings))
    draft.load_state_dict(trained.state_dict())
    save_draft(draft.to(torch.bfloat16), out / kind, TARGET, facts[-1])
    (out / kind / "model.safetensors").chmod(0o644)
    (out / f"{kind}.log.jsonl").write_text("".join(lines))
    return out / kind


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="longdraft bench ship_drafts", description=(__doc__ or "").split("\n\n")[1])
    parser.add_argument("--runs", type=Path, nargs="+", required=True, help="folders of one kind's stages, in order")
    parser.add_argument("--data", type=Path, help="sources.json of bench draft_corpus")
    parser.add_argument(
        "--generated", nargs="+", default=[], metavar="NAME=FILE", help="provenance.json of own answers"
    )
    parser.add_argument("--out", type=Path, default=Path("recipes/smollm2-135m"))
    args = parser.parse_args(argv)
    folder = ship(args.runs, args.out)
    if args.data is not None:
        listed = data_list(json.loads(args.data.read_text()))
        (args.out / "data.json").write_text(json.dumps(listed, indent=0, ensure_ascii=False) + "\n")
    if args.generated:
        named = {name: Path(path) for name, _, path in (word.partition("=") for word in args.generated)}
        (args.out / "generated.json").write_text(generations(named))
    size = sum(path.stat().st_size for path in args.out.rglob("*") if path.is_file())
    print(f"{folder}; {args.out} has {size / 2**20:.1f} MiB", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
