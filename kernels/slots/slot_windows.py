"""Updates of the slots' windows between sampling and the next forward: accept drafts and advance
the slots, and write new drafts. On CUDA one Triton kernel each, elsewhere the plain-torch
references. Chains and trees are two compilations of the same kernels."""

import torch

from tllm_spec.kernels.dispatch import tl, triton, with_kernel
from tllm_spec.kernels.launch import begin, programmatic_launch, strided
from tllm_spec.kernels.sampling.gumbel import COIN_DOMAIN, uniform
from tllm_spec.kernels.slots.accept import (
    Accepted,
    Drafts,
    DraftTree,
    SlotTables,
    SyntheticRates,
    accept_by_rates,
    accept_path,
)


@with_kernel("accept_windows_triton", argument=1)
def accept_windows(
    tables: SlotTables,
    slots: torch.Tensor,
    kv_lens: torch.Tensor,
    targets: torch.Tensor,
    depth: int | None = None,
    synthetic: SyntheticRates | None = None,
) -> Accepted:
    """Accepts the drafts in the windows of slots `[B]` and advances these slots.

    Args:
        kv_lens: `[B]` int64: of these slots.
        targets: `[B, W]` int64, contiguous: the target's token after each row of a window.
        depth: D, drafts on the longest path of the trees in the windows, at most; None: the
            windows are chains, and D is W - 1.

    Row r of request b is row `b * W + r` of the round. Duplicate slots (padding) keep one of their
    results."""
    width, parents = targets.shape[1], None
    if depth is not None:
        assert tables.trees is not None
        parents = tables.trees.parents.index_select(0, slots)[:, :width]
    drafts = (
        targets,
        tables.window.index_select(0, slots)[:, :width],
        parents,
        width - 1 if depth is None else depth,
        # A slot may hold more drafts than this round verifies.
        tables.num_drafts.index_select(0, slots),
    )
    if synthetic is None:
        accepted = accept_path(*drafts)
    else:
        coins = uniform(synthetic.seeds.index_select(0, slots), kv_lens + 1, COIN_DOMAIN)
        accepted = accept_by_rates(*drafts, synthetic.bounds, coins)
    advance(tables, slots, kv_lens, accepted)
    return accepted if depth is not None else accepted._replace(rows=None)


@with_kernel("write_drafts_triton", argument=1)
def write_drafts(
    tables: SlotTables, slots: torch.Tensor, drafts: Drafts, draft_limits: torch.Tensor
) -> None:
    """Writes drafts into the windows of slots `[B]`. Rows after them, and the roots' rows, stay as
    they are. A tree's rows may be one layout, expanded.

    draft_limits `[S]` int64: the length, or the depth of the deepest draft, that a slot may verify;
    deeper ones do not count as proposed."""
    length, limits = drafts.tokens.shape[1], draft_limits.index_select(0, slots)
    tables.window[slots, 1 : 1 + length] = drafts.tokens
    depths = torch.arange(1, 1 + length, device=slots.device).expand_as(drafts.tokens)
    is_proposed = torch.ones_like(depths, dtype=torch.bool)
    if drafts.num_drafts is not None:
        is_proposed = depths <= drafts.num_drafts.unsqueeze(1)
    if isinstance(drafts, DraftTree):
        assert tables.trees is not None
        depths = drafts.depths[:, 1:]
        for name, table in vars(tables.trees).items():
            table[slots, 1 : 1 + length] = getattr(drafts, name)[:, 1:]
    tables.num_drafts[slots] = (is_proposed & (depths <= limits.unsqueeze(1))).sum(dim=1)


def advance(
    tables: SlotTables, slots: torch.Tensor, kv_lens: torch.Tensor, accepted: Accepted
) -> None:
    """The second half of `accept_windows`, after any rule.

    An invalid token (-1) is stored as 0: the next round may be launched before the host has seen
    it, and its embedding must exist. No draft is valid until a drafter writes one."""
    last = (accepted.lens - 1).unsqueeze(1)
    bonus = tables.window[slots, 0]
    tail = torch.cat((bonus.unsqueeze(1), accepted.tokens), dim=1).gather(
        1, torch.cat((last, last + 1), dim=1)
    )
    tables.previous_token[slots] = tail[:, 0]
    tables.window[slots, 0] = tail[:, 1].clamp_min(0)
    tables.num_drafts.index_fill_(0, slots, 0)
    tables.kv_lens[slots] = kv_lens + accepted.lens


