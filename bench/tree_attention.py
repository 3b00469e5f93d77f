"""python -m longdraft.bench.tree_attention [--shapes 16x69 1x69 16x6 16x128] --out tree_attention.json

Tree attention and the merge with a prefix part, of one layer, in GB/s and as a share of a measured copy: ``tree`` alone,
``merge`` of two parts, and ``onto``, which is both in one kernel and what a verification runs. Outputs are checked against the
torch twin. Llama-8B's heads: 32 of queries, 8 of keys and values, of 128, in bfloat16.

Floor. A new token's queries and its output are 8 KiB each, its keys and values 4 KiB together, a log-sum-exp 128 B: ``tree``
moves 20.1 KiB a token, ``merge`` 24.4, ``onto`` 28.3. 16 requests x 69 nodes: 22.8, 27.6 and 32.0 MB, which an H200 moves in
5.3, 6.4 and 7.4 us at the 4.3 TB/s that it copies with; 1 x 69: 0.3, 0.4 and 0.5 us; 16 x 128: 9.8, 11.9 and 13.8 us. The
1.2 GFLOP of 16 x 69 under any mask are 1.6 us at 790 TFLOP/s, beside the reading.

Prediction (before the first run). 16 x 69: ``tree`` 9 us, 59 % of the copy: programs of 64 packed rows, two a multiprocessor,
run 2.4 waves of a three-block loop whose head and tail nothing hides; ``merge`` 8 us, 80 %; ``onto`` 11 us, 65 %, so 6 us
a layer less than both. 16 x 128: ``onto`` 18 us, 75 %. 1 x 69 and 16 x 6: every one of them 3 to 5 us, the time of a small
kernel in a CUDA graph, so ``onto`` saves a launch, 2 to 3 us a layer.
"""

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from longdraft.bench.card_time import copy_bandwidth, seconds
from longdraft.bench.prefix_attention import HEADS, KV_HEADS, SCALE, SIZE, differences
from longdraft.bench.record import make_record, write_record
from longdraft.kernels.merge import merge_attention, torch_merge_attention
from longdraft.kernels.plan import AttentionPlan
from longdraft.kernels.tree_attention import torch_tree_attention, tree_attention
from longdraft.kernels.tree_bits import ancestor_bits, words

SHAPES = ["16x69", "1x69", "16x6", "16x128"]
PASS_BYTES = 256 << 20  # a pass goes over the tensors of as many layers as this takes, so that no layer stays in L2
ELEMENT = 2

Part = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Shape:
    """A batch: requests and new tokens of each."""

    batch: int
    rows: int

    @staticmethod
    def parse(text: str) -> "Shape":
        """From ``16x69``."""
        try:
            batch, rows = (int(x) for x in text.split("x"))
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r}: write requests x new tokens, such as 16x69") from None
        return Shape(batch, rows)

    def bytes_moved(self) -> dict[str, int]:
        """Bytes that each kernel must read and write once in one layer."""
        tokens = self.batch * self.rows
        part = tokens * HEADS * (SIZE * ELEMENT + 4)
        inputs = tokens * ((HEADS + 2 * KV_HEADS) * SIZE * ELEMENT + 8 * words(self.rows))
        return {"tree": inputs + part, "merge": 3 * part, "onto": inputs + 2 * part}

    def __str__(self) -> str:
        return f"b{self.batch}_t{self.rows}"


@dataclass(frozen=True)
class Layer:
    """One layer's new tokens, and both parts of its attention as tensors behind one another for ``merge``."""

    q_THD: torch.Tensor
    k_TKD: torch.Tensor
    v_TKD: torch.Tensor
    out_2THD: torch.Tensor
    lse_2TH: torch.Tensor

    @property
    def prefix(self) -> Part:
        """The part that a prefix's attention would have left."""
        return self.out_2THD[0], self.lse_2TH[0]


