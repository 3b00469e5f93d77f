"""Growing trees: against an exhaustive search in plain Python, with ties; what the draft is asked; ends of the vocabulary.

Scores are multiples of 1/8, so sums are exact and equal sums are ties.
"""

import itertools
import random
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from longdraft.draft_models.draft_tree import Frontier, TreeDraft, beam_tree, ranked_tree
from longdraft.kernels.tree import Tree
from longdraft.kernels.tree_bits import unpack_bits

INF = float("inf")
Path = tuple[int, ...]
Table = Callable[[int, Path], list[float]]  # request, tokens behind the root -> score of each next one


def random_table(seed: int, vocab: int, holes: float = 0.0) -> Table:
    def scores(request: int, path: Path) -> list[float]:
        rng = random.Random(f"{seed} {request} {path}")
        return [-INF if rng.random() < holes else -rng.randrange(1, 12) / 8 for _ in range(vocab)]

    return scores


class Asked:
    """A draft that answers from a table; it follows each node's path by what the frontier says."""

    def __init__(self, table: Table, ids: list[int] | None = None) -> None:
        self.table, self.ids = table, ids
        self.runs: list[list[Path]] = []  # of each request, in the order of the runs
        self.frontiers: list[Frontier] = []

    def __call__(self, nodes: Frontier) -> torch.Tensor:
        token, parent = nodes.token_BM.tolist(), nodes.parent_BM.tolist()
        if nodes.depth == 0:
            self.before: list[list[Path]] = [[()] for _ in token]
            self.runs = [[] for _ in token]
        else:
            self.before = [
                [self.before[b][p] + (t,) for t, p in zip(token[b], parent[b], strict=True)] for b in range(len(token))
            ]
        assert all(nodes.first == len(runs) for runs in self.runs)
        for runs, paths in zip(self.runs, self.before, strict=True):
            runs += paths
        self.frontiers.append(nodes)
        return torch.tensor([[self.table(b, path) for path in paths] for b, paths in enumerate(self.before)])


def plain_scores(logits_BMN: torch.Tensor, depth: int) -> torch.Tensor:
    return logits_BMN


def nodes_of(tree: Tree, request: int) -> list[Path]:
    """Paths of the tree's nodes, by place."""
    token, parent = tree.token_BT[request].tolist(), tree.parent_BT[request].tolist()
    assert parent[0] == -1
    paths: dict[int, Path] = {0: ()}
    for place in range(1, len(token)):
        if parent[place] >= 0:
            paths[place] = paths[parent[place]] + (token[place],)
            assert int(tree.depth_BT[request, place]) == len(paths[place])
    return list(paths.values())


def beam_reference(table: Table, request: int, widths: list[int]) -> list[Path]:
    """All children of all nodes of a depth, sorted."""
    level: list[tuple[float, Path]] = [(0.0, ())]
    found = [()]
    for width in widths:
        children = [
            (total + score, rank, token, path)
            for rank, (total, path) in enumerate(level)
            for token, score in enumerate(table(request, path))
        ]
        children.sort(key=lambda c: (-c[0], c[1], c[2]))
        level = [(total, (*path, token)) for total, _, token, path in children[:width] if total > -INF]
        found += [path for _, path in level]
    return found


def ranked_reference(table: Table, request: int, depth: int, branch: int, places: int) -> list[Path]:
    """The pool as a list in order of creation, then sorted."""
    level: list[tuple[float, Path]] = [(0.0, ())]
    pool: list[tuple[float, int, Path]] = []
    for _ in range(depth):
        grown = []
        for total, path in level:
            scores = table(request, path)
            best = sorted(range(len(scores)), key=lambda v, s=scores: (-s[v], v))[:branch]
            grown += [(total + scores[v], (*path, v)) for v in best]
        pool += [(total, len(pool) + i, path) for i, (total, path) in enumerate(grown)]
        order = sorted(range(len(grown)), key=lambda i, g=grown: (-g[i][0], i))[:branch]
        level = [grown[i] for i in order]
    pool.sort(key=lambda c: (-c[0], c[1]))
    kept = sorted(pool[: places - 1], key=lambda c: c[1])
    return [(), *(path for total, _, path in kept if total > -INF)]


def every_path(table: Table, request: int, depth: int) -> dict[Path, float]:
    """All nodes down to a depth with their sums."""
    sums: dict[Path, float] = {(): 0.0}
    for path in itertools.chain.from_iterable(
        itertools.product(range(len(table(request, ()))), repeat=d) for d in range(1, depth + 1)
    ):
        sums[path] = sums[path[:-1]] + table(request, path[:-1])[path[-1]]
    del sums[()]
    return sums


ROOTS = torch.tensor([5, 3, 0])


@settings(max_examples=30, deadline=None)
@given(
    widths=st.lists(st.integers(1, 5), min_size=1, max_size=4),
    seed=st.integers(0, 10_000),
    holes=st.sampled_from([0.0, 0.4, 0.95]),
)
def test_the_beam_tree_equals_an_exhaustive_search(widths: list[int], seed: int, holes: float) -> None:
    table = random_table(seed, 6, holes)
    tree = beam_tree(TreeDraft(Asked(table), plain_scores), ROOTS, widths)
    assert tree.token_BT.shape == (3, 1 + sum(widths))
    assert tree.token_BT[:, 0].tolist() == ROOTS.tolist()
    for request in range(3):
        assert nodes_of(tree, request) == beam_reference(table, request, widths)


