"""python -m longdraft.bench.draft_step [--batches 1 16] [--context 4096] [--steps 5] --out bench/results/draft_step_h200.json

A LongSpec draft's chain of steps in one CUDA graph, as the server replays it: Llama-8B's shape in bfloat16, a ranked head of 32,768
rows, random weights, a view of 4,096 cached tokens a request. Three ways, in milliseconds a chain and launches a chain:

- ``masked``: the module, whole rings gathered and masked, logits over the whole vocabulary (what was served before);
- ``module``: the module over rings that are read in place;
- ``fused``: :class:`longdraft.draft_models.fused_step.FusedStep`, which is served.

Floor. A step reads 252 million weights and 134 million of the ranked head, 772 MB, and a window of 512 tokens and a view of 4,096 in
a layer each, 19 MB a request: five steps and the last token's keys and values 3.98 GB at batch 1 and 5.4 GB at 16, 0.93 and 1.25 ms
at the 4.3 TB/s that an H200 copies with.

Prediction (before the first run). Launches a step: ``masked`` about 115 (three rotations of 14, a masked attention of some 20, three
scattered writes, 10 for FA3's log-sum-exp and the whole vocabulary's logits), ``module`` about 80, ``fused`` 20 (7 products, 2 x 3 of
FA3, 7 of ours) and some four for products that the library splits; beside the steps ``fused`` has about 12 a chain. Batch 1:
``masked`` 2.4 ms, ``module`` 1.9 ms, ``fused`` 1.25 ms: products at 88 % of the copy's rate, 1.05 ms, and 2 us for each of 100
launches between them. Batch 16: ``fused`` 1.75 ms, ``masked`` 3.1 ms.
"""

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig

from longdraft.bench.card_time import copy_bandwidth, seconds
from longdraft.bench.gpu_full_speed import LLAMA_8B
from longdraft.bench.record import make_record, write_record
from longdraft.draft_models.chain import propose_chain
from longdraft.draft_models.config import LongSpecConfig, LongSpecSettings
from longdraft.draft_models.fused_step import FusedStep
from longdraft.draft_models.longspec import LongSpecDraft
from longdraft.draft_models.rope import Rotary
from longdraft.draft_models.target import TargetSpec
from longdraft.draft_models.tree_steps import rows_plan
from longdraft.draft_models.window_state import WindowState
from longdraft.kernels.plan import AttentionPlan
from longdraft.kernels.prefix_attention import prefix_attention, prefix_output
from longdraft.kernels.row_ops import best_id

HEAD = 32_768
WAYS = ("masked", "module", "fused")
CLOSE = 2e-2  # of hidden rows, relative to their norm: a layer rounds a dozen times to bfloat16, which is 4e-3 a number


class MaskedState(WindowState):
    """Rings that are gathered and read through a mask on every device."""

    def attend(
        self,
        row_B: torch.Tensor,
        position_B: torch.Tensor,
        q_BHD: torch.Tensor,
        k_BKD: torch.Tensor,
        v_BKD: torch.Tensor,
        window: AttentionPlan | None = None,
        backend: str | None = None,
    ) -> torch.Tensor:
        return super().attend(row_B, position_B, q_BHD, k_BKD, v_BKD)


