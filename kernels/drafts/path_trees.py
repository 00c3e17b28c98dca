"""Draft trees and paths: equal beginnings of paths become one tree, and accepted paths show which
child of a node came next."""

from collections import Counter

import torch

from tllm_spec.config.draft_shape import END, NOTHING, OFF_CHAIN
from tllm_spec.kernels.dispatch import tl, triton, with_kernel
from tllm_spec.kernels.drafts.draft_layout import HostTree
from tllm_spec.kernels.launch import begin, programmatic_launch, strided
from tllm_spec.kernels.slots.accept import DraftTree

# Makes draft trees of paths: equal beginnings become one. On CUDA a Triton kernel, elsewhere the
# plain-torch reference.


Path = tuple[int, ...]


@with_kernel("path_trees_triton")
def path_trees(paths: torch.Tensor, lens: torch.Tensor, max_nodes: int, topk: int) -> DraftTree:
    """The trees of B requests, with `max_nodes` + 1 rows. Rows after the last node follow the root.

    Args:
        paths: `[B, M, D]` int64, contiguous, the best first. After a path there is any token.
        lens: `[B, M]` int64, contiguous: tokens of each path.
        max_nodes, topk: a path ends before a node or child for which there is no room.
    """
    found = [
        HostTree.of_paths(_nodes_of(*each, max_nodes, topk))
        for each in zip(paths.tolist(), lens.tolist(), strict=True)
    ]
    paddings = paths[:, 0, 0].tolist()
    rows = (tree.padded(max_nodes + 1, own) for tree, own in zip(found, paddings, strict=True))
    tokens, parents, depths, bits = map(torch.tensor, zip(*rows, strict=True))
    number = torch.tensor([len(tree.tokens) for tree in found])
    return DraftTree(tokens, number, parents=parents, depths=depths, bits=bits)


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


def path_trees_triton(
    paths: torch.Tensor, lens: torch.Tensor, max_nodes: int, topk: int
) -> DraftTree:
    """See `path_trees`."""
    assert paths.is_contiguous() and lens.is_contiguous()
    batch, num_paths, depth = paths.shape
    tokens = paths.new_empty((batch, max_nodes))
    parents, depths, bits = paths.new_empty((3, batch, max_nodes + 1))
    num_nodes = paths.new_empty(batch)
    _grow[(batch,)](
        paths,
        lens,
        tokens,
        parents,
        depths,
        bits,
        num_nodes,
        num_paths,
        depth,
        max_nodes,
        topk,
        triton.next_power_of_2(max_nodes + 1),
        **programmatic_launch(paths.device, 1),
    )
    return DraftTree(tokens, num_nodes, parents=parents, depths=depths, bits=bits)


