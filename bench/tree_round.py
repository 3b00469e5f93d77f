"""python -m longdraft.bench.tree_round [--batches 1 16 64] --out record.json

What a round's sampling costs on a card beside attention: scores and candidates of one depth of a draft tree, the target's choices,
bits and acceptance; each in a CUDA graph, in microseconds, and where logits are read also in GB/s of one reading of them beside a
measured copy. Trees of 69 places (LongSpec's widths 4, 16, 16, 16, 16), a draft vocabulary of 32,768, a target's of 128,256. Outputs
are checked against the torch twins.

Floor. A depth's draft logits are B x 16 x 32,768 float32: 34 MB at 16 requests, 8 us at the 4.3 TB/s that an H200 copies with. The
target's are B x 69 x 128,256 float32: 566 MB, 132 us. Bits and acceptance read B x 69 x 5 numbers: nothing but a launch, 2 to 3 us.

Prediction (before the first run), 16 requests. Candidates: log-softmax reads twice and writes once, the ordering key is eight bytes
an entry and is written and read some four times: 15 to 20 times the floor, 150 us. Greedy choice: one reading, 60 % of the copy. Choice by
shared noise: float64 noise of every entry, some ten passes of eight bytes: 3 to 5 ms, which a kernel that makes the noise where it
reads the logits would bring to 0.3 ms; with filters a sort of every row on top, 20 ms and more. Acceptance: Triton 4 us; the twin is
25 launches, 60 us in a graph. Bits: 25 launches, 50 us.
"""

import argparse
import random
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from longdraft.bench.card_time import copy_bandwidth, seconds
from longdraft.bench.record import make_record, write_record
from longdraft.bench.sampling_exactness import row_params
from longdraft.kernels.stable_topk import stable_topk
from longdraft.kernels.tree import Tree
from longdraft.kernels.tree_accept import tree_accept
from longdraft.kernels.tree_bits import ancestor_bits
from longdraft.serve.sampling.rows import RowParams

WIDTHS = (4, 16, 16, 16, 16)
DRAFT_VOCAB, VOCAB = 32_768, 128_256
PARAMS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "seeded": {},
    "filtered": {"top_p": 0.9, "top_k": 50},
}


def beam_shaped(batch: int, device: str) -> Tree:
    """Trees of the widths whose parents are random nodes of the depth before, of two tokens, so that some paths are kept."""
    rng, parents, depths, first = random.Random(0), [-1], [0], 0
    for depth, width in enumerate(WIDTHS, 1):
        start = len(parents)
        parents += [rng.randrange(first, start) for _ in range(width)]
        depths += [depth] * width
        first = start
    g = torch.Generator().manual_seed(0)
    token_BT = torch.randint(0, 2, (batch, len(parents)), generator=g).to(device)
    parent_BT, depth_BT = (torch.tensor(x, device=device).repeat(batch, 1) for x in (parents, depths))
    return Tree.build(token_BT, parent_BT, depth_BT, len(WIDTHS))


def parameters(batch: int, params: dict[str, Any], device: str) -> RowParams:
    """One row a request, seeds of their own."""
    rows = row_params(torch.arange(batch), params)
    moved: dict[str, Any] = {name: x.to(device) if isinstance(x, torch.Tensor) else x for name, x in vars(rows).items()}
    return RowParams(**moved)


def parts(
    batch: int, device: str, vocab: int = VOCAB, draft_vocab: int = DRAFT_VOCAB
) -> tuple[dict[str, tuple[Callable[[], object], int]], dict[str, bool]]:
    """What is timed, each with the bytes of logits that it has to read; and checks."""
    tree = beam_shaped(batch, device)
    places, position_B = tree.token_BT.shape[1], torch.arange(batch, device=device) + 1000
    choice_BT = torch.randint(0, 2, tree.token_BT.shape, device=device)
    draft_BMN = torch.randn(batch, max(WIDTHS), draft_vocab, device=device)
    logits_NV = torch.randn(batch * places, vocab, device=device)
    position_N = tree.position_BT(position_B).flatten()
    work: dict[str, tuple[Callable[[], object], int]] = {
        "bits": (partial(ancestor_bits, tree.parent_BT, tree.depth), 0),
        "accept": (partial(tree_accept, tree, choice_BT), 0),
        "accept_twin": (partial(tree_accept, tree, choice_BT, "torch"), 0),
    }
    for name, params in PARAMS.items():
        rows = parameters(batch, params, device)

        def candidates(rows: RowParams = rows) -> object:
            return stable_topk(rows.scores(draft_BMN, position_B), max(WIDTHS))

        def choose(rows: RowParams = rows) -> object:
            return rows.repeat(places).choose(logits_NV, position_N)

        work[f"candidates_{name}"] = candidates, 4 * draft_BMN.numel()
        work[f"choice_{name}"] = choose, 4 * logits_NV.numel()
    one, other = (vars(tree_accept(tree, choice_BT, backend)).values() for backend in (None, "torch"))
    order = draft_BMN.sort(dim=-1, descending=True, stable=True).indices[..., : max(WIDTHS)]
    checks = {
        "accept_equals_twin": all(torch.equal(a, b) for a, b in zip(one, other, strict=True)),
        "candidates_equal_a_stable_sort": bool(torch.equal(stable_topk(draft_BMN, max(WIDTHS))[1], order)),
    }
    return work, checks


def main(argv: list[str] | None = None) -> int:
    """Measure, check, print, write one record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--out", type=Path, default=Path("tree_round.json"))
    args = parser.parse_args(argv)
    if not torch.cuda.is_available():
        print("error: a round's sampling is measured on a GPU, and there is none", file=sys.stderr)
        return 2
    copy = copy_bandwidth()
    figures, checks = {"copy_gb_s": copy / 1e9}, dict[str, bool]()
    for batch in args.batches:
        work, right = parts(batch, "cuda")
        checks |= {f"b{batch}_{name}": value for name, value in right.items()}
        for name, (run, read) in work.items():
            took = seconds(run)
            figures[f"{name}_us_b{batch}"] = round(took * 1e6, 2)
            line = f"b{batch:<3} {name:<20} {took * 1e6:10.1f} us"
            if read:
                figures[f"{name}_gb_s_b{batch}"] = round(read / took / 1e9, 1)
                line += f" {read / took / 1e9:8.0f} GB/s, {read / took / copy:6.1%} of the copy"
            print(line, flush=True)
    settings = {"widths": WIDTHS, "draft_vocabulary": DRAFT_VOCAB, "vocabulary": VOCAB, "params": PARAMS}
    write_record(make_record("tree_round", settings, figures, checks), args.out)
    print(f"checks: {checks}; {args.out}")
    return 0 if all(checks.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
