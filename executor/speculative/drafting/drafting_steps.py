"""The steps of a draft network: chains, trees, and all drafts at once from mask rows."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property

import torch
from torch.nn import functional as F

from tllm_spec.config.draft_shape import DraftShape
from tllm_spec.executor.engine.rows import TreeRows, Windows
from tllm_spec.executor.resources.slot_state import SlotState
from tllm_spec.executor.sampling.draft_sampling import DraftSampling
from tllm_spec.executor.sampling.row_group import RowGroup
from tllm_spec.executor.speculative.drafting.draft_net import DraftNet
from tllm_spec.executor.speculative.drafting.suffix_match import DraftChoice
from tllm_spec.kernels.attention.visible_keys import MAX_TREE_KEYS, TreeMask
from tllm_spec.kernels.drafts.draft_beams import BeamPool, first_beams, grow, select
from tllm_spec.kernels.drafts.draft_layout import HostTree, StaticStep, static_steps
from tllm_spec.kernels.slots.accept import Drafts, DraftTree
from tllm_spec.kernels.slots.row_copies import gather_rows
from tllm_spec.models.draft_head import Masks

# Rows of mask tokens, from which a draft network drafts all tokens in one forward (P-EAGLE, PARD,
# DFlash, DSpark).
#
# They follow the last token that the network has read, and each gives one draft. Their keys and
# values lie after those of the request's tokens: the next round writes there what was emitted, as
# it does over entries of drafts that were made one after the other.


def with_masks(
    windows: Windows,
    state: torch.Tensor | None,
    num_read: torch.Tensor,
    num_drafts: int,
    masks: Masks,
) -> tuple[Windows, torch.Tensor | None, torch.Tensor]:
    """Lets mask rows follow the first num_read `[B]` rows of whole windows, instead of the rest.

    state `[B * W, H]`: of the windows' rows, or None. Returns the windows, K - 1 rows longer, their
    state, and the rows that K drafts come from, `[K * B]`: those of all first drafts, then those of
    all second ones, and so on. Nothing reads what is after them."""
    batch, width = windows.token_ids.shape
    num_more, device = num_drafts - 1, num_read.device
    places = torch.arange(width + num_more, device=device)
    is_mask = places >= num_read.unsqueeze(1)
    longer = Windows(
        windows.slots,
        windows.first,
        F.pad(windows.token_ids, (0, num_more)).masked_fill_(is_mask, masks.token_id),
        windows.max_kv_len + num_more,
    )
    if state is not None:
        assert masks.state is not None
        rows = F.pad(state.view(batch, width, -1), (0, 0, 0, num_more))
        state = torch.where(is_mask.unsqueeze(2), masks.state, rows).flatten(0, 1)
    firsts = torch.arange(-1, batch * len(places) - 1, len(places), device=device) + num_read
    return longer, state, (firsts + places[:num_drafts].unsqueeze(1)).flatten()


def read_masks(
    net: DraftNet, slots: torch.Tensor, kv_lens: torch.Tensor, num_masks: int, bound: int
) -> torch.Tensor:
    """The states of mask rows after all that slots `[N]` with these lengths `[N]` have read, in a
    forward of their own: `[num_masks * N, H]`, those of all first rows before those of all second
    ones. bound: of the KV lengths before it."""
    number = len(slots)
    assert net.masks is not None
    tokens = slots.new_full((number, num_masks), net.masks.token_id)
    state = net.masks.state
    if state is not None:
        state = state.expand(number * num_masks, -1).contiguous()
    # See DraftNet.lookahead for the position of an entry in the draft cache.
    first = kv_lens + (1 - net.lookahead)
    windows = Windows(slots, first, tokens, min(bound + num_masks, net.rows.max_len))
    states = net.forward([], windows, state)
    return states.view(number, num_masks, -1).transpose(0, 1).flatten(0, 1)


def fill_in(
    net: DraftNet,
    slots: torch.Tensor,
    kv_lens: torch.Tensor,
    newest: torch.Tensor,
    num_drafts: int,
    bound: int,
) -> torch.Tensor:
    """As `read_masks`, of the K rows of a block that draft. The block begins with the newest tokens
    `[N]`, and its rows see each other: `[K * N, H]`."""
    masks, block = net.masks, net.block
    assert masks is not None and block is not None
    width = block.first + num_drafts
    tokens = F.pad(newest.unsqueeze(1), (0, width - 1), value=masks.token_id)
    places = torch.arange(width, device=slots.device)
    masks_by = {is_causal: _block_mask(tokens, is_causal) for is_causal in set(block.is_causal)}
    whole, in_windows = (masks_by[is_causal] for is_causal in block.is_causal)
    tree = TreeRows(places.expand_as(tokens).contiguous(), whole, in_windows)
    longest = min(bound + width, net.rows.max_len)
    windows = Windows(slots, kv_lens, tokens, longest, tree=tree)
    firsts = torch.arange(0, tokens.numel(), width, device=slots.device)
    wanted = (firsts + places[block.first :].unsqueeze(1)).flatten()
    return net.forward([], windows, None, wanted=wanted, step=width)


def _block_mask(tokens: torch.Tensor, is_causal: bool) -> TreeMask:
    """Each of W rows `[N, W]` sees all of them, or those up to itself."""
    number, width = tokens.shape
    assert width <= MAX_TREE_KEYS
    last = torch.arange(width, device=tokens.device)
    if not is_causal:
        last = torch.full_like(last, width - 1)
    highest = torch.ones_like(last) << last
    return TreeMask((highest | highest - 1).expand(number, -1).contiguous(), width)


# Drafts chains and trees with a draft network: one forward of the network for each step after the
# first, or all steps from the states of one forward.
#
# Dynamic trees (EAGLE-2): K beams grow for S steps, and the best of all their candidates become
# the nodes of the next window. Static trees: the layout says which candidates become nodes. S
# steps need S - 1 forwards of the network, since the last candidates are not read by it.
#
# What the network reads is stored after the accepted tokens, step by step. A mask lets each draft
# of a tree see its own ancestors only.


class DraftSteps:
    """Draws draft after draft. `draft` is a function of device tensors, so that a CUDA graph can
    hold it. For rejection sampling of chains it keeps what they were drawn from, by slot; where
    requests share a round's rows it says how likely they are. choice: adds drafts of matches in the
    text; None: there are none."""

    def __init__(
        self,
        net: DraftNet,
        slots: SlotState,
        sampling: DraftSampling,
        choice: DraftChoice | None = None,
    ) -> None:
        self._net, self._slots, self._sampling, self._choice = net, slots, sampling, choice
        self._static = cache(self._static_tree)
        self._probs: torch.Tensor | None = None
        if sampling.keeps_probs:
            width = sampling.width(net.vocab_size)
            size = (len(slots.kv_lens), slots.max_draft_len, width)
            self._probs = torch.zeros(size, dtype=torch.float32, device=slots.device)

    def draft(
        self,
        group: RowGroup,
        shape: DraftShape,
        kv_lens: torch.Tensor,
        states: torch.Tensor,
        bound: int,
    ) -> Drafts:
        """Drafts of this shape for the group, one row each. kv_lens `[N]`: of the slots. states
        `[N, H]`: of the last tokens that the network has read; bound: of the KV lengths up to
        them. A network that drafts all tokens at once has the states of all steps, `[S * N, H]`:
        those of all first drafts, then those of all second ones, and so on. In a tree a step's
        candidates are then the same after every path."""
        newest = None
        if self._net.block is not None:
            newest = gather_rows(self._slots.window[:, 0], group.slots)
        if shape.is_tree:
            growth = _Growth(self._net, self._sampling, group, kv_lens, shape.topk, bound, newest)
            if self._net.masks is not None:
                growth.states = torch.split(states, len(kv_lens))
                states = growth.states[0]
            draft = self._draft_static if shape.choices else self._draft_dynamic
            drafts: Drafts = draft(growth, shape, states)
        else:
            drafts = self._draft_chain(group, shape, kv_lens, states, bound, newest)
        return drafts if self._choice is None else self._choice.choose(drafts, group, shape)

    def probs(self, group: RowGroup) -> torch.Tensor | None:
        """As `Drafter.draft_probs`."""
        if self._probs is None or group.rows.window == 1:
            return None
        probs = self._probs.index_select(0, group.slots)[:, : group.rows.window - 1]
        return self._sampling.spread(probs)

    def _draft_chain(
        self,
        group: RowGroup,
        shape: DraftShape,
        kv_lens: torch.Tensor,
        states: torch.Tensor,
        bound: int,
        previous: torch.Tensor | None,
    ) -> Drafts:
        net, positions, slots = self._net, self._slots.positions(kv_lens, shape.depth), group.slots
        logits, at_once = net.compute_logits(states), net.masks is not None
        of_step = torch.split(logits, len(slots)) if at_once else (logits,)
        of_row = torch.split(states, len(slots))
        memory: torch.Tensor | None = None
        tokens, likely = list[torch.Tensor](), list[torch.Tensor]()
        for step in range(shape.depth):
            if step and not at_once:
                # The draft before is at position kv_lens + step; see DraftNet.lookahead for its
                # position in the draft cache.
                first = positions[step - net.lookahead]
                window = Windows(slots, first, tokens[-1].unsqueeze(1), bound + step)
                states = net.forward([], window, states, step=step)
                logits = net.compute_logits(states)
            else:
                logits = of_step[step]
            if net.correction is not None and previous is not None:
                logits, memory = net.correction.forward(logits, of_row[step], previous, memory)
            if self._slots.values is not None:
                best = self._sampling.best(group, logits, positions[1 + step], 1)
                chance, token = (each.squeeze(1) for each in best)
                if net.confidence is not None and previous is not None:
                    chance = net.confidence.forward(of_row[step], previous, step)
                likely.append(chance)
                probs = None
            else:
                token, probs = self._sampling.choose(group, step, logits, positions[1])
            tokens.append(token)
            previous = token
            if probs is not None:
                assert self._probs is not None
                self._probs[slots, step] = probs
        chances = torch.stack(likely, dim=1) if likely else None
        return Drafts(torch.stack(tokens, dim=1), likely=chances)

    def _draft_dynamic(
        self, growth: "_Growth", shape: DraftShape, state: torch.Tensor
    ) -> DraftTree:
        topk = shape.topk
        pool = BeamPool.allocate(len(growth.kv_lens), topk, shape.depth, state.device)
        beams = first_beams(pool, *growth.candidates(0, state))
        for step in range(1, shape.depth):
            # The K first beams all continue the same row.
            parents = (beams.rows if step > 1 else beams.rows // topk).flatten()
            num_before = (step - 1) * topk
            state = growth.read(step, beams.tokens, beams.bits, num_before, state, parents)
            probs, tokens = growth.candidates(step, state)
            children = probs.view(-1, topk, topk), tokens.view(-1, topk, topk)
            beams = grow(pool, step, beams, *children)
        return select(pool, shape.num_nodes, self._choice is not None)

    def _draft_static(self, growth: "_Growth", shape: DraftShape, state: torch.Tensor) -> DraftTree:
        steps, layout = self._static(shape)
        batch, num_read, found = len(growth.kv_lens), 0, list[torch.Tensor]()
        scores, before = list[torch.Tensor](), state.new_ones((), dtype=torch.float32)
        for index, step in enumerate(steps):
            probs, tokens = growth.candidates(index, state)
            own = tokens.view(batch, -1).index_select(1, step.candidates)
            found.append(own)
            if self._choice is not None:
                worth = (probs.view(batch, -1, shape.topk) * before).flatten(1)
                scores.append(worth.index_select(1, step.candidates))
                before = scores[-1].index_select(1, step.runs).unsqueeze(2)
            if index + 1 < len(steps):
                num_rows, num_parents = len(step.runs), len(state) // batch
                firsts = torch.arange(0, len(state), num_parents, device=state.device)
                parents = (firsts.unsqueeze(1) + step.parent_rows).flatten()
                bits = step.bits.expand(batch, num_rows).contiguous()
                read = own.index_select(1, step.runs)
                state = growth.read(index + 1, read, bits, num_read, state, parents)
                num_read += num_rows
        parents, depths, bits = (each.expand(batch, -1) for each in layout)
        of_nodes, tokens = torch.cat(scores, dim=1) if scores else None, torch.cat(found, dim=1)
        rows = {"parents": parents, "depths": depths, "bits": bits}
        return DraftTree(tokens, **rows, scores=of_nodes)

    def _static_tree(self, shape: DraftShape) -> tuple[list[StaticStep], list[torch.Tensor]]:
        """The steps of a static tree, and its parents, depths and bits."""
        tree, device = HostTree.of_paths(shape.choices), self._slots.device
        rows = [torch.tensor(each, device=device) for each in tree[1:]]
        return static_steps(tree, shape.topk, device), rows


@dataclass
class _Growth:
    """What the steps of one round's trees share: N requests, with their lengths kv_lens `[N]`.
    `previous`: the tokens before the next candidates, one for each row, of a network that fills in
    blocks; `memory`: of the correction of their logits. `states`: of each step, `[N, H]`, where
    they are known before; None: each is read."""

    net: DraftNet
    sampling: DraftSampling
    group: RowGroup
    kv_lens: torch.Tensor
    topk: int
    bound: int
    previous: torch.Tensor | None
    memory: torch.Tensor | None = None
    states: Sequence[torch.Tensor] | None = None

    @cached_property
    def first(self) -> torch.Tensor:
        """See DraftNet.lookahead: a head's entry of a draft is at the position before it."""
        return self.kv_lens if self.net.lookahead else self.kv_lens + 1

    def candidates(self, step: int, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The best next tokens after each row and their probabilities, `[N * n, K]`, best first.
        state `[N * n, H]`: after `step` drafts."""
        logits = self.net.compute_logits(state)
        if (correction := self.net.correction) is not None and self.previous is not None:
            logits, self.memory = correction.forward(logits, state, self.previous, self.memory)
        return self.sampling.best(self.group, logits, self.kv_lens + (1 + step), self.topk)

    def read(
        self,
        depth: int,
        tokens: torch.Tensor,
        bits: torch.Tensor,
        num_before: int,
        state: torch.Tensor,
        parents: torch.Tensor,
    ) -> torch.Tensor:
        """The states after drafts tokens `[N, R]` of a depth (from 1 on), `[N * R, H]`.

        bits `[N, R]`: which of all drafts read in this round each sees; num_before: those of
        earlier steps. state `[N * n, H]`: of the step before; parents `[N * R]`: its rows that
        these drafts continue."""
        self.previous = tokens.flatten()
        if self.memory is not None:
            self.memory = gather_rows(self.memory, parents)
        if self.states is not None:
            return self.states[depth].repeat_interleave(tokens.shape[1], dim=0)
        length = num_before + tokens.shape[1]
        if self.net.spec is not None:
            state = gather_rows(state, parents)
        depths = torch.full_like(tokens, depth - 1)
        windows = Windows(
            self.group.slots,
            self.first,
            tokens,
            min(self.bound + length, self.net.rows.max_len),
            tree=TreeRows(depths, TreeMask(bits, length)),
        )
        return self.net.forward([], windows, state, step=depth)
