"""How a launch of window_attention_triton.py is laid out: how many programs share the keys of a
request, and of how many warps each is. Partial results of the splits lie in a workspace, which the
CUDA kernel's long requests use, too.

It knows sizes only: no queries, keys or pages.
"""

from dataclasses import dataclass

import torch

# Of four warps, which are enough to keep the memory busy; more of them only begin and end more
# often.
PROGRAMS_PER_MULTIPROCESSOR = 3
# Of two warps: on an H200 so many run at once.
SMALL_PROGRAMS_PER_MULTIPROCESSOR = 4
# A split has more keys than this, in whole blocks: with fewer its fixed costs (its query rows, its
# partial result) outweigh reading them.
MIN_KEYS_PER_SPLIT, MIN_KEYS_PER_BLOCK = 64, 64
# Where a program for each tile is more than half of what fills the device, only what is very long
# is split.
MIN_KEYS_PER_LONG_SPLIT, MAX_LONG_SPLITS = 2048, 4
MAX_SPLITS = 64
# 32 query rows for each of 8 programs of 128 multiprocessors.
MAX_PARTIAL_ROWS = 1 << 15
MAX_TILE_ROWS = 64
MAX_TILE_KEYS = 128
# The keys, and as many values, that are on their way while a program computes on those before.
TILE_BYTES = 16384
# Of a thread, where a program has 128 threads and three share 65,536.
MAX_REGISTERS = 168


@dataclass(frozen=True)
class WindowWorkspace:
    """Where splits leave their partial results. One serves all launches of one stream, of any
    shape; its addresses are part of every captured graph, so it lives as long as they do."""

    outputs: torch.Tensor
    """[R, D] float32: row ((b * W + w) * Hq + head) * num_splits + split."""
    log_sums: torch.Tensor
    """[R] float32: log2 of the summed weights of those rows."""
    num_processors: int
    """Multiprocessors of the device."""
    num_programs: int
    """How many programs of Triton's kernel fill it."""

    @classmethod
    def allocate(cls, head_dim: int, device: torch.device) -> "WindowWorkspace":
        number = 1
        if device.type == "cuda":
            number = torch.cuda.get_device_properties(device).multi_processor_count
        outputs = torch.empty(MAX_PARTIAL_ROWS, head_dim, dtype=torch.float32, device=device)
        log_sums = outputs.new_empty(MAX_PARTIAL_ROWS)
        return cls(outputs, log_sums, number, number * PROGRAMS_PER_MULTIPROCESSOR)

    def splits(self, num_tiles: int, num_rows: int, max_len: int) -> "Splits":
        """Of a launch that would have `num_tiles` programs and `num_rows` output rows were nothing
        split."""
        wanted, min_keys = self.num_programs // num_tiles, MIN_KEYS_PER_SPLIT
        are_rare = wanted <= 1
        if are_rare:
            wanted, min_keys = MAX_LONG_SPLITS, MIN_KEYS_PER_LONG_SPLIT
        most = -(-max_len // (min_keys + MIN_KEYS_PER_BLOCK))
        number = min(wanted, self.outputs.shape[0] // num_rows, most, MAX_SPLITS)
        return Splits(max(1, number), min_keys, are_rare, self._are_small(num_tiles))

    def _are_small(self, num_programs: int) -> bool:
        """Whether so many programs, in as many turns as they need, leave fewer places empty with
        two warps each than with four."""
        small = self.num_programs * SMALL_PROGRAMS_PER_MULTIPROCESSOR // PROGRAMS_PER_MULTIPROCESSOR
        return (
            -(-num_programs // small) * small
            <= -(-num_programs // self.num_programs) * self.num_programs
        )


@dataclass(frozen=True)
class Splits:
    """min_keys: a split has more. are_rare: most requests are not split. small_programs: of two
    warps, not four."""

    number: int
    min_keys: int
    are_rare: bool
    small_programs: bool


def warps_of(splits: Splits, block_m: int, block_d: int) -> dict[str, int]:
    """Measured on an H200 for 16 rows and heads of 128 in bfloat16: a program of four warps, three
    of which have room for their registers, ends earlier than one of two; four of these read as fast
    together."""
    if block_m > 16 or block_d > 128:
        return {"num_warps": 8 if block_m * block_d > 8192 else 4}
    return {"num_warps": 2} if splits.small_programs else {"num_warps": 4, "maxnreg": MAX_REGISTERS}


def power_of_two(size: int) -> int:
    """The smallest power of two that is not below `size`."""
    return 1 << (size - 1).bit_length()
