"""Draft networks that run outside torch: a draft model, and the layers of an EAGLE-3 head. They
make chains."""

from dataclasses import replace

import torch

from tllm_spec.attention.geometry import KVPool
from tllm_spec.attention.interface import SpecMetadata
from tllm_spec.draft_network.decoder import LOGITS
from tllm_spec.draft_network.head_decoder import NEXT_STATES, STATES, WANTED
from tllm_spec.draft_network.network import ExternalDraft, ExternalHead
from tllm_spec.executor.engine.model_engine import PagedNetwork
from tllm_spec.executor.engine.rows import ContextChunk, RowBuilder, Windows
from tllm_spec.executor.speculative.drafting.draft_net import CausalNet, HeadNet


class ExternalModelNet(CausalNet):
    """A draft model whose states are its logits. A forward returns those after the last token of
    each window, in the model's dtype."""

    has_one_layer = False
    reads_whole_windows = True

    def __init__(
        self, draft: ExternalDraft, pool: KVPool, rows: RowBuilder, input_vocab_size: int
    ) -> None:
        self.rows, self.vocab_size = rows, draft.num_logits
        self._last_token_id = draft.config.vocab_size - 1
        self._clamps = input_vocab_size > draft.config.vocab_size
        self._paged, self._dtype = PagedNetwork(draft.network, pool, rows), draft.dtype

    @property
    def may_be_captured(self) -> bool:
        return self._paged.may_be_captured

    def compute_logits(self, state: torch.Tensor) -> torch.Tensor:
        return state

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
        self, draft: ExternalHead, spec: SpecMetadata, pool: KVPool, rows: RowBuilder
    ) -> None:
        super().__init__(None, draft.head, spec)
        self.pool, self.rows = pool, rows
        self._paged = PagedNetwork(draft.network, pool, rows)
        self._size = draft.config.hidden_size

    def compute_logits(self, state: torch.Tensor) -> torch.Tensor:
        return state[:, self._size :]

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
            captured = self.captured(num_rows)
            assert captured is not None
            state = self.fuse(captured)
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
