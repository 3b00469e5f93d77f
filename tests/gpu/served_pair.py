"""Servers on one card for tests: plain ones and ones with LONGDRAFT over the same target, compared token by token.

``LONGDRAFT_GPU_MODEL`` names a folder of a real target; without it a random one of a small Llama's shape is made.
"""

import contextlib
import os
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tiny import tiny_model
from tiny_draft import known_prompts

from longdraft.bench.server import Server
from longdraft.bench.token_compare import gap_at_divergence

SHAPE: dict[str, Any] = {
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "initializer_range": 0.08,
}
COMMON = [
    "--dtype",
    "bfloat16",
    "--sampling-backend",
    "pytorch",
    "--grammar-backend",
    "none",
    "--skip-server-warmup",
    "--log-level",
    "info",
    "--mem-fraction-static",
    "0.3",
    "--max-total-tokens",
    "20000",
    "--max-running-requests",
    "8",
    "--cuda-graph-max-bs",
    "8",
]
NEW = 64


def target_folder(folder: Path) -> Path:
    given = os.environ.get("LONGDRAFT_GPU_MODEL")
    return Path(given) if given else tiny_model("llama", folder, **SHAPE)


def prompts(count: int = 8) -> list[list[int]]:
    """Those that tiny drafts have seen, and the same behind a longer text, over several pages and a chunk."""
    known = [p.tolist() for p in known_prompts()]
    return [*known[: count - 2], known[8] * 9 + known[0], known[9] * 70 + known[1]]


def server(name: str, target: Path, log: Path, arguments: Sequence[str], speculative: bool) -> Server:
    command = [sys.executable, "-m", "sglang.launch_server", "--model-path", str(target), *COMMON, *arguments]
    plugins = "none"
    if speculative:
        plugins = "longdraft"
        command += ["--speculative-algorithm", "LONGDRAFT", "--speculative-num-steps", "4"]
    return Server(name, command, log, {"SGLANG_PLUGINS": plugins})


@contextlib.contextmanager
def up(servers: list[Server]) -> Iterator[list[Server]]:
    """All of them, started at once: a start takes most of a minute."""
    with contextlib.ExitStack() as stack, ThreadPoolExecutor(len(servers)) as pool:
        yield list(pool.map(stack.enter_context, servers))


def differences(plain: Server, drafted: Server, asked: list[list[int]]) -> list[str]:
    """What a failed comparison says, one line a prompt whose outputs part."""
    found = []
    for number, ids in enumerate(asked):
        want, got = plain.generate(ids, NEW).tokens, drafted.generate(ids, NEW).tokens
        gap = gap_at_divergence(plain, ids, want, got)
        if gap is not None or len(want) != len(got):
            at = next((i for i, (a, b) in enumerate(zip(want, got, strict=False)) if a != b), min(len(want), len(got)))
            found.append(f"prompt {number} ({len(ids)} tokens) parts at {at} of {len(want)}, gap {gap}")
    return found


def gaps(lines: list[str]) -> list[float]:
    """Of :func:`differences`."""
    return [float("inf") if line.endswith("None") else float(line.rsplit(" ", 1)[1]) for line in lines]


def kept(drafted: Server, asked: list[list[int]]) -> int:
    """Drafted tokens that were accepted; the prompts come from the prefix cache by now."""
    return sum(int(drafted.generate(ids, NEW).counters["accepted"]) for ids in asked)
