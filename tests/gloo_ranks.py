"""Processes with gloo between them: ``run_gloo(2, function, tmp_path)`` calls ``function(rank, size)`` in each."""

import multiprocessing
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist


def run_gloo(size: int, function: Callable[..., Any], folder: Path, *args: Any, seconds: float = 120) -> list[Any]:
    """What the function, which must stand in a module, returns on each rank; an exception comes back as its text.

    Raises:
        TimeoutError: a rank that does not end.
    """
    context = multiprocessing.get_context("spawn")
    processes = [
        context.Process(target=_run, args=(rank, size, function, str(folder), args), daemon=True)
        for rank in range(size)
    ]
    for process in processes:
        process.start()
    for rank, process in enumerate(processes):
        process.join(seconds)
        if process.is_alive():
            for each in processes:
                each.kill()
            raise TimeoutError(f"rank {rank} has not ended within {seconds} s")
    return [torch.load(folder / f"rank{rank}", weights_only=False) for rank in range(size)]


def _run(rank: int, size: int, function: Callable[..., Any], folder: str, args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=size)
    try:
        found = function(rank, size, *args)
    except BaseException as error:
        traceback.print_exc()
        found = f"{type(error).__name__}: {error}"
    torch.save(found, Path(folder) / f"rank{rank}")
    sys.stdout.flush()
    os._exit(0)  # threads of gloo's that are still there when the interpreter ends make C++ abort the process, rarely
