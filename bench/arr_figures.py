"""longdraft bench arr_figures RECORD ... --out FOLDER: the figures of attention recovery, from records of ``longdraft bench arr``.

Figures 2, 3, 4 and 13 of Dustin and its figure 9 in shape: history by lag, lookahead against the oracle for every pair, layer by
layer, every split of a budget, and recovery against the distortion of the output.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

STYLES = ["-", "--", "-.", ":", (0, (5, 1)), (0, (1, 1))]  # readable without colour
MARKERS = "osv^Dx"
LAYERED = {
    "oracle_by_layer": "oracle, a set a layer",
    "history_lag1": "history",
    "lookahead": "lookahead",
    "hybrid": "hybrid",
}


def budgets_of(record: dict[str, Any]) -> list[int]:
    return sorted(record["settings"]["budgets"])


def line(record: dict[str, Any], kind: str) -> list[float] | None:
    """Recovery by budget; None where the record has no such policy."""
    names = [f"arr_{kind}_k{k}" for k in budgets_of(record)]
    return [record["figures"][name] for name in names] if names[0] in record["figures"] else None


def pair_name(record: dict[str, Any]) -> str:
    return f"{record['settings']['target']} + {record['settings']['draft'] or 'no draft'}"


def by_budget(axes: Any, record: dict[str, Any], kinds: dict[str, str], first: int = 0) -> None:
    """Lines of some policies of one record, with their labels."""
    for place, (kind, label) in enumerate(kinds.items(), first):
        if (values := line(record, kind)) is not None:
            shown = {"linestyle": STYLES[place % len(STYLES)], "marker": MARKERS[place % len(MARKERS)], "markersize": 4}
            color = "black" if place < len(STYLES) else "0.6"
            axes.plot(budgets_of(record), values, color=color, label=label, **shown)
    axes.set_xscale("log", base=2)
    axes.set_xticks(budgets_of(record), [str(k) for k in budgets_of(record)])
    axes.set_xlabel("tokens of a set (k)")
    axes.set_ylabel("attention recovery rate")


def history(axes: Any, records: Sequence[dict[str, Any]]) -> None:
    """Figure 2: the target's history by its lag."""
    lags = {f"history_lag{lag}": f"history, lag {lag}" for lag in records[0]["settings"]["lags"]}
    by_budget(axes, records[0], {"oracle": "oracle", **lags, "recent": "sinks and recent"})
    axes.set_title(pair_name(records[0]))


def lookahead(axes: Any, records: Sequence[dict[str, Any]]) -> None:
    """Figure 3: the draft's lookahead beside the oracle, for every record."""
    for place, record in enumerate(records):
        kinds = {"oracle": "oracle", "lookahead": "lookahead", "hybrid": "hybrid"}
        by_budget(axes, record, {kind: f"{pair_name(record)}: {label}" for kind, label in kinds.items()}, 3 * place)


def layers(axes: Any, records: Sequence[dict[str, Any]]) -> None:
    """Figure 4: layer by layer at the recipe's budget, or the nearest that was measured."""
    record = records[0]
    budget = min(budgets_of(record), key=lambda k: abs(k - record["settings"]["budget"]))
    for place, (kind, label) in enumerate(LAYERED.items()):
        if (values := record["layers"].get(f"{kind}_k{budget}")) is not None:
            axes.plot(values, linestyle=STYLES[place], marker=MARKERS[place], markersize=3, color="black", label=label)
    axes.axvline(record["settings"]["target_layer"], color="0.7", linewidth=1, label="layer of the history")
    axes.set_xlabel("layer of the target")
    axes.set_ylabel("attention recovery rate")
    axes.set_title(f"{pair_name(record)}, {budget} tokens")


def splits(axes: Any, records: Sequence[dict[str, Any]]) -> None:
    """Figure 13 in shape: every split of the budgets, between history alone (0) and lookahead alone."""
    for place, (budget, rows) in enumerate(records[0]["splits"].items()):
        most = rows[-1][0]
        shares, values = [m / most for m, _ in rows], [value for _, value in rows]
        axes.plot(shares, values, linestyle=STYLES[place % len(STYLES)], color="black", label=f"{budget} tokens")
        axes.plot([0, 1], [values[0], values[-1]], "o", color="black", markersize=4)
    axes.set_xlabel("share of the lookahead (0: history alone, 1: lookahead alone)")
    axes.set_ylabel("attention recovery rate")
    axes.set_title(pair_name(records[0]))


def distortion(axes: Any, records: Sequence[dict[str, Any]]) -> None:
    """Figure 9: recovery and KL divergence of sampled sets."""
    for place, record in enumerate(record for record in records if record["kl"]):
        arr, kl = ([point[key] for point in record["kl"]] for key in ("arr", "kl"))
        label = f"{record['settings']['target']}, Pearson {record['figures']['kl_pearson']:.3f}"
        axes.plot(arr, kl, MARKERS[place % len(MARKERS)], color="black", markersize=4, label=label)
    axes.set_xlabel("attention recovery rate")
    axes.set_ylabel("KL(full || sparse), nats")


FIGURES = {"history": history, "lookahead": lookahead, "layers": layers, "splits": splits, "kl": distortion}


def has(name: str, record: dict[str, Any]) -> bool:
    """Whether a record holds what a figure shows."""
    drafted = line(record, "lookahead") is not None
    return {"lookahead": drafted, "splits": bool(record["splits"]), "kl": bool(record["kl"])}.get(name, True)


def draw(records: Sequence[dict[str, Any]], folder: Path) -> list[Path]:
    """Draw every figure that the records have something for; the files, ``arr_NAME.png``."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for name, figure in FIGURES.items():
        if not (own := [record for record in records if has(name, record)]):
            continue
        canvas, axes = pyplot.subplots(figsize=(7, 4.5))
        figure(axes, own)
        axes.grid(color="0.9")
        axes.legend(fontsize=8, frameon=False)
        canvas.tight_layout()
        paths.append(folder / f"arr_{name}.png")
        canvas.savefig(paths[-1], dpi=110)
        pyplot.close(canvas)
    return paths


def main(argv: Sequence[str] | None = None) -> int:
    """Draw records; history, layers and splits show the first of them."""
    parser = argparse.ArgumentParser(prog="longdraft bench arr_figures", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("records", nargs="+", type=Path, help="of longdraft bench arr, one a pair of models")
    parser.add_argument("--out", type=Path, required=True, help="folder for the pictures")
    args = parser.parse_args(argv)
    for path in draw([json.loads(record.read_text()) for record in args.records], args.out):
        print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
