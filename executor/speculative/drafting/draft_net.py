"""One interface for the kinds of draft networks over KV pages: an EAGLE head, MTP modules and a
whole model. The pages are the target's, with pools of the network's own and the block table of the
group that keeps all pages, or they are its own.

They differ in their inputs (a token with the hidden state before it, or a token only) and in the
position that a token's KV goes to."""

from abc import ABC, abstractmethod

import torch

from tllm_spec.attention.interface import ForwardContext, SpecMetadata
from tllm_spec.distributed.communicator import VocabShard
from tllm_spec.executor.device.transfer import to_device
from tllm_spec.executor.engine.attention_groups import AttentionGroups
from tllm_spec.executor.engine.rows import ContextChunk, RowBuilder, Windows
from tllm_spec.kernels.slots.row_copies import gather_rows
from tllm_spec.models.dflash import DFlashHead
from tllm_spec.models.draft_head import DraftHead, Masks, SteppedHead
from tllm_spec.models.llama import CausalLM
from tllm_spec.models.mtp import NextnModules


class DraftNet(ABC):
    """A draft network. `lookahead`: how many tokens after its own position an entry of the draft
    cache depends on. 1 for a head, whose entry at j is (hidden state of token j, token j + 1); 0
    for a model, whose entry of a token is at the token's own position.

    `reads_tokens_only`: what it has missed can be read later, from tokens. `has_one_layer`: rows
    that are not wanted need no attention. `vocab_size` is that of the logits; `token_map`
    `[vocab_size]` has the target's ids of a reduced vocabulary. `shard`: this rank's columns of the
    logits; None: all. `masks`: it drafts all tokens at once, from rows that read them; None: one
    after the other. `fills_in`: a mask row drafts the token at its own position, and its rows see
    each other."""

    lookahead: int
    reads_tokens_only: bool
    has_one_layer: bool
    vocab_size: int
    token_map: torch.Tensor | None = None
    shard: VocabShard | None = None
    masks: Masks | None = None
    fills_in: bool = False
    # Windows are a rectangle: `Windows.part` is not served.
    reads_whole_windows: bool = False
    rows: RowBuilder  # with the block table
    attention: AttentionGroups

    def __init__(self, attention: AttentionGroups | None) -> None:
        """All groups of `attention` have the same rows. None: the network runs outside torch, with
        `rows` and a `forward` of its own."""
        if attention is not None:
            self.attention, self.rows = attention, attention.rows

    @property
    def may_be_captured(self) -> bool:
        """Whether CUDA graphs may hold a forward where they hold the target's rounds."""
        return True

    @abstractmethod
    def draft_chunk(self, chunk: ContextChunk, following: int | None) -> ContextChunk:
        """What the network reads when the target has read `chunk`. following: the token after it;
        None: the host does not know it, and it will replace the last token of the result."""

    def captured(self, num_rows: int) -> torch.Tensor | None:
        """The hidden states that the target's latest forward captured for its first rows, `[T, n *
        H]`; None: the network reads none."""
        return None

    def state_of(self, rows: torch.Tensor) -> torch.Tensor | None:
        """The state that `forward` takes for these rows `[R]` of the target's latest forward,
        `[R, H]`; None: it needs none."""
        return None

    def fuse(self, captured: torch.Tensor) -> torch.Tensor:
        """Captured states as the state that `forward` takes, `[T, n * H]` -> `[T, H]`."""
        raise AssertionError("nothing is captured for this network")

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
        read, k what draft k - 1 is."""
        only_writes = self.has_one_layer and wanted is not None and not len(wanted)
        rows = self.attention.plan(chunks, windows, only_writes=only_writes)
        if patched is not None:
            to_patch = to_device(patched[0], rows.token_ids.device)
            rows.token_ids.index_copy_(0, to_patch, patched[1])
        context = ForwardContext(rows.groups, wanted=wanted)
        return self.run(rows.token_ids, rows.positions, context, state, step)

    def after_last(self, windows: Windows) -> torch.Tensor:
        """The states after the last token of each window, `[B, H]`, of a network that reads tokens
        only."""
        width = windows.token_ids.shape[1]
        return self.forward([], windows, None)[width - 1 :: width]

    @abstractmethod
    def run(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        context: ForwardContext,
        state: torch.Tensor | None,
        step: int,
    ) -> torch.Tensor:
        """A forward over planned rows `[T]`; otherwise as `forward`."""

    @abstractmethod
    def compute_logits(self, state: torch.Tensor) -> torch.Tensor:
        """`[R, H]` -> `[R, vocab_size]` in the network's dtype, or the columns of `shard`."""


class HiddenStatesNet(DraftNet):
    """A network on the hidden states that the target's forward captured in `spec`."""

    lookahead = 1
    reads_tokens_only = False

    def __init__(self, attention: AttentionGroups | None, spec: SpecMetadata) -> None:
        super().__init__(attention)
        self._spec = spec

    def draft_chunk(self, chunk: ContextChunk, following: int | None) -> ContextChunk:
        return ContextChunk(chunk.slot, chunk.start, [*chunk.tokens[1:], following or 0])

    def captured(self, num_rows: int) -> torch.Tensor | None:
        return self._spec.captured(num_rows)