# They replace about 25 and 4 launches of plain torch per round, and 90 more with synthetic
# acceptance (Philox in plain torch).


def accept_windows_triton(
    tables: SlotTables,
    slots: torch.Tensor,
    kv_lens: torch.Tensor,
    targets: torch.Tensor,
    depth: int | None = None,
    synthetic: SyntheticRates | None = None,
) -> Accepted:
    """See `accept_windows`."""
    assert targets.is_contiguous() and slots.is_contiguous() and kv_lens.is_contiguous()
    (batch, width), rows, parents = targets.shape, None, None
    tokens, lens, num_ranks = torch.empty_like(targets), torch.empty_like(slots), 1
    block = triton.next_power_of_2(width)
    if depth is not None:
        assert tables.trees is not None and tables.trees.parents.stride(1) == 1
        parents = tables.trees.parents
        rows, tokens = targets.new_empty(2, batch, depth + 1)
    if synthetic is not None:
        longest = width - 1 if depth is None else depth
        assert synthetic.bounds.is_contiguous() and len(synthetic.bounds) >= longest
        num_ranks = synthetic.bounds.shape[1]
    _accept[(batch,)](
        tables.kv_lens,
        *strided(tables.window),
        tables.num_drafts,
        tables.previous_token,
        *strided(parents),
        slots,
        kv_lens,
        targets,
        synthetic.bounds if synthetic else None,
        *strided(synthetic.seeds if synthetic else None),
        rows,
        tokens,
        lens,
        width,
        block,
        tokens.shape[1] - 1,
        triton.next_power_of_2(tokens.shape[1]),
        num_ranks,
        block if depth is None else triton.next_power_of_2(num_ranks),
        COIN_DOMAIN,
        depth is not None,
        **programmatic_launch(slots.device, 1),
    )
    return Accepted(tokens, lens, rows)


def write_drafts_triton(
    tables: SlotTables, slots: torch.Tensor, drafts: Drafts, draft_limits: torch.Tensor
) -> None:
    """See `write_drafts`."""
    numbers, is_tree = drafts.num_drafts, isinstance(drafts, DraftTree)
    assert all(each.is_contiguous() for each in (slots, draft_limits))
    assert numbers is None or numbers.is_contiguous()
    stored: tuple[torch.Tensor | None, ...] = (None, None, None)
    rows, strides = stored, (0, 0)
    if isinstance(drafts, DraftTree):
        assert tables.trees is not None
        stored = (tables.trees.parents, tables.trees.depths, tables.trees.bits)
        rows = (drafts.parents, drafts.depths, drafts.bits)
        assert all(each.stride() == tables.trees.parents.stride() for each in stored)
        assert all(each.stride() == drafts.parents.stride() for each in rows)
        assert drafts.parents.stride(1) == tables.trees.parents.stride(1) == 1
        strides = tables.trees.parents.stride(0), drafts.parents.stride(0)
    batch, length = drafts.tokens.shape
    _write[(batch,)](
        *strided(tables.window),
        tables.num_drafts,
        *stored,
        strides[0],
        slots,
        drafts.tokens,
        drafts.tokens.stride(0),
        drafts.tokens.stride(1),
        *rows,
        strides[1],
        draft_limits,
        numbers,
        length,
        triton.next_power_of_2(length),
        is_tree,
        **programmatic_launch(slots.device, 1),
    )


