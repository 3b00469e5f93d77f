"""Attention recovery of sparse sets: ``longdraft bench arr --target T --recipe R.json --documents FILE.jsonl --record RECORD``.

Traces texts that the recipe was not found on (``longdraft calibrate``) and says what share of the target's attention, over the retrieval
heads of all its layers, sets of a budget would have kept (Dustin, equations 1 to 4), by who chose them:

- ``oracle``: the window's own attention, one set for all layers; ``oracle_by_layer``: a set for each layer;
- ``history_lagN``: the recipe's layer of the target, at the row that stands N tokens before the window (figure 2);
- ``lookahead``: the draft, alone (figure 3); ``hybrid``: both, as the recipe splits the budget (figure 4, layer by layer);
- ``recent``: sinks and the last tokens, as StreamingLLM.

All but the oracles and ``recent`` hold sinks and window within the budget. The record has the recovery of every split of the budget
between lookahead and history too (figure 13 in shape: recovery in place of accuracy) and, with ``--kl-points``, how recovery and the
distortion of the output go together (appendix B). ``longdraft bench arr_figures`` draws all of it.

Legend: S layers, W verifications, N tokens.
"""

import argparse
import sys
from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from longdraft.bench.arr_figures import draw
from longdraft.bench.arr_kl import kl_points, pearson
from longdraft.bench.record import check_record, make_record, write_record
from longdraft.draft_models.sparse_recipe import PROTECTED, SparseRecipe
from longdraft.errors import UserError
from longdraft.train.calibration.pair import load_lookahead, load_looked_at
from longdraft.train.calibration.recovery import SINKS, Split, choose_sets, oracle_sets, recovery, valid
from longdraft.train.calibration.search import lookahead_values
from longdraft.train.calibration.traces import Trace, Tracer, Windows, own_text
from longdraft.train.config import DataSettings, TargetSettings
from longdraft.train.documents import JsonlRows
from longdraft.train.target import load_tokenizer

CLOSE = 1e-4  # sums of float32 that are equal


def recent_sets(length_W: torch.Tensor, tokens: int, budget: int) -> torch.Tensor:
    """Sinks and the last tokens, ``budget`` in all, bool ``[W, N]``."""
    place_N = torch.arange(tokens)
    return valid(length_W, tokens) & ((place_N < SINKS) | (place_N >= length_W[:, None] - (budget - SINKS)))


def policies(
    trace: Trace, lags: Sequence[int], target: int, draft: Sequence[int], split: Split
) -> dict[str, torch.Tensor]:
    """Sets of one budget by name, bool ``[W, N]``, or ``[S, W, N]`` where every layer has its own."""
    length_W, attention_SWN = trace.length_W, trace.attention_SWN
    look_WN = trace.lookahead_SWN[list(draft)].sum(0) if draft else None
    alone = Split(split.budget)
    found = {
        "oracle": oracle_sets(attention_SWN.mean(0), length_W, split.budget),
        "oracle_by_layer": oracle_sets(attention_SWN, length_W, split.budget),
        "recent": recent_sets(length_W, attention_SWN.shape[-1], split.budget),
    }
    for place, lag in enumerate(lags):
        found[f"history_lag{lag}"] = choose_sets(trace.history_GSWN[place, target], None, length_W, alone)
    if look_WN is not None:
        last_WN = trace.history_GSWN[list(lags).index(1), target]
        found["lookahead"] = choose_sets(last_WN, look_WN, length_W, Split(split.budget, split.most))
        found["hybrid"] = choose_sets(last_WN, look_WN, length_W, split)
    return found


def shared_split(recipe: SparseRecipe, budget: int) -> Split:
    """The recipe's split in the same proportion of another budget, as serving divides it."""
    share = recipe.lookahead / Split(recipe.budget).most
    return Split(budget, round(share * Split(budget).most))


