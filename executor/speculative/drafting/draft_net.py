"""One class for the kinds of draft networks over KV pages: an EAGLE head, MTP modules and a whole
model. The pages are the target's, with pools of the network's own and the block table of the group
that keeps all pages, or they are its own.

They differ in their inputs (a token with the hidden state before it, or a token only) and in the
position that a token's KV goes to."""

from collections.abc import Callable
from dataclasses import replace
from typing import cast

import torch

from tllm_spec.attention.geometry import KVPool
from tllm_spec.attention.indexed import first_choice
from tllm_spec.attention.interface import (
    AttentionMetadata,
    FirstChoice,
    ForwardContext,
    SpecMetadata,
)
from tllm_spec.distributed.communicator import VocabShard
from tllm_spec.draft_network.network import LOGITS, NEXT_STATES, STATES, WANTED, ExternalDraft
from tllm_spec.executor.device.transfer import to_device
from tllm_spec.executor.engine.model_engine import PagedNetwork
from tllm_spec.executor.engine.rows import (
    AttentionGroups,
    ContextChunk,
    RowBuilder,
    Windows,
    slot_rows,
)
from tllm_spec.executor.resources.adapter_slots import AdapterSlots
from tllm_spec.kernels.slots.round_rows import RoundRows
from tllm_spec.kernels.slots.row_copies import gather_rows
from tllm_spec.models.draft_head import Block, DraftHead, HeadRows, Masks
from tllm_spec.models.llama import CausalLM
from tllm_spec.models.mtp import NextnModules
from tllm_spec.models.step_correction import Confidence, StepCorrection


