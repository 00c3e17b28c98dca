"""`slot_windows` for windows that are draft trees: accept a path of drafts and advance the slots,
and write new trees. On CUDA one Triton kernel each, elsewhere the plain-torch references."""

import torch

from tllm_spec.kernels.dispatch import tl, triton, with_kernel
from tllm_spec.kernels.drafts.draft_beams import DraftTree
from tllm_spec.kernels.launch import begin, programmatic_launch
from tllm_spec.kernels.sampling.gumbel import COIN_DOMAIN, uniform
from tllm_spec.kernels.slots.accept import (
    Accepted,
    SlotTables,
    TreeRates,
    TreeTables,
    accept_tree,
    accept_tree_by_rates,
)
from tllm_spec.kernels.slots.slot_windows import advance


@with_kernel("accept_trees_triton", argument=1)
def accept_trees(
    tables: SlotTables,
    parents: torch.Tensor,
    slots: torch.Tensor,
    kv_lens: torch.Tensor,
    targets: torch.Tensor,
    depth: int,
    synthetic: TreeRates | None = None,
) -> Accepted:
    """Accepts paths in the windows of slots `[B]` and advances these slots.

    Args:
        parents: `[S, >= W]` int64 by slot, any stride between rows: -1 for the root, a parent
            before its children. A layout that all slots have is expanded.
        kv_lens: `[B]` int64: of these slots.
        targets: `[B, W]` int64, contiguous: the target's token after each node.
        depth: D, drafts on the longest path, at most.

    Returns accepted rows `[B, D+1]`, emitted tokens `[B, D+1]` and their numbers `[B]`, see
    `accept_tree`. Row r of request b is row `b * W + r` of the round. Duplicate slots (padding)
    keep one of their results."""
    width = targets.shape[1]
    tokens = tables.window.index_select(0, slots)[:, :width]
    tree = (
        parents.index_select(0, slots)[:, :width],
        depth,
        tables.num_drafts.index_select(0, slots),
    )
    if synthetic is None:
        accepted = accept_tree(targets, tokens, *tree)
    else:
        coins = uniform(synthetic.seeds.index_select(0, slots), kv_lens + 1, COIN_DOMAIN)
        accepted = accept_tree_by_rates(targets, tokens, *tree, synthetic.bounds, coins)
    advance(tables, slots, kv_lens, *accepted[1:])
    return accepted


@with_kernel("write_trees_triton", argument=2)
def write_trees(
    tables: SlotTables,
    trees: TreeTables,
    slots: torch.Tensor,
    tree: DraftTree,
    draft_limits: torch.Tensor,
) -> None:
    """Writes trees whose nodes are ordered by depth into the windows of slots `[B]`. Rows after the
    tree's stay as they are.

    The tree's rows may be one layout, expanded. draft_limits `[S]` int64: the depth of the deepest
    draft that a slot may verify; deeper ones do not count as proposed."""
    width = tree.parents.shape[1]
    tables.window[slots, 1:width] = tree.tokens
    trees.parents[slots, :width] = tree.parents
    trees.depths[slots, :width] = tree.depths
    trees.bits[slots, :width] = tree.bits
    is_proposed = tree.depths[:, 1:] <= draft_limits.index_select(0, slots).unsqueeze(1)
    if tree.num_nodes is not None:
        is_proposed &= torch.arange(width - 1, device=slots.device) < tree.num_nodes.unsqueeze(1)
    tables.num_drafts[slots] = is_proposed.sum(dim=1)


def accept_trees_triton(
    tables: SlotTables,
    parents: torch.Tensor,
    slots: torch.Tensor,
    kv_lens: torch.Tensor,
    targets: torch.Tensor,
    depth: int,
    synthetic: TreeRates | None = None,
) -> Accepted:
    """See `accept_trees`."""
    assert targets.is_contiguous() and slots.is_contiguous() and kv_lens.is_contiguous()
    assert parents.stride(1) == 1
    batch, width = targets.shape
    rows, tokens = targets.new_empty(2, batch, depth + 1)
    lens, num_ranks = torch.empty_like(slots), 1
    if synthetic is not None:
        assert synthetic.bounds.is_contiguous() and len(synthetic.bounds) >= depth
        num_ranks = synthetic.bounds.shape[1]
    _accept[(batch,)](
        tables.kv_lens,
        tables.window,
        tables.window.stride(0),
        tables.num_drafts,
        tables.previous_token,
        parents,
        parents.stride(0),
        slots,
        kv_lens,
        targets,
        synthetic.bounds if synthetic else None,
        synthetic.seeds if synthetic else None,
        synthetic.seeds.stride(0) if synthetic else 0,
        rows,
        tokens,
        lens,
        width,
        triton.next_power_of_2(width),
        depth,
        triton.next_power_of_2(depth + 1),
        num_ranks,
        triton.next_power_of_2(num_ranks),
        COIN_DOMAIN,
        **programmatic_launch(slots.device),
        num_warps=1,
    )
    return rows, tokens, lens


