"""python -m longdraft.bench.prefix_attention [--shapes 16x32768x6 ...] [--backends ...] [--sweep] --out record.json

Prefix attention of one layer, every backend, in GB/s of cache read and as a share of a measured copy; outputs are checked
against the torch twin. Llama-8B's heads: 32 of queries, 8 of keys and values, of 128.

Floor. A layer's keys and values are 4 KiB a token in 16 bit: 16 requests x 32,768 tokens are 2.15 GB, which an H200 reads in
0.50 ms at the 4.3 TB/s that it copies with; 1 x 32,768: 0.13 GB, 31 us; 1 x 125,000: 0.51 GB, 119 us. The 52, 3 and 12 GFLOP
of 6 rows are 65, 4 and 16 us at 790 TFLOP/s: bandwidth binds, up to about 45 rows.

Prediction (before the first run). Triton at 16 x 32,768: 0.59 ms, 85 % of the copy: its loop issues about 590 instructions a
warp for 32 KiB, a third of what bandwidth leaves time for, and pieces are 1 % of the bytes; at 1 x 32,768: 43 us, 72 %, of
which about 10 us are launch, first block and merge; 1 x 125,000: 84 %. FA3: 85 to 90 % at the large shapes. FlashInfer: 75 to
85 %. Pages of 16 read like single slots, since a head's row of 256 bytes is what lies together either way. Float8: half the
bytes, of which our kernel reads 50 to 65 % of the copy's rate, being bound by conversion. The twin: below 10 %. SGLang's own
verification in Triton: 3 to 6 % at 16 requests, 1 % or less at one.
"""

import argparse
import itertools
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from triton.runtime.errors import OutOfResources

from longdraft.bench.card_time import copy_bandwidth, seconds
from longdraft.bench.record import make_record, write_record
from longdraft.bench.sglang_verify import SglangVerify
from longdraft.kernels.hybrid_attention import hybrid_tree_attention
from longdraft.kernels.plan import AttentionPlan
from longdraft.kernels.prefix_attention import BACKENDS, prefix_attention
from longdraft.kernels.prefix_fit import FLOAT8
from longdraft.kernels.triton_prefix import Tile, tile_for, triton_prefix_attention

HEADS, KV_HEADS, SIZE = 32, 8, 128
SCALE = SIZE**-0.5
SHAPES = ["16x32768x6", "1x32768x6", "1x125000x6"]
READ_BYTES = 2 << 30  # a pass goes over the caches of as many layers as this takes, so that no layer stays in L2
DTYPES = {"bfloat16": torch.bfloat16, "float8": FLOAT8}


@dataclass(frozen=True)
class Shape:
    """A batch: requests, cached tokens and query rows of each."""

    batch: int
    context: int
    rows: int

    @staticmethod
    def parse(text: str) -> "Shape":
        """From ``16x32768x6``."""
        try:
            batch, context, rows = (int(x) for x in text.split("x"))
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r}: write requests x tokens x rows, such as 16x32768x6") from None
        return Shape(batch, context, rows)

    def bytes_read(self, dtype: torch.dtype) -> int:
        """Bytes of one layer's keys and values."""
        return 2 * self.batch * self.context * KV_HEADS * SIZE * dtype.itemsize

    def __str__(self) -> str:
        return f"b{self.batch}_c{self.context}_r{self.rows}"


@dataclass(frozen=True)
class Layers:
    """Caches of some layers, queries and the plan that all layers share."""

    q_THD: torch.Tensor
    caches: list[tuple[torch.Tensor, torch.Tensor]]
    plan: AttentionPlan
    kv_scales: tuple[float, float]