@settings(max_examples=30, deadline=None)
@given(
    depth=st.integers(1, 4),
    branch=st.integers(1, 4),
    share=st.floats(0, 1),
    seed=st.integers(0, 10_000),
    holes=st.sampled_from([0.0, 0.4, 0.95]),
)
def test_the_ranked_tree_equals_a_plain_one(depth: int, branch: int, share: float, seed: int, holes: float) -> None:
    table = random_table(seed, 5, holes)
    places = 1 + round(share * (branch + (depth - 1) * branch**2))
    tree = ranked_tree(TreeDraft(Asked(table), plain_scores), ROOTS, depth, branch, places)
    assert tree.token_BT.shape == (3, places)
    for request in range(3):
        assert nodes_of(tree, request) == ranked_reference(table, request, depth, branch, places)


@pytest.mark.parametrize("seed", range(20))
def test_a_ranked_tree_within_its_branches_has_the_largest_sums_of_all_trees(seed: int) -> None:
    table, places = random_table(seed, 4), 5
    tree = ranked_tree(TreeDraft(Asked(table), plain_scores), ROOTS, 3, 4, places)
    for request in range(3):
        sums = every_path(table, request, 3)
        got = sorted((sums[path] for path in nodes_of(tree, request)[1:]), reverse=True)
        assert got == sorted(sums.values(), reverse=True)[: places - 1]


@pytest.mark.parametrize("kind", ["beam", "ranked"])
def test_the_draft_is_shown_each_nodes_ancestors_among_its_runs(kind: str) -> None:
    """More than 64 runs, so that bits cross a word."""
    asked = Asked(random_table(1, 20))
    draft = TreeDraft(asked, plain_scores)
    tree = beam_tree(draft, ROOTS, [4, 20, 20, 20, 20]) if kind == "beam" else ranked_tree(draft, ROOTS, 5, 17, 100)
    assert [len(f.token_BM[0]) for f in asked.frontiers] == (
        [1, 4, 20, 20, 20] if kind == "beam" else [1, 17, 17, 17, 17]
    )
    assert tree.depth == 5
    for request, runs in enumerate(asked.runs):
        seen = torch.cat([unpack_bits(f.bits_BMW[request], len(runs)) for f in asked.frontiers])
        for run, path in enumerate(runs):
            assert {runs[i] for i in seen[run].nonzero()[:, 0].tolist()} == {path[:d] for d in range(len(path) + 1)}
            assert int(seen[run].sum()) == len(path) + 1


@pytest.mark.parametrize("kind", ["beam", "ranked"])
def test_a_ranked_heads_rows_become_the_targets_ids(kind: str) -> None:
    ids = torch.tensor([3, 8, 9, 40, 77])
    table = random_table(4, 5)
    position = {int(v): i for i, v in enumerate(ids)}
    translated = Asked(lambda b, path: table(b, tuple(position[t] for t in path)))
    plain = TreeDraft(Asked(table), plain_scores)
    mapped = TreeDraft(translated, plain_scores, id_N=ids)
    if kind == "beam":
        want, got = beam_tree(plain, ROOTS, [3, 4]), beam_tree(mapped, ROOTS, [3, 4])
    else:
        want, got = ranked_tree(plain, ROOTS, 3, 3, 9), ranked_tree(mapped, ROOTS, 3, 3, 9)
    assert torch.equal(got.token_BT[:, 1:], ids[want.token_BT[:, 1:]])
    assert torch.equal(got.parent_BT, want.parent_BT)


@pytest.mark.parametrize("kind", ["beam", "ranked"])
def test_no_node_is_deeper_than_a_request_can_use(kind: str) -> None:
    draft = TreeDraft(Asked(random_table(2, 6)), plain_scores, limit_B=torch.tensor([0, 2, 9]))
    tree = beam_tree(draft, ROOTS, [2, 3, 4]) if kind == "beam" else ranked_tree(draft, ROOTS, 3, 3, 12)
    assert [max(len(path) for path in nodes_of(tree, b)) for b in range(3)] == [0, 2, 3]


@pytest.mark.parametrize("bad", [float("nan"), INF, -INF])
@pytest.mark.parametrize("kind", ["beam", "ranked"])
def test_a_broken_draft_still_leaves_a_tree_with_its_root(kind: str, bad: float) -> None:
    """Its tokens are the vocabulary's and its parents are nodes, so that a verification is right whatever was drafted."""
    draft = TreeDraft(lambda nodes: torch.full((3, nodes.token_BM.shape[1], 6), bad))
    tree = beam_tree(draft, ROOTS, [3, 4]) if kind == "beam" else ranked_tree(draft, ROOTS, 3, 3, 9)
    assert tree.token_BT[:, 0].tolist() == ROOTS.tolist()
    assert ((tree.token_BT >= 0) & (tree.token_BT < 6)).all()
    assert all(len(nodes_of(tree, b)) == 1 for b in range(3))


def test_the_greedy_score_is_the_log_probability() -> None:
    """The sums along a chain that is a beam of one are its log-likelihood; the best chain is the argmax of each step."""
    logits = torch.randn(3, 1, 6, generator=torch.Generator().manual_seed(0))
    tree = beam_tree(TreeDraft(lambda nodes: logits), ROOTS, [1, 1])
    best = logits[:, 0].argmax(-1)
    assert torch.equal(tree.token_BT[:, 1:], torch.stack([best, best], 1))


def test_more_nodes_than_candidates_are_refused() -> None:
    draft = TreeDraft(Asked(random_table(0, 3)), plain_scores)
    with pytest.raises(ValueError, match="the 4 largest of 3"):
        beam_tree(draft, ROOTS, [4])
    with pytest.raises(ValueError, match="the 20 largest of 7"):
        ranked_tree(draft, ROOTS, 2, 2, 20)