class Recoveries:
    """Mean recoveries over texts by policy and budget, and by split."""

    def __init__(self, recipe: SparseRecipe, draft: Sequence[int], lags: Sequence[int], budgets: Sequence[int]) -> None:
        self.recipe, self.draft, self.lags, self.budgets = recipe, draft, lags, budgets
        self.layers: dict[str, list[torch.Tensor]] = defaultdict(list)
        self.splits: dict[tuple[int, int], list[float]] = defaultdict(list)

    def add(self, trace: Trace, step: int) -> None:
        """Count one text; ``step`` tokens lie between two splits."""
        target = self.recipe.target.layer
        for budget in self.budgets:
            sets = policies(trace, self.lags, target, self.draft, shared_split(self.recipe, budget))
            for name, set_WN in sets.items():
                self.layers[f"{name}_k{budget}"].append(recovery(trace.attention_SWN, set_WN).mean(-1))
            if self.draft:
                self._add_splits(trace, budget, step)

    def _add_splits(self, trace: Trace, budget: int, step: int) -> None:
        attention_WN = trace.attention_SWN.mean(0)
        last_WN = trace.history_GSWN[list(self.lags).index(1), self.recipe.target.layer]
        look_WN = trace.lookahead_SWN[list(self.draft)].sum(0)
        for lookahead in lookahead_values(budget, step):
            set_WN = choose_sets(last_WN, look_WN, trace.length_W, Split(budget, lookahead))
            self.splits[budget, lookahead].append(float(recovery(attention_WN, set_WN).mean()))

    def by_layer(self) -> dict[str, list[float]]:
        """``[S]`` for each policy and budget."""
        return {name: torch.stack(found).mean(0).tolist() for name, found in self.layers.items()}

    def figures(self) -> dict[str, float]:
        """Means over layers."""
        return {f"arr_{name}": round(sum(row) / len(row), 5) for name, row in self.by_layer().items()}

    def split_rows(self) -> dict[str, list[list[float]]]:
        """Pairs of lookahead and recovery for each budget."""
        rows: dict[str, list[list[float]]] = defaultdict(list)
        for (budget, lookahead), found in sorted(self.splits.items()):
            rows[str(budget)].append([lookahead, round(sum(found) / len(found), 5)])
        return dict(rows)


def checks_of(by_layer: dict[str, list[float]], budgets: Sequence[int]) -> dict[str, bool]:
    """What must hold of any recovery (U4): it is a share, no policy beats its oracle, and more tokens recover more."""
    means = {name: sum(row) / len(row) for name, row in by_layer.items()}
    kinds = {name.rpartition("_k")[0] for name in means}
    ordered = sorted(budgets)
    return {
        "shares": all(0 <= x <= 1 + CLOSE for row in by_layer.values() for x in row),
        "no_policy_beats_the_oracle": all(
            means[f"{kind}_k{k}"] <= means[f"oracle_k{k}"] + CLOSE
            for kind in kinds - {"oracle_by_layer"}
            for k in budgets
        ),
        "own_sets_beat_a_shared_one": all(
            means[f"oracle_by_layer_k{k}"] >= means[f"oracle_k{k}"] - CLOSE for k in budgets
        ),
        "oracle_grows_with_the_budget": all(
            means[f"oracle_k{a}"] <= means[f"oracle_k{b}"] + CLOSE for a, b in pairwise(ordered)
        ),
    }


def known_heads(
    recipe: SparseRecipe, layers: int, draft: Sequence[int] | None
) -> tuple[list[list[int]], list[list[int]]]:
    """Retrieval heads of all layers of target and draft, which a calibration leaves in its recipe.

    Raises:
        UserError: a recipe without them, or of other models.
    """
    heads = recipe.provenance.get("retrieval_heads", {})
    target, of_draft = heads.get("target", []), heads.get("draft", [])
    if len(target) != layers or (draft is not None and len(of_draft) != len(draft)):
        raise UserError(
            f"the recipe has retrieval heads of {len(target)} and {len(of_draft)} layers, target and draft have {layers} and "
            f"{0 if draft is None else len(draft)}: give the one that longdraft calibrate wrote for this pair"
        )
    if draft is not None and (missing := {each.layer for each in recipe.draft} - set(draft)):
        raise UserError(
            f"the recipe looks at the draft's layers {sorted(missing)}, it has {list(draft)}: give the recipe of this draft"
        )
    return target, of_draft


