"""Drift of mode ``sparse``: ``longdraft bench sparse_drift --target T --draft D --documents F.jsonl --record R.json --plot P.png``.

One server answers the same prompts with every refresh setting, and with every verification on the whole cache as the control;
greedy, streamed, and not ended by a stop token. Then one teacher-forced pass of the target over prompt and answer says at every
token whether the target would have chosen it too, with the answer's keys and values all exact. Accept length and agreement are given
by tokens since the last exact key and value: the prompt's end, or a refresh. Answers that loop are left out and counted.

The recommended default is the cheapest setting whose agreement over the last quarter of the answers is within one standard error
of the difference from the best one's. In bf16 the control says how often rounding alone flips a choice.
"""

import argparse
import json
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from longdraft.bench.drift_figures import (
    CONTROL,
    LEAST,
    OFF,
    Answer,
    bins,
    cheapest_first,
    figures_of,
    finding,
    label,
    quarters,
    recommended,
    trace,
    unaccounted,
)
from longdraft.bench.record import make_record, write_record
from longdraft.bench.server import Server
from longdraft.bench.view_agreement import STEPS, check_room, digest, launch, read_documents
from longdraft.draft_models.repetition import ALLOWED, repeated_share
from longdraft.errors import UserError
from longdraft.serve.settings import LONGEST_REFRESH
from longdraft.train.config import TargetSettings
from longdraft.train.target import FrozenTarget, load_target

STYLES, MARKERS = ("-", "--", "-.", ":"), "osv^Dx"  # readable without colour
RULE = "cheapest setting whose agreement in the last quarter of answers is within one standard error of the difference from the best"
SHORTEST = 32  # tokens of an answer whose quarters mean something


def sparse_settings(args: argparse.Namespace) -> dict[str, Any]:
    """The server's, whose sets its requests may make smaller."""
    given = {"sparse_recipe": args.recipe, "sparse_lookahead": args.lookahead}
    own = {key: value for key, value in given.items() if value is not None}
    return {"mode": "sparse", "allow_lossy": True, "sparse_tokens": args.budget, **own}


def request(setting: str, budget: int) -> dict[str, Any]:
    """What a request asks of us under a setting."""
    if setting == CONTROL:
        return {"mode": "full"}
    return {"mode": "sparse", "budget": budget, **({} if setting == OFF else {"refresh": int(setting)})}


def answer(server: Server, document: int, ids: list[int], setting: str, args: argparse.Namespace) -> Answer:
    """One streamed answer."""
    own = request(setting, args.budget)
    sampling = {"max_new_tokens": args.new_tokens, "ignore_eos": True, "custom_params": {"longdraft": own}}
    chunks = deque(server.stream(ids, sampling), maxlen=1)
    if not chunks or "output_ids" not in chunks[0]:
        raise UserError(f"the {server.name} server sent no answer to document {document} ({chunks}), see {server.log}")
    totals = chunks[0]["meta_info"].get("longdraft") or [{}]
    refreshes, on_view = (int(totals[-1].get(key, 0)) for key in ("refreshes", "verified_on_view"))
    found = Answer(document, tuple(chunks[0]["output_ids"]), trace(totals), refreshes, on_view)
    return found.by_place() if setting == CONTROL else found


def answers(server: Server, prompts: list[list[int]], setting: str, args: argparse.Namespace) -> list[Answer]:
    """Answers to all prompts, ``batch`` at once."""
    with ThreadPoolExecutor(args.batch) as pool:
        return list(pool.map(lambda each: answer(server, each[0], each[1], setting, args), enumerate(prompts)))


def without_loops(found: dict[str, list[Answer]]) -> tuple[dict[str, list[Answer]], dict[str, int]]:
    """Answers that do not loop, and how many of each setting do.

    Raises:
        UserError: hardly an answer of some setting is left.
    """
    kept = {name: [a for a in own if repeated_share(a.tokens) <= ALLOWED] for name, own in found.items()}
    loops = {name: len(own) - len(kept[name]) for name, own in found.items()}
    if any(len(own) < LEAST for own in kept.values()):
        raise UserError(
            f"of {len(found[CONTROL])} answers each, so many have more than {ALLOWED:.0%} repeated 4-grams, by setting: {loops}; errors "
            f"need {LEAST} that have not: raise --count, lower --new-tokens or give other --documents"
        )
    return kept, loops


