"""python -m longdraft.bench.block_lse [--shapes 16x32768x5 ...] [--sweep] --out block_lse.json

What choosing a KV view costs: the kernels that score blocks of 16 from one layer's keys, in GB/s of keys read and as a share of a
measured copy; the shares made of it (``mass``); and a whole choice (``choose``: two layers' scores, all that is summed, a list of
4096 columns) in one CUDA graph, as a share of the time that a full verification's cache takes to read. Outputs are checked against
the torch twin. Llama-8B's heads: 32 of queries, 8 of keys, of 128; 32 layers.

Floor. A layer's keys are 2 KiB a token in 16 bit: 16 requests x 32,768 tokens are 1.07 GB, which an H200 reads in 0.25 ms at the
4.3 TB/s that it copies with; 1 x 125,000: 0.26 GB, 60 us. Two layers' keys are 1/32 of what a full verification reads: 0.50 of
16 ms, 0.12 of 3.8. The results of 5 rows are 21 and 5 MB, 2 %; a block of one column gives 16 times that.

Prediction (before the first run). ``lse`` at 16 x 32,768: 0.29 ms, 86 % of the copy: some 20 instructions a score and 32 scores
a key leave the issue slots two thirds free; 1 x 125,000: 75 us, 80 %, of which the last programs' tail is a tenth. Float8: 60 %
of the copy's rate, being bound by conversion. Blocks of one: 65 %, since a third as much is written as read. ``bound`` and
``corners`` (SpecPV's rule): 70 %, six instructions for each number of a key. ``mass``: some ten passes over the results, 50 and
15 us. ``choose``: 0.75 ms and 0.25 ms, of which a fourth and a half is small kernels: 5 and 7 % of a full verification's reading.
"""

import argparse
import itertools
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from longdraft.bench.card_time import copy_bandwidth, seconds, sweep_tiles
from longdraft.bench.prefix_attention import DTYPES, HEADS, KV_HEADS, SCALE, SIZE, Layers, Shape, make_layers
from longdraft.bench.record import make_record, write_record
from longdraft.kernels.block_bound import block_bound
from longdraft.kernels.block_lse import block_lse, block_mass, count_blocks
from longdraft.kernels.triton_block_lse import BlockTile, block_tile_for, triton_block_lse
from longdraft.serve.views.budget import Budget
from longdraft.serve.views.choose import Chosen, choose_columns
from longdraft.serve.views.selectors import make_selector

SHAPES = ["16x32768x5", "1x125000x5"]
BLOCK, LAYERS, BUDGET = 16, 32, Budget(4096)
CLOSE = {"bfloat16": 1e-3, "float8": 3e-2}  # of scores up to about 6; queries of a float8 cache are rounded to float16

Score = Callable[..., torch.Tensor]


def scorers(layers: Layers) -> dict[str, Score]:
    """Each kernel as a function of queries, keys and plan; ``backend`` picks the twin."""
    kv_scale = layers.kv_scales[0]
    return {
        "lse": partial(block_lse, scale=SCALE, block=BLOCK, kv_scale=kv_scale),
        "lse_block1": partial(block_lse, scale=SCALE, block=1, kv_scale=kv_scale),
        "bound": partial(block_bound, scale=SCALE * kv_scale, block=BLOCK),
        "corners": partial(block_bound, scale=SCALE * kv_scale, block=BLOCK, rule="specpv"),
    }


def score_all(layers: Layers, score: Score) -> None:
    """One pass over the layers' keys."""
    for k_SKD, _ in layers.caches:
        score(layers.q_THD, k_SKD, layers.plan)


def choose(layers: Layers) -> tuple[torch.Tensor, Chosen]:
    """A view by attention mass from two layers, and its scores."""
    keys = [layers.caches[at % len(layers.caches)][0] for at in range(2)]
    blocks = count_blocks(layers.plan, BLOCK, None)
    score = make_selector("mass", block=BLOCK).score
    score_BN = score([layers.q_THD] * 2, keys, layers.plan, SCALE, blocks, [layers.kv_scales[0]] * 2)
    return score_BN, choose_columns(score_BN, layers.plan.lens_B.long(), BUDGET)


