"""python -m longdraft.bench.longspec_latency [--context 32768] [--layers 32] --out longspec_latency.json

LongSpec's latency figure in shape (section 4.3, figure 5: tree attention of the target 49.92 ms by EAGLE's dense masked
softmax, 12.54 ms hybrid): the attention of one tree verification in all layers of a Llama-8B shape, one request, a beam tree of
widths [4, 16, 16, 16, 16] and its root, in CUDA graphs, by

- ``dense``: as transformers' eager attention does it, and EAGLE with it: keys and values repeated for every query head, a mask
  ``[T, L + T]`` added to scores, softmax in float32, product;
- ``grouped``: the same without the repetition, the least that a dense masked softmax costs;
- ``sdpa``: torch's fused attention with the mask;
- ``hybrid_<backend>``: :func:`longdraft.kernels.hybrid_attention.hybrid_tree_attention` over a page list of scattered slots.

Outputs of all are compared with float64. Ratios are over the fastest hybrid.

Floor, a layer at 32K. The cache: 134 MB, 31 us at 4.3 TB/s. ``hybrid``: 37 GFLOP, 47 us at 790 TFLOP/s: with 69 rows x 4 heads
a key/value head it is bound by products. ``grouped``: 72 million scores, written and read in 16 bit, masked, widened, weighed
and narrowed: 20 bytes a score, 1.45 GB, 0.34 ms. ``dense`` copies keys and values four times over and reads the copies: 1.2 GB
more, 0.62 ms.

Prediction (before the first run), 32 layers: ``dense`` 24 ms, ``grouped`` 14 ms, ``sdpa`` 7 ms (no split over the context, 32 to
64 programs on 132 multiprocessors, mask read), ``hybrid_fa3`` 2.9 ms, ``hybrid_triton`` 4.5 ms. Ratio of the first to the best
hybrid 8; the paper's is 4.0 on an A100, whose bandwidth is less short of its products.
"""

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.nn.functional import scaled_dot_product_attention

from longdraft.bench.card_time import copy_bandwidth, seconds
from longdraft.bench.prefix_attention import HEADS, KV_HEADS, SCALE, SIZE
from longdraft.bench.record import make_record, write_record
from longdraft.kernels.hybrid_attention import hybrid_tree_attention
from longdraft.kernels.plan import AttentionPlan
from longdraft.kernels.prefix_attention import BACKENDS
from longdraft.kernels.tree_bits import ancestor_bits, unpack_bits

WIDTHS = [4, 16, 16, 16, 16]
GRAPHED = [name for name in BACKENDS if name != "torch"]  # the twin waits for the device
CLOSE = 1e-2  # error relative to the norm; bfloat16 has 4e-3 a number
PAPER = {"paper_dense_ms": 49.92, "paper_hybrid_ms": 12.54}


def beam_parents(widths: list[int]) -> torch.Tensor:
    """``[1, T]``: a root and a beam tree of these widths; the nodes of a depth hang on some of the depth before."""
    g, parents, first, last = torch.Generator().manual_seed(0), [-1], 0, 1
    for width in widths:
        parents += (first + torch.randint(last - first, (width,), generator=g)).tolist()
        first, last = last, last + width
    return torch.tensor([parents], dtype=torch.int32)


