"""`top_tokens` as two Triton kernels. Importing this file imports Triton.

The first one reduces each part of a row to its maximum and its sum of exponentials. The K best
tokens are in the K parts with the best maxima, so the second one reads only these parts again. Each
order is one maximum after the other of distinct keys: a value's bits as an ordered integer, then
the column or part. A row's results do not depend on other rows.

Work for R rows of V tokens: 2 or 4 R V bytes of logits read once, and K maxima of V / 512 parts and
of 512 K tokens per row."""

import torch
import triton
import triton.language as tl

from tllm_spec.kernels.choose_token_triton import noise_at, part_noise
from tllm_spec.kernels.programmatic_launch import programmatic_launch
from tllm_spec.kernels.programmatic_launch_triton import begin
from tllm_spec.kernels.top_tokens import MAX_TOPK

_BLOCK = 512  # tokens of a part
_NO_KEY = tl.constexpr(-(2**63))
_LAST_INDEX = tl.constexpr(2**31 - 1)
_INDEX_STEP = tl.constexpr(2**32)


def top_tokens_triton(
    logits: torch.Tensor,
    topk: int,
    token_map: torch.Tensor | None = None,
    temperature: torch.Tensor | None = None,
    seeds: torch.Tensor | None = None,
    positions: torch.Tensor | None = None,
    cut: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `top_tokens`. logits and the three columns may have a stride between rows."""
    assert 1 <= topk <= min(MAX_TOPK, logits.shape[1])
    assert logits.stride(1) == 1 and (cut is None or cut.is_contiguous())
    (num_rows, vocab_size), device = logits.shape, logits.device
    num_parts = triton.cdiv(vocab_size, _BLOCK)
    num_requests = num_rows if temperature is None else len(temperature)
    assert num_rows % num_requests == 0
    inputs = [
        logits,
        logits.stride(0),
        *(
            item
            for column in (temperature, seeds, positions)
            for item in (column, 0 if column is None else column.stride(0))
        ),
        num_rows // num_requests,
        cut,
        token_map,
    ]
    options = {**programmatic_launch(device), "enable_fp_fusion": False}
    parts = torch.empty((2, num_rows, num_parts), dtype=torch.float32, device=device)
    _reduce_part[(num_rows, num_parts)](*inputs, parts, vocab_size, _BLOCK, **options, num_warps=4)
    probs = torch.empty((num_rows, topk), dtype=torch.float32, device=device)
    tokens = torch.empty((num_rows, topk), dtype=torch.int64, device=device)
    _best_of_row[(num_rows,)](
        *inputs,
        parts,
        probs,
        tokens,
        vocab_size,
        num_parts,
        topk,
        triton.next_power_of_2(topk),
        triton.next_power_of_2(num_parts),
        _BLOCK,
        **options,
        num_warps=8,
    )
    return probs, tokens


@triton.jit  # type: ignore[untyped-decorator]  # triton has no types
def _keys(values: tl.tensor, indices: tl.tensor) -> tl.tensor:
    """values without NaN."""
    bits = tl.where(values == 0, 0.0, values).to(tl.int32, bitcast=True)  # -0 is 0
    bits = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64)
    return bits * _INDEX_STEP + (_LAST_INDEX - indices)


@triton.jit  # type: ignore[untyped-decorator]  # triton has no types
def _indices(keys: tl.tensor) -> tl.tensor:
    return (keys & 0x7FFFFFFF) ^ 0x7FFFFFFF


@triton.jit  # type: ignore[untyped-decorator]  # triton has no types
def _keep_best(keys: tl.tensor, topk: tl.constexpr, block: tl.constexpr) -> tl.tensor:
    """The `topk` largest of distinct keys, largest first, `[block]`."""
    ranks = tl.arange(0, block)
    kept = tl.full([block], _NO_KEY, tl.int64)
    for rank in tl.range(0, topk):
        best = tl.max(keys, axis=0)
        kept = tl.where(ranks == rank, best, kept)
        keys = tl.where(keys == best, _NO_KEY, keys)
    return kept


@triton.jit  # type: ignore[untyped-decorator]  # triton has no types
def _scores(
    logits: tl.tensor, logits_stride: tl.tensor, temperatures: tl.tensor,
    temperatures_stride: tl.tensor, seeds: tl.tensor, seeds_stride: tl.tensor,
    positions: tl.tensor, positions_stride: tl.tensor, rows_per_request: tl.constexpr,
    cuts: tl.tensor, token_map: tl.tensor, row: tl.tensor, columns: tl.tensor, exists: tl.tensor,
    part: tl.tensor, block: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """What the tokens at `columns` of a row are compared by: logits, or logits / temperature that
    the filters keep, plus noise. part: the columns are this part; None: they are any."""
    values = tl.load(logits + row * logits_stride + columns, mask=exists, other=float("-inf")).to(
        tl.float32
    )
    if temperatures is not None:
        request = row // rows_per_request
        temperature = tl.load(temperatures + request * temperatures_stride)
        if temperature != 0:
            seed = tl.load(seeds + request * seeds_stride)
            position = tl.load(positions + request * positions_stride)
            values = tl.div_rn(values, temperature)
            if cuts is not None:
                values = tl.where(values < tl.load(cuts + row), float("-inf"), values)
            if token_map is not None:
                token = tl.load(token_map + columns, mask=exists, other=0)
                values += noise_at(seed, position, token, 0)
            elif part is not None:
                values += part_noise(seed, position, part, 0, block)
            else:
                values += noise_at(seed, position, columns, 0)
    return values


_STRIDES = ["temperatures_stride", "seeds_stride", "positions_stride"]


@triton.jit(do_not_specialize=_STRIDES)  # type: ignore[untyped-decorator]  # triton has no types
def _reduce_part(
    logits: tl.tensor, logits_stride: tl.tensor, temperatures: tl.tensor,
    temperatures_stride: tl.tensor, seeds: tl.tensor, seeds_stride: tl.tensor,
    positions: tl.tensor, positions_stride: tl.tensor, rows_per_request: tl.constexpr,
    cuts: tl.tensor, token_map: tl.tensor, parts: tl.tensor, vocab_size: tl.tensor,
    block: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """Grid (rows, parts). Writes to `parts` `[2, rows, parts]` the maximum, NaN as -inf, and the
    sum of exp(value - maximum)."""
    begin(PDL)
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    columns = part * block + tl.arange(0, block)
    exists = columns < vocab_size
    values = _scores(
        logits, logits_stride, temperatures, temperatures_stride, seeds, seeds_stride, positions,
        positions_stride, rows_per_request, cuts, token_map, row, columns, exists, part, block,
    )  # fmt: skip
    top = tl.max(tl.where(values != values, float("-inf"), values), axis=0)
    shift = tl.where(top > float("-inf"), top, 0.0)
    index = row * tl.num_programs(1) + part
    tl.store(parts + index, top)
    sums = parts + tl.num_programs(0).to(tl.int64) * tl.num_programs(1)
    tl.store(sums + index, tl.sum(tl.exp(values - shift), axis=0))


@triton.jit(do_not_specialize=[*_STRIDES, "num_parts"])  # type: ignore[untyped-decorator]  # triton has no types
def _best_of_row(
    logits: tl.tensor, logits_stride: tl.tensor, temperatures: tl.tensor,
    temperatures_stride: tl.tensor, seeds: tl.tensor, seeds_stride: tl.tensor,
    positions: tl.tensor, positions_stride: tl.tensor, rows_per_request: tl.constexpr,
    cuts: tl.tensor, token_map: tl.tensor, parts: tl.tensor, probs: tl.tensor, tokens: tl.tensor,
    vocab_size: tl.tensor, num_parts: tl.tensor, topk: tl.constexpr, topk_block: tl.constexpr,
    parts_block: tl.constexpr, block: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """Grid (rows)."""
    begin(PDL)
    row, part = tl.program_id(0).to(tl.int64), tl.arange(0, parts_block)
    is_part = part < num_parts
    sums = parts + tl.num_programs(0).to(tl.int64) * num_parts
    tops = tl.load(parts + row * num_parts + part, mask=is_part, other=float("-inf"))
    part_sums = tl.load(sums + row * num_parts + part, mask=is_part, other=0.0)
    top = tl.max(tops, axis=0)
    shift = tl.where(top > float("-inf"), top, 0.0)
    total = tl.sum(part_sums * tl.exp(tops - shift), axis=0)
    best = _keep_best(tl.where(is_part, _keys(tops, part), _NO_KEY), topk, topk_block)
    best_part = tl.where(best != _NO_KEY, _indices(best), 0).to(tl.int32)
    columns = best_part[:, None] * block + tl.arange(0, block)[None, :]
    exists = (best != _NO_KEY)[:, None] & (columns < vocab_size)
    values = _scores(
        logits, logits_stride, temperatures, temperatures_stride, seeds, seeds_stride, positions,
        positions_stride, rows_per_request, cuts, token_map, row, columns, exists, None, block,
    )  # fmt: skip
    values = tl.where(values != values, float("-inf"), values)
    keys = tl.where(exists, _keys(values, columns), _NO_KEY)
    kept = _keep_best(tl.reshape(keys, [topk_block * block]), topk, topk_block)
    rank = tl.arange(0, topk_block)
    bits = (kept >> 32).to(tl.int32)
    values = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.float32, bitcast=True)
    prob = tl.div_rn(tl.exp(values - shift), total)
    tl.store(probs + row * topk + rank, prob, mask=rank < topk)
    token = _indices(kept)
    if token_map is not None:
        token = tl.load(token_map + token, mask=rank < topk, other=0)
    tl.store(tokens + row * topk + rank, token, mask=rank < topk)