def make_draft(shape: dict[str, Any], head: int, dtype: torch.dtype, device: str, window: int = 512) -> LongSpecDraft:
    """A draft with random weights, bound to a random embedding and head, of which it ranks some rows spread evenly."""
    spec = TargetSpec.from_config(LlamaConfig(**shape))
    torch.manual_seed(0)
    with torch.device(device):
        draft = LongSpecDraft(LongSpecConfig(spec, LongSpecSettings(head_tokens=head, window=window))).to(dtype)
        embedding, rows = (0.02 * torch.randn(spec.vocab_size, spec.hidden_size, dtype=dtype) for _ in range(2))
    draft.rotary = Rotary(spec).to(device)
    draft.rank_head(torch.arange(head) * (spec.vocab_size // head))
    return draft.bind(embedding, rows)


@dataclass(frozen=True)
class Case:
    """A batch: rings that hold the tokens before the roots, and a cache whose slots belong to the requests in random order."""

    draft: LongSpecDraft
    states: dict[str, WindowState]
    fused: FusedStep
    row_B: torch.Tensor
    root_B: torch.Tensor
    position_B: torch.Tensor
    cache: torch.Tensor
    plan: AttentionPlan
    steps: int
    hidden: list[torch.Tensor]

    @staticmethod
    def build(draft: LongSpecDraft, batch: int, context: int, steps: int) -> "Case":
        """Every request's text is ``context`` tokens long, all of which its draft reads."""
        weight, t = draft.self_attn.q_proj.weight, draft.config.target
        device, g = weight.device, torch.Generator(weight.device).manual_seed(1)
        ids = torch.randint(0, t.vocab_size, (batch, context + 1), generator=g, device=device)
        states = {way: (MaskedState if way == "masked" else WindowState)(draft, batch + 1, steps) for way in WAYS}
        for state in states.values():
            for row, text in enumerate(ids.tolist()):
                state.rebuild(row, text[:context], context)
        shape = 2, batch * context, t.num_kv_heads, t.head_dim
        cache = torch.randn(*shape, generator=g, device=device, dtype=weight.dtype)
        pages_BW = torch.randperm(batch * context, generator=g, device=device).int().view(batch, context)
        lens_B = torch.full_like(pages_BW[:, 0], context)
        plan = rows_plan(batch, 1, device, pages_BW, lens_B)
        row_B, position_B = torch.arange(batch, device=device), lens_B.long()
        return Case(draft, states, FusedStep(draft), row_B, ids[:, -1], position_B, cache, plan, steps, [])

    def run(self, way: str) -> torch.Tensor:
        """Drafted tokens ``[B, steps]``; :attr:`hidden` are the rows behind each step."""
        head_ids = self.draft.target_ids
        assert head_ids is not None
        keys, values = self.cache
        read = prefix_attention if way == "masked" else prefix_output
        self.hidden.clear()

        def cross_attend(q_BHD: torch.Tensor) -> torch.Tensor:
            found = read(q_BHD, keys, values, self.plan, q_BHD.shape[-1] ** -0.5)
            return found[0] if isinstance(found, tuple) else found

        def logits(hidden_BE: torch.Tensor) -> torch.Tensor:
            self.hidden.append(hidden_BE)
            return self.draft.logits(hidden_BE) if way == "masked" else self.draft.draft_logits(hidden_BE)

        def choose(logits_BV: torch.Tensor, at_B: torch.Tensor, step: int) -> torch.Tensor:
            return logits_BV.argmax(-1) if way == "masked" else best_id(logits_BV, head_ids)

        return propose_chain(
            self.states[way], self.row_B, self.root_B, self.position_B, self.steps, cross_attend, choose, logits,
            fused=self.fused if way == "fused" else None, keep_last=True,
        )  # fmt: skip

    @property
    def floor_bytes(self) -> int:
        """Weights, head, windows and views that a chain reads."""
        t, draft = self.draft.config.target, self.draft
        weights = sum(p.nbytes for p in draft.parameters()) + draft.drafting_head_NE.nbytes
        token = 2 * t.num_kv_heads * t.head_dim * self.cache.itemsize
        read = int(self.plan.lens_B.sum()) + len(self.row_B) * draft.config.settings.window
        kept = draft.self_attn.k_proj.weight.nbytes + draft.self_attn.v_proj.weight.nbytes
        return self.steps * (weights + token * read) + kept


def checks(case: Case) -> dict[str, bool]:
    """The ways read the same: first hidden rows are close, the rings behind a chain as long as the tokens are the same."""
    case.run("masked")
    want = case.hidden[0].clone()
    found = dict[str, bool]()
    for way in WAYS[1:]:
        case.run(way)
        off = float((case.hidden[0].double() - want.double()).norm() / want.double().norm())
        found[f"{way}_first_step_equals_masked"] = off < CLOSE
        a, b = case.states[way], case.states["masked"]
        root = case.row_B, case.position_B % a.ring
        found[f"{way}_stores_the_root_as_masked"] = bool(
            (a.k[root] - b.k[root]).norm() < CLOSE * b.k[root].norm()
            and (a.v[root] - b.v[root]).norm() < CLOSE * b.v[root].norm()
        )
    return found


def launches(work: Callable[[], object]) -> int:
    """Kernels, copies and fills that the card runs; 0 where the profiler sees none."""
    from torch.profiler import ProfilerActivity, profile

    work()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        work()
        torch.cuda.synchronize()
    return sum(str(event.device_type).endswith("CUDA") for event in seen.events() or [])


def measure(case: Case, way: str, copy: float) -> tuple[dict[str, float], bool]:
    """Figures of one way, and whether a graph's replay drafts what was drafted eagerly."""
    eager, replayed = case.run(way).clone(), torch.empty_like(case.run(way))
    took = seconds(lambda: replayed.copy_(case.run(way)))
    floor = case.floor_bytes / copy
    figures = {"ms": took * 1e3, "share_of_floor": floor / took, "launches": float(launches(lambda: case.run(way)))}
    return figures, bool(torch.equal(eager, replayed))


def main(argv: list[str] | None = None) -> int:
    """Measure, check, print, write one record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--out", type=Path, default=Path("draft_step.json"))
    args = parser.parse_args(argv)
    if not torch.cuda.is_available():
        print("error: a draft's steps are measured on a GPU, and there is none", file=sys.stderr)
        return 2
    copy = copy_bandwidth()
    figures, right = {"copy_gb_s": copy / 1e9}, dict[str, bool]()
    draft = make_draft(LLAMA_8B, HEAD, torch.bfloat16, "cuda")
    for batch in args.batches:
        case = Case.build(draft, batch, args.context, args.steps)
        figures[f"floor_ms_b{batch}"] = floor = 1e3 * case.floor_bytes / copy
        print(
            f"b{batch:<3} floor  {floor:6.3f} ms of {case.floor_bytes / 1e9:.2f} GB at {copy / 1e9:.0f} GB/s",
            flush=True,
        )
        right |= {f"b{batch}_{name}": value for name, value in checks(case).items()}
        for way in WAYS:
            found, same = measure(case, way, copy)
            figures |= {f"{way}_{name}_b{batch}": round(value, 4) for name, value in found.items()}
            right[f"b{batch}_{way}_graph_equals_eager"] = same
            print(
                f"b{batch:<3} {way:<6} {found['ms']:6.3f} ms, {found['launches']:4.0f} launches, {found['share_of_floor']:.1%} of the floor's rate",
                flush=True,
            )
    settings = {
        "shape": "Llama-8B, random weights", "dtype": "bfloat16", "steps": args.steps, "context": args.context,
        "window": draft.config.settings.window, "head_rows": HEAD, "graph": True,
    }  # fmt: skip
    write_record(make_record("draft_step", settings, figures, right), args.out)
    print(f"checks: {right}; {args.out}")
    return 0 if all(right.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