# fmt: off
@triton.jit(do_not_specialize=["seeds_stride", "parents_stride"])
def _accept(
    all_kv_lens: tl.tensor, windows: tl.tensor, windows_stride: tl.tensor,
    all_num_drafts: tl.tensor, previous_tokens: tl.tensor, all_parents: tl.tensor,
    parents_stride: tl.tensor, slots: tl.tensor, kv_lens: tl.tensor, targets: tl.tensor,
    bounds: tl.tensor, seeds: tl.tensor, seeds_stride: tl.tensor, rows: tl.tensor,
    tokens: tl.tensor, lens: tl.tensor, width: tl.constexpr, block: tl.constexpr,
    depth: tl.constexpr, path_block: tl.constexpr, num_ranks: tl.constexpr, lanes: tl.constexpr,
    coin_domain: tl.constexpr, TREE: tl.constexpr, PDL: tl.constexpr,
) -> None:
    begin(PDL)
    request = tl.program_id(0).to(tl.int64)
    slot, kv_len = tl.load(slots + request), tl.load(kv_lens + request)
    window, own_targets = windows + slot * windows_stride, targets + request * width
    num_drafts = tl.load(all_num_drafts + slot)
    coin = tl.zeros([lanes], tl.float64)
    if bounds is not None:
        coin = _first_coin(tl.load(seeds + slot * seeds_stride), kv_len + 1, coin_domain, lanes)
    if TREE:
        own = request * (depth + 1)
        num_accepted, last, before = _accept_path(
            window, own_targets, all_parents + slot * parents_stride, num_drafts, bounds, coin,
            rows + own, tokens + own, width, block, depth, path_block, num_ranks, lanes
        )
    else:
        num_accepted, last, before = _accept_run(
            window, own_targets, num_drafts, bounds, coin, tokens + request * width, width, block
        )
    num_new = num_accepted.to(tl.int64) + 1
    tl.store(lens + request, num_new)
    tl.store(previous_tokens + slot, before)
    tl.store(window, tl.maximum(last, 0))
    tl.store(all_num_drafts + slot, tl.zeros_like(slot))
    tl.store(all_kv_lens + slot, kv_len + num_new)


