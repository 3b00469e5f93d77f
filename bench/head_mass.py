"""python -m longdraft.bench.head_mass [--shapes 16x32768x5 ...] [--sweep] --out head_mass.json

What choosing a sparse verification's tokens costs (Dustin, Eq. 5 and 6): the probabilities of 4 heads over the whole context, in GB/s
of keys read and as a share of a measured copy, for ``spread`` heads of four key heads and ``near`` ones of a single key head, with
all query rows counting (``ahead``: the draft's) and with the last alone (``history``: the target's); the choice of 512 tokens from
both scores (``tokens``); and all of it in one CUDA graph, as it precedes a verification (``choice``: a target layer and a draft layer
of spread heads; ``choice_near``), as a share of the time that a full verification's cache takes to read. Beside that, cutting a set from
a row (``set``) against sorting for it (``set_sorted``), at the size of views of blocks of 16. Outputs are checked against the torch
twins. Llama-8B's heads: 32 of queries, 8 of keys, of 128; 32 layers.

Floor. A key of one head is 256 bytes in 16 bit. Spread heads read four a token, half of a layer's keys: 537 MB at 16 requests x 32,768
tokens, 125 us at the 4.3 TB/s that an H200 copies with, and 128 MB, 30 us, at 1 x 125,000. Near heads: a fourth of that, 31 and 7 us.
Scores are written and read again, 16 bytes a token and row: 8 MB each way for one row, 42 MB for five. A full verification reads 16 ms
and 3.8 ms, so a layer of spread heads is 0.8 % of it, of near ones 0.2 %.

Prediction (before the first run). ``history`` of spread heads at 16 x 32,768: 160 us, 78 % of the copy; near: 52 us, 60 %, since 256
bytes of every 2 KiB are read, no two together. ``ahead`` with five rows: 185 and 75 us, of which the scores' way through memory is 20.
1 x 125,000: 45 and 18 us, of which launches, first loads and the sums are ten. Float8: 60 and 45 % of the copy's rate. ``tokens``: 30
and 35 us in two launches: 31 passes of a piece over registers are 5 us, of which there is one in the first and are two in the second,
beside running sums, a sort of 512 and the loads. ``choice``: 375 us and 125 us, 2.3 and 3.3 % of a full verification's reading; near:
155 and 70 us. ``set``: 8 us at 16 x 2048 and 1 x 7813, against 100 sorted.
"""

import argparse
import itertools
import sys
from functools import partial
from pathlib import Path

import torch

from longdraft.bench.card_time import copy_bandwidth, seconds, sweep_tiles
from longdraft.bench.prefix_attention import DTYPES, HEADS, KV_HEADS, SCALE, SIZE, Layers, Shape, make_layers
from longdraft.bench.record import make_record, write_record
from longdraft.kernels.head_mass import head_mass
from longdraft.kernels.top_set import top_set
from longdraft.kernels.triton_head_mass import MassTile, mass_tile_for, triton_head_mass
from longdraft.serve.views.choose import Chosen
from longdraft.serve.views.token_set import SparseBudget, choose_tokens

SHAPES = ["16x32768x5", "1x125000x5"]
CHOSEN = {"spread": (1, 10, 19, 28), "near": (4, 5, 6, 7)}  # Llama-8B has four query heads for each of keys
LAYERS, BUDGET, BLOCK, VIEW = 32, SparseBudget(512, lookahead=192), 16, 4096
CLOSE = {
    "bfloat16": 1e-4,
    "float8": 3e-2,
}  # relative to the largest score; queries of a float8 cache are rounded to float16

Figures = dict[str, float]
Checks = dict[str, bool]


def last_rows(layers: Layers) -> torch.Tensor:
    """The last row of each request alone counts."""
    valid_BR = torch.zeros(len(layers.plan), layers.plan.max_rows, dtype=torch.bool, device=layers.q_THD.device)
    valid_BR[:, -1] = True
    return valid_BR


def score(
    layers: Layers, at: int, heads: str, valid_BR: torch.Tensor | None, backend: str | None = None
) -> torch.Tensor:
    """Summed probabilities from the keys of one layer."""
    k_SKD, kv_scale = layers.caches[at % len(layers.caches)][0], layers.kv_scales[0]
    mine = layers.q_THD, k_SKD, layers.plan, SCALE, CHOSEN[heads], valid_BR
    return head_mass(*mine, kv_scale=kv_scale, backend=backend)