@dataclass(frozen=True)
class Verification:
    """Caches of all layers with the new tokens' keys and values behind the prefix, and what the layers share.

    Attributes:
        queries: ``[T, H, D]`` a layer.
        caches: ``[L + T, K, D]`` twice a layer.
        plan: page list of the prefix's slots, scattered, and of the new tokens'.
        bits_TW: the tree's visibility.
        visible_TN: the same for the prefix and the tree, as the dense ways take it.
    """

    queries: list[torch.Tensor]
    caches: list[tuple[torch.Tensor, torch.Tensor]]
    plan: AttentionPlan
    bits_TW: torch.Tensor
    visible_TN: torch.Tensor

    @staticmethod
    def build(
        context: int, layers: int, widths: list[int], device: str, dtype: torch.dtype = torch.bfloat16
    ) -> "Verification":
        """Random numbers of a given shape."""
        g = torch.Generator(device).manual_seed(0)
        bits_TW = ancestor_bits(beam_parents(widths).to(device), len(widths))[0]
        rows = len(bits_TW)

        def normal(count: int, heads: int) -> torch.Tensor:
            return torch.randn(count, heads, SIZE, generator=g, device=device, dtype=dtype)

        slots = torch.cat(
            [torch.randperm(context, generator=g, device=device), context + torch.arange(rows, device=device)]
        )
        seen = torch.ones(rows, context, dtype=torch.bool, device=device)
        return Verification(
            [normal(rows, HEADS) for _ in range(layers)],
            [(normal(context + rows, KV_HEADS), normal(context + rows, KV_HEADS)) for _ in range(layers)],
            AttentionPlan.build(slots[None], [context], [rows]),
            bits_TW,
            torch.cat([seen, unpack_bits(bits_TW, rows)], 1),
        )

    def hybrid(self, layer: int, backend: str | None, dtype: torch.dtype | None = None) -> torch.Tensor:
        """One layer by the hybrid, ``[T, H, D]``; in another dtype for reference."""
        q, k, v = (x.to(dtype or x.dtype) for x in (self.queries[layer], *self.caches[layer]))
        context = self.plan.lens[0]
        args = q, k[context:], v[context:], k, v, self.plan, SCALE, self.bits_TW, backend
        return hybrid_tree_attention(*args)


Dense = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def dense_softmax(q_THD: torch.Tensor, k_NKD: torch.Tensor, v_NKD: torch.Tensor, bias_TN: torch.Tensor) -> torch.Tensor:
    """Transformers' eager attention, ``[T, H, D]``; the mask is added, 0 or -inf in the queries' dtype."""
    group = q_THD.shape[1] // k_NKD.shape[1]
    k_HND, v_HND = (x.transpose(0, 1).repeat_interleave(group, 0) for x in (k_NKD, v_NKD))
    score_HTN = q_THD.transpose(0, 1) @ k_HND.transpose(1, 2) * SCALE + bias_TN
    weight_HTN = torch.softmax(score_HTN, -1, dtype=torch.float32).to(q_THD.dtype)
    return (weight_HTN @ v_HND).transpose(0, 1)


def grouped_softmax(
    q_THD: torch.Tensor, k_NKD: torch.Tensor, v_NKD: torch.Tensor, bias_TN: torch.Tensor
) -> torch.Tensor:
    """The same with the heads of a group as rows of one matrix: nothing is repeated."""
    rows, heads, size = q_THD.shape
    kv_heads = k_NKD.shape[1]
    q_KRD = q_THD.unflatten(1, (kv_heads, -1)).permute(1, 2, 0, 3).reshape(kv_heads, -1, size)
    score_KGTN = (q_KRD @ k_NKD.permute(1, 2, 0) * SCALE).unflatten(1, (-1, rows)) + bias_TN
    weight_KGTN = torch.softmax(score_KGTN, -1, dtype=torch.float32).to(q_THD.dtype)
    out_KRD = weight_KGTN.flatten(1, 2) @ v_NKD.transpose(0, 1)
    return out_KRD.unflatten(1, (-1, rows)).permute(2, 0, 1, 3).reshape(rows, heads, size)


