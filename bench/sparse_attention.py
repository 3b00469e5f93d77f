"""python -m longdraft.bench.sparse_attention [--shapes 8x16384x5 ...] [--budgets 128 256 512] --out sparse_attention.json

The self-attention of a verification over the whole cache against one over a sparse set (Dustin, Figure 8), all layers of a Llama-8B
shape, by FlashAttention-3 or what there is: milliseconds, their ratio without and with what choosing the set costs (scores of four heads
of a target layer and of a draft layer over the whole context, Eq. 5 and 6, and the page list), and that cost's share of both sides.

Floor. A layer's keys and values are 4 KiB a token in 16 bit: 16 x 32,768 tokens are 2.1 GB, 0.50 ms at the 4.3 TB/s that an H200
copies with, 16 ms in 32 layers; 512 tokens are a 64th of that, 8 us, less than a kernel needs to start and end.

Prediction (before the first run). Full: 4.2, 8.0, 8.0 and 15.8 ms at 8 and 16 requests of 16,384 and 32,768 tokens. Sparse at 512: 12 us
a layer, 0.4 ms, whatever the context is: ratios of 11, 21, 21 and 41 (paper, for its models: 9.4, 15.6, 16.6 and 27.9). Choosing, 0.2 to
0.45 ms, is 3 to 5 % of the full side, more than the paper's 0.5 to 0.8 % of a 72B's 80 layers, and as much as the sparse side itself.
"""

import argparse
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch

from longdraft.bench.card_time import copy_bandwidth, seconds
from longdraft.bench.head_mass import CHOSEN, LAYERS, last_rows, score
from longdraft.bench.prefix_attention import HEADS, KV_HEADS, SCALE, SIZE, Layers, Shape, attend_all, make_layers
from longdraft.bench.record import make_record, write_record
from longdraft.kernels.plan import AttentionPlan
from longdraft.kernels.prefix_attention import prefix_attention
from longdraft.kernels.view_pages import Lists, view_pages
from longdraft.serve.views.choose import Chosen
from longdraft.serve.views.token_set import SparseBudget, choose_tokens

SHAPES = ["8x16384x5", "16x16384x5", "8x32768x5", "16x32768x5"]
BUDGETS = [128, 256, 512]
CLOSE = 1e-2  # of the output's norm: weights in bfloat16 are off by 2^-9

Figures = dict[str, float]


def choose(layers: Layers, budget: SparseBudget, valid_BR: torch.Tensor) -> Chosen:
    """A set from all rows of one layer (the draft's) and the last row of another (the target's)."""
    draft_BN, target_BN = score(layers, 0, "spread", None), score(layers, 1, "spread", valid_BR)
    return choose_tokens(draft_BN, target_BN, layers.plan.lens_B.long(), budget)


def sparse_plan(layers: Layers, chosen: Chosen, budget: SparseBudget) -> AttentionPlan:
    """The page lists of sets, as a verification reads them."""
    batch, device = len(layers.plan), layers.q_THD.device
    lists = Lists(chosen.column_BV[None], chosen.count_B.long()[None], chosen.start_B, budget.sinks)
    row_B, table_RC = torch.arange(batch, device=device), layers.plan.pages_BW
    pages, read = view_pages(lists, table_RC, row_B, layers.plan.lens_B.long(), None, budget.tokens, 0)
    rows = [layers.plan.max_rows * b for b in range(batch + 1)]
    return AttentionPlan.on_device(pages[0], read[0], layers.plan.cu_rows_B1, rows)


def choose_and_page(layers: Layers, budget: SparseBudget, valid_BR: torch.Tensor) -> None:
    """All that comes before a sparse verification's attention."""
    sparse_plan(layers, choose(layers, budget, valid_BR), budget)


def bench_shape(shape: Shape, budgets: list[int]) -> tuple[Figures, dict[str, bool]]:
    """Figures and checks of one shape."""
    layers = make_layers(shape, torch.bfloat16, 1, "cuda")
    count, valid_BR = len(layers.caches), last_rows(layers)
    figures, checks = Figures(), dict[str, bool]()
    full = LAYERS * seconds(partial(attend_all, layers, prefix_attention)) / count
    figures[f"full_{shape}_ms"] = 1e3 * full
    for tokens in budgets:
        budget, name = SparseBudget(tokens, lookahead=tokens * 3 // 8), f"{tokens}_{shape}"
        plan = sparse_plan(layers, choose(layers, budget, valid_BR), budget)
        few = Layers(layers.q_THD, layers.caches, plan, layers.kv_scales)
        first = few.q_THD, *few.caches[0], plan, SCALE
        out, wanted = prefix_attention(*first)[0].double(), prefix_attention(*first, "torch")[0].double()
        checks[f"sparse_{name}_equals_torch"] = bool((out - wanted).norm() / wanted.norm() < CLOSE)
        checks[f"sparse_{name}_reads_its_budget"] = bool((plan.lens_B == tokens).all())
        sparse = LAYERS * seconds(partial(attend_all, few, prefix_attention)) / count
        cost = seconds(partial(choose_and_page, layers, budget, valid_BR))
        figures |= {
            f"sparse_{name}_ms": 1e3 * sparse,
            f"choice_{name}_ms": 1e3 * cost,
            f"ratio_{name}": full / sparse,
            f"ratio_with_choice_{name}": full / (sparse + cost),
            f"choice_share_of_full_{name}": cost / full,
            f"choice_share_of_sparse_{name}": cost / (sparse + cost),
        }
        print(
            f"{name}: full {1e3 * full:.2f} ms, sparse {1e3 * sparse:.3f} ({full / sparse:.1f} times), with the choice "
            f"{1e3 * (sparse + cost):.3f} ({full / (sparse + cost):.1f} times); the choice is {cost / full:.2%} of full",
            flush=True,
        )
    return figures, checks


def main(argv: list[str] | None = None) -> int:
    """Measure, check, print, write one record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", type=Shape.parse, nargs="+", default=[Shape.parse(x) for x in SHAPES])
    parser.add_argument("--budgets", type=int, nargs="+", default=BUDGETS)
    parser.add_argument("--out", type=Path, default=Path("sparse_attention.json"))
    args = parser.parse_args(argv)
    if not torch.cuda.is_available():
        print("error: sparse attention is measured on a GPU, and there is none", file=sys.stderr)
        return 2
    copy = copy_bandwidth()
    print(f"copy: {copy / 1e9:.0f} GB/s", flush=True)
    figures, checks = {"copy_gb_s": copy / 1e9}, dict[str, bool]()
    settings: dict[str, Any] = {"heads": HEADS, "kv_heads": KV_HEADS, "head_dim": SIZE, "layers": LAYERS, "graph": True}
    settings |= {"chosen_heads": list(CHOSEN["spread"])}
    for shape in args.shapes:
        more_figures, more_checks = bench_shape(shape, args.budgets)
        figures |= more_figures
        checks |= more_checks
        write_record(make_record("sparse_attention", settings, figures, checks), args.out)
    return 0 if all(checks.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