def make_batch(shape: Shape, device: str, least: int = PASS_BYTES) -> tuple[list[Layer], AttentionPlan, torch.Tensor]:
    """Random layers, and the plan and bits of random trees that all layers share."""
    g = torch.Generator(device).manual_seed(0)
    tokens = shape.batch * shape.rows

    def normal(*sizes: int) -> torch.Tensor:
        return torch.randn(*sizes, SIZE, generator=g, device=device, dtype=torch.bfloat16)

    def layer() -> Layer:
        q, k, v = (normal(tokens, heads) for heads in (HEADS, KV_HEADS, KV_HEADS))
        return Layer(q, k, v, normal(2, tokens, HEADS), torch.randn(2, tokens, HEADS, generator=g, device=device))

    node_T = torch.arange(shape.rows, device=device)
    parents_BT = (torch.rand(shape.batch, shape.rows, generator=g, device=device) * node_T).long()
    parents_BT[:, 0] = -1
    pages_BW = torch.zeros(shape.batch, 1, dtype=torch.int32, device=device)
    plan = AttentionPlan.build(pages_BW, [0] * shape.batch, [shape.rows] * shape.batch)
    count = max(1, -(-least // shape.bytes_moved()["tree"]))
    return [layer() for _ in range(count)], plan, ancestor_bits(parents_BT).flatten(0, 1)


def kernels(plan: AttentionPlan, bits_TW: torch.Tensor, twin: bool = False) -> dict[str, Callable[[Layer], Part]]:
    """What is measured, by name; or the twins that it is checked against."""
    attend, merge = (torch_tree_attention, torch_merge_attention) if twin else (tree_attention, merge_attention)
    return {
        "tree": lambda x: attend(x.q_THD, x.k_TKD, x.v_TKD, plan, SCALE, bits_TW),
        "merge": lambda x: merge(x.out_2THD, x.lse_2TH),
        "onto": lambda x: attend(x.q_THD, x.k_TKD, x.v_TKD, plan, SCALE, bits_TW, onto=x.prefix),
    }


def all_layers(attend: Callable[[Layer], Part], layers: list[Layer]) -> None:
    """One pass."""
    for layer in layers:
        attend(layer)


def bench_shape(shape: Shape, copy: float) -> tuple[dict[str, float], dict[str, bool]]:
    """Figures and checks of one shape."""
    layers, plan, bits_TW = make_batch(shape, "cuda")
    figures, checks = dict[str, float](), dict[str, bool]()
    twins = kernels(plan, bits_TW, twin=True)
    for name, attend in kernels(plan, bits_TW).items():
        label = f"{name}_{shape}"
        error, lse_error = differences(attend(layers[0]), twins[name](layers[0]))
        checks[f"{label}_equals_torch"] = max(error, lse_error) < 5e-3
        each = seconds(partial(all_layers, attend, layers)) / len(layers)
        rate = shape.bytes_moved()[name] / each
        figures |= {f"{label}_us": each * 1e6, f"{label}_gb_s": rate / 1e9, f"{label}_share_of_copy": rate / copy}
        print(
            f"{label}: {each * 1e6:6.1f} us {rate / 1e9:6.0f} GB/s {rate / copy:6.1%} of copy, off by {error:.1e}, "
            f"log-sum-exp by {lse_error:.1e}",
            flush=True,
        )
    return figures, checks


def main(argv: list[str] | None = None) -> int:
    """Measure, check, print, write one record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", type=Shape.parse, nargs="+", default=[Shape.parse(x) for x in SHAPES])
    parser.add_argument("--out", type=Path, default=Path("tree_attention.json"))
    args = parser.parse_args(argv)
    if not torch.cuda.is_available():
        print("error: tree attention is measured on a GPU, and there is none", file=sys.stderr)
        return 2
    copy = copy_bandwidth()
    print(f"copy: {copy / 1e9:.0f} GB/s", flush=True)
    figures, checks = {"copy_gb_s": copy / 1e9}, dict[str, bool]()
    for shape in args.shapes:
        more_figures, more_checks = bench_shape(shape, copy)
        figures |= more_figures
        checks |= more_checks
    settings = {
        "heads": HEADS,
        "kv_heads": KV_HEADS,
        "head_dim": SIZE,
        "dtype": "bfloat16",
        "graph": True,
        "layer": "one",
    }
    write_record(make_record("tree_attention", settings, figures, checks), args.out)
    return 0 if all(checks.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