class HeadNet(HiddenStatesNet):
    """A head on captured states."""

    def __init__(
        self, attention: AttentionGroups | None, head: DraftHead, spec: SpecMetadata
    ) -> None:
        super().__init__(attention, spec)
        self.head = head
        self.has_one_layer = head.config.num_layers == 1
        self.vocab_size = head.num_logits
        self.token_map = head.draft_to_target
        self.shard = head.output.shard
        self.masks = head.masks

    def state_of(self, rows: torch.Tensor) -> torch.Tensor | None:
        return self.head.fuse(gather_rows(self._spec.buffer, rows))

    def fuse(self, captured: torch.Tensor) -> torch.Tensor:
        return self.head.fuse(captured)

    def run(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        context: ForwardContext,
        state: torch.Tensor | None,
        step: int,
    ) -> torch.Tensor:
        if state is None:
            state = self.head.fuse(self._spec.captured(token_ids.shape[0]))
        assert isinstance(self.head, SteppedHead)
        return self.head.forward(token_ids, positions, state, context)

    def compute_logits(self, state: torch.Tensor) -> torch.Tensor:
        return self.head.compute_logits(state)


class DFlashNet(HeadNet):
    """A DFlash head. Step 0 writes the keys and values of the text, and step 1 fills in a block.
    An entry depends on nothing after its own position; it is read and reused as an EAGLE head's."""

    fills_in = True
    head: DFlashHead

    def __init__(self, attention: AttentionGroups, head: DFlashHead, spec: SpecMetadata) -> None:
        super().__init__(attention, head, spec)
        self.has_one_layer = True  # no row of the text needs attention

    def run(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        context: ForwardContext,
        state: torch.Tensor | None,
        step: int,
    ) -> torch.Tensor:
        if step:
            return self.head.fill_in(token_ids, positions, context)
        if state is None:
            state = self.head.fuse(self._spec.captured(token_ids.shape[0]))
        self.head.write_context(positions, state, context)
        return state[:0]


class NextnNet(HiddenStatesNet):
    """MTP modules, which read the states after the target's final norm."""

    has_one_layer = True

    def __init__(
        self, attention: AttentionGroups, modules: NextnModules, spec: SpecMetadata
    ) -> None:
        super().__init__(attention, spec)
        self.modules = modules
        self.vocab_size = modules.config.vocab_size
        self.shard = modules.target.lm_head.shard

    def state_of(self, rows: torch.Tensor) -> torch.Tensor | None:
        return gather_rows(self._spec.buffer, rows)

    def fuse(self, captured: torch.Tensor) -> torch.Tensor:
        return captured

    def run(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        context: ForwardContext,
        state: torch.Tensor | None,
        step: int,
    ) -> torch.Tensor:
        if state is None:
            state = self._spec.captured(token_ids.shape[0])
        return self.modules.predict(token_ids, positions, state, context, step)

    def compute_logits(self, state: torch.Tensor) -> torch.Tensor:
        return self.modules.compute_logits(state)


class CausalNet(DraftNet):
    """A small causal model. `input_vocab_size` is the target's. With another tokenizer the model's
    `read_as` says as what ids are read; else ids outside its vocabulary are read as its last id.
    mask_token: of a model that drafts all tokens at once."""

    lookahead = 0
    reads_tokens_only = True
    _read_as: torch.Tensor | None = None

    def __init__(
        self,
        attention: AttentionGroups,
        model: CausalLM,
        input_vocab_size: int,
        mask_token: int | None = None,
    ) -> None:
        super().__init__(attention)
        self._model = model
        self.has_one_layer = model.config.num_layers == 1
        self.vocab_size = model.num_logits
        self.token_map, self._read_as = model.draft_to_target, model.read_as
        if mask_token is not None:
            # Behind the target's ids, where there is a table of these.
            own = mask_token if self._read_as is None else len(self._read_as) - 1
            self.masks = Masks(own)
        self.shard = model.lm_head.shard
        self._last_token_id = model.config.vocab_size - 1
        self._clamps = input_vocab_size > model.config.vocab_size

    def draft_chunk(self, chunk: ContextChunk, following: int | None) -> ContextChunk:
        return (
            chunk
            if following is not None
            else ContextChunk(chunk.slot, chunk.start, [*chunk.tokens, 0])
        )

    def known(self, token_ids: torch.Tensor) -> torch.Tensor:
        """The ids as the model reads them."""
        if self._read_as is not None:
            return self._read_as[token_ids]
        return token_ids.clamp_max(self._last_token_id) if self._clamps else token_ids

    def run(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        context: ForwardContext,
        state: torch.Tensor | None,
        step: int,
    ) -> torch.Tensor:
        return self._model.forward(self.known(token_ids), positions, context)

    def compute_logits(self, state: torch.Tensor) -> torch.Tensor:
        return self._model.compute_logits(state)
