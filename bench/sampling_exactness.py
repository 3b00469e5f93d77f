"""python -m longdraft.bench.sampling_exactness [--draws 100000] --out record.json

What speculative sampling by shared noise draws, against the exact distribution: a chi-square test over the first three tokens of
many seeds, for chains and for both kinds of trees, plain and with every filter. Two controls with broken noise go through the same
test and must fail it: noise that leaves the position out of its key, and uniform noise in place of Gumbel's. The tokens of each
run must also be those of plain decoding with the same seeds, one by one.

A small world: the next token hangs on the last one alone, and a draft's logits are the target's with an error. Beside each
acceptance rate of a first draft stand the exact ones of the same two distributions: shared noise (the sum over v of
1 / sum_w max(p_w / p_v, q_w / q_v)), the optimal coupling (sum of min(p, q)) and a draft with noise of its own (sum of p q).

Legend: N seeds, T places of a tree, V vocabulary.
"""

import argparse
import dataclasses
import itertools
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from longdraft.bench.record import make_record, write_record
from longdraft.draft_models.draft_tree import TreeDraft, beam_tree, ranked_tree
from longdraft.kernels.gumbel import gumbel_noise
from longdraft.kernels.tree import Tree
from longdraft.kernels.tree_accept import tree_accept
from longdraft.serve.sampling.rows import RowParams

VOCAB, LENGTH, FIRST_POSITION = 6, 3, 40
CHUNK = 25_000  # seeds that go through a round together
BOUND = 0.01  # p-value that a right sampler passes
Choose = Callable[[RowParams, torch.Tensor, torch.Tensor], torch.Tensor]  # rows, logits_NV, position_N -> id_N
PARAMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "filtered": {"temperature": 1.3, "top_k": 5, "top_p": 0.9, "min_p": 0.05},
}


@dataclasses.dataclass(frozen=True)
class World:
    """Next-token logits of target and draft by the last token, ``[V, V]``."""

    target_VV: torch.Tensor
    draft_VV: torch.Tensor

    @staticmethod
    def build(error: float, vocab: int = VOCAB, spread: float = 1.2) -> "World":
        """A target of random logits and a draft that errs by Gumbel noise of that scale."""
        g = torch.Generator().manual_seed(0)
        target_VV = torch.randn(vocab, vocab, generator=g) * spread
        wrong_VV = -torch.empty(vocab, vocab).exponential_(generator=g).log()
        return World(target_VV, target_VV + error * wrong_VV)


def shared_noise(rows: RowParams, logits_NV: torch.Tensor, position_N: torch.Tensor) -> torch.Tensor:
    """The server's own choice."""
    return rows.choose(logits_NV, position_N)


def without_position(rows: RowParams, logits_NV: torch.Tensor, position_N: torch.Tensor) -> torch.Tensor:
    """Broken: every position draws with the same noise."""
    return rows.choose(logits_NV, torch.zeros_like(position_N))


def uniform_noise(rows: RowParams, logits_NV: torch.Tensor, position_N: torch.Tensor) -> torch.Tensor:
    """Broken: noise of the right range of probabilities, of the wrong law."""
    gumbel_NV = gumbel_noise(rows.seed_N, position_N, torch.arange(logits_NV.shape[1]))
    return (torch.log_softmax(logits_NV / rows.temperature_N1, -1) + torch.exp(-torch.exp(-gumbel_NV))).argmax(-1)


def row_params(seed_N: torch.Tensor, params: dict[str, Any]) -> RowParams:
    """Parameters of one request under many seeds."""
    from sglang.srt.sampling.sampling_params import SamplingParams

    request = SimpleNamespace(sampling_params=SamplingParams(sampling_seed=0, **params), rid="")
    return dataclasses.replace(RowParams.build([request], [1], torch.device("cpu")).repeat(len(seed_N)), seed_N=seed_N)


CHAIN, DEPTH = "chain", 3
TREES: dict[str, Callable[[TreeDraft, torch.Tensor], Tree]] = {
    "beam": lambda draft, root_N: beam_tree(draft, root_N, (2, 3, 3)),
    "ranked": lambda draft, root_N: ranked_tree(draft, root_N, DEPTH, 3, 9),
}
SHAPES = (CHAIN, *TREES)


