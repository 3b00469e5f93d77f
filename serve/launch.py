"""longdraft serve --model-path TARGET [--draft FOLDER] [--steps 4] [--mode full] [SGLang's own arguments ...]

The friendlier spelling of ``sglang serve --model-path TARGET --speculative-algorithm LONGDRAFT ...``: it writes our settings
to the environment, adds what a CPU needs where there is no GPU, and hands everything else to SGLang as it is.
"""

import argparse
import os
import sys
from collections.abc import Sequence

import torch
from pydantic import Field

from longdraft.serve.settings import ServeSettings, write_environment
from longdraft.serve.tree_shape import parse_tree

CPU_ENVIRONMENT = {"SGLANG_USE_CPU_ENGINE": "1"}
CPU_DEFAULTS = {
    "--device": "cpu",
    "--attention-backend": "torch_native",
    "--max-running-requests": "8",
    "--max-total-tokens": "40000",
    "--chunked-prefill-size": "512",
    "--dtype": "float32",
}
CPU_SWITCHES = ("--skip-server-warmup", "--sleep-on-idle", "--disable-overlap-schedule")


class ServeOptions(ServeSettings):
    """Serve a model in SGLang with a draft. Besides these options, --model-path TARGET is needed, and every argument of
    ``sglang serve`` is taken as it is.
    """

    draft: str | None = Field(
        None,
        description="draft folder: a LongSpec or EAGLE-3 draft, or a causal language model with the target's tokenizer; without one "
        "the lookup drafter serves",
    )
    steps: int = Field(4, ge=1, description="drafted tokens a verification")


def sglang_arguments(options: ServeOptions, rest: Sequence[str], on_cpu: bool) -> list[str]:
    """SGLang's command line for these options; what the user gave wins over our defaults."""
    shape = parse_tree(options.tree)
    steps = shape.depth if shape else options.steps
    args = [*rest, "--speculative-algorithm", "LONGDRAFT", "--speculative-num-steps", str(steps)]
    if options.draft is not None:
        args += ["--speculative-draft-model-path", options.draft]
    return [*args, *cpu_arguments(rest)] if on_cpu else args


def cpu_arguments(given: Sequence[str]) -> list[str]:
    """What SGLang's command line needs on a CPU beyond what it has."""
    names = {word.split("=", 1)[0] for word in given}
    more = [word for name, value in CPU_DEFAULTS.items() if name not in names for word in (name, value)]
    return more + [switch for switch in CPU_SWITCHES if switch not in names]


def ranks_of(rest: Sequence[str]) -> int:
    """How many ranks SGLang's arguments ask for; what is no number is SGLang's to refuse."""
    parser = argparse.ArgumentParser(add_help=False, exit_on_error=False, allow_abbrev=False)
    parser.add_argument("--tensor-parallel-size", "--tp-size", "--tp", dest="size", type=int, default=1)
    try:
        return max(1, int(parser.parse_known_args(list(rest))[0].size))
    except argparse.ArgumentError:
        return 1


def rank_environment(ranks: int, cores: int) -> dict[str, str]:
    """What SGLang wants to know of several ranks on one CPU: the cores of each. It would compile a mask of the embedding, for 20 seconds."""
    each = max(1, cores // ranks)
    first = [rank * each % cores for rank in range(ranks)]
    bound = "|".join(str(core) if each == 1 else f"{core}-{core + each - 1}" for core in first)
    return {"SGLANG_CPU_OMP_THREADS_BIND": bound, "TORCHDYNAMO_DISABLE": "1"}


def prepare_environment(options: ServeOptions, on_cpu: bool, ranks: int = 1) -> None:
    """What SGLang's processes read: our settings and, on a CPU, its CPU engine."""
    fields = ServeSettings.model_fields
    write_environment(ServeSettings(**{k: v for k, v in options.model_dump().items() if k in fields}))
    os.environ.setdefault("SGLANG_PLUGINS", "longdraft")
    if on_cpu:
        os.environ.update(CPU_ENVIRONMENT)
        cores = os.cpu_count() or 1
        os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores // ranks)))
        for name, value in (rank_environment(ranks, cores) if ranks > 1 else {}).items():
            os.environ.setdefault(name, value)


def serve(options: ServeOptions, rest: Sequence[str]) -> None:
    """Start SGLang with LONGDRAFT in this process; returns when the server ends."""
    on_cpu = not torch.cuda.is_available()
    prepare_environment(options, on_cpu, ranks_of(rest))
    from sglang.launch_server import run_server
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args
    from sglang.srt.utils import kill_process_tree

    load_plugins()
    arguments = prepare_server_args(sglang_arguments(options, rest, on_cpu))
    try:
        run_server(arguments)
    finally:
        kill_process_tree(os.getpid(), include_parent=False)


def main(argv: Sequence[str] | None = None) -> int:
    """Command line of ``longdraft serve``."""
    from longdraft.options import parse_options

    options, rest = parse_options(ServeOptions, list(sys.argv[1:] if argv is None else argv), prog="longdraft serve")
    serve(options, rest)
    return 0
