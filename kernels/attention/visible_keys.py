"""Which keys a row sees: those of its path in a draft tree, and in layers with sliding windows or
chunks the last ones only."""

from dataclasses import dataclass, replace

import torch

from tllm_spec.kernels.dispatch import tl, triton
from tllm_spec.kernels.slots.round_rows import RoundRows

# Which keys the rows of a draft tree see: one bit for each row and key of the tree's region, or
# the keys of each row's path in order.


MAX_TREE_KEYS = 64


@dataclass(frozen=True)
class TreeMask:
    """The last `length` keys of each of B sequences are its tree region: those at indices
    kv_len - length to kv_len - 1. Row r of sequence b sees key j of the region if bit j of
    bits[b, r] is set, and every key before the region. No causal rule applies to these rows. A row
    sees itself. The R rows' own keys are the end of the region, and kv_len is at least `length`.

    Batch-invariant attention needs more: the keys of the region that a row sees are its path, in
    order."""

    bits: torch.Tensor
    """`[B, R]` int64, contiguous, on the device; bit 63 is the sign. Of parts of windows `[T]`."""
    length: int
    """Keys of the region, R to 64."""
    part: RoundRows | None = None
    """A sequence has only these rows, the first of its R ones, and the region ends with them. None:
    all have R rows."""

    def __post_init__(self) -> None:
        assert self.bits.dtype == torch.int64 and self.bits.is_contiguous()
        assert self.rows.window <= self.length <= MAX_TREE_KEYS

    @property
    def rows(self) -> RoundRows:
        return self.part or RoundRows.rectangle(*self.bits.shape)

    def of(self, rows: RoundRows) -> "TreeMask":
        """The mask of the first rows of each sequence, of a mask of all."""
        if rows.offsets is None:
            return self
        return TreeMask(rows.flat(self.bits), self.length, rows)

    @property
    def offset(self) -> int:
        """Keys of the region before the rows' own: those of earlier draft steps."""
        return self.length - self.rows.window

    def starts(self, kv_lens: torch.Tensor) -> torch.Tensor:
        """Indices of the region's first keys in sequences with `kv_lens` `[B]` keys."""
        return kv_lens - self.rows.counts - self.offset

    def visible(self, kv_lens: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        """Whether each row sees the keys at indices `keys` `[L]` of its sequence, `[B, R, L]`;
        kv_lens: `[B]`."""
        in_region = keys - self.starts(kv_lens).unsqueeze(1)  # [B, L]
        shifts = in_region.clamp(0, MAX_TREE_KEYS - 1).unsqueeze(1)
        own = self.bits if self.part is None else self.part.padded(self.bits)
        bits = (own.unsqueeze(2) >> shifts) & 1 != 0
        return (bits | (in_region < 0).unsqueeze(1)) & (in_region < self.length).unsqueeze(1)


def hidden_keys(
    rows: RoundRows, kv_lens: torch.Tensor, keys: torch.Tensor, tree: TreeMask | None
) -> torch.Tensor:
    """Which of the `keys` `[L]` the windows' rows do not see, `[B, W, L]`: those after their own,
    or those that the tree hides. kv_lens `[B]`: tokens with those of the windows."""
    if tree is not None:
        return ~tree.visible(kv_lens, keys)
    queries = (kv_lens - rows.counts)[:, None] + torch.arange(rows.window, device=keys.device)
    return keys > queries[:, :, None]


@dataclass(frozen=True)
class TreePaths:
    """The keys of the region that each row sees, in order: the row's path from the region's start
    to the row itself."""

    mask: TreeMask
    keys: torch.Tensor
    """`[B * R, length]` int32: indices into the region; after a row's path come other keys."""
    lens: torch.Tensor
    """`[B * R]` int32: keys of each path."""

    @classmethod
    def of(cls, mask: TreeMask) -> "TreePaths":
        index = torch.arange(mask.length, device=mask.bits.device)
        sees = (mask.bits.view(-1, 1) >> index) & 1
        keys = (sees * -MAX_TREE_KEYS + index).argsort(1)  # the row's own first
        return cls(mask, keys.to(torch.int32), sees.sum(1, dtype=torch.int32))


@triton.jit
def is_set(bits: tl.tensor, index: tl.tensor) -> tl.tensor:
    """Bits `index` `[N]` of `bits` `[R]`, `[R, N]`. An index above 63 reads bit 63."""
    return ((bits[:, None] >> tl.minimum(index, 63).to(tl.int64)[None, :]) & 1) != 0


# Layers that see a part of the keys only, sliding windows (Mistral) and chunks of positions (Llama
# 4): the first key that each row sees.


@dataclass(frozen=True)
class KeySpan:
    """The keys that a query sees up to its own: if it `slides` the last `size`, otherwise those
    from the start of its own chunk of `size` positions on."""

    size: int
    slides: bool

    @property
    def code(self) -> int:
        """What kernels are compiled for: `size` of chunks, -`size` of sliding windows."""
        return -self.size if self.slides else self.size

    def first_key(self, position: int) -> int:
        """The lowest position that a query at this one sees."""
        if self.slides:
            return max(position - self.size + 1, 0)
        return position // self.size * self.size


@dataclass(frozen=True)
class KeySpans:
    """Rows of windows, which see the keys in `span` of their own position."""

    span: KeySpan
    positions: torch.Tensor
    """`[T]` int64, on the device."""

    def first_keys(self) -> torch.Tensor:
        """The lowest position that each row sees, `[T]`."""
        size, rows = self.span.size, self.positions
        return (rows - (size - 1)).clamp_min(0) if self.span.slides else rows // size * size

    def cut(self, tree: TreeMask) -> TreeMask:
        """The same tree without the keys of its region that its rows do not see. A row's keys of
        the region are a path that ends at the row's own position, so the last ones are kept."""
        rows = self.positions.view(tree.bits.shape)
        index = torch.arange(tree.length, device=rows.device)
        sees = (tree.bits.unsqueeze(-1) >> index) & 1
        # Keys of the path from each key to its end.
        num_left = sees.flip(-1).cumsum(-1).flip(-1)
        num_seen = rows - self.first_keys().view(rows.shape) + 1
        sees *= num_left <= num_seen.unsqueeze(-1)
        return replace(tree, bits=(sees << index).sum(-1))


# `KeySpan.first_key` in Triton kernels.


@triton.jit
def first_key(positions: tl.tensor, SPAN: tl.constexpr) -> tl.tensor:
    """The lowest position that queries at `positions` see. SPAN: `KeySpan.code`, not 0."""
    if SPAN < 0:
        return tl.maximum(positions + (SPAN + 1), 0)
    return tl.maximum(positions, 0) // SPAN * SPAN
