"""`path_trees` as a Triton kernel, one program per request. Importing this file imports Triton."""

import torch
import triton
import triton.language as tl

from tllm_spec.kernels.beam_pool import DraftTree
from tllm_spec.kernels.programmatic_launch import programmatic_launch
from tllm_spec.kernels.programmatic_launch_triton import begin


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
        **programmatic_launch(paths.device),
        num_warps=1,
    )
    return DraftTree(tokens, parents, depths, bits, num_nodes)


@triton.jit  # type: ignore[untyped-decorator]  # triton has no types
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
