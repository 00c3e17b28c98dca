"""The K best tokens of each row of logits and their probabilities: the candidates of a draft tree.
On CUDA two Triton kernels, elsewhere the plain-torch reference.

A row's values are its logits, or where it has a temperature, logits / temperature + the Gumbel
noise that the target will use at the same position (coupled drafts, as `choose_draft`). The
candidates are the K best values, so the first one is what `choose_draft` returns, and a chain is
K = 1. Probabilities are the softmax of the values, noise included: of Gumbel variables, the
probability that the token is still the best one after independent errors of the draft's logits /
temperature (Gumbel, scale 1). The probability without noise would rank a token that the noise has
chosen, which the target will choose as well, below a more common one."""

import torch

from tllm_spec.kernels.dispatch import tl, triton, with_kernel
from tllm_spec.kernels.launch import begin, programmatic_launch, strided
from tllm_spec.kernels.sampling.choose_token import drawn, drawn_values

MAX_TOPK = 16
_LAST_COLUMN = 2**31 - 1


@with_kernel("top_tokens_triton")
def top_tokens(
    logits: torch.Tensor,
    topk: int,
    token_map: torch.Tensor | None = None,
    temperature: torch.Tensor | None = None,
    seeds: torch.Tensor | None = None,
    positions: torch.Tensor | None = None,
    cut: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Probabilities `[R, K]` float32 and tokens `[R, K]` int64, best first, equal values by column.

    Args:
        logits: `[R, V]` float32, bfloat16 or float16; V at least K. A NaN counts as -inf in the
            order, and makes the row's probabilities NaN, as +inf does.
        topk: K, 1 to 16.
        token_map: `[V]` int64: the target's id of each column, which keys the noise and is
            returned; None: the column itself.
        temperature, seeds, positions: `[B]` float32 and int64: of requests that have R / B rows
            each. Temperature 0: no noise. None: no row has a temperature.
        cut: `[R]` float32: values of logits / temperature below it count as -inf in rows with a
            temperature.
    """
    values = logits.to(torch.float32)
    if temperature is not None:
        assert seeds is not None and positions is not None
        per_request = len(values) // len(temperature)
        given = [x.repeat_interleave(per_request) for x in (temperature, seeds, positions)]
        values = drawn_values(values, given[0], given[1], given[2], token_map, cut=cut)
    columns = best_columns(values, topk)
    probs = values.softmax(dim=1).gather(1, columns)
    return probs, columns if token_map is None else token_map[columns]


def best_columns(values: torch.Tensor, topk: int) -> torch.Tensor:
    """Columns `[R, K]` of the largest float32 values `[R, V]`, equal ones by column, NaN as -inf.

    torch.topk leaves the order of equal values open, and on CUDA it depends on the number of rows.
    So it gets distinct keys: the float's bits as an ordered integer, then the column."""
    bits = (values.nan_to_num(-torch.inf, torch.inf, -torch.inf) + 0.0).view(torch.int32)
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(torch.int64)
    columns = torch.arange(values.shape[1], device=values.device)
    keys = (ordered << 32) + (_LAST_COLUMN - columns)
    return _LAST_COLUMN - (keys.topk(topk, dim=1).values & 0xFFFFFFFF)


# The first one reduces each part of a row to its maximum and its sum of exponentials. The K best
# tokens are in the K parts with the best maxima, so the second one reads only these parts again.
# Each order is one maximum after the other of distinct keys: a value's bits as an ordered integer,
# then the column or part. A row's results do not depend on other rows.
#
# Work for R rows of V tokens: 2 or 4 R V bytes of logits read once, and K maxima of V / 512 parts
# and of 512 K tokens per row.


_BLOCK = 512  # tokens of a part
NO_KEY = tl.constexpr(-(2**63))
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
        *strided(logits, temperature, seeds, positions),
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


@triton.jit
def ordered_keys(values: tl.tensor, indices: tl.tensor) -> tl.tensor:
    """values without NaN."""
    bits = tl.where(values == 0, 0.0, values).to(tl.int32, bitcast=True)  # -0 is 0
    bits = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64)
    return bits * _INDEX_STEP + (_LAST_INDEX - indices)


@triton.jit
def key_indices(keys: tl.tensor) -> tl.tensor:
    return (keys & 0x7FFFFFFF) ^ 0x7FFFFFFF


@triton.jit
def largest_keys(keys: tl.tensor, topk: tl.constexpr, block: tl.constexpr) -> tl.tensor:
    """The `topk` largest of distinct keys, largest first, `[block]`."""
    ranks = tl.arange(0, block)
    kept = tl.full([block], NO_KEY, tl.int64)
    for rank in tl.range(0, topk):
        best = tl.max(keys, axis=0)
        kept = tl.where(ranks == rank, best, kept)
        keys = tl.where(keys == best, NO_KEY, keys)
    return kept


_STRIDES = ["temperatures_stride", "seeds_stride", "positions_stride"]


@triton.jit(do_not_specialize=_STRIDES)
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
    values = drawn(
        logits, logits_stride, temperatures, temperatures_stride, seeds, seeds_stride, positions,
        positions_stride, rows_per_request, cuts, token_map, row, columns, exists, part, 0,
        block,
    )  # fmt: skip
    top = tl.max(tl.where(values != values, float("-inf"), values), axis=0)
    shift = tl.where(top > float("-inf"), top, 0.0)
    index = row * tl.num_programs(1) + part
    tl.store(parts + index, top)
    sums = parts + tl.num_programs(0).to(tl.int64) * tl.num_programs(1)
    tl.store(sums + index, tl.sum(tl.exp(values - shift), axis=0))


@triton.jit(do_not_specialize=[*_STRIDES, "num_parts"])
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
    best = largest_keys(tl.where(is_part, ordered_keys(tops, part), NO_KEY), topk, topk_block)
    best_part = tl.where(best != NO_KEY, key_indices(best), 0).to(tl.int32)
    columns = best_part[:, None] * block + tl.arange(0, block)[None, :]
    exists = (best != NO_KEY)[:, None] & (columns < vocab_size)
    values = drawn(
        logits, logits_stride, temperatures, temperatures_stride, seeds, seeds_stride, positions,
        positions_stride, rows_per_request, cuts, token_map, row, columns, exists, None, 0,
        block,
    )  # fmt: skip
    values = tl.where(values != values, float("-inf"), values)
    keys = tl.where(exists, ordered_keys(values, columns), NO_KEY)
    kept = largest_keys(tl.reshape(keys, [topk_block * block]), topk, topk_block)
    rank = tl.arange(0, topk_block)
    bits = (kept >> 32).to(tl.int32)
    values = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.float32, bitcast=True)
    prob = tl.div_rn(tl.exp(values - shift), total)
    tl.store(probs + row * topk + rank, prob, mask=rank < topk)
    token = key_indices(kept)
    if token_map is not None:
        token = tl.load(token_map + token, mask=rank < topk, other=0)
    tl.store(tokens + row * topk + rank, token, mask=rank < topk)