@triton.jit
def _grow(
    paths: tl.tensor, lens: tl.tensor, tokens: tl.tensor, parents: tl.tensor, depths: tl.tensor,
    all_bits: tl.tensor, num_nodes: tl.tensor, num_paths: tl.constexpr, max_depth: tl.constexpr,
    max_nodes: tl.constexpr, topk: tl.constexpr, block: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """Nodes are numbered as they are found, and stored by depth. -1 stands for the end of a
    path."""
    begin(PDL)
    request, own = tl.program_id(0).to(tl.int64), tl.arange(0, block)
    first = paths + request * num_paths * max_depth
    token = tl.zeros([block], tl.int64) + tl.load(first)
    parent = tl.where(own > 0, 0, -1)
    depth = (own > 0).to(tl.int32)
    bits = (tl.full([block], 1, tl.int64) << own.to(tl.int64)) | 1
    own_bits = tl.full([block], 1, tl.int64) << own.to(tl.int64)
    number = request.to(tl.int32) * 0
    for path in range(num_paths):
        length = tl.load(lens + request * num_paths + path)
        node = number * 0
        for step in range(max_depth):
            drafted = tl.load(first + path * max_depth + step)
            is_child = (own > 0) & (own <= number) & (parent == node)
            child = tl.max(tl.where(is_child & (token == drafted), own, 0), axis=0)
            has_room = (number < max_nodes) & (tl.sum(is_child.to(tl.int32), axis=0) < topk)
            is_on = (step < length) & (node >= 0)
            is_new = (is_on & (child == 0) & has_room).to(tl.int32)
            new = (own == number + 1) & (is_new > 0)
            path_bits = tl.sum(tl.where(own == node, bits, 0), axis=0)
            token = tl.where(new, drafted, token)
            parent = tl.where(new, node, parent)
            depth = tl.where(new, step + 1, depth)
            bits = tl.where(new, own_bits | path_bits, bits)
            number += is_new
            child = tl.where(is_new > 0, number, tl.where(child > 0, child, -1))
            node = tl.where(is_on, child, -1)
    is_node = (own > 0) & (own <= number)
    is_before = (depth[None, :] < depth[:, None]) | (
        (depth[None, :] == depth[:, None]) & (own[None, :] < own[:, None])
    )
    is_before = is_before & is_node[None, :]
    row = tl.where(is_node, 1 + tl.sum(is_before.to(tl.int32), axis=1), own)
    is_parent = parent[:, None] == own[None, :]
    parent_row = tl.sum(tl.where(is_parent, row[None, :], 0), axis=1)
    is_above = ((bits[:, None] >> own[None, :].to(tl.int64)) & 1) > 0
    row_bits = tl.full([block], 1, tl.int64) << row.to(tl.int64)
    moved = tl.sum(tl.where(is_above, row_bits[None, :], 0), axis=1)
    exists, at = own <= max_nodes, request * (max_nodes + 1) + row
    tl.store(tokens + request * max_nodes + row - 1, token, mask=exists & (own > 0))
    tl.store(parents + at, tl.where(own > 0, parent_row, -1).to(tl.int64), mask=exists)
    tl.store(depths + at, depth.to(tl.int64), mask=exists)
    tl.store(all_bits + at, moved, mask=exists)
    tl.store(num_nodes + request, number.to(tl.int64))


# What accepted paths show about the children of their nodes: which child came next, and how many
# were rejected. On CUDA a Triton kernel, elsewhere the plain-torch reference.


@with_kernel("path_ranks_triton")
def path_ranks(
    parents: torch.Tensor,
    slots: torch.Tensor,
    num_drafts: torch.Tensor,
    rows: torch.Tensor,
    lens: torch.Tensor,
    width: int,
) -> torch.Tensor:
    """Ranks of the paths that `accept_windows` has accepted, `[B, D+1]` int64.

    Args:
        parents: `[S, >= W]` int64 by slot, as in `SlotTables.trees`.
        slots: `[B]` int64.
        num_drafts: `[B]` int64: nodes that were proposed, as before acceptance.
        rows, lens: `[B, D+1]` and `[B]`, the accepted rows and their numbers.
        width: W, rows of a window.
    """
    nodes = torch.arange(width, device=rows.device)
    is_draft = (nodes > 0) & (nodes <= num_drafts.unsqueeze(1))  # [B, W]
    own = parents.index_select(0, slots)[:, :width]
    is_child = (own.unsqueeze(1) == rows.unsqueeze(2)) & is_draft.unsqueeze(1)  # [B, D+1, W]
    next_rows = rows.roll(-1, dims=1).unsqueeze(2)
    ranks = (is_child & (nodes < next_rows)).sum(dim=2)
    columns, last = torch.arange(rows.shape[1], device=rows.device), lens.unsqueeze(1) - 1
    # A path as long as a round may emit had no children to try.
    tried = torch.where(columns == rows.shape[1] - 1, 0, is_child.sum(dim=2))
    found = torch.where(columns < last, ranks, END + tried)
    strayed = ((ranks > 0) & (columns < last)).cumsum(dim=1)
    found = found + OFF_CHAIN * (strayed.roll(1, dims=1).masked_fill(columns == 0, 0) > 0)
    return found.masked_fill(columns > last, NOTHING)


def path_ranks_triton(
    parents: torch.Tensor,
    slots: torch.Tensor,
    num_drafts: torch.Tensor,
    rows: torch.Tensor,
    lens: torch.Tensor,
    width: int,
) -> torch.Tensor:
    """See `path_ranks`."""
    assert all(each.is_contiguous() for each in (slots, num_drafts, rows, lens))
    assert parents.stride(1) == 1
    found = torch.empty_like(rows)
    _path_ranks[(len(slots),)](
        *strided(parents),
        slots,
        num_drafts,
        rows,
        lens,
        found,
        width,
        triton.next_power_of_2(width),
        rows.shape[1],
        END,
        OFF_CHAIN,
        NOTHING,
        **programmatic_launch(slots.device, 1),
    )
    return found


@triton.jit(do_not_specialize=["parents_stride"])
def _path_ranks(
    all_parents: tl.tensor, parents_stride: tl.tensor, slots: tl.tensor, all_num_drafts: tl.tensor,
    rows: tl.tensor, lens: tl.tensor, found: tl.tensor, width: tl.constexpr, block: tl.constexpr,
    path: tl.constexpr, end: tl.constexpr, off_chain: tl.constexpr, nothing: tl.constexpr,
    PDL: tl.constexpr,
) -> None:  # fmt: skip
    begin(PDL)
    request, node = tl.program_id(0).to(tl.int64), tl.arange(0, block)
    slot, last = tl.load(slots + request), tl.load(lens + request) - 1
    parent = tl.load(all_parents + slot * parents_stride + node, mask=node < width, other=-1)
    is_draft = (node > 0) & (node < width) & (node <= tl.load(all_num_drafts + request))
    own, strayed = request * path, tl.zeros([], tl.int64)
    for column in tl.range(0, path):
        row = tl.load(rows + own + column)
        is_child = is_draft & (parent == row)
        tried = tl.sum(is_child.to(tl.int64), axis=0)
        if column + 1 < path:
            next_row = tl.load(rows + own + column + 1)
            rank = tl.sum((is_child & (node < next_row)).to(tl.int64), axis=0)
        else:
            rank = tl.zeros([], tl.int64)
            tried = tl.zeros([], tl.int64)
        value = tl.where(column < last, rank, end + tried) + off_chain * strayed
        tl.store(found + own + column, tl.where(column > last, nothing, value))
        strayed = tl.where((rank > 0) & (column < last), 1, strayed)