@dataclasses.dataclass
class Drawn:
    """Tokens ``[N, LENGTH]`` of every seed, rounds and tokens of all of them, and how many first rounds kept a draft."""

    token_NL: torch.Tensor
    rounds: int = 0
    gained: int = 0
    first_kept: int = 0


def decode(world: World, shape: str, params: dict[str, Any], draws: int, choose: Choose = shared_noise) -> Drawn:
    """Draw with drafts: rounds of a tree, its verification and its acceptance, until every seed has its tokens."""
    drawn = Drawn(torch.empty(draws, LENGTH, dtype=torch.int64))
    for start in range(0, draws, CHUNK):
        seed_N = torch.arange(start, min(start + CHUNK, draws))
        at_N = torch.zeros_like(seed_N)  # tokens that a seed has
        root_N, live_N = torch.zeros_like(seed_N), torch.arange(len(seed_N))
        while len(live_N):
            rows, position_N = row_params(seed_N[live_N], params), FIRST_POSITION + at_N[live_N]
            tree = grow(world, shape, rows, root_N[live_N], position_N)
            count = tree.token_BT.shape[1]
            choice_N = choose(
                rows.repeat(count), world.target_VV[tree.token_BT].flatten(0, 1), tree.position_BT(position_N).flatten()
            )
            kept = tree_accept(tree, choice_N.view(-1, count))
            drawn.rounds += len(live_N)
            drawn.gained += int(kept.count_B.sum()) + len(live_N)
            if int(at_N.max()) == 0:
                drawn.first_kept += int((kept.count_B > 0).sum())
            for step in range(tree.depth + 1):
                place_N = at_N[live_N] + step
                some = (step <= kept.count_B) & (place_N < LENGTH)
                drawn.token_NL[start + live_N[some], place_N[some]] = kept.token_BD1[some, step]
            at_N[live_N] += kept.count_B + 1
            root_N[live_N] = kept.next_B
            live_N = live_N[at_N[live_N] < LENGTH]
    return drawn


def grow(world: World, shape: str, rows: RowParams, root_N: torch.Tensor, position_N: torch.Tensor) -> Tree:
    """What the draft proposes, under the rows' noise, as the server does it for chains and for trees."""
    if shape == CHAIN:
        drafted = [root_N]
        for step in range(DEPTH):
            drafted.append(rows.choose(world.draft_VV[drafted[-1]], position_N + step))
        return Tree.chain(root_N, torch.stack(drafted[1:], 1))
    draft = TreeDraft(
        lambda nodes: world.draft_VV[nodes.token_BM], lambda logits, depth: rows.scores(logits, position_N + depth)
    )
    return TREES[shape](draft, root_N)


def decode_plainly(world: World, params: dict[str, Any], draws: int) -> torch.Tensor:
    """The same seeds without drafts, ``[N, LENGTH]``."""
    rows, token_N, found = row_params(torch.arange(draws), params), torch.zeros(draws, dtype=torch.int64), []
    for step in range(LENGTH):
        token_N = rows.choose(world.target_VV[token_N], torch.full((draws,), FIRST_POSITION + step))
        found.append(token_N)
    return torch.stack(found, 1)


def processed(logits_V: torch.Tensor, params: dict[str, Any]) -> list[float]:
    """A distribution after the parameters, by their definitions: each cut looks at the whole distribution."""
    p = torch.softmax(logits_V.double() / params.get("temperature", 1.0), 0).tolist()
    order = sorted(range(len(p)), key=lambda v: -p[v])
    before, kept = 0.0, set()
    for rank, v in enumerate(order):
        if (
            rank < params.get("top_k", len(p))
            and before <= params.get("top_p", 1.0)
            and p[v] >= params.get("min_p", 0.0) * p[order[0]]
        ):
            kept.add(v)
        before += p[v]
    total = sum(p[v] for v in kept)
    return [p[v] / total if v in kept else 0.0 for v in range(len(p))]


def exact_texts(world: World, params: dict[str, Any]) -> dict[tuple[int, ...], float]:
    """Probability of every text of LENGTH tokens."""
    after = [processed(row, params) for row in world.target_VV]
    found = {}
    for text in itertools.product(range(VOCAB), repeat=LENGTH):
        chance = 1.0
        for last, token in zip((0, *text), text, strict=False):
            chance *= after[last][token]
        found[text] = chance
    return found