@triton.jit
def _accept_run(
    window: tl.tensor, targets: tl.tensor, num_drafts: tl.tensor, bounds: tl.tensor,
    coin: tl.tensor, tokens: tl.tensor, width: tl.constexpr, block: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """A chain: how many drafts are accepted, the token after them, and the token before that. The
    first rejected draft ends the run."""
    column = tl.arange(0, block)
    is_draft = column < width - 1
    bonus = tl.load(window)
    drafts = tl.load(window + 1 + column, mask=is_draft, other=-1)
    chosen = tl.load(targets + column, mask=column < width, other=-1)
    num_drafts = tl.minimum(num_drafts, width - 1)
    if bounds is None:
        accepted = (chosen == drafts) & (column < num_drafts)
        num_accepted = tl.min(tl.where(accepted, block, column), axis=0)
    else:
        rates = tl.cumprod(tl.load(bounds + column, mask=is_draft, other=0.0), 0)
        wins = is_draft & (coin < rates)
        num_accepted = tl.minimum(tl.sum(wins.to(tl.int32), axis=0), num_drafts.to(tl.int32))
        chosen = tl.where(column < num_accepted, drafts, chosen)
    last = tl.max(tl.where(column == num_accepted, chosen, -1), axis=0)
    before = tl.max(tl.where(column == num_accepted - 1, chosen, -1), axis=0)
    tl.store(tokens + column, chosen, mask=column < width)
    return num_accepted, last, tl.where(num_accepted == 0, bonus, before)


@triton.jit
def _accept_path(
    window: tl.tensor, targets: tl.tensor, parents: tl.tensor, num_drafts: tl.tensor,
    bounds: tl.tensor, coin: tl.tensor, rows: tl.tensor, tokens: tl.tensor, width: tl.constexpr,
    block: tl.constexpr, depth: tl.constexpr, path_block: tl.constexpr, num_ranks: tl.constexpr,
    lanes: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """As `_accept_run`, of a tree. Descends from the root, one node a step. Once a step finds no
    child, no later one does."""
    node, path = tl.arange(0, block), tl.arange(0, path_block)
    exists = node < width
    draft = tl.load(window + node, mask=exists, other=0)
    parent = tl.load(parents + node, mask=exists, other=-1)
    target = tl.load(targets + node, mask=exists, other=0)
    is_draft = exists & (node > 0) & (node <= num_drafts)
    path_rows = tl.zeros([path_block], tl.int32)
    emitted = tl.zeros([path_block], tl.int64)
    row = tl.zeros([], tl.int32)
    num_accepted = tl.zeros([], tl.int32)
    for step in tl.range(0, depth):
        is_child = is_draft & (parent == row)
        if bounds is None:
            is_next = is_child & (draft == _at(target, node, row))
        else:
            rank, coin = _choose_rank(bounds + step * num_ranks, coin, num_ranks, lanes)
            is_next = is_child & (tl.cumsum(is_child.to(tl.int32), axis=0) == rank + 1)
            is_next = is_next & (rank < num_ranks) & (num_accepted == step)
        next_row = tl.min(tl.where(is_next, node, block), axis=0)
        is_found = next_row < block
        emitted = tl.where((path == step) & is_found, _at(draft, node, next_row), emitted)
        row = tl.where(is_found, next_row, row)
        num_accepted += is_found.to(tl.int32)
        path_rows = tl.where(path > step, row, path_rows)
    last = _at(target, node, row)
    tl.store(rows + path, path_rows.to(tl.int64), mask=path <= depth)
    tl.store(tokens + path, tl.where(path < num_accepted, emitted, last), mask=path <= depth)
    return num_accepted, last, _at(draft, node, row)  # an accepted draft, or the bonus token


@triton.jit
def _at(values: tl.tensor, indices: tl.tensor, index: tl.tensor) -> tl.tensor:
    """The value at one index."""
    return tl.sum(tl.where(indices == index, values, 0), axis=0)


@triton.jit
def _first_coin(
    seed: tl.tensor, position: tl.tensor, domain: tl.constexpr, lanes: tl.constexpr
) -> tl.tensor:
    """The same coin in every lane, `[lanes]` float64."""
    zeros = tl.zeros([lanes], tl.int32)
    word, _, _, _ = tl.philox(seed, zeros, zeros + position.to(tl.int32), zeros + domain, zeros)
    return (word.to(tl.float64) + 0.5) * (1.0 / 4294967296.0)


@triton.jit
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


@triton.jit(do_not_specialize=["drafts_row_stride", "drafts_stride"])
def _write(
    windows: tl.tensor, windows_stride: tl.tensor, all_num_drafts: tl.tensor,
    all_parents: tl.tensor, all_depths: tl.tensor, all_bits: tl.tensor, trees_stride: tl.tensor,
    slots: tl.tensor, drafts: tl.tensor, drafts_row_stride: tl.tensor, drafts_stride: tl.tensor,
    parents: tl.tensor, depths: tl.tensor, bits: tl.tensor, rows_stride: tl.tensor,
    draft_limits: tl.tensor, num_drafts: tl.tensor, length: tl.constexpr, block: tl.constexpr,
    TREE: tl.constexpr, PDL: tl.constexpr,
) -> None:
    begin(PDL)
    request, column = tl.program_id(0).to(tl.int64), tl.arange(0, block)
    slot = tl.load(slots + request)
    exists = column < length
    tokens = tl.load(drafts + request * drafts_row_stride + column * drafts_stride, mask=exists)
    tl.store(windows + slot * windows_stride + 1 + column, tokens, mask=exists)
    limit = tl.load(draft_limits + slot)
    if TREE:
        own, stored = request * rows_stride + 1 + column, slot * trees_stride + 1 + column
        depth = tl.load(depths + own, mask=exists, other=0)
        tl.store(all_depths + stored, depth, mask=exists)
        tl.store(all_parents + stored, tl.load(parents + own, mask=exists, other=0), mask=exists)
        tl.store(all_bits + stored, tl.load(bits + own, mask=exists, other=0), mask=exists)
        is_proposed = exists & (depth <= limit)
        if num_drafts is not None:
            is_proposed = is_proposed & (column < tl.load(num_drafts + request))
        number = tl.sum(is_proposed.to(tl.int64), axis=0)
    else:
        number = tl.minimum(limit, length)
        if num_drafts is not None:
            number = tl.minimum(number, tl.load(num_drafts + request))
    tl.store(all_num_drafts + slot, number)
# fmt: on