def read_texts(path: Path, tokenizer: Any, least: int, count: int) -> list[list[int]]:
    """Tokens of the first documents of a JSONL file that have as many as are needed.

    Raises:
        UserError: there is none, no such file, or a line that holds no text.
    """
    rows = JsonlRows(str(path), DataSettings(train=str(path)))
    texts: list[list[int]] = []
    for number in range(len(rows)):
        row, where = rows.row(number)
        if not isinstance(row.get("text"), str):
            raise UserError(f"{where}: has no text: give a string under 'text'")
        ids = list(tokenizer(row["text"], verbose=False).input_ids)
        if len(ids) >= least:
            texts.append(ids)
        if len(texts) == count:
            break
    if not texts:
        raise UserError(f"{path} has no document of {least:,} tokens: lower --tokens")
    return texts


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="longdraft bench arr", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--target", required=True)
    parser.add_argument(
        "--draft", help="of any kind that longdraft calibrate takes; without one the history alone is looked at"
    )
    parser.add_argument("--recipe", type=Path, required=True, help="what longdraft calibrate wrote for this pair")
    parser.add_argument(
        "--documents", type=Path, required=True, help="JSONL with text, none of which the recipe was found on"
    )
    parser.add_argument("--count", type=int, default=8, help="documents")
    parser.add_argument("--tokens", type=int, default=7500, help="of each before the first verification")
    parser.add_argument("--windows", type=int, default=32, help="verifications along each")
    parser.add_argument("--window", type=int, default=4, help="rows of a verification, and steps of a draft")
    parser.add_argument("--own", action="store_true", help="along the target's own continuations in place of the texts")
    parser.add_argument("--budgets", nargs="+", type=int, default=[64, 128, 256, 512, 1024])
    parser.add_argument("--lags", nargs="+", type=int, default=[1, 2, 4, 8, 16])
    parser.add_argument("--split-step", type=int, default=16, help="tokens between two splits of a budget")
    parser.add_argument("--kl-points", type=int, default=0, help="sets by which recovery and distortion are compared")
    parser.add_argument("--kl-budget", type=int, default=512, help="tokens of each of them")
    parser.add_argument("--kl-rows", type=int, default=64, help="tokens over which they are compared")
    parser.add_argument("--dtype", default="auto", choices=("auto", "float32", "bfloat16"))
    parser.add_argument("--seed", type=int, default=0, help="of the sets of --kl-points")
    parser.add_argument("--plots", type=Path, help="folder to draw into")
    parser.add_argument("--record", type=Path, required=True)
    args = parser.parse_args(argv)
    if 1 not in args.lags or min(args.lags) < 1 or max(args.lags) > args.tokens:
        parser.error(f"--lags {args.lags}: name 1 and others up to --tokens")
    for name in ("count", "windows", "window", "split_step", "kl_rows"):
        if (value := getattr(args, name)) < 1:
            parser.error(f"--{name.replace('_', '-')} {value}: give 1 or more")
    if args.kl_points == 1 or args.kl_points < 0:
        parser.error(f"--kl-points {args.kl_points}: a correlation needs 2 or more, 0 leaves it out")
    if min(args.budgets) <= PROTECTED or args.kl_budget <= PROTECTED:
        parser.error(f"a budget counts {PROTECTED} tokens of sinks and window: give more than that")
    return args


def settings_of(args: argparse.Namespace, recipe: SparseRecipe) -> dict[str, Any]:
    """The record's settings."""
    names = ("count", "tokens", "windows", "window", "own", "budgets", "lags", "kl_budget", "kl_rows", "dtype", "seed")
    files = {"target": args.target, "draft": args.draft, "recipe": args.recipe, "documents": args.documents}
    found = {key: getattr(args, key) for key in names}
    found |= {key: None if path is None else Path(path).name for key, path in files.items()}
    return found | recipe.model_dump(include={"lookahead", "budget"}) | {"target_layer": recipe.target.layer}


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, write one record and, where asked, draw it; 1 where a check fails."""
    args = parse(argv)
    check_record(args.record)
    recipe = SparseRecipe.load(args.recipe)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    settings = TargetSettings(path=args.target, dtype=args.dtype)
    tokenizer, target = load_tokenizer(settings), load_looked_at(settings, device)
    draft = None if args.draft is None else load_lookahead(args.draft, settings, target, tokenizer)
    heads = known_heads(recipe, target.spec.num_layers, None if draft is None else draft.layers)
    windows = Windows(args.tokens, args.windows, args.window)
    texts = read_texts(args.documents, tokenizer, windows.end, args.count)
    places = [] if draft is None else [draft.layers.index(each.layer) for each in recipe.draft]
    tracer, found = (
        Tracer(target.model, draft, *heads, lags=args.lags),
        Recoveries(recipe, places, args.lags, args.budgets),
    )
    looped = 0
    for number, ids in enumerate(texts):
        text = own_text(target.model, ids[: args.tokens], windows.end - args.tokens) if args.own else ids
        looped += text is None
        if text is not None:
            found.add(tracer.trace(text[: windows.end], windows), args.split_step)
        print(f"text {number + 1} of {len(texts)}{': loops, left out' if text is None else ''}", flush=True)
    if looped == len(texts):
        raise UserError(f"--own: all {looped} continuations loop: give other documents, or trace the texts as they are")
    figures: dict[str, float] = {"texts": len(texts) - looped, "looping": looped, **found.figures()}
    points: list[dict[str, float]] = []
    if args.kl_points:
        points = kl_points(
            target.model, texts[0][: args.tokens], args.kl_rows, args.kl_budget, args.kl_points, args.seed
        )
        figures["kl_pearson"] = round(pearson(points), 4)
    by_layer = {name: [round(x, 5) for x in row] for name, row in found.by_layer().items()}
    checks = checks_of(found.by_layer(), args.budgets)
    record = make_record(
        "arr", settings_of(args, recipe), figures, checks, layers=by_layer, splits=found.split_rows(), kl=points
    )
    write_record(record, args.record)
    for name, value in figures.items():
        print(f"{name:<32} {value}")
    if args.plots is not None:
        draw([record], args.plots)
    return 0 if all(checks.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