@torch.no_grad()
def judged(target: FrozenTarget, prompt: Sequence[int], own: Answer) -> Answer:
    """With the target's word on every token: one pass over prompt and answer, all on exact keys and values."""
    id_L = torch.tensor([*prompt, *own.tokens[:-1]], device=target.device)
    seen = target.capture(
        id_L, torch.arange(len(id_L), device=target.device), [0, len(id_L)], hidden=True, kv_layers=()
    )
    assert seen.hidden_TE is not None
    logits_NV = seen.hidden_TE[len(prompt) - 1 :] @ target.head_VE.T
    token_N1 = torch.tensor(own.tokens, device=target.device)[:, None]
    best_N = logits_NV.gather(1, token_N1)[:, 0] >= logits_NV.amax(-1)  # in bf16 several may be
    return replace(own, agrees=tuple(best_N.tolist()))


def name_of(setting: str) -> str:
    """In the record."""
    return {OFF: "no_refresh", CONTROL: "whole_cache"}.get(setting, f"refresh_{setting}")


def picture(record: dict[str, Any], path: Path) -> None:
    """Agreement above accept length, a line a setting, by tokens since the last exact key and value."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(2, 1, figsize=(9, 7.5), sharex=True, layout="constrained")
    kinds = (
        ("agreement", 100, "tokens that the target would choose too, %"),
        ("accept", 1, "tokens a verification, bonus token in"),
    )
    for axis, (kind, factor, unit) in zip(axes, kinds, strict=True):
        for number, (setting, curves) in enumerate(record["curves"].items()):
            rows = curves[kind]
            style: dict[str, Any] = {
                "linestyle": STYLES[number % len(STYLES)],
                "marker": MARKERS[number % len(MARKERS)],
            }
            style |= {"color": "0.6"} if setting == CONTROL else {}
            places = [(row["from"] + row["to"]) / 2 for row in rows]
            means, errors = ([factor * row[key] for row in rows] for key in ("mean", "error"))
            answers, loops = (record["figures"][f"{name_of(setting)}_{key}"] for key in ("answers", "looping"))
            name = f"{label(setting)}: {answers} answers, {loops} more loop"
            axis.errorbar(places, means, errors, label=name, capsize=3, markersize=4, **style)
        axis.set_ylabel(unit)
        axis.grid(alpha=0.3)
    axes[0].set_title(record["finding"], fontsize=10, wrap=True)
    axes[0].legend()
    axes[1].set_xlabel(
        f"tokens since the last exact key and value, bins of {record['settings']['bin']} (whole cache: since the prompt's end)"
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def summary(kept: dict[str, list[Answer]], loops: dict[str, int], args: argparse.Namespace) -> dict[str, Any]:
    """The record's parts that follow from judged answers: ``figures``, ``checks``, ``curves``, ``finding`` and ``recommended``."""
    figures: dict[str, float] = {}
    checks, curves = {}, {}
    early, late = {}, {}
    for setting, own in kept.items():
        mine = {"looping": loops[setting], **figures_of(own, args.new_tokens)}
        figures |= {f"{name_of(setting)}_{key}": value for key, value in mine.items()}
        kinds = {"agreement": {a.document: a.judged for a in own}, "accept": {a.document: a.accepted for a in own}}
        curves[setting] = {kind: bins(points, args.bin) for kind, points in kinds.items()}
        checks[f"{name_of(setting)}_answers_are_whole"] = all(len(a.tokens) == args.new_tokens for a in own)
        # The server leaves the last verification out of its counters.
        checks[f"{name_of(setting)}_counters_account_for_tokens"] = all(
            -STEPS <= unaccounted(a) <= STEPS + 1 for a in own
        )
        if setting == CONTROL:
            continue
        early[setting], late[setting] = quarters(own, args.new_tokens)
        checks[f"{name_of(setting)}_sets_were_read"] = all(a.on_view > 0 for a in own)
        if setting == OFF:
            checks["no_refresh_never_refreshed"] = not any(a.refreshes for a in own)
        elif args.new_tokens > int(setting) + STEPS + 1:
            checks[f"{name_of(setting)}_refreshed"] = all(a.refreshes > 0 for a in own)
    told = {"finding": finding(early, late), "recommended": recommended(late)}
    return {"figures": figures, "checks": checks, "curves": curves, **told}


def measured(args: argparse.Namespace, prompts: list[list[int]], on_cpu: bool) -> dict[str, Any]:
    """Answers of all settings from one server, and then the target's word on them."""
    words, environment = launch(args, sparse_settings(args), on_cpu)
    with Server("sparse", words, args.logs / "sparse_drift.log", environment) as server:
        found = {name: answers(server, prompts, name, args) for name in (*cheapest_first(args.refresh), CONTROL)}
    kept, loops = without_loops(found)
    device = torch.device("cpu" if on_cpu else "cuda")
    target = load_target(TargetSettings(path=args.target, dtype=args.dtype, liger="off"), device)
    return summary(dict(all_judged(target, prompts, kept)), loops, args)


