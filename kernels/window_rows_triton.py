"""`window_rows` as a Triton kernel: a program copies up to 1,024 pages of one request's block table
row; the first program also computes the window's positions and slots. Importing this file imports
Triton."""

import torch
import triton
import triton.language as tl

from tllm_spec.kernels.programmatic_launch import programmatic_launch
from tllm_spec.kernels.programmatic_launch_triton import begin
from tllm_spec.kernels.window_rows import WindowRows

_BLOCK = 1024


def window_rows_triton(
    table: torch.Tensor,
    slots: torch.Tensor,
    first: torch.Tensor,
    width: int,
    num_pages: int,
    page_size: int,
    depths: torch.Tensor | None = None,
    offset: int = 0,
) -> WindowRows:
    """See `window_rows`."""
    assert depths is None or depths.is_contiguous()
    batch, device = len(slots), table.device
    positions = torch.empty(batch * width, dtype=torch.int64, device=device)
    kv_slots = torch.empty_like(positions)
    kv_lens = torch.empty(batch, dtype=torch.int32, device=device)
    block_tables = torch.empty((batch, num_pages), dtype=torch.int32, device=device)
    # Not from num_pages, because each block size compiles another kernel.
    block = min(_BLOCK, triton.next_power_of_2(table.shape[1]))
    _rows[(batch, triton.cdiv(num_pages, block))](
        table,
        table.stride(0),
        slots,
        first,
        positions,
        kv_slots,
        kv_lens,
        block_tables,
        num_pages,
        depths,
        offset,
        depths is not None,
        page_size,
        width,
        triton.next_power_of_2(width),
        block,
        **programmatic_launch(device),
    )
    return WindowRows(positions, kv_slots, kv_lens, block_tables)


@triton.jit(  # type: ignore[untyped-decorator]  # triton has no types
    do_not_specialize=["num_pages", "offset"],
    do_not_specialize_on_alignment=["slots", "first", "depths"],
)
def _rows(
    table: tl.tensor,
    table_stride: tl.tensor,
    slots: tl.tensor,
    first: tl.tensor,
    positions: tl.tensor,
    kv_slots: tl.tensor,
    kv_lens: tl.tensor,
    block_tables: tl.tensor,
    num_pages: tl.tensor,
    depths: tl.tensor,
    offset: tl.tensor,
    in_tree: tl.constexpr,
    page_size: tl.constexpr,
    width: tl.constexpr,
    padded_width: tl.constexpr,
    block: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    begin(PDL)
    request, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row = table + tl.load(slots + request) * table_stride
    index = part * block + tl.arange(0, block)
    exists = index < num_pages
    tl.store(
        block_tables + request * num_pages + index,
        tl.load(row + index, mask=exists, other=0),
        mask=exists,
    )
    if part == 0:
        column = tl.arange(0, padded_width)
        is_row = column < width
        start = tl.load(first + request)
        key = start + column
        position = key
        if in_tree:
            depth = tl.load(depths + request * width + column, mask=is_row, other=0)
            position = start + depth
            start += offset
            key = start + column
        page = tl.load(row + key // page_size, mask=is_row, other=0).to(tl.int64)
        tl.store(positions + request * width + column, position, mask=is_row)
        tl.store(
            kv_slots + request * width + column, page * page_size + key % page_size, mask=is_row
        )
        tl.store(kv_lens + request, (start + width).to(tl.int32))
