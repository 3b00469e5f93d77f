"""Random trees and their acceptance by walking, for tests."""

import random

import torch

from longdraft.kernels.tree import NO_NODE, Tree
from longdraft.kernels.tree_accept import Accepted


def tree_of(tokens: list[list[int]], parents: list[list[int]], depth: int | None = None) -> Tree:
    """Trees from lists; depths are counted here."""
    depths = []
    for row in parents:
        deep = [0] * len(row)
        for node in range(len(row)):
            up = row[node] if row[node] >= -1 else -1
            while up >= 0:
                deep[node] += 1
                up = row[up]
        depths.append(deep)
    most = max(map(max, depths)) if depth is None else depth
    return Tree.build(torch.tensor(tokens), torch.tensor(parents), torch.tensor(depths), most)


def random_tree(batch: int, count: int, vocab: int, rng: random.Random, ordered: bool = True) -> Tree:
    """Trees with duplicate siblings and places without nodes; unordered ones hold children before parents too."""
    tokens, parents = [], []
    for _ in range(batch):
        order = [0, *rng.sample(range(1, count), count - 1)] if not ordered else list(range(count))
        row = [-1] * count
        for i in range(1, count):
            row[order[i]] = order[rng.randrange(max(0, i - 4), i)]
        leaves = [node for node in range(1, count) if node not in row]
        for node in rng.sample(leaves, len(leaves) // 3):
            row[node] = NO_NODE
        parents.append(row)
        tokens.append([rng.randrange(vocab) for _ in range(count)])
    return tree_of(tokens, parents)


def walked(tree: Tree, choice: list[list[int]]) -> list[list[int]]:
    """Kept path of each tree by trying every path, the deepest, of several the one that ends at the smallest place."""
    found = []
    for token, parent, wanted in zip(tree.token_BT.tolist(), tree.parent_BT.tolist(), choice, strict=True):
        best = [0]
        for node in range(len(token)):
            if parent[node] == NO_NODE:
                continue
            path = [node]
            while parent[path[0]] >= 0:
                path.insert(0, parent[path[0]])
            if all(token[b] == wanted[a] for a, b in zip(path, path[1:], strict=False)) and len(path) > len(best):
                best = path
        found.append(best)
    return found


def check_accepted(got: Accepted, tree: Tree, choice_BT: torch.Tensor) -> None:
    """Every field, against the walk."""
    choice = choice_BT.tolist()
    paths = walked(tree, choice)
    width = tree.depth + 1
    filled = [path + [path[-1]] * (width - len(path)) for path in paths]
    assert got.path_BD1.tolist() == filled
    assert got.count_B.tolist() == [len(path) - 1 for path in paths]
    assert got.next_B.tolist() == [row[path[-1]] for row, path in zip(choice, paths, strict=True)]
    assert got.token_BD1.tolist() == [[row[node] for node in path] for row, path in zip(choice, filled, strict=True)]