def write_trees_triton(
    tables: SlotTables,
    trees: TreeTables,
    slots: torch.Tensor,
    tree: DraftTree,
    draft_limits: torch.Tensor,
) -> None:
    """See `write_trees`."""
    stored = (trees.parents, trees.depths, trees.bits)
    rows = (tree.parents, tree.depths, tree.bits)
    assert all(each.is_contiguous() for each in (slots, draft_limits, tree.tokens))
    assert all(each.stride() == tree.parents.stride() for each in rows)
    assert tree.parents.stride(1) == 1
    assert all(each.stride() == trees.parents.stride() for each in stored)
    assert trees.parents.stride(1) == 1
    assert tree.num_nodes is None or tree.num_nodes.is_contiguous()
    width = tree.parents.shape[1]
    _write[(len(slots),)](
        tables.window,
        tables.window.stride(0),
        tables.num_drafts,
        *stored,
        trees.parents.stride(0),
        slots,
        tree.tokens,
        *rows,
        tree.parents.stride(0),
        draft_limits,
        tree.num_nodes,
        width,
        triton.next_power_of_2(width),
        **programmatic_launch(slots.device),
        num_warps=1,
    )


@triton.jit  # type: ignore[untyped-decorator]  # triton has no types
def _at(values: tl.tensor, indices: tl.tensor, index: tl.tensor) -> tl.tensor:
    """The value at one index."""
    return tl.sum(tl.where(indices == index, values, 0), axis=0)


@triton.jit  # type: ignore[untyped-decorator]  # triton has no types
def _first_coin(
    seed: tl.tensor, position: tl.tensor, domain: tl.constexpr, lanes: tl.constexpr
) -> tl.tensor:
    """The same coin in every lane, `[lanes]` float64."""
    zeros = tl.zeros([lanes], tl.int32)
    word, _, _, _ = tl.philox(seed, zeros, zeros + position.to(tl.int32), zeros + domain, zeros)
    return (word.to(tl.float64) + 0.5) * (1.0 / 4294967296.0)