class DraftNet:
    """A draft network. `spec`: the hidden states of the target that it reads; None: it reads tokens
    only, and what it has missed can be read later. `lookahead`: how many tokens after its own
    position an entry of the draft cache depends on. 1 for a head, whose entry at j is (hidden state
    of token j, token j + 1); 0 for a model, whose entry of a token is at the token's own position.

    `has_one_layer`: rows that are not wanted need no attention. `vocab_size` is that of the logits;
    `token_map` `[vocab_size]` has the target's ids of a reduced vocabulary. `shard`: this rank's
    columns of the logits; None: all. `masks`: it drafts all tokens at once, from rows that read
    them; None: one after the other. `block`: how it fills in masks, whose rows see each other;
    None: it does not. `correction` and `confidence`: as in `DraftHead`.

    `run`: a forward over planned rows `[T]`, of token ids, positions, state, context and step,
    otherwise as `forward`. `compute_logits`: `[R, H]` -> `[R, vocab_size]` in the network's dtype,
    or the columns of `shard`. `fuse`: captured states as the state that `forward` takes, `[T, n *
    H]` -> `[T, H]`, of a network that reads them."""

    run: Callable[[HeadRows, ForwardContext, int], torch.Tensor]
    compute_logits: Callable[[torch.Tensor], torch.Tensor]
    fuse: Callable[[torch.Tensor], torch.Tensor]
    has_one_layer: bool
    vocab_size: int
    token_map: torch.Tensor | None = None
    shard: VocabShard | None = None
    masks: Masks | None = None
    block: Block | None = None
    correction: StepCorrection | None = None
    confidence: Confidence | None = None
    # Windows are a rectangle: `Windows.part` is not served.
    reads_whole_windows: bool = False
    has_keys: bool = True  # and values, of its own
    # Of the latest first step, where its indexer chooses for later ones, too.
    first_choice: FirstChoice | None = None
    adapters: AdapterSlots | None = None  # whose `draft_tables` are of this network
    rows: RowBuilder  # with the block table
    attention: AttentionGroups

    def __init__(self, attention: AttentionGroups | None, spec: SpecMetadata | None = None) -> None:
        """All groups of `attention` have the same rows. None: the network runs outside torch, with
        `rows` and a `forward` of its own."""
        self.spec, self.lookahead = spec, int(spec is not None)
        if attention is not None:
            self.attention, self.rows = attention, attention.rows

    @property
    def may_be_captured(self) -> bool:
        """Whether CUDA graphs may hold a forward where they hold the target's rounds."""
        return True

    def draft_chunk(self, chunk: ContextChunk, following: int | None) -> ContextChunk:
        """What the network reads when the target has read `chunk`. following: the token after it;
        None: the host does not know it, and it will replace the last token of the result."""
        if self.lookahead or following is None:
            tokens = [*chunk.tokens[self.lookahead :], following or 0]
            return ContextChunk(chunk.slot, chunk.start, tokens)
        return chunk

    def captured(self, num_rows: int) -> torch.Tensor | None:
        """The hidden states that the target's latest forward captured for its first rows, `[T, n *
        H]`; None: the network reads none."""
        return None if self.spec is None else self.spec.captured(num_rows)

    def state_of(self, rows: torch.Tensor) -> torch.Tensor | None:
        """The state that `forward` takes for these rows `[R]` of the target's latest forward,
        `[R, H]`; None: it needs none."""
        return None if self.spec is None else self.fuse(gather_rows(self.spec.buffer, rows))

    def forward(
        self,
        chunks: list[ContextChunk],
        windows: Windows | None,
        state: torch.Tensor | None,
        patched: tuple[list[int], torch.Tensor] | None = None,
        wanted: torch.Tensor | None = None,
        step: int = 0,
    ) -> torch.Tensor:
        """Reads these chunks and windows. Returns the state for `compute_logits` and for the next
        step, `[T, H]`, or `[R, H]` of the wanted rows.

        state `[T, H]`: of the step before; None: what the target's latest forward captured is read.
        patched: rows whose tokens only the device knows, and the tokens. wanted `[R]`: the rows
        that are returned (`ForwardContext.wanted`); None: all. step: 0 reads what the target has
        read, k what draft k - 1 is, or blocks of k rows."""
        only_writes = self.has_one_layer and wanted is not None and not len(wanted)
        choice = self.first_choice
        if choice is not None:
            choice = replace(choice, step=step) if step else FirstChoice()
        rows = self.attention.plan(chunks, windows, only_writes=only_writes, first_choice=choice)
        if patched is not None:
            to_patch = to_device(patched[0], rows.token_ids.device)
            rows.token_ids.index_copy_(0, to_patch, patched[1])
        if state is None and self.spec is not None and not step:
            state = self.fuse(self.spec.captured(len(rows.token_ids)))
        if self.adapters is not None:
            self.adapters.begin_draft(*slot_rows(chunks, windows), len(rows.token_ids), wanted)
        context = ForwardContext(rows.groups, wanted=wanted)
        # A network that reads tokens only has no states.
        own = HeadRows(rows.token_ids, rows.positions, cast(torch.Tensor, state))
        states = self.run(own, context, step)
        if choice is not None and not step:
            self.first_choice = first_choice(context)
        return states

    def after_last(self, windows: Windows) -> torch.Tensor:
        """The states after the last token of each window, `[B, H]`, of a network that reads tokens
        only."""
        width = windows.token_ids.shape[1]
        return self.forward([], windows, None)[width - 1 :: width]


class HeadNet(DraftNet):
    """A head, or MTP modules, on the hidden states that the target's forward captured in `spec`."""

    def __init__(
        self, attention: AttentionGroups | None, head: DraftHead, spec: SpecMetadata
    ) -> None:
        super().__init__(attention, spec)
        self.head, self.block = head, head.block
        self.correction, self.confidence = head.correction, head.confidence
        # No row of the text needs attention where a block is filled in, and modules write one step
        # after the other.
        is_written_alone = head.block is not None or isinstance(head, NextnModules)
        self.has_one_layer = is_written_alone or head.config.num_layers == 1
        if isinstance(head, NextnModules) and head.shares_choice:
            self.first_choice = FirstChoice()
        self.vocab_size, self.token_map = head.num_logits, head.draft_to_target
        self.shard, self.masks = head.output.shard, head.masks
        self.run = head.forward
        self.fuse, self.compute_logits = head.fuse, head.compute_logits


