"""Which layer's history should choose: ``longdraft bench history_layers --target T --recipe R.json --documents FILE.jsonl --record RECORD``.

Sets of tokens chosen by history alone (Dustin, equations 5 and 6 without lookahead), by each layer of the target in turn with its own
retrieval heads, as a recipe of ``longdraft calibrate`` names them. The target summarises documents; along its greedy answers, teacher
forced and with an exact cache, each set has

- its agreement: the share of tokens for which a verification that reads the set and its own rows, nothing else, chooses what the whole
  cache chooses;
- its attention recovery rate (equations 1, 2 and 4) of the retrieval heads, the mean over all layers, by which the paper's Algorithm 1
  chooses the layer, and over the deeper ones alone (``--skip``, as in the calibration's search).

The record says how either recovery goes with agreement over the layers, and which layer each would take. Beside them: ``all_layers``, the
histories of all layers together; ``recent``, sinks and the last tokens; ``random`` tokens; ``oracle``, the window's own attention; and
``whole``, everything, which agrees but for rounding. Answers that loop are left out.

Legend: S layers, W verifications, C rows of each, R = W C, N tokens committed before the last, K = N + R keys.
"""

import argparse
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import StatisticsError, correlation
from typing import Any

import torch

from longdraft.bench.arr import CLOSE, known_heads, read_texts, recent_sets
from longdraft.bench.record import check_record, make_record, write_record
from longdraft.bench.view_agreement import asked_to_summarise, digest
from longdraft.draft_models.attention_rows import run_looking
from longdraft.draft_models.repetition import ALLOWED, repeated_share
from longdraft.draft_models.sparse_recipe import PROTECTED, SparseRecipe
from longdraft.errors import UserError
from longdraft.train.calibration.pair import load_looked_at
from longdraft.train.calibration.reading import Reading
from longdraft.train.calibration.recovery import Split, choose_sets, oracle_sets, recovery, valid
from longdraft.train.calibration.retrieval_heads import end_tokens, own_answer
from longdraft.train.calibration.settings import SearchSettings
from longdraft.train.calibration.traces import Trace, Tracer, Windows
from longdraft.train.config import TargetSettings
from longdraft.train.positions import seeded
from longdraft.train.target import load_tokenizer

CONTROLS = ("all_layers", "recent", "random", "oracle")
KINDS = ("agreement", "recovery", "recovery_deeper")  # of a set, in this order
LABELS = {"recovery": "recovery of all layers", "recovery_deeper": "recovery of the deeper layers"}