def p_value(token_NL: torch.Tensor, wanted: dict[tuple[int, ...], float]) -> float:
    """Of Pearson's chi-square; texts that are expected less than five times are one cell. 0 where an impossible one came."""
    place = {text: i for i, text in enumerate(wanted)}
    found, times = token_NL.unique(dim=0, return_counts=True)
    counts = torch.zeros(len(wanted), dtype=torch.float64)
    counts[[place[tuple(text)] for text in found.tolist()]] = times.double()
    expected = torch.tensor(list(wanted.values()), dtype=torch.float64) * len(token_NL)
    if counts[expected == 0].any():
        return 0.0
    rare = expected < 5
    counts = torch.cat([counts[~rare], counts[rare].sum()[None]])
    expected = torch.cat([expected[~rare], expected[rare].sum()[None]])
    live = expected > 0
    statistic = ((counts - expected)[live] ** 2 / expected[live]).sum()
    freedom = torch.tensor((int(live.sum()) - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(freedom, statistic / 2))


def couplings(p: list[float], q: list[float]) -> dict[str, float]:
    """Exact acceptance of one draft drawn from q where the target draws from p, by how the two draws are coupled."""
    both = [v for v in range(len(p)) if p[v] > 0 and q[v] > 0]
    return {
        "shared_noise": sum(1 / sum(max(a / p[v], b / q[v]) for a, b in zip(p, q, strict=True)) for v in both),
        "optimal_coupling": sum(map(min, p, q)),
        "noise_of_its_own": sum(a * b for a, b in zip(p, q, strict=True)),
    }


def measure(draws: int, error: float) -> tuple[dict[str, float], dict[str, bool]]:
    """All runs: figures and checks."""
    world, figures, checks = World.build(error), dict[str, float](), dict[str, bool]()
    for name, params in PARAMS.items():
        wanted, plain_NL = exact_texts(world, params), decode_plainly(world, params, draws)
        chances = couplings(*(processed(table[0], params) for table in (world.target_VV, world.draft_VV)))
        figures |= {f"{name}_accept_exact_{key}": round(value, 5) for key, value in chances.items()}
        for shape in SHAPES:
            drawn = decode(world, shape, params, draws)
            label = f"{shape}_{name}"
            figures[f"{label}_p"] = p_value(drawn.token_NL, wanted)
            figures[f"{label}_accept_first"] = round(drawn.first_kept / draws, 5)
            figures[f"{label}_tau"] = round(drawn.gained / drawn.rounds, 4)
            # Five standard errors. A tree's first drafts are several, so only a chain's have the exact rate.
            near = abs(figures[f"{label}_accept_first"] - chances["shared_noise"]) < 2.5 * draws**-0.5
            checks |= {f"{label}_accept_first_is_exact": near} if shape == CHAIN else {}
            checks[f"{label}_p_above_{BOUND}"] = figures[f"{label}_p"] > BOUND
            checks[f"{label}_tokens_equal_plain_decoding"] = bool(torch.equal(drawn.token_NL, plain_NL))
    for broken in (without_position, uniform_noise):
        for shape in ("chain", "beam"):
            label = f"control_{broken.__name__}_{shape}"
            drawn = decode(world, shape, {}, draws, broken)
            figures[f"{label}_p"] = p_value(drawn.token_NL, exact_texts(world, {}))
            checks[f"{label}_fails"] = figures[f"{label}_p"] < BOUND
    return figures, checks


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="longdraft bench sampling_exactness", description="Chi-square of speculative sampling"
    )
    parser.add_argument("--draws", type=int, default=100_000, help="seeds of each run")
    parser.add_argument("--error", type=float, default=0.6, help="scale of the draft's error in its logits")
    parser.add_argument("--out", type=Path, required=True, help="record to write")
    args = parser.parse_args(argv)
    start = time.perf_counter()
    figures, checks = measure(args.draws, args.error)
    figures["seconds"] = round(time.perf_counter() - start, 1)
    for key, value in figures.items():
        print(f"{key:<44} {value:.5g}")
    settings = {"draws": args.draws, "error": args.error, "vocabulary": VOCAB, "tokens": LENGTH, "params": PARAMS}
    write_record(make_record("sampling_exactness", settings, figures, checks), args.out)
    wrong = [name for name, right in checks.items() if not right]
    print(f"{len(checks)} checks, wrong: {wrong or 'none'}; {args.out}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