def key_bytes(shape: Shape, dtype: torch.dtype, heads: str) -> int:
    """Bytes of the keys that one layer's scores read."""
    read = {h * KV_HEADS // HEADS for h in CHOSEN[heads]}
    return shape.bytes_read(dtype) // 2 * len(read) // KV_HEADS


def choose(layers: Layers, heads: str, valid_BR: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, Chosen]:
    """A set from the last row of one layer and all rows of another, with both scores."""
    draft_BN, target_BN = score(layers, 0, heads, None), score(layers, 1, heads, valid_BR)
    return draft_BN, target_BN, choose_tokens(draft_BN, target_BN, layers.plan.lens_B.long(), BUDGET)


def furthest(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """The largest error relative to the largest score."""
    return float((found - wanted).abs().max() / wanted.abs().max())


def bench_scores(shape: Shape, dtype: str, tail: str, layers: Layers, copy: float) -> tuple[Figures, Checks]:
    """Each kind of score."""
    figures, checks = Figures(), Checks()
    for heads, (name, valid_BR) in itertools.product(CHOSEN, (("ahead", None), ("history", last_rows(layers)))):
        label = f"{name}_{heads}_{tail}"
        error = furthest(score(layers, 0, heads, valid_BR), score(layers, 0, heads, valid_BR, "torch"))
        checks[f"{label}_equals_torch"] = error < CLOSE[dtype]
        count = len(layers.caches)
        each = seconds(lambda: [score(layers, at, heads, valid_BR) for at in range(count)]) / count  # noqa: B023
        rate = key_bytes(shape, DTYPES[dtype], heads) / each
        figures |= {f"{label}_us": each * 1e6, f"{label}_gb_s": rate / 1e9, f"{label}_share_of_copy": rate / copy}
        print(f"{label}: {each * 1e6:8.1f} us {rate / copy:6.1%} of copy, off by {error:.0e}", flush=True)
    return figures, checks


def bench_choice(shape: Shape, dtype: str, tail: str, layers: Layers, copy: float) -> tuple[Figures, Checks]:
    """The choice alone, and with its scores."""
    figures, checks, valid_BR = Figures(), Checks(), last_rows(layers)
    full = LAYERS * shape.bytes_read(DTYPES[dtype]) / copy
    length_B = layers.plan.lens_B.long()
    for heads, name in (("spread", "choice"), ("near", "choice_near")):
        draft_BN, target_BN, chosen = choose(layers, heads, valid_BR)
        again = choose_tokens(draft_BN.cpu(), target_BN.cpu(), length_B.cpu(), BUDGET)
        same = all(torch.equal(x.cpu(), y) for x, y in zip(chosen, again, strict=True))
        checks[f"{name}_{tail}_equals_cpu"] = same
        whole = seconds(partial(choose, layers, heads, valid_BR))
        figures |= {f"{name}_{tail}_us": whole * 1e6, f"{name}_{tail}_share_of_full_read": whole / full}
        print(f"{name}_{tail}: {whole * 1e6:8.1f} us, {whole / full:.2%} of reading the whole cache", flush=True)
    alone = seconds(partial(choose_tokens, draft_BN, target_BN, length_B, BUDGET))
    figures |= {f"tokens_{tail}_us": alone * 1e6, f"tokens_{tail}_share_of_full_read": alone / full}
    print(f"tokens_{tail}: {alone * 1e6:8.1f} us, {alone / full:.2%} of reading the whole cache", flush=True)
    return figures, checks


def bench_sets(shape: Shape) -> tuple[Figures, Checks]:
    """A view's blocks, cut and sorted for."""
    blocks, room = shape.context // BLOCK, VIEW // BLOCK
    score_BN = torch.rand(shape.batch, blocks, device="cuda").bfloat16().float()  # with ties
    count_B, end_B = (torch.full((shape.batch,), n, device="cuda") for n in (room, blocks - 8))
    work = partial(top_set, score_BN, count_B, end_B, room, 2)
    figures = Figures()
    for name, backend in (("set", "triton"), ("set_sorted", "torch")):
        figures[f"{name}_{shape}_us"] = 1e6 * seconds(partial(work, backend=backend))
        print(f"{name}_{shape}: {figures[f'{name}_{shape}_us']:8.1f} us", flush=True)
    return figures, {f"set_{shape}_equals_sorted": torch.equal(work(backend="triton"), work(backend="torch"))}


def bench_shape(shape: Shape, dtype: str, page_size: int, copy: float) -> tuple[Figures, Checks]:
    """Figures and checks of one shape."""
    layers = make_layers(shape, DTYPES[dtype], page_size, "cuda")
    tail = f"{'fp8' if dtype == 'float8' else 'bf16'}_page{page_size}_{shape}"
    figures, checks = bench_scores(shape, dtype, tail, layers, copy)
    more_figures, more_checks = bench_choice(shape, dtype, tail, layers, copy)
    return figures | more_figures, checks | more_checks


def sweep(shape: Shape, dtype: str, page_size: int, copy: float) -> None:
    """Print the rate of all rows' scores under other tiles; the best belongs in ``mass_tile_for``."""
    layers = make_layers(shape, DTYPES[dtype], page_size, "cuda")
    columns, kv_scale = layers.plan.pages_BW.shape[1] * page_size, layers.kv_scales[0]
    for heads, chosen in CHOSEN.items():
        keys = len({h * KV_HEADS // HEADS for h in chosen})
        rows, count = shape.rows * len(chosen) // keys, len(layers.caches)
        first = mass_tile_for(rows, SIZE, DTYPES[dtype].itemsize, shape.batch * keys * columns)

        def rate(tile: MassTile, chosen: tuple[int, ...] = chosen, name: str = heads, count: int = count) -> float:
            def work() -> None:
                for k_SKD, _ in layers.caches:
                    mine = layers.q_THD, k_SKD, layers.plan, SCALE * kv_scale, chosen, None, None, columns
                    triton_head_mass(*mine, tile)

            return key_bytes(shape, DTYPES[dtype], name) * count / seconds(work) / copy

        sizes = itertools.product((32, 64, 128), (256, 512, 1024, 2048), (2, 4, 8), (2, 3, 4))
        tiles = [first._replace(columns=n, turns=span // n, warps=w, stages=s) for n, span, w, s in sizes]
        sweep_tiles(f"{shape} {dtype} {heads} page {page_size}", first, tiles, rate)


def main(argv: list[str] | None = None) -> int:
    """Measure, check, print, write one record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", type=Shape.parse, nargs="+", default=[Shape.parse(x) for x in SHAPES])
    parser.add_argument("--page-sizes", type=int, nargs="+", default=[1])
    parser.add_argument("--dtypes", nargs="+", choices=list(DTYPES), default=list(DTYPES))
    parser.add_argument("--sweep", action="store_true", help="try other tiles of the kernel instead; writes no record")
    parser.add_argument("--out", type=Path, default=Path("head_mass.json"))
    args = parser.parse_args(argv)
    if not torch.cuda.is_available():
        print("error: scores are measured on a GPU, and there is none", file=sys.stderr)
        return 2
    copy = copy_bandwidth()
    print(f"copy: {copy / 1e9:.0f} GB/s", flush=True)
    if args.sweep:
        for shape, dtype, page_size in itertools.product(args.shapes, args.dtypes, args.page_sizes):
            sweep(shape, dtype, page_size, copy)
        return 0
    figures, checks = {"copy_gb_s": copy / 1e9}, Checks()
    runs = [bench_shape(*each, copy) for each in itertools.product(args.shapes, args.dtypes, args.page_sizes)]
    for more_figures, more_checks in [*runs, *map(bench_sets, args.shapes)]:
        figures |= more_figures
        checks |= more_checks
    settings = {
        "heads": HEADS,
        "kv_heads": KV_HEADS,
        "head_dim": SIZE,
        "chosen_heads": {name: list(heads) for name, heads in CHOSEN.items()},
        "layers": LAYERS,
        "tokens": BUDGET.tokens,
        "lookahead": BUDGET.lookahead,
        "graph": True,
    }
    write_record(make_record("head_mass", settings, figures, checks), args.out)
    return 0 if all(checks.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
