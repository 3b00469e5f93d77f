"""Train a LongSpec draft: ``torchrun train/long_draft.py --config recipes/smoke/longspec.yaml optim.lr=1e-3 --plan``.

Plain ``python`` is one process; torchrun's ``--nproc-per-node`` adds more. The same command again resumes a stopped run.
"""

import argparse
import os
import sys

from longdraft.errors import UserError
from longdraft.schema import load_settings
from longdraft.train.config import TrainSettings
from longdraft.train.recipe_files import find_config, resolve_data_paths


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="long_draft.py", description="Train a LongSpec draft for a frozen target.")
    parser.add_argument("--config", help="YAML recipe")
    parser.add_argument("--plan", action="store_true", help="print shapes, tokens, memory and time; start nothing")
    parser.add_argument("--trainer", choices=["longdraft", "specforge"], default="longdraft", help="who runs the steps")
    parser.add_argument("overrides", nargs="*", metavar="a.b=value", help="settings that replace the recipe's")
    return parser.parse_intermixed_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Run the command line; returns the exit status: 2 for a user's error, 1 for a training that diverged or could not be saved."""
    args = parse(argv)
    rank = os.environ.get("RANK", "0")
    try:
        recipe = find_config(args.config) if args.config else None
        settings = load_settings(TrainSettings, recipe, args.overrides)
        resolve_data_paths(settings, recipe)
        if args.plan:
            return plan(settings)
        return run_specforge(settings) if args.trainer == "specforge" else run(settings, argv)
    except UserError as error:
        print(f"error: {error}" if rank == "0" else f"error on rank {rank}: {error}", file=sys.stderr)
        return 2


def plan(settings: TrainSettings) -> int:
    from longdraft.train.estimate import plan_text

    if os.environ.get("RANK", "0") == "0":
        print(plan_text(settings, int(os.environ.get("WORLD_SIZE", "1"))))
    return 0


def run_specforge(settings: TrainSettings) -> int:
    from longdraft.train.specforge_seam.trainer import train_with_specforge

    train_with_specforge(settings)
    return 0


def run(settings: TrainSettings, argv: list[str] | None) -> int:
    from longdraft.train.checkpoints import SaveFailed
    from longdraft.train.loop import Diverged, train

    try:
        train(settings, [sys.argv[0], *(sys.argv[1:] if argv is None else argv)])
    except (Diverged, SaveFailed) as error:
        if os.environ.get("RANK", "0") == "0":
            print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
