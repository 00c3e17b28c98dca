"""The memory of layers with a recurrent state, by slot, and the rows of one forward in them.

Such layers are a group without pages. What they keep of a request does not grow with it."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tllm_spec.kernels.attention.move_kv import move_kv
from tllm_spec.kernels.slots.round_rows import RoundRows
from tllm_spec.kernels.states.delta_blocks import delta_blocks, work_elements
from tllm_spec.kernels.states.gated_delta import (
    DeltaBlocks,
    DeltaMemory,
    DeltaRows,
    DeltaShape,
    DeltaWeights,
    gated_delta,
)


@dataclass(frozen=True)
class RecurrentGeometry:
    """One rank's share of the layers with a recurrent state. window: the most rows of a request
    that wait for acceptance. block: rows of a prompt, from a multiple of their number on, that are
    always in one forward. They run together (`delta_blocks`); those after the last whole block, and
    generated tokens that are read again, run one after another, and, if it is 0, all rows do."""

    num_layers: int
    shape: DeltaShape
    window: int
    block: int
    state_dtype: torch.dtype = torch.float32

    def num_blocks(self, first: int, end: int, prompt_len: int) -> int:
        """Blocks in the context tokens from `first` to `end`."""
        number = self.block and max(0, min(end, prompt_len) - first) // self.block
        assert not number or first % self.block == 0, "a block is cut"
        return number

    def chunk_end(self, end: int, prompt_len: int) -> int:
        """The last place up to `end` where a forward may end: not in a block."""
        if not self.block or end >= prompt_len // self.block * self.block:
            return end
        return end - end % self.block

    @property
    def ring(self) -> int:
        """Rows whose inputs a slot keeps: accepted ones, those of the next window, and those
        before, which the convolution reads again."""
        return 2 * self.window + self.shape.kernel_size - 1

    def slot_bytes(self, dtype: torch.dtype) -> int:
        """What a slot takes in all layers. dtype: of the model."""
        return self._bytes(self.ring, dtype)

    def snapshot_bytes(self, dtype: torch.dtype) -> int:
        """The same for a snapshot."""
        return self._bytes(self.shape.kernel_size - 1, dtype)

    def prompt_bytes(self, num_rows: int) -> int:
        """What a layer takes for that many rows of prompts while it runs."""
        number = self.block and work_elements(self.shape, self.block)
        return num_rows * number * torch.float32.itemsize

    def _bytes(self, num_rows: int, dtype: torch.dtype) -> int:
        shape = self.shape
        elements = shape.num_value_heads * shape.key_dim * shape.value_dim
        state = elements * self.state_dtype.itemsize
        return self.num_layers * (state + num_rows * shape.num_inputs * dtype.itemsize)


class RecurrentMemory:
    """`states` `[L, S, Hv, Dk, Dv]`: after each slot's first `lens` `[S]` tokens. `inputs`
    `[L, S, R, I]`: of the latest rows (`DeltaMemory`)."""

    def __init__(
        self, geometry: RecurrentGeometry, num_slots: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.geometry = geometry
        shape, number = geometry.shape, geometry.num_layers
        heads = shape.num_value_heads, shape.key_dim, shape.value_dim
        sizes = number, num_slots, *heads
        self.states = torch.zeros(sizes, dtype=geometry.state_dtype, device=device)
        rings = number, num_slots, geometry.ring, shape.num_inputs
        self.inputs = torch.zeros(rings, dtype=dtype, device=device)
        self.lens = torch.zeros(num_slots, dtype=torch.int64, device=device)
        self.layers = [DeltaMemory(*own) for own in zip(self.states, self.inputs, strict=True)]

    def make_room(self, num_snapshots: int) -> None:
        """Allocates room for `num_snapshots` copies of a slot's states."""
        (number, _, *heads), (_, _, _, width) = self.states.shape, self.inputs.shape
        taps = self.geometry.shape.kernel_size - 1
        self._saved = self.states.new_empty((number, num_snapshots, *heads))
        self._saved_inputs = self.inputs.new_empty((number, num_snapshots, taps, width))

    def save(self, slot: int, number: int, position: int) -> None:
        """Copies what the slot has after its first `position` tokens, which are of a prompt, to a
        snapshot."""
        self._saved[:, number].copy_(self.states[:, slot])
        for index, place in enumerate(self._tap_places(position)):
            self._saved_inputs[:, number, index].copy_(self.inputs[:, slot, place])

    def restore(self, number: int, slot: int, position: int) -> None:
        """Lets the slot continue from a snapshot after `position` tokens."""
        self.states[:, slot].copy_(self._saved[:, number])
        for index, place in enumerate(self._tap_places(position)):
            self.inputs[:, slot, place].copy_(self._saved_inputs[:, number, index])
        self.lens[slot : slot + 1].fill_(position)

    def _tap_places(self, position: int) -> list[int]:
        """Where the ring has the inputs that the convolution at a position reads again."""
        first = position - self.geometry.shape.kernel_size + 1
        return [index % self.geometry.ring for index in range(first, position)]

    def begin(
        self,
        slots: torch.Tensor,
        first: torch.Tensor,
        rows: RoundRows,
        *,
        are_kept: bool,
        tree: torch.Tensor | None = None,
        blocks: DeltaBlocks | None = None,
    ) -> DeltaRows:
        """The rows of slots `[B]` from positions first `[B]` on, which one forward runs in all
        layers; see `DeltaRows`. Device work only."""
        # Only dummy requests, whose lengths jump, have other numbers of pending rows.
        pending = (first - self.lens.index_select(0, slots)).clamp_(0, self.geometry.window)
        self.lens[slots] = first + rows.counts if are_kept else first
        return DeltaRows(slots, first, pending, rows, are_kept, tree, blocks)

    def keep_paths(
        self, slots: torch.Tensor, first: torch.Tensor, rows: torch.Tensor, lens: torch.Tensor
    ) -> None:
        """Moves the inputs of the accepted rows of trees to the front of their windows: lens `[B]`
        of rows `[B, D+1]`. A ring that is passed over its end begins again."""
        tables = slots.to(torch.int32).unsqueeze(1).repeat(1, 2)
        move_kv(self.inputs, tables, first % self.geometry.ring, rows, lens)


@dataclass(frozen=True)
class RecurrentRows:
    """The rows of one forward: those of prompts, then windows."""

    memory: RecurrentMemory
    parts: Sequence[DeltaRows]

    def run(self, layer: int, projected: torch.Tensor, weights: DeltaWeights) -> torch.Tensor:
        """The states' answers `[T, Hv, Dv]` float32. layer: its number in the group; projected
        `[T, P]`: see `gated_delta`."""
        memory, shape = self.memory.layers[layer], self.memory.geometry.shape
        sizes = len(projected), shape.num_value_heads, shape.value_dim
        output = projected.new_empty(sizes, dtype=torch.float32)
        counts = [part.rows.num_rows for part in self.parts]
        pieces = projected.split_with_sizes(counts), output.split_with_sizes(counts)
        for part, piece, own in zip(self.parts, *pieces, strict=True):
            if part.blocks is not None:
                delta_blocks(piece, memory, shape, weights, part, own)
            gated_delta(piece, memory, shape, weights, part, own)
        return output