def all_judged(
    target: FrozenTarget, prompts: list[list[int]], kept: dict[str, list[Answer]]
) -> Iterator[tuple[str, list[Answer]]]:
    """Settings and their answers, judged."""
    for setting, own in kept.items():
        yield setting, [judged(target, prompts[a.document], a) for a in own]


def refresh(word: str) -> str:
    """``off`` or a number of tokens."""
    if word == OFF or (word.isdecimal() and 1 <= int(word) <= LONGEST_REFRESH):
        return word
    raise argparse.ArgumentTypeError(f"{word!r} is no refresh: write off, or 1 to {LONGEST_REFRESH} tokens")


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="longdraft bench sparse_drift", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--target", required=True)
    parser.add_argument("--draft", required=True, help="folder of a draft, whose lookahead chooses")
    parser.add_argument("--documents", type=Path, required=True, help="JSONL with text, or with input_ids")
    parser.add_argument("--refresh", nargs="+", type=refresh, default=["off", "64", "256"])
    parser.add_argument("--budget", type=int, default=512, help="cached tokens of a set")
    parser.add_argument(
        "--lookahead", type=int, help="tokens of a set that the draft chooses; as the recipe says, or half"
    )
    parser.add_argument("--recipe", help="file of longdraft calibrate")
    parser.add_argument("--count", type=int, default=20, help="documents")
    parser.add_argument("--prompt-tokens", nargs="+", type=int, default=[7900], help="of the documents in turn")
    parser.add_argument("--new-tokens", type=int, default=512)
    parser.add_argument("--bin", type=int, default=32, help="tokens of a bin")
    parser.add_argument("--batch", type=int, default=8, help="requests at once")
    parser.add_argument("--dtype", default=None, help="bfloat16 on a card, float32 on a CPU")
    parser.add_argument("--attention-backend", default="fa3", help="SGLang's, on a card")
    parser.add_argument("--logs", type=Path, default=Path("sparse_drift_logs"))
    parser.add_argument("--plot", type=Path, required=True)
    parser.add_argument("--record", type=Path, required=True)
    return parser.parse_args(argv)


def checked(args: argparse.Namespace, prompts: list[list[int]]) -> None:
    """Refuse what could show nothing.

    Raises:
        UserError: answers too short for quarters or bins, or prompts that a set holds whole.
    """
    if args.new_tokens < SHORTEST:
        raise UserError(f"--new-tokens {args.new_tokens} has no quarters to compare: write {SHORTEST} or more")
    if not 1 <= args.bin <= args.new_tokens:
        raise UserError(f"--bin {args.bin} with --new-tokens {args.new_tokens}: write 1 to {args.new_tokens}")
    if short := sum(len(ids) <= args.budget for ids in prompts):
        raise UserError(
            f"{short} of {len(prompts)} prompts have no more than --budget {args.budget} tokens, so that a set holds all of them: lower "
            "--budget, raise --prompt-tokens or give longer --documents"
        )


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, draw and write one record; 1 where a check fails."""
    from transformers import AutoTokenizer

    args, on_cpu = parse(argv), not torch.cuda.is_available()
    args.dtype = args.dtype or ("float32" if on_cpu else "bfloat16")
    documents = read_documents(
        args.documents, AutoTokenizer.from_pretrained(args.target), args.prompt_tokens, ask=False, count=args.count
    )
    prompts = [document["ids"] for document in documents]
    checked(args, prompts)
    check_room(documents, args.target, args.new_tokens)
    found = measured(args, prompts, on_cpu)
    names = ("refresh", "budget", "lookahead", "count", "prompt_tokens", "new_tokens", "bin", "batch", "dtype")
    settings = {key: getattr(args, key) for key in names} | {
        "steps": STEPS,
        "accept_length": "bonus token in",
        "rule": RULE,
    }
    settings |= {key: (value := getattr(args, key)) and Path(value).name for key in ("target", "draft", "recipe")}
    settings |= {"documents": args.documents.name, "prompts_sha256": digest(documents)}
    record = make_record("sparse_drift", settings, found.pop("figures"), found.pop("checks"), **found)
    write_record(record, args.record)
    picture(record, args.plot)
    print(json.dumps({**record["figures"], **record["checks"]}, indent=1))
    print(record["finding"])
    return 0 if all(record["checks"].values()) else 1


if __name__ == "__main__":
    sys.exit(main())
