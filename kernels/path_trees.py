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
    nodes = torch.arange(max_nodes + 1)
    tokens = paths[:, 0, :1].repeat(1, max_nodes)
    shape = len(paths), 1
    parents = torch.where(nodes > 0, 0, -1).repeat(shape)
    depths = (nodes > 0).to(torch.int64).repeat(shape)
    own_bits = torch.ones_like(nodes) << nodes
    bits = (own_bits | 1).repeat(shape)
    trees = [
        _nodes_of(*each, max_nodes, topk)
        for each in zip(paths.tolist(), lens.tolist(), strict=True)
    ]
    for request, tree in enumerate(trees):
        rows: dict[Path, int] = {(): 0}
        for row, node in enumerate(tree, 1):
            rows[node], parent = row, rows[node[:-1]]
            tokens[request, row - 1], depths[request, row] = node[-1], len(node)
            parents[request, row], bits[request, row] = (
                parent,
                own_bits[row] | bits[request, parent],
            )
    return DraftTree(tokens, parents, depths, bits, torch.tensor(list(map(len, trees))))


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
