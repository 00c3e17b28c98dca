"""An EAGLE-3 head in torch and in a network outside torch, over caches of the same shape and the
same captured states."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from tests.draft_network.step_pairs import CPU, MAX_LEN, cache_of
from tllm_spec.attention.geometry import AttentionGeometry, KVPool
from tllm_spec.attention.interface import SpecMetadata
from tllm_spec.attention.vanilla import VanillaAttention
from tllm_spec.distributed.communicator import SINGLE_RANK
from tllm_spec.draft_network.network import ExternalDraft, Network
from tllm_spec.executor.engine.rows import AttentionGroups, ContextChunk, PagedGroup, Windows
from tllm_spec.executor.speculative.drafting.draft_net import DraftNet, ExternalHeadNet, HeadNet
from tllm_spec.models.draft_head import HeadSource
from tllm_spec.models.eagle3 import Eagle3Head, load_eagle3_head
from tllm_spec.models.llama import CausalLM
from tllm_spec.models.registry import load_model

MAX_ROWS = 256
NO_ROWS = torch.empty(0, dtype=torch.int64)


def load_target(folder: Path, dtype: torch.dtype = torch.float32) -> CausalLM:
    return load_model(folder, dtype=dtype, device=CPU, max_positions=MAX_LEN)


def load_head(folder: Path, target: CausalLM, num_captured: int) -> Eagle3Head:
    return load_eagle3_head(HeadSource(folder, target, "auto", MAX_LEN), num_captured)


def states_for(head: Eagle3Head) -> SpecMetadata:
    """Where the target's states would be; these are random."""
    size, layers = head.config.target_hidden_size, tuple(range(head.num_captured))
    spec = SpecMetadata(layers, size, MAX_ROWS, torch.float32, CPU)
    spec.buffer.normal_(generator=torch.Generator().manual_seed(3))
    return spec


@dataclass
class HeadSide:
    """One head's layers with their cache."""

    net: DraftNet
    pool: KVPool
    hidden_size: int
    state: torch.Tensor | None = None

    def read(
        self,
        chunks: Sequence[tuple[int, int, list[int]]] = (),
        windows: Windows | None = None,
        *,
        ended: Sequence[int] = (),
        new_lens: Sequence[int] = (),
    ) -> torch.Tensor:
        """Reads chunks (slot, start, tokens), then windows, after a forward of the target. ended:
        the chunks whose last token only the device knows; new_lens: valid tokens of each window.
        Returns the logits after them."""
        ends = torch.tensor([len(tokens) for *_, tokens in chunks], dtype=torch.int64).cumsum(0)
        last_rows = [int(ends[index]) - 1 for index in ended]
        wanted, num_rows = [*last_rows], int(ends[-1]) if len(ends) else 0
        patched = None
        if ended:
            patched = last_rows, torch.tensor([chunks[index][2][-1] for index in ended])
        wanted += [
            num_rows + index * windows.token_ids.shape[1] + length - 1
            for index, length in enumerate(new_lens)
            if windows is not None
        ]
        known = [
            ContextChunk(slot, start, [*tokens[:-1], 0] if index in ended else tokens)
            for index, (slot, start, tokens) in enumerate(chunks)
        ]
        rows = torch.tensor(wanted, dtype=torch.int64)
        self.state = self.net.forward(known, windows, None, patched, rows)
        return self.net.compute_logits(self.state)

    def step(
        self, slots: Sequence[int], first: Sequence[int], tokens: torch.Tensor
    ) -> torch.Tensor:
        """Logits after one draft `[B]` of each slot, at these positions of the draft cache."""
        windows = window(slots, first, tokens.unsqueeze(1))
        self.state = self.net.forward([], windows, self.state, step=1)
        return self.net.compute_logits(self.state)

    def catch_up(
        self,
        slots: Sequence[int],
        ends: Sequence[int],
        num_due: Sequence[int],
        tokens: torch.Tensor,
    ) -> None:
        """Reads the last rows of windows `[B, W]` that end there."""
        net, width = self.net, tokens.shape[1]
        captured = net.captured(tokens.numel())
        assert captured is not None
        windows = Windows(
            torch.tensor(slots),
            torch.tensor(ends) - width,
            tokens,
            max(ends),
            num_padding=width - torch.tensor(num_due),
        )
        found = self.net.forward([], windows, net.fuse(captured), wanted=NO_ROWS)
        assert len(found) == 0

    def states(self) -> torch.Tensor:
        assert self.state is not None
        return self.state[:, : self.hidden_size]

    def entries(self, slot: int, length: int) -> torch.Tensor:
        """`[layers, 2, length, Hkv, D]` of the slot's first tokens."""
        pages = self.net.rows.table.host_rows[slot]
        return self.pool.data[:, :, pages].flatten(2, 3)[:, :, :length]


def window(slots: Sequence[int], first: Sequence[int], tokens: torch.Tensor) -> Windows:
    longest = max(first) + tokens.shape[1]
    return Windows(torch.tensor(slots), torch.tensor(first), tokens, longest)


def head_pair(head: Eagle3Head, network: Network) -> tuple[HeadSide, HeadSide]:
    """Torch's side first. The network's has no more of the head than `fuse`."""
    spec, size = states_for(head), head.config.hidden_size
    geometry = head.config.layer_groups(SINGLE_RANK)[0].geometry
    assert isinstance(geometry, AttentionGeometry)
    pool, rows = cache_of(head)
    attention = AttentionGroups([PagedGroup(VanillaAttention(geometry, pool), rows)])
    own_pool, own_rows = cache_of(head)
    draft = ExternalDraft(head.config, head.dtype, CPU, network, head)
    outside = ExternalHeadNet(draft, spec, own_pool, own_rows)
    return HeadSide(HeadNet(attention, head, spec), pool, size), HeadSide(outside, own_pool, size)