def fused_softmax(q_THD: torch.Tensor, k_NKD: torch.Tensor, v_NKD: torch.Tensor, bias_TN: torch.Tensor) -> torch.Tensor:
    """Torch's fused attention; the heads of a group are rows of one head, which it would otherwise repeat for a mask."""
    rows, heads, size = q_THD.shape
    kv_heads = k_NKD.shape[1]
    q_KRD = q_THD.unflatten(1, (kv_heads, -1)).permute(1, 2, 0, 3).reshape(1, kv_heads, -1, size)
    k_KND, v_KND = (x.transpose(0, 1)[None] for x in (k_NKD, v_NKD))
    bias_RN = bias_TN.repeat(heads // kv_heads, 1)
    out_KRD = scaled_dot_product_attention(q_KRD, k_KND, v_KND, attn_mask=bias_RN, scale=SCALE)[0]
    return out_KRD.unflatten(1, (-1, rows)).permute(2, 0, 1, 3).reshape(rows, heads, size)


DENSE: dict[str, Dense] = {"dense": dense_softmax, "grouped": grouped_softmax, "sdpa": fused_softmax}


def ways(case: Verification, backends: list[str]) -> dict[str, Callable[[int], torch.Tensor]]:
    """Everything that is measured: name to the attention of one layer by its number."""
    bias_TN = torch.zeros(case.visible_TN.shape, dtype=case.queries[0].dtype, device=case.visible_TN.device)
    bias_TN.masked_fill_(~case.visible_TN, float("-inf"))

    def by_dense(attend: Dense) -> Callable[[int], torch.Tensor]:
        return lambda layer: attend(case.queries[layer], *case.caches[layer], bias_TN)

    def by_hybrid(backend: str) -> Callable[[int], torch.Tensor]:
        return lambda layer: case.hybrid(layer, backend)

    hybrids = {f"hybrid_{name}": by_hybrid(name) for name in backends}
    return {name: by_dense(attend) for name, attend in DENSE.items()} | hybrids


def errors(case: Verification, found: dict[str, Callable[[int], torch.Tensor]]) -> dict[str, float]:
    """Error of each way's first layer relative to the norm of float64's."""
    want = case.hybrid(0, "torch", torch.float64)
    return {name: float((attend(0).double() - want).norm() / want.norm()) for name, attend in found.items()}


def main(argv: list[str] | None = None) -> int:
    """Measure, check, print, write one record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--context", type=int, default=32768)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--widths", type=int, nargs="+", default=WIDTHS)
    parser.add_argument("--backends", nargs="+", choices=GRAPHED, default=GRAPHED)
    parser.add_argument("--out", type=Path, default=Path("longspec_latency.json"))
    args = parser.parse_args(argv)
    if not torch.cuda.is_available():
        print("error: the latency of tree attention is measured on a GPU, and there is none", file=sys.stderr)
        return 2
    case = Verification.build(args.context, args.layers, args.widths, "cuda")
    backends = [x for x in args.backends if BACKENDS[x].unfit(case.queries[0], case.caches[0][0], case.plan) is None]
    found = ways(case, backends)
    figures, checks = {"copy_gb_s": copy_bandwidth() / 1e9, **PAPER}, dict[str, bool]()
    for name, error in errors(case, found).items():
        checks[f"{name}_equals_float64"] = error < CLOSE
        attend = found[name]
        figures[f"{name}_ms"] = 1e3 * seconds(lambda attend=attend: [attend(layer) for layer in range(args.layers)])  # type: ignore[misc]
        print(f"{name}: {figures[f'{name}_ms']:8.3f} ms in {args.layers} layers, off by {error:.1e}", flush=True)
    best = min((figures[f"hybrid_{name}_ms"] for name in backends), default=float("nan"))
    for name in DENSE:
        figures[f"ratio_{name}_to_hybrid"] = figures[f"{name}_ms"] / best
    print({name: round(x, 2) for name, x in figures.items() if name.startswith("ratio")}, flush=True)
    settings = {
        "context": args.context, "layers": args.layers, "widths": args.widths, "batch": 1, "rows": len(case.bits_TW),
        "heads": HEADS, "kv_heads": KV_HEADS, "head_dim": SIZE, "dtype": "bfloat16", "page_size": 1, "graph": True,
    }  # fmt: skip
    write_record(make_record("longspec_latency", settings, figures, checks), args.out)
    return 0 if all(checks.values()) and backends else 1


if __name__ == "__main__":
    sys.exit(main())