@triton.jit  # type: ignore[untyped-decorator]  # triton has no types
def _choose_rank(
    bounds: tl.tensor, coin: tl.tensor, num_ranks: tl.constexpr, lanes: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """The rank whose interval has the coin (num_ranks: none, the path ends), and the coin's place
    in it."""
    rank = tl.arange(0, lanes)
    bound = tl.load(bounds + rank, mask=rank < num_ranks, other=2.0)
    chosen = tl.sum((coin >= bound).to(tl.int32), axis=0)
    lower = tl.max(tl.where(rank == chosen - 1, bound, 0.0), axis=0)
    upper = tl.max(tl.where(rank == chosen, bound, 0.0), axis=0)
    return chosen, (coin - lower) / tl.where(upper > lower, upper - lower, 1.0)


@triton.jit(do_not_specialize=["seeds_stride", "parents_stride"])  # type: ignore[untyped-decorator]  # triton has no types
def _accept(
    all_kv_lens: tl.tensor, windows: tl.tensor, windows_stride: tl.tensor,
    all_num_drafts: tl.tensor, previous_tokens: tl.tensor, all_parents: tl.tensor,
    parents_stride: tl.tensor, slots: tl.tensor, kv_lens: tl.tensor, targets: tl.tensor,
    bounds: tl.tensor, seeds: tl.tensor, seeds_stride: tl.tensor, rows: tl.tensor,
    tokens: tl.tensor, lens: tl.tensor, width: tl.constexpr, block: tl.constexpr,
    depth: tl.constexpr, path_block: tl.constexpr, num_ranks: tl.constexpr,
    ranks_block: tl.constexpr, coin_domain: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """Descends from the root, one node a step. Once a step finds no child, no later one does."""
    begin(PDL)
    request, node = tl.program_id(0).to(tl.int64), tl.arange(0, block)
    slot, kv_len = tl.load(slots + request), tl.load(kv_lens + request)
    exists, window = node < width, windows + slot * windows_stride
    draft = tl.load(window + node, mask=exists, other=0)
    parent = tl.load(all_parents + slot * parents_stride + node, mask=exists, other=-1)
    target = tl.load(targets + request * width + node, mask=exists, other=0)
    is_draft = exists & (node > 0) & (node <= tl.load(all_num_drafts + slot))
    if bounds is not None:
        coin = _first_coin(
            tl.load(seeds + slot * seeds_stride), kv_len + 1, coin_domain, ranks_block
        )
    path = tl.arange(0, path_block)
    path_rows = tl.zeros([path_block], tl.int32)
    emitted = tl.zeros([path_block], tl.int64)
    row = tl.zeros([], tl.int32)
    num_accepted = tl.zeros([], tl.int32)
    for step in tl.range(0, depth):
        is_child = is_draft & (parent == row)
        if bounds is None:
            is_next = is_child & (draft == _at(target, node, row))
        else:
            rank, coin = _choose_rank(bounds + step * num_ranks, coin, num_ranks, ranks_block)
            is_next = is_child & (tl.cumsum(is_child.to(tl.int32), axis=0) == rank + 1)
            is_next = is_next & (rank < num_ranks) & (num_accepted == step)
        next_row = tl.min(tl.where(is_next, node, block), axis=0)
        is_found = next_row < block
        emitted = tl.where((path == step) & is_found, _at(draft, node, next_row), emitted)
        row = tl.where(is_found, next_row, row)
        num_accepted += is_found.to(tl.int32)
        path_rows = tl.where(path > step, row, path_rows)
    last = _at(target, node, row)
    num_new = num_accepted.to(tl.int64) + 1
    own = request * (depth + 1) + path
    tl.store(rows + own, path_rows.to(tl.int64), mask=path <= depth)
    tl.store(tokens + own, tl.where(path < num_accepted, emitted, last), mask=path <= depth)
    tl.store(lens + request, num_new)
    tl.store(previous_tokens + slot, _at(draft, node, row))  # an accepted draft, or the bonus token
    tl.store(window, tl.maximum(last, 0))
    tl.store(all_num_drafts + slot, tl.zeros_like(slot))
    tl.store(all_kv_lens + slot, kv_len + num_new)


@triton.jit  # type: ignore[untyped-decorator]  # triton has no types
def _write(
    windows: tl.tensor, windows_stride: tl.tensor, all_num_drafts: tl.tensor,
    all_parents: tl.tensor, all_depths: tl.tensor, all_bits: tl.tensor, trees_stride: tl.tensor,
    slots: tl.tensor, tokens: tl.tensor, parents: tl.tensor, depths: tl.tensor, bits: tl.tensor,
    rows_stride: tl.tensor, draft_limits: tl.tensor, num_nodes: tl.tensor, width: tl.constexpr,
    block: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    begin(PDL)
    request, node = tl.program_id(0).to(tl.int64), tl.arange(0, block)
    slot, exists = tl.load(slots + request), node < width
    is_draft = exists & (node > 0)
    token = tl.load(tokens + request * (width - 1) + node - 1, mask=is_draft, other=0)
    tl.store(windows + slot * windows_stride + node, token, mask=is_draft)
    own, stored = request * rows_stride + node, slot * trees_stride + node
    depth = tl.load(depths + own, mask=exists, other=0)
    tl.store(all_depths + stored, depth, mask=exists)
    tl.store(all_parents + stored, tl.load(parents + own, mask=exists, other=0), mask=exists)
    tl.store(all_bits + stored, tl.load(bits + own, mask=exists, other=0), mask=exists)
    is_proposed = is_draft & (depth <= tl.load(draft_limits + slot))
    if num_nodes is not None:
        is_proposed = is_proposed & (node <= tl.load(num_nodes + request))
    tl.store(all_num_drafts + slot, tl.sum(is_proposed.to(tl.int64), axis=0))