def furthest(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """The largest error where a block has columns; infinite where the two disagree on which have."""
    if not torch.equal(found.isneginf(), wanted.isneginf()):
        return float("inf")
    return float((found - wanted).nan_to_num(0.0).abs().max())


def bench_shape(shape: Shape, dtype: str, page_size: int, copy: float) -> tuple[dict[str, float], dict[str, bool]]:
    """Figures and checks of one shape."""
    layers = make_layers(shape, DTYPES[dtype], page_size, "cuda")
    figures, checks = dict[str, float](), dict[str, bool]()
    tail = f"{'fp8' if dtype == 'float8' else 'bf16'}_page{page_size}_{shape}"
    key_bytes = shape.bytes_read(DTYPES[dtype]) / 2
    for name, score in scorers(layers).items():
        label = f"{name}_{tail}"
        first = layers.q_THD, layers.caches[0][0], layers.plan
        error = furthest(score(*first, backend="triton"), score(*first, backend="torch"))
        checks[f"{label}_equals_torch"] = error < CLOSE[dtype] * (10 if name in ("bound", "corners") else 1)
        each = seconds(partial(score_all, layers, score)) / len(layers.caches)
        rate = key_bytes / each
        figures |= {f"{label}_us": each * 1e6, f"{label}_gb_s": rate / 1e9, f"{label}_share_of_copy": rate / copy}
        print(f"{label}: {each * 1e6:8.1f} us {rate / copy:6.1%} of copy, off by {error:.0e}", flush=True)
    lse_THN = block_lse(layers.q_THD, layers.caches[0][0], layers.plan, SCALE, BLOCK)
    figures[f"mass_{tail}_us"] = seconds(lambda: block_mass(lse_THN)) * 1e6
    whole = seconds(lambda: choose(layers))
    figures[f"choose_{tail}_us"] = whole * 1e6
    figures[f"choose_{tail}_share_of_full_read"] = whole / (2 * LAYERS * key_bytes / copy)
    score_BN, chosen = choose(layers)
    again = choose_columns(score_BN.cpu(), layers.plan.lens_B.long().cpu(), BUDGET)
    checks[f"choose_{tail}_equals_cpu"] = all(torch.equal(x.cpu(), y) for x, y in zip(chosen, again, strict=True))
    print(
        f"{tail}: mass {figures[f'mass_{tail}_us']:.1f} us, choose {whole * 1e6:.1f} us, "
        f"{figures[f'choose_{tail}_share_of_full_read']:.1%} of reading a full verification's cache",
        flush=True,
    )
    return figures, checks


def sweep(shape: Shape, dtype: str, page_size: int, copy: float) -> None:
    """Print the rate of ``lse`` under other tiles; the best belongs in ``block_tile_for``."""
    layers = make_layers(shape, DTYPES[dtype], page_size, "cuda")
    key_bytes = shape.bytes_read(DTYPES[dtype]) / 2
    first = block_tile_for(shape.rows * HEADS // KV_HEADS, SIZE, DTYPES[dtype].itemsize, BLOCK)
    blocks = count_blocks(layers.plan, BLOCK, None)

    def rate(tile: BlockTile) -> float:
        score = partial(triton_block_lse, scale=SCALE, block=BLOCK, blocks=blocks, tile=tile)
        return key_bytes * len(layers.caches) / seconds(partial(score_all, layers, score)) / copy

    sizes = itertools.product((16, 32, 64, 128), (1, 2, 4), (2, 4, 8), (2, 3, 4))
    tiles = [first._replace(blocks=n, turns=t, warps=w, stages=s) for n, t, w, s in sizes]
    sweep_tiles(f"{shape} {dtype} page {page_size}", first, tiles, rate)


def main(argv: list[str] | None = None) -> int:
    """Measure, check, print, write one record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", type=Shape.parse, nargs="+", default=[Shape.parse(x) for x in SHAPES])
    parser.add_argument("--page-sizes", type=int, nargs="+", default=[1])
    parser.add_argument("--dtypes", nargs="+", choices=list(DTYPES), default=list(DTYPES))
    parser.add_argument("--sweep", action="store_true", help="try other tiles of the kernel instead; writes no record")
    parser.add_argument("--out", type=Path, default=Path("block_lse.json"))
    args = parser.parse_args(argv)
    if not torch.cuda.is_available():
        print("error: block scores are measured on a GPU, and there is none", file=sys.stderr)
        return 2
    copy = copy_bandwidth()
    print(f"copy: {copy / 1e9:.0f} GB/s", flush=True)
    figures, checks = {"copy_gb_s": copy / 1e9}, dict[str, bool]()
    for shape, dtype, page_size in itertools.product(args.shapes, args.dtypes, args.page_sizes):
        if args.sweep:
            sweep(shape, dtype, page_size, copy)
            continue
        more_figures, more_checks = bench_shape(shape, dtype, page_size, copy)
        figures |= more_figures
        checks |= more_checks
    if not args.sweep:
        settings = {
            "heads": HEADS,
            "kv_heads": KV_HEADS,
            "head_dim": SIZE,
            "block": BLOCK,
            "layers": LAYERS,
            "budget": BUDGET.tokens,
            "graph": True,
        }
        write_record(make_record("block_lse", settings, figures, checks), args.out)
    return 0 if all(checks.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
