"""The layout of a launch of window_attention_triton.py: how many programs share a request's keys,
and how many warps each has. The workspace for partial results of the splits, which the CUDA kernel
uses for long requests, too."""

from dataclasses import dataclass

import torch

from tllm_spec.kernels.shared_memory import shared_memory_bytes

# Programs of four warps. They keep the memory busy; more of them would only add overhead.
PROGRAMS_PER_MULTIPROCESSOR = 3
# Programs of two warps that run at once on a multiprocessor of an H200.
SMALL_PROGRAMS_PER_MULTIPROCESSOR = 4
# Programs of wide windows stage 3 blocks of keys and values each, so that no more fit. A launch of
# more would have a second wave.
WIDE_PROGRAMS_PER_MULTIPROCESSOR = 2
# Each split has more keys than this, in whole blocks. With fewer the fixed costs of a split (query
# rows, partial result) outweigh reading its keys.
MIN_KEYS_PER_SPLIT, MIN_KEYS_PER_BLOCK = 64, 64
# If one program per tile fills more than half of the device, only very long requests are split.
MIN_KEYS_PER_LONG_SPLIT, MAX_LONG_SPLITS = 2048, 4
MAX_SPLITS = 64
# 32 query rows for each of 8 programs of 128 multiprocessors.
MAX_PARTIAL_ROWS = 1 << 15
MAX_TILE_ROWS = 64
MAX_TILE_KEYS = 128
# A split of a full tile has more keys than this: then its partial result, written and read again,
# has fewer bytes than its keys and values.
MIN_KEYS_PER_WIDE_SPLIT = 2 * MAX_TILE_ROWS
# Windows of more tokens are wide, if they fill a tile.
MAX_NARROW_WINDOW = 8
# Bytes of keys, and as many of values, in flight while a program computes.
TILE_BYTES = 16384
NUM_STAGES = 3
# Registers of a thread when three programs of 128 threads share 65,536.
MAX_REGISTERS = 168


@dataclass(frozen=True)
class WindowWorkspace:
    """Partial results of the splits. One workspace serves all launches of a stream, of any shape.
    Captured graphs contain its addresses, so it must live as long as they do."""

    outputs: torch.Tensor
    """[R, D] float32: row ((b * W + w) * Hq + head) * num_splits + split."""
    log_sums: torch.Tensor
    """[R] float32: log2 of the summed weights of those rows."""
    num_processors: int
    """Multiprocessors of the device."""
    num_programs: int
    """Programs of the Triton kernel that fill the device."""

    @classmethod
    def allocate(cls, head_dim: int, device: torch.device) -> "WindowWorkspace":
        number = 1
        if device.type == "cuda":
            number = torch.cuda.get_device_properties(device).multi_processor_count
        outputs = torch.empty(MAX_PARTIAL_ROWS, head_dim, dtype=torch.float32, device=device)
        log_sums = outputs.new_empty(MAX_PARTIAL_ROWS)
        return cls(outputs, log_sums, number, number * PROGRAMS_PER_MULTIPROCESSOR)

    def splits(
        self, num_tiles: int, num_rows: int, max_len: int, *, is_wide: bool = False
    ) -> "Splits":
        """The splits of a launch that has `num_tiles` programs and `num_rows` output rows without
        splits."""
        num_programs, min_keys = self.num_programs, MIN_KEYS_PER_SPLIT
        if is_wide:
            num_programs = num_programs * WIDE_PROGRAMS_PER_MULTIPROCESSOR
            num_programs //= PROGRAMS_PER_MULTIPROCESSOR
            min_keys = MIN_KEYS_PER_WIDE_SPLIT
        wanted = num_programs // num_tiles
        are_rare = wanted <= 1
        if are_rare:
            wanted, min_keys = MAX_LONG_SPLITS, MIN_KEYS_PER_LONG_SPLIT
        most = -(-max_len // (min_keys + MIN_KEYS_PER_BLOCK))
        number = min(wanted, self.outputs.shape[0] // num_rows, most, MAX_SPLITS)
        return Splits(max(1, number), min_keys, are_rare, self._are_small(num_tiles))

    def _are_small(self, num_programs: int) -> bool:
        """Whether waves of two-warp programs leave at most as many slots empty as waves of
        four-warp programs."""
        small = self.num_programs * SMALL_PROGRAMS_PER_MULTIPROCESSOR // PROGRAMS_PER_MULTIPROCESSOR
        return (
            -(-num_programs // small) * small
            <= -(-num_programs // self.num_programs) * self.num_programs
        )


@dataclass(frozen=True)
class Splits:
    """min_keys: each split has more keys. are_rare: most requests are not split. small_programs:
    two warps instead of four."""

    number: int
    min_keys: int
    are_rare: bool
    small_programs: bool


def warps_of(splits: Splits, block_m: int, block_d: int) -> dict[str, int]:
    """Measured on an H200 for 16 rows and heads of 128 in bfloat16: a program of four warps, three
    of which fit a multiprocessor, ends earlier than one of two warps. Four of the latter fit and
    read as fast together."""
    if block_m > 16 or block_d > 128:
        return {"num_warps": 8 if block_m * block_d > 8192 else 4}
    return {"num_warps": 2} if splits.small_programs else {"num_warps": 4, "maxnreg": MAX_REGISTERS}


def is_wide(window: int, block_m: int) -> bool:
    """Whether windows of so many tokens, in tiles of `block_m` rows, have the splits of wide
    ones."""
    return window > MAX_NARROW_WINDOW and block_m == MAX_TILE_ROWS


def power_of_two(size: int) -> int:
    """The smallest power of two that is not below `size`."""
    return 1 << (size - 1).bit_length()


def tile_keys(q: torch.Tensor, layer: torch.Tensor, block_d: int) -> int:
    """Keys of a block. Codes are multiplied in the type of the queries, and those of float32 need
    four times the memory."""
    size = q.element_size() if q.dtype == torch.float32 else layer.element_size()
    return max(16, min(MAX_TILE_KEYS, TILE_BYTES // (block_d * size)))


def stages_next_to(q: torch.Tensor, block_m: int, block_d: int) -> int:
    """Stages of the pipeline of keys and values: one where a tile of queries leaves no room."""
    used = block_m * block_d * q.element_size() + NUM_STAGES * TILE_BYTES
    return NUM_STAGES if used <= shared_memory_bytes(q.device) else 1