def make_layers(shape: Shape, dtype: torch.dtype, page_size: int, device: str, least: int = READ_BYTES) -> Layers:
    """Random caches whose pages belong to the requests in random order."""
    g = torch.Generator(device).manual_seed(0)
    pages = -(-shape.context // page_size)
    slots = shape.batch * pages * page_size
    listed = torch.randperm(shape.batch * pages, generator=g, device=device).view(shape.batch, pages)
    plan = AttentionPlan.build(listed, [shape.context] * shape.batch, [shape.rows] * shape.batch, page_size)

    def cache() -> torch.Tensor:
        return torch.randn(slots, KV_HEADS, SIZE, generator=g, device=device, dtype=torch.bfloat16).to(dtype)

    q_THD = torch.randn(shape.batch * shape.rows, HEADS, SIZE, generator=g, device=device, dtype=torch.bfloat16)
    layers = max(1, -(-least // shape.bytes_read(dtype)))
    scales = (0.5, 2.0) if dtype == FLOAT8 else (1.0, 1.0)
    return Layers(q_THD, [(cache(), cache()) for _ in range(layers)], plan, scales)


def differences(found: tuple[torch.Tensor, ...], wanted: tuple[torch.Tensor, ...]) -> tuple[float, float]:
    """Error of the output relative to its norm, and the largest of the log-sum-exp."""
    out, want = (x[0].double() for x in (found, wanted))
    return float((out - want).norm() / want.norm()), float((found[1].double() - wanted[1].double()).abs().max())


def attend_all(layers: Layers, attend: Callable[..., Any]) -> None:
    """One pass over the layers."""
    for k_SKD, v_SKD in layers.caches:
        attend(layers.q_THD, k_SKD, v_SKD, layers.plan, SCALE, kv_scales=layers.kv_scales)


def bench_backends(
    shape: Shape, dtype: torch.dtype, page_size: int, names: list[str], copy: float
) -> tuple[dict[str, float], dict[str, bool]]:
    """Figures and checks of one shape."""
    layers = make_layers(shape, dtype, page_size, "cuda")
    figures, checks = dict[str, float](), dict[str, bool]()
    first = layers.q_THD, *layers.caches[0], layers.plan, SCALE

    def report(label: str, work: Callable[[], object], graph: bool, error: float) -> None:
        each = seconds(work, graph) / len(layers.caches)
        rate = shape.bytes_read(dtype) / each
        figures.update({f"{label}_us": each * 1e6, f"{label}_gb_s": rate / 1e9, f"{label}_share_of_copy": rate / copy})
        print(
            f"{label}: {each * 1e6:8.1f} us {rate / 1e9:6.0f} GB/s {rate / copy:6.1%} of copy, off by {error:.0e}",
            flush=True,
        )

    wanted = prefix_attention(*first, "torch", layers.kv_scales)
    for name in names:
        label = f"{name}_{'fp8' if dtype == FLOAT8 else 'bf16'}_page{page_size}_{shape}"
        if reason := BACKENDS[name].unfit(layers.q_THD, layers.caches[0][0], layers.plan):
            print(f"{label}: {reason}", flush=True)
            continue
        error, lse_error = differences(prefix_attention(*first, name, layers.kv_scales), wanted)
        # Weights rounded to bfloat16 are off by 2^-9; FA3 rounds queries and weights to float8, which is off by 2^-4.
        allowed = 0.1 if name == "fa3" and dtype == FLOAT8 else 1e-2
        checks[f"{label}_equals_torch"] = max(error, lse_error) < allowed
        report(
            label,
            partial(attend_all, layers, partial(prefix_attention, backend=name)),
            name != "torch",
            max(error, lse_error),
        )
    if dtype == torch.bfloat16 and page_size == 1:
        label = f"sglang_triton_verify_bf16_page1_{shape}"
        new_k, new_v = torch.randn(2, len(layers.q_THD), KV_HEADS, SIZE, device="cuda", dtype=dtype).unbind()
        verify = SglangVerify.build(layers.plan, new_k, new_v)
        whole = hybrid_tree_attention(
            layers.q_THD, new_k, new_v, *layers.caches[0], layers.plan, SCALE, backend="torch"
        )
        error = float((verify(layers.q_THD, *layers.caches[0], SCALE).double() - whole).norm() / whole.double().norm())
        checks[f"{label}_equals_torch"] = error < 1e-2
        report(label, lambda: [verify(layers.q_THD, *cache, SCALE) for cache in layers.caches], True, error)
    return figures, checks


def sweep(shape: Shape, dtype: torch.dtype, page_size: int, copy: float) -> None:
    """Print the rate of our kernel under other tiles; the best belongs in ``tile_for``."""
    layers = make_layers(shape, dtype, page_size, "cuda")
    first = tile_for(shape.rows * HEADS // KV_HEADS, SIZE, dtype.itemsize)
    found = dict[Tile, float]()

    def rate(tile: Tile) -> None:
        try:
            work = partial(attend_all, layers, partial(triton_prefix_attention, tile=tile))
            found[tile] = shape.bytes_read(dtype) * len(layers.caches) / seconds(work) / copy
        except OutOfResources:
            found[tile] = 0.0
        print(f"{shape} {dtype} page {page_size}: {found[tile]:6.1%} of copy with {tile}", flush=True)

    for keys, warps, stages in itertools.product((32, 64, 128), (2, 4, 8), (2, 3, 4)):
        rate(first._replace(keys=keys, warps=warps, stages=stages))
    best = max(found, key=found.__getitem__)
    for resident, waves in itertools.product((1, 2, 3), (1, 2, 4, 8)):
        rate(best._replace(resident=resident, waves=waves))
    best = max(found, key=found.__getitem__)
    print(
        f"{shape} {dtype} page {page_size}: chosen {found.get(first, 0.0):.1%}, best {found[best]:.1%} {best}",
        flush=True,
    )


def main(argv: list[str] | None = None) -> int:
    """Measure, check, print, write one record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", type=Shape.parse, nargs="+", default=[Shape.parse(x) for x in SHAPES])
    parser.add_argument("--backends", nargs="+", choices=list(BACKENDS), default=list(BACKENDS))
    parser.add_argument("--page-sizes", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--dtypes", nargs="+", choices=list(DTYPES), default=list(DTYPES))
    parser.add_argument("--sweep", action="store_true", help="try other tiles of our kernel instead; writes no record")
    parser.add_argument("--out", type=Path, default=Path("prefix_attention.json"))
    args = parser.parse_args(argv)
    if not torch.cuda.is_available():
        print("error: prefix attention is measured on a GPU, and there is none", file=sys.stderr)
        return 2
    copy = copy_bandwidth()
    print(f"copy: {copy / 1e9:.0f} GB/s", flush=True)
    figures, checks = {"copy_gb_s": copy / 1e9}, dict[str, bool]()
    for shape, name, page_size in itertools.product(args.shapes, args.dtypes, args.page_sizes):
        if args.sweep:
            sweep(shape, DTYPES[name], page_size, copy)
            continue
        more_figures, more_checks = bench_backends(shape, DTYPES[name], page_size, args.backends, copy)
        figures |= more_figures
        checks |= more_checks
    if not args.sweep:
        settings = {"heads": HEADS, "kv_heads": KV_HEADS, "head_dim": SIZE, "graph": "all but torch", "layer": "one"}
        write_record(make_record("prefix_attention", settings, figures, checks), args.out)
    return 0 if all(checks.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
