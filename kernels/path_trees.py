"""Makes draft trees of paths: equal beginnings become one. On CUDA a Triton kernel, elsewhere the
plain-torch reference."""

from collections import Counter

import torch

from tllm_spec.kernels.beam_pool import DraftTree
from tllm_spec.kernels.dispatch import with_kernel

Path = tuple[int, ...]


@with_kernel("path_trees_triton.path_trees_triton")
def path_trees(paths: torch.Tensor, lens: torch.Tensor, max_nodes: int, topk: int) -> DraftTree:
    """The trees of B requests, with `max_nodes` + 1 rows. Rows after the last node follow the root.

    Args:
        paths: `[B, M, D]` int64, contiguous, the best first. After a path there is any token.
        lens: `[B, M]` int64, contiguous: tokens of each path.
        max_nodes, topk: a path ends before a node or child for which there is no room.
    """
    found = [
        _nodes_of(*each, max_nodes, topk)
        for each in zip(paths.tolist(), lens.tolist(), strict=True)
    ]
    paddings = paths[:, 0, 0].tolist()
    trees = [_rows_of(*each, max_nodes) for each in zip(found, paddings, strict=True)]
    tokens, parents, depths, bits = map(torch.tensor, zip(*trees, strict=True))
    return DraftTree(tokens, parents, depths, bits, torch.tensor(list(map(len, found))))


def _rows_of(nodes: list[Path], padding: int, max_nodes: int) -> tuple[list[int], ...]:
    """Tokens, parents, depths and bits. padding: the token of rows after the tree."""
    rows: dict[Path, int] = {(): 0}
    tokens: list[int] = []
    parents, depths, bits = [-1], [0], [1]
    for row, node in enumerate(nodes, 1):
        rows[node], parent = row, rows[node[:-1]]
        tokens.append(node[-1])
        parents.append(parent)
        depths.append(len(node))
        bits.append(bits[parent] | 1 << row)
    left = range(len(bits), max_nodes + 1)
    tokens += [padding] * len(left)
    parents += [0] * len(left)
    depths += [1] * len(left)
    bits += [1 | 1 << row for row in left]
    bits[-1] -= (bits[-1] >> 63) << 64  # as int64
    return tokens, parents, depths, bits


def _nodes_of(paths: list[list[int]], lens: list[int], max_nodes: int, topk: int) -> list[Path]:
    """The paths that lead to the nodes, by depth, and then as they were found."""
    nodes: dict[Path, None] = {}
    num_children: Counter[Path] = Counter()
    for path, length in zip(paths, lens, strict=True):
        for node in (tuple(path[:end]) for end in range(1, length + 1)):
            if node in nodes:
                continue
            if len(nodes) == max_nodes or num_children[node[:-1]] == topk:
                break
            num_children[node[:-1]] += 1
            nodes[node] = None
    return sorted(nodes, key=len)