class KeyReadingNet(HeadNet):
    """A head whose layers attend to the target's keys before the newest token, in every step.
    Windows say which tokens it reads; nothing is written where they begin."""

    has_keys = False

    def __init__(self, attention: AttentionGroups, head: DraftHead, spec: SpecMetadata) -> None:
        super().__init__(attention, head, spec)
        self.lookahead = 0  # the newest token has the position after the last key

    def forward(
        self,
        chunks: list[ContextChunk],
        windows: Windows | None,
        state: torch.Tensor | None,
        patched: tuple[list[int], torch.Tensor] | None = None,
        wanted: torch.Tensor | None = None,
        step: int = 0,
    ) -> torch.Tensor:
        """All rows of a window, also those of a tree, have the position of the newest token."""
        assert windows is not None and not chunks
        width = windows.token_ids.shape[1]
        newest = windows.first - (step if windows.tree is None else 1)
        slots, newest = (each.repeat_interleave(width) for each in (windows.slots, newest))
        lens, longest = newest.clamp_min(1), min(windows.max_kv_len, self.rows.max_len)
        planned = []
        for group in self.attention.groups:
            tables = group.rows.table.rows(slots, -(-longest // group.rows.page_size))
            metadata = AttentionMetadata(
                *((), (), RoundRows.rectangle(len(slots), 1), tables, lens.to(torch.int32)),
                *(lens - 1, torch.zeros_like(slots), longest),
            )
            planned.append((group.backend, group.backend.plan(metadata)))
        context = ForwardContext(tuple(planned))
        assert state is not None
        own = HeadRows(windows.token_ids.flatten(), newest.clamp_min(0), state)
        return self.run(own, context, step)


class CausalNet(DraftNet):
    """A small causal model. `input_vocab_size` is the target's. With another tokenizer the model's
    `read_as` says as what ids are read; else ids outside its vocabulary are read as its last id.
    mask_token: of a model that drafts all tokens at once."""

    _read_as: torch.Tensor | None = None

    def __init__(
        self,
        attention: AttentionGroups | None,
        model: CausalLM | ExternalDraft,
        input_vocab_size: int,
        mask_token: int | None = None,
    ) -> None:
        super().__init__(attention)
        config = model.config
        self.vocab_size, self.has_one_layer = model.num_logits, config.num_layers == 1
        self._last_token_id = config.vocab_size - 1
        self._clamps = input_vocab_size > config.vocab_size
        if isinstance(model, ExternalDraft):
            return
        self._model, self.compute_logits = model, model.compute_logits
        self.token_map, self._read_as = model.draft_to_target, model.read_as
        self.shard = model.lm_head.shard
        if mask_token is not None:
            # After the target's ids, where there is a table of these.
            own = mask_token if self._read_as is None else len(self._read_as) - 1
            self.masks = Masks(own)

    def known(self, token_ids: torch.Tensor) -> torch.Tensor:
        """The ids as the model reads them."""
        if self._read_as is not None:
            return self._read_as[token_ids]
        return token_ids.clamp_max(self._last_token_id) if self._clamps else token_ids

    def run(self, rows: HeadRows, context: ForwardContext, step: int) -> torch.Tensor:
        return self._model.forward(self.known(rows.input_ids), rows.positions, context)


# Draft networks that run outside torch: a draft model, and the layers of an EAGLE-3 head. They
# make chains.


class ExternalModelNet(CausalNet):
    """A draft model whose states are its logits. A forward returns those after the last token of
    each window, in the model's dtype."""

    reads_whole_windows = True

    def __init__(
        self, draft: ExternalDraft, pool: KVPool, rows: RowBuilder, input_vocab_size: int
    ) -> None:
        super().__init__(None, draft, input_vocab_size)
        self.rows, self._dtype = rows, draft.dtype
        self._paged = PagedNetwork(draft.network, pool, rows)
        self.compute_logits = lambda state: state

    @property
    def may_be_captured(self) -> bool:
        return self._paged.may_be_captured

    def forward(
        self,
        chunks: list[ContextChunk],
        windows: Windows | None,
        state: torch.Tensor | None,
        patched: tuple[list[int], torch.Tensor] | None = None,
        wanted: torch.Tensor | None = None,
        step: int = 0,
    ) -> torch.Tensor:
        """Reads the chunks, or the windows."""
        assert patched is None
        found = [self.after_last(self._paged.window_of(chunk)) for chunk in chunks]
        return found[-1] if windows is None else self.after_last(windows)

    def after_last(self, windows: Windows) -> torch.Tensor:
        token_ids = self.known(windows.token_ids)
        shape = len(token_ids), self.vocab_size
        logits = torch.empty(shape, dtype=self._dtype, device=token_ids.device)
        self._paged.run(replace(windows, token_ids=token_ids), {}, {LOGITS: logits})
        return logits


class ExternalHeadNet(HeadNet):
    """A head on the target's pages, whose `fc` is in torch. One run of the network gives states and
    logits, so they are passed on side by side: `[R, H + V_draft]`."""

    reads_whole_windows = True

    def __init__(
        self, draft: ExternalDraft, spec: SpecMetadata, pool: KVPool, rows: RowBuilder
    ) -> None:
        assert draft.head is not None
        super().__init__(None, draft.head, spec)
        self.pool, self.rows = pool, rows
        self._paged = PagedNetwork(draft.network, pool, rows)
        size = self._size = draft.config.hidden_size
        self.compute_logits = lambda state: state[:, size:]

    def forward(
        self,
        chunks: list[ContextChunk],
        windows: Windows | None,
        state: torch.Tensor | None,
        patched: tuple[list[int], torch.Tensor] | None = None,
        wanted: torch.Tensor | None = None,
        step: int = 0,
    ) -> torch.Tensor:
        """Returns the patched rows of chunks, and one row of each window: none if `wanted` is
        empty, the only row if it is None."""
        num_before = sum(len(chunk.tokens) for chunk in chunks)
        if state is None:
            num_rows = num_before + (0 if windows is None else windows.token_ids.numel())
            assert self.spec is not None
            state = self.fuse(self.spec.captured(num_rows))
        states = state[:, : self._size]
        found = self._read(chunks, states, patched)
        if windows is not None:
            own = None
            if wanted is not None and len(wanted):
                own = wanted[len(found) :] - num_before
            found.append(self._run(windows, states[num_before:], own))
        if wanted is not None and not len(wanted):
            return states.new_empty((0, self._size + self.vocab_size))
        return torch.cat(found)

    def _read(
        self,
        chunks: list[ContextChunk],
        states: torch.Tensor,
        patched: tuple[list[int], torch.Tensor] | None,
    ) -> list[torch.Tensor]:
        """Reads the chunks. Returns what follows from each patched row, which is a chunk's last."""
        rows, tokens = ([], states) if patched is None else patched
        found: list[torch.Tensor] = []
        start = 0
        for chunk in chunks:
            end = start + len(chunk.tokens)
            windows, is_patched = self._paged.window_of(chunk), end - 1 in rows
            if is_patched:
                windows.token_ids[0, -1:] = tokens[len(found) : len(found) + 1]
            result = self._run(windows, states[start:end], None)
            if is_patched:
                found.append(result)
            start = end
        return found

    def _run(
        self, windows: Windows, states: torch.Tensor, wanted: torch.Tensor | None
    ) -> torch.Tensor:
        """`[B, H + V_draft]` of the wanted rows `[B]`; None: of the windows' last ones."""
        batch, width = windows.token_ids.shape
        if wanted is None:
            wanted = torch.arange(width - 1, batch * width, width, device=states.device)
        next_states = states.new_empty((batch, self._size))
        logits = states.new_empty((batch, self.vocab_size))
        # A copy, since addresses of rows are not multiples of ALIGNMENT.
        own = states.clone(memory_format=torch.contiguous_format).view(batch, width, -1)
        outputs = {NEXT_STATES: next_states, LOGITS: logits}
        self._paged.run(windows, {STATES: own, WANTED: wanted}, outputs)
        return torch.cat((next_states, logits), dim=1)