def sets_of(trace: Trace, budget: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """Sets by who chose them, bool ``[W, N]``: ``layer0`` and so on, and the controls.

    Args:
        trace: with histories at the last committed row.
        budget: tokens of a set.
        generator: of the random one; its state goes on.
    """
    history_SWN, length_W, alone = trace.history_GSWN[0], trace.length_W, Split(budget)
    by_score = {f"layer{layer}": history_WN for layer, history_WN in enumerate(history_SWN)}
    by_score |= {"all_layers": history_SWN.sum(0), "random": torch.rand(history_SWN.shape[1:], generator=generator)}
    found = {name: choose_sets(score_WN, None, length_W, alone) for name, score_WN in by_score.items()}
    found["recent"] = recent_sets(length_W, history_SWN.shape[-1], budget)
    found["oracle"] = oracle_sets(trace.attention_SWN.mean(0), length_W, budget)
    return found


def choices(reading: Reading, text: Sequence[int], windows: Windows, set_WN: torch.Tensor) -> torch.Tensor:
    """What the target chooses in the rows of all verifications, int64 ``[W, C]`` on the CPU.

    One pass runs them side by side: the cache is exact for each, since no row sees one of another verification.

    Args:
        reading: has read the ``N`` tokens before the last verification, and is left so.
        text: ``windows.end`` tokens or more.
        windows: where the verifications stand.
        set_WN: bool, which committed tokens each reads.
    """
    device, rows = reading.model.device, windows.rows
    place_R = torch.arange(windows.first, windows.end, device=device)
    window_R = (place_R - windows.first) // rows
    own_RR = (window_R[:, None] == window_R) & (place_R <= place_R[:, None])
    mask_RK = torch.cat([set_WN.to(device)[window_R], own_RR], 1)
    id_R = torch.tensor(text[windows.first : windows.end], device=device)
    more = {"attention_mask": mask_RK[None, None], "position_ids": place_R[None]}
    logits_RV = run_looking(reading.model, id_R, reading.cache, None, **more)
    reading.cache.crop(len(reading))
    return logits_RV.argmax(-1).view(-1, rows).cpu()


def measure(
    tracer: Tracer, text: Sequence[int], windows: Windows, budgets: Sequence[int], first: int, seed: Sequence[int]
) -> dict[str, torch.Tensor]:
    """What each set is worth along one text: float64 ``[3, W]``, :data:`KINDS`, by ``NAME_kBUDGET``, and ``whole``.

    Args:
        tracer: of the target and its retrieval heads, at lag 1.
        text: a prompt and the target's greedy answer, at least one token beyond ``windows.end``.
        windows: of the answer's tokens; the first has the prompt committed.
        budgets: tokens of sets.
        first: layer from which on attention counts as the deeper layers'.
        seed: of random sets.
    """
    trace, reading = tracer.trace(text, windows), Reading(tracer.model)
    reading.read(text[: windows.starts[-1]])
    said_WC = torch.tensor(text[windows.first + 1 : windows.end + 1]).view(-1, windows.rows)

    def worth(set_WN: torch.Tensor) -> torch.Tensor:
        agreed_W = (choices(reading, text, windows, set_WN) == said_WC).double().mean(1)
        found_SW = recovery(trace.attention_SWN, set_WN).double()
        return torch.stack([agreed_W, found_SW.mean(0), found_SW[first:].mean(0)])

    found = {"whole": worth(valid(trace.length_W, windows.starts[-1]))}
    for budget in budgets:
        sets = sets_of(trace, budget, seeded("history_layers", *seed, budget))
        found |= {f"{name}_k{budget}": worth(set_WN) for name, set_WN in sets.items()}
    return found


def by_layer(means: Mapping[str, Sequence[float]], layers: int, budgets: Sequence[int]) -> dict[str, list[float]]:
    """``[S]`` for each of :data:`KINDS` and each budget."""
    return {
        f"{kind}_k{k}": [round(means[f"layer{layer}_k{k}"][place], 5) for layer in range(layers)]
        for k in budgets
        for place, kind in enumerate(KINDS)
    }


def figures_of(
    means: Mapping[str, Sequence[float]], rows: Mapping[str, list[float]], budgets: Sequence[int]
) -> dict[str, float]:
    """Controls, and of each budget how recovery goes with agreement over the layers and which layers are the best by what.

    A correlation is left out where one of the two is the same for all layers.
    """
    found: dict[str, float] = {"agreement_whole": round(means["whole"][0], 5)}
    for k in budgets:
        agreement = rows[f"agreement_k{k}"]
        for kind in KINDS:
            values = rows[f"{kind}_k{k}"]
            best = values.index(max(values))
            found |= {f"best_layer_by_{kind}_k{k}": best, f"agreement_of_best_layer_by_{kind}_k{k}": agreement[best]}
            with suppress(StatisticsError):
                found |= {f"pearson_{kind}_k{k}": round(correlation(values, agreement), 4)} if kind in LABELS else {}
        for name in CONTROLS:
            found |= {f"{kind}_{name}_k{k}": round(x, 5) for kind, x in zip(KINDS, means[f"{name}_k{k}"], strict=True)}
    return found


def checks_of(means: Mapping[str, Sequence[float]], budgets: Sequence[int], exact: bool) -> dict[str, bool]:
    """What a record answers for: shares, an oracle that no set beats over all layers and, without rounding, a whole cache that agrees."""
    found = {
        "shares": all(0 <= x <= 1 + CLOSE for row in means.values() for x in row),
        "no_set_beats_the_oracle": all(
            row[1] <= means[f"oracle_k{k}"][1] + CLOSE
            for k in budgets
            for name, row in means.items()
            if name.endswith(f"_k{k}")
        ),
    }
    return found | ({"whole_cache_agrees": means["whole"][0] == 1} if exact else {})


def draw(record: Mapping[str, Any], path: Path) -> None:
    """Agreement against recovery, a mark a layer and kind of recovery, a panel a budget; the layers that recover most by number."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    budgets, layers, figures = record["settings"]["budgets"], record["layers"], record["figures"]
    canvas, panels = pyplot.subplots(1, len(budgets), figsize=(6 * len(budgets), 4.5), squeeze=False, sharey=True)
    for axes, k in zip(panels[0], budgets, strict=True):
        for (kind, label), face in zip(LABELS.items(), ("black", "white"), strict=True):
            x, y, best = layers[f"{kind}_k{k}"], layers[f"agreement_k{k}"], figures[f"best_layer_by_{kind}_k{k}"]
            pearson = figures.get(f"pearson_{kind}_k{k}")
            told = "" if pearson is None else f", Pearson {pearson:+.2f}"
            axes.plot(x, y, "o", color="black", markerfacecolor=face, markersize=5, label=label + told)
            axes.annotate(
                f"layer {best}", (x[best], y[best]), (-6, 3), textcoords="offset points", ha="right", fontsize=8
            )
        for name, style in zip(CONTROLS, (":", "--", "-.", "-"), strict=True):
            level = figures[f"agreement_{name}_k{k}"]
            axes.axhline(level, color="0.6", linewidth=1, linestyle=style, label=f"agreement, {name.replace('_', ' ')}")
        axes.set_title(f"{record['settings']['target']}, {k} tokens")
        axes.set_xlabel("attention recovery rate")
        axes.legend(fontsize=8, frameon=False, ncols=2, loc="upper center", bbox_to_anchor=(0.5, -0.13))
    panels[0][0].set_ylabel("agreement")
    canvas.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    canvas.savefig(path, dpi=110)
    pyplot.close(canvas)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="longdraft bench history_layers", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--target", required=True, help="a model that answers chats")
    parser.add_argument("--recipe", type=Path, required=True, help="of longdraft calibrate, for its retrieval heads")
    parser.add_argument("--documents", type=Path, required=True, help="JSONL with text, to be summarised")
    parser.add_argument("--count", type=int, default=4, help="documents")
    parser.add_argument("--tokens", type=int, default=1000, help="of each document")
    parser.add_argument("--new-tokens", type=int, default=48, help="of an answer at most")
    parser.add_argument("--window", type=int, default=2, help="rows of a verification")
    parser.add_argument("--budgets", nargs="+", type=int, default=[128, 512], help="tokens of a set")
    parser.add_argument("--skip", type=float, default=SearchSettings().skip, help="share of layers before the deeper")
    parser.add_argument("--dtype", default="auto", choices=("auto", "float32", "bfloat16"))
    parser.add_argument("--seed", type=int, default=0, help="of random sets")
    parser.add_argument("--plot", type=Path, help="PNG to draw")
    parser.add_argument("--record", type=Path, required=True)
    args = parser.parse_args(argv)
    for name in ("count", "window"):
        if (value := getattr(args, name)) < 1:
            parser.error(f"--{name} {value}: give 1 or more")
    if args.new_tokens <= args.window:
        parser.error(f"--new-tokens {args.new_tokens}: give more than the {args.window} of --window")
    if min(args.budgets) <= PROTECTED or max(args.budgets) >= args.tokens:
        parser.error(
            f"--budgets {args.budgets}: give more than the {PROTECTED} tokens of sinks and window and fewer than --tokens {args.tokens}"
        )
    if len(set(args.budgets)) < len(args.budgets):
        parser.error(f"--budgets {args.budgets}: name each once")
    if not 0 <= args.skip < 1:
        parser.error(f"--skip {args.skip}: give a share, 0 or more and below 1")
    return args


def read_prompts(args: argparse.Namespace, tokenizer: Any, positions: int) -> list[list[int]]:
    """Questions about the documents, as tokens.

    Raises:
        UserError: no chat template, documents that do not fit, or more tokens than the target has positions for.
    """
    if not tokenizer.chat_template:
        raise UserError(f"target {args.target!r} has no chat template, so that it cannot be asked: give one that has")
    texts = read_texts(args.documents, tokenizer, args.tokens, args.count)
    prompts = [asked_to_summarise(tokenizer, ids[: args.tokens]) for ids in texts]
    if (over := max(map(len, prompts)) + args.new_tokens - positions) > 0:
        raise UserError(
            f"a prompt and an answer of {args.new_tokens} tokens are {over} more than the target's {positions} positions: lower "
            "--tokens or --new-tokens"
        )
    return prompts


def settings_of(args: argparse.Namespace, recipe: SparseRecipe, prompts: Sequence[list[int]]) -> dict[str, Any]:
    """The record's settings."""
    names = ("count", "tokens", "new_tokens", "window", "budgets", "skip", "dtype", "seed")
    found = {key: getattr(args, key) for key in names}
    found |= {key: Path(getattr(args, key)).name for key in ("target", "recipe", "documents")}
    return found | {"target_layer": recipe.target.layer, "prompts_sha256": digest([{"ids": ids} for ids in prompts])}


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, write one record and, where asked, draw it; 1 where a check fails."""
    args = parse(argv)
    check_record(args.record)
    recipe, settings = SparseRecipe.load(args.recipe), TargetSettings(path=args.target, dtype=args.dtype)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    tokenizer, target = load_tokenizer(settings), load_looked_at(settings, device)
    model, layers = target.model, target.spec.num_layers
    tracer = Tracer(model, None, known_heads(recipe, layers, None)[0], [])
    prompts, stop_ids = read_prompts(args, tokenizer, target.spec.max_position), end_tokens(model, tokenizer)
    worth: dict[str, list[torch.Tensor]] = defaultdict(list)
    for number, prompt in enumerate(prompts):
        answer = own_answer(Reading(model), prompt, args.new_tokens, stop_ids)
        windows = Windows(len(prompt), (len(answer) - 1) // args.window, args.window)
        kept = windows.count > 0 and repeated_share(answer) <= ALLOWED
        if kept:
            seed = (args.seed, number)
            first = int(args.skip * layers)
            for name, found in measure(tracer, [*prompt, *answer], windows, args.budgets, first, seed).items():
                worth[name].append(found)
        left_out = "" if kept else f": answer of {len(answer)} tokens loops or ends at once, left out"
        print(f"document {number + 1} of {len(prompts)}{left_out}", flush=True)
    if not worth:
        raise UserError(f"all {len(prompts)} answers loop or end at once: give other --documents, or more of them")
    means = {name: torch.cat(found, 1).mean(1).tolist() for name, found in worth.items()}
    counted = worth["whole"]
    figures: dict[str, float] = {
        "texts": len(counted),
        "left_out": len(prompts) - len(counted),
        "tokens": args.window * sum(found.shape[1] for found in counted),
    }
    rows = by_layer(means, layers, args.budgets)
    figures |= figures_of(means, rows, args.budgets)
    checks = checks_of(means, args.budgets, next(model.parameters()).dtype == torch.float32)
    record = make_record("history_layers", settings_of(args, recipe, prompts), figures, checks, layers=rows)
    write_record(record, args.record)
    for name, value in figures.items():
        print(f"{name:<48} {value}")
    if args.plot is not None:
        draw(record, args.plot)
    return 0 if all(checks.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
