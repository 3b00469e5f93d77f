"""python -m longdraft.bench.tree_scores [--seeds 4000] --out record.json

What a tree of drafts gains under shared noise by what it is grown with: accept length (bonus in) of LongSpec's and EAGLE-2's trees
of 22 drafts in a small random world, for drafts of growing error. ``served`` is the server's score; ``raw_sums`` sums
``log q + G`` itself; ``noiseless`` sums ``log q``; ``hard_cut`` takes out what top-k, top-p and min-p leave out of the draft's
distribution, ``no_cut`` ignores them. No model: it says which score is right, not what a draft is worth.

Legend: N seeds, B requests, M nodes of one depth, V vocabulary.
"""

import argparse
import dataclasses
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from longdraft.bench.record import make_record, write_record
from longdraft.bench.sampling_exactness import World, row_params
from longdraft.draft_models.draft_tree import Score, TreeDraft, beam_tree, ranked_tree
from longdraft.kernels.gumbel import gumbel_noise
from longdraft.kernels.tree import Tree
from longdraft.kernels.tree_accept import tree_accept
from longdraft.serve.sampling.rows import RowParams

VOCAB, POSITION = 40, 40
ERRORS = (0.15, 0.3, 0.6, 1.0)
PARAMS: dict[str, dict[str, Any]] = {
    "plain": {}, "cool": {"temperature": 0.6}, "top_p": {"top_p": 0.8}, "top_k": {"top_k": 5}, "min_p": {"min_p": 0.1},
}  # fmt: skip
TREES: dict[str, Callable[[TreeDraft, torch.Tensor], Tree]] = {
    "beam": lambda draft, root_B: beam_tree(draft, root_B, (4, 6, 6, 6)),
    "ranked": lambda draft, root_B: ranked_tree(draft, root_B, 4, 5, 23),
}


def scores_of(rows: RowParams, position_B: torch.Tensor) -> dict[str, Score]:
    """The candidates, by name."""
    uncut = dataclasses.replace(rows, filtered=False)

    def noisy(logits_BMV: torch.Tensor, depth: int, cut: bool) -> torch.Tensor:
        prob_NV = torch.softmax(logits_BMV.flatten(0, 1) / rows.temperature_N1[0], -1)
        if cut:
            prob_NV = rows.repeat(logits_BMV.shape[1])._filter(prob_NV)
        noise_BV = gumbel_noise(rows.seed_N, position_B + depth, torch.arange(VOCAB)).float()
        return prob_NV.log().view(logits_BMV.shape) + noise_BV[:, None]

    return {
        "served": lambda logits, depth: rows.scores(logits, position_B + depth),
        "no_cut": lambda logits, depth: uncut.scores(logits, position_B + depth),
        "hard_cut": lambda logits, depth: noisy(logits, depth, True).log_softmax(-1),
        # Shifted below 0, where scores have to be; as much for all nodes of a depth.
        "raw_sums": lambda logits, depth: noisy(logits, depth, False) - 60,
        "noiseless": lambda logits, depth: torch.log_softmax(logits / rows.temperature_N1[0], -1),
    }


def accept_length(world: World, rows: RowParams, root_B: torch.Tensor, tree: str, score: Score) -> float:
    """Mean tokens of one round."""
    position_B = torch.full_like(root_B, POSITION)
    grown = TREES[tree](TreeDraft(lambda nodes: world.draft_VV[nodes.token_BM], score), root_B)
    count = grown.token_BT.shape[1]
    logits_NV, position_N = world.target_VV[grown.token_BT].flatten(0, 1), grown.position_BT(position_B).flatten()
    choice_BT = rows.repeat(count).choose(logits_NV, position_N).view(-1, count)
    return 1 + float(tree_accept(grown, choice_BT).count_B.double().mean())


def measure(seeds: int) -> dict[str, float]:
    """Accept lengths by tree, parameters, error and score."""
    figures = {}
    root_B = torch.arange(seeds) % VOCAB
    for error in ERRORS:
        world = World.build(error, VOCAB, spread=2.2)
        for params, setting in PARAMS.items():
            rows = row_params(torch.arange(seeds), setting)
            for tree in TREES:
                for name, score in scores_of(rows, torch.full_like(root_B, POSITION)).items():
                    if setting.keys() & {"top_p", "top_k", "min_p"} or not name.endswith("cut"):
                        length = accept_length(world, rows, root_B, tree, score)
                        figures[f"{tree}_{params}_error{error}_{name}_tau"] = round(length, 3)
    return figures


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="longdraft bench tree_scores", description="What a tree is grown with")
    parser.add_argument("--seeds", type=int, default=4000)
    parser.add_argument("--out", type=Path, required=True, help="record to write")
    args = parser.parse_args(argv)
    figures = measure(args.seeds)
    for key, value in figures.items():
        print(f"{key:<44} {value}")
    write_record(make_record("tree_scores", {"seeds": args.seeds, "vocabulary": VOCAB}, figures, {}), args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
