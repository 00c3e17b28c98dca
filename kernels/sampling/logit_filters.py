"""What excludes tokens: top_k, top_p and min_p as one number per row, the smallest value of logits
/ temperature that they keep; and bitmasks of grammars."""

import numpy as np
import torch

from tllm_spec.kernels.dispatch import tl, triton, with_kernel
from tllm_spec.kernels.launch import begin, programmatic_launch, strided

# top_k, top_p and min_p as one number per row: the smallest value of logits / temperature that
# they keep.
#
# The filters apply in this order. min_p keeps values of at least the greatest + log(min_p). top_k
# keeps values of at least the k-th greatest (ties count individually). top_p keeps, of the rest,
# values whose strictly greater ones weigh less than top_p of the total. So tokens with equal
# values are kept or dropped together, and one number describes the result.
#
# Weights are integers, floor(exp(value - greatest) * 2**40), so their sums are exact in any order.
# exp is the sequence of float32 operations in `token_weights`, so all devices compute the same
# cut. Tokens less likely than e**-27.7 of the most likely one weigh nothing, and a weight is
# accurate to about 1e-7.
#
# On CUDA two Triton kernels count the values of 16-bit logits and walk the counts. The plain-torch
# reference sorts; it also serves float32 logits on any device.


WEIGHT_BITS = 40


@with_kernel("filter_cut_triton")
def filter_cut(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
) -> torch.Tensor:
    """logits `[R, V]` float32, bfloat16 or float16; temperature, top_p, min_p `[R]` float32; top_k
    `[R]` int64. A filter is off if top_k >= V, top_p >= 1, min_p = 0. Returns `[R]` float32.

    The greatest value is always kept. -inf where nothing is filtered or the temperature is 0. The
    cut of a row with a NaN is arbitrary; the NaN itself is always kept."""
    temperature, top_k, top_p, min_p = (x.unsqueeze(1) for x in (temperature, top_k, top_p, min_p))
    values = logits.to(torch.float32) / torch.where(temperature > 0, temperature, 1.0)
    values = _descending(values)
    best = values[:, :1]
    # The logarithm in float64, rounded once, so that devices agree.
    cut = torch.where(min_p > 0, best + min_p.double().log().float(), -torch.inf)
    last = top_k.clamp_max(logits.shape[1]) - 1
    cut = torch.where(top_k < logits.shape[1], torch.maximum(cut, values.gather(1, last)), cut)
    weights = torch.where(values < cut, 0, token_weights(values, best))
    sums = weights.cumsum(dim=-1)
    target = top_p.double() * sums[:, -1:].double()
    inside = sums.sub_(weights).double() < target
    last = (inside.sum(dim=-1, keepdim=True) - 1).clamp_min(0)
    cut = torch.where(top_p < 1, torch.maximum(cut, values.gather(1, last)), cut)
    return torch.where(temperature > 0, cut, -torch.inf).squeeze(1)


def _descending(values: torch.Tensor) -> torch.Tensor:
    """`[R, V]` float32, sorted, NaN first. On a CPU NumPy takes a quarter of torch's time, which
    sorts the positions, too."""
    if values.device.type != "cpu":
        return values.sort(dim=-1, descending=True).values
    return torch.from_numpy(np.sort(values.numpy(), axis=-1)).flip(-1)


def token_weights(values: torch.Tensor, best: torch.Tensor) -> torch.Tensor:
    """floor(exp(values - best) * 2**40), int64. exp as in Cephes' expf, each operation rounded to
    float32."""
    x = torch.where(values == best, 0.0, values - best)
    x = torch.where(x > -30.0, x, -30.0)  # weighs 0
    exponent = (x * 1.44269504088896341 + 0.5).floor()
    x = x - exponent * 0.693359375  # exact: the constant has few bits
    x = x - exponent * -2.12194440e-4
    y = x * 1.9875691500e-4 + 1.3981999507e-3
    y = y * x + 8.3334519073e-3
    y = y * x + 4.1665795894e-2
    y = y * x + 1.6666665459e-1
    y = y * x + 5.0000001201e-1
    y = y * (x * x) + x + 1.0
    scale = ((exponent.to(torch.int32) + (127 + WEIGHT_BITS)) << 23).view(torch.float32)
    return (y * scale).to(torch.int64)


# There are 65,536 different 16-bit logits, so a histogram describes a row. The first kernel counts
# the values of all rows. The second, with one program per row, walks the counts from the greatest
# value down, 4,096 at a time: once for the k-th value, and again for the mass of top_p. Division
# by the temperature may make different logits equal but keeps their order. The cut is the same as
# if equal values were counted together, because the lowest of them is kept if and only if the
# first one is.
#
# Work for R rows of V tokens: 2 R V bytes of logits read, R * 256 KiB of counts cleared, R V
# atomic additions. Rows that are greedy or have no filters are not read.


_BLOCK = 1024  # tokens per program
_NUM_KEYS = 65536
_WALK = 4096  # keys per step


def filter_cut_triton(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
) -> torch.Tensor:
    """See `filter_cut`. Every argument may have a stride between rows. The reference serves
    float32."""
    if logits.element_size() != 2:
        return filter_cut.reference(logits, temperature, top_k, top_p, min_p)
    assert logits.stride(1) == 1
    num_rows, vocab_size = logits.shape
    # The greatest key of each row follows the counts of all rows.
    counts = torch.zeros(num_rows * (_NUM_KEYS + 1), dtype=torch.int32, device=logits.device)
    cut = torch.empty(num_rows, dtype=torch.float32, device=logits.device)
    parameters = strided(temperature, top_k, top_p, min_p)
    bits = logits.view(torch.int16)
    grid = (num_rows, triton.cdiv(vocab_size, _BLOCK))
    sizes = (vocab_size, _BLOCK, _NUM_KEYS)
    _count_keys[grid](bits, bits.stride(0), *parameters, counts, *sizes, enable_fp_fusion=True)
    _find_cut[(num_rows,)](
        *parameters,
        counts,
        cut,
        vocab_size,
        logits.dtype == torch.bfloat16,
        _WALK,
        _NUM_KEYS,
        num_warps=8,
        enable_fp_fusion=False,
    )
    return cut


_UNSPECIALIZED = ["temperatures_stride", "top_ks_stride", "top_ps_stride", "min_ps_stride"]


@triton.jit(do_not_specialize=_UNSPECIALIZED)
def _count_keys(
    bits: tl.tensor, bits_stride: tl.tensor, temperatures: tl.tensor,
    temperatures_stride: tl.tensor, top_ks: tl.tensor, top_ks_stride: tl.tensor, top_ps: tl.tensor,
    top_ps_stride: tl.tensor, min_ps: tl.tensor, min_ps_stride: tl.tensor, counts: tl.tensor,
    vocab_size: tl.tensor, block: tl.constexpr, num_keys: tl.constexpr,
) -> None:  # fmt: skip
    """Histogram of each row's keys. A key is an unsigned integer with the order of the logits: the
    sign bit flipped, or all bits of a negative number."""
    row = tl.program_id(0).to(tl.int64)
    filters = tl.load(top_ks + row * top_ks_stride) < vocab_size
    filters |= tl.load(top_ps + row * top_ps_stride) < 1
    filters |= tl.load(min_ps + row * min_ps_stride) > 0
    if filters & (tl.load(temperatures + row * temperatures_stride) > 0):
        tokens = tl.program_id(1) * block + tl.arange(0, block)
        exists = tokens < vocab_size
        word = tl.load(bits + row * bits_stride + tokens, mask=exists, other=0)
        word = word.to(tl.int32) & 0xFFFF
        keys = tl.where(word >= 0x8000, 0xFFFF - word, word + 0x8000)
        tl.atomic_add(counts + row * num_keys + keys, 1, mask=exists, sem="relaxed")
        greatest = tl.max(tl.where(exists, keys, 0), axis=0)
        tl.atomic_max(
            counts + tl.num_programs(0).to(tl.int64) * num_keys + row, greatest, sem="relaxed"
        )


@triton.jit(do_not_specialize=_UNSPECIALIZED)
def _find_cut(
    temperatures: tl.tensor, temperatures_stride: tl.tensor, top_ks: tl.tensor,
    top_ks_stride: tl.tensor, top_ps: tl.tensor, top_ps_stride: tl.tensor, min_ps: tl.tensor,
    min_ps_stride: tl.tensor, counts: tl.tensor, cuts: tl.tensor, vocab_size: tl.tensor,
    is_bfloat16: tl.constexpr, walk: tl.constexpr, num_keys: tl.constexpr,
) -> None:  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    temperature = tl.load(temperatures + row * temperatures_stride)
    top_k = tl.load(top_ks + row * top_ks_stride)
    top_p = tl.load(top_ps + row * top_ps_stride)
    min_p = tl.load(min_ps + row * min_ps_stride)
    cut = tl.full([], float("-inf"), tl.float32)
    if (temperature > 0) & ((top_k < vocab_size) | (top_p < 1) | (min_p > 0)):
        greatest = tl.load(counts + tl.num_programs(0).to(tl.int64) * num_keys + row)
        counts += row * num_keys
        best = _value(greatest, temperature, is_bfloat16)
        if min_p > 0:
            cut = best + tl.log(min_p.to(tl.float64)).to(tl.float32)
        if top_k < vocab_size:
            key = _kth_key(counts, greatest, top_k.to(tl.int32), walk)
            kth = _value(key, temperature, is_bfloat16)
            cut = tl.where(kth > cut, kth, cut)
        if top_p < 1:
            total = _mass(counts, greatest, best, cut, temperature, is_bfloat16, walk)
            target = top_p.to(tl.float64) * total.to(tl.float64)
            cut = _nucleus(counts, greatest, best, cut, target, temperature, is_bfloat16, walk)
    tl.store(cuts + row, cut)


@triton.jit
def _kth_key(
    counts: tl.tensor, greatest: tl.tensor, top_k: tl.tensor, walk: tl.constexpr
) -> tl.tensor:
    """The key of the `top_k`-th greatest logit."""
    above, first, found = top_k * 0, greatest, top_k * 0
    while (above < top_k) & (first >= 0):
        keys = first - tl.arange(0, walk)
        number = tl.load(counts + keys, mask=keys >= 0, other=0)
        reached = above + tl.cumsum(number, axis=0) >= top_k
        found = tl.max(tl.where(reached, keys, 0), axis=0)
        above += tl.sum(number, axis=0)
        first -= walk
    return found


@triton.jit
def _mass(
    counts: tl.tensor, greatest: tl.tensor, best: tl.tensor, cut: tl.tensor, temperature: tl.tensor,
    is_bfloat16: tl.constexpr, walk: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """The sum of the weights of all tokens not below `cut`."""
    total, first, goes_on = tl.full([], 0, tl.int64), greatest, greatest >= 0
    while goes_on:
        keys = first - tl.arange(0, walk)
        values = _value(tl.maximum(keys, 0), temperature, is_bfloat16)
        number = tl.load(counts + keys, mask=(keys >= 0) & (values >= cut), other=0)
        total += tl.sum(number.to(tl.int64) * _weights(values, best), axis=0)
        first -= walk
        # Stop below the cut, or when the next value weighs 0. (With an infinite best value this
        # comparison is with NaN; then only infinities weigh, and the cut is infinite anyway.)
        value = _value(tl.maximum(first, 0), temperature, is_bfloat16)
        goes_on = (first >= 0) & (value >= cut) & (value - best > -30.0)
    return total


@triton.jit
def _nucleus(
    counts: tl.tensor, greatest: tl.tensor, best: tl.tensor, cut: tl.tensor, target: tl.tensor,
    temperature: tl.tensor, is_bfloat16: tl.constexpr, walk: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """The smallest value not below `cut` whose strictly greater ones weigh less than `target`; at
    most `best`."""
    above, first, found, goes_on = tl.full([], 0, tl.int64), greatest, best, greatest >= 0
    while goes_on:
        keys = first - tl.arange(0, walk)
        values = _value(tl.maximum(keys, 0), temperature, is_bfloat16)
        number = tl.load(counts + keys, mask=(keys >= 0) & (values >= cut), other=0)
        mass = number.to(tl.int64) * _weights(values, best)
        kept = (number > 0) & ((above + tl.cumsum(mass, axis=0) - mass).to(tl.float64) < target)
        lowest = tl.min(tl.where(kept, values, float("inf")), axis=0)
        found = tl.where(lowest < found, lowest, found)
        above += tl.sum(mass, axis=0)
        first -= walk
        value = _value(tl.maximum(first, 0), temperature, is_bfloat16)
        goes_on = (first >= 0) & (value >= cut) & (above.to(tl.float64) < target)
    return found


@triton.jit
def _value(keys: tl.tensor, temperature: tl.tensor, is_bfloat16: tl.constexpr) -> tl.tensor:
    """logits / temperature of keys, float32."""
    word = tl.where(keys >= 0x8000, keys - 0x8000, 0xFFFF - keys)
    if is_bfloat16:
        logits = (word << 16).to(tl.float32, bitcast=True)
    else:
        logits = word.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    return tl.div_rn(logits, temperature)


@triton.jit
def _weights(values: tl.tensor, best: tl.tensor) -> tl.tensor:
    """The same operations as `token_weights`."""
    x = tl.where(values == best, 0.0, values - best)
    x = tl.where(x > -30.0, x, -30.0)
    exponent = tl.floor(x * 1.44269504088896341 + 0.5)
    x = x - exponent * 0.693359375
    x = x - exponent * -2.12194440e-4
    y = x * 1.9875691500e-4 + 1.3981999507e-3
    y = y * x + 8.3334519073e-3
    y = y * x + 4.1665795894e-2
    y = y * x + 1.6666665459e-1
    y = y * x + 5.0000001201e-1
    y = y * (x * x) + x + 1.0
    scale = ((exponent.to(tl.int32) + 167) << 23).to(tl.float32, bitcast=True)
    return (y * scale).to(tl.int64)


# Excludes tokens by bitmasks, or all but one: their logits become -inf. That one is 0 then, also
# where something else has excluded it. One Triton kernel on CUDA, elsewhere the plain-torch
# reference.


@with_kernel("mask_tokens_triton")
def mask_tokens(
    logits: torch.Tensor, mask_of_row: torch.Tensor, bitmasks: torch.Tensor, first: int = 0
) -> None:
    """Sets excluded tokens to -inf, in place. logits `[R, n]`, contiguous rows, of the tokens from
    `first` on; mask_of_row `[R]` int32: the number of each row's bitmask, -1 for none, -2 - token
    for that token only; bitmasks `[M, ceil(V / 32)]` int32: bit i % 32 of word i // 32 is set if
    token i is allowed."""
    (rows,) = torch.nonzero(mask_of_row >= 0, as_tuple=True)
    words = bitmasks.index_select(0, mask_of_row.index_select(0, rows))
    bits = torch.arange(32, dtype=torch.int32, device=logits.device)
    allowed = ((words.unsqueeze(2) >> bits) & 1).flatten(1)[:, first:][:, : logits.shape[1]].bool()
    logits.index_copy_(0, rows, logits.index_select(0, rows).masked_fill_(~allowed, -torch.inf))
    (rows,) = torch.nonzero(mask_of_row < -1, as_tuple=True)
    only = -2 - mask_of_row.index_select(0, rows).unsqueeze(1) - first
    is_it = torch.arange(logits.shape[1], device=logits.device) == only
    logits.index_copy_(0, rows, torch.where(is_it, 0.0, -torch.inf).to(logits.dtype))


_MASK_BLOCK = 4096


def mask_tokens_triton(
    logits: torch.Tensor, mask_of_row: torch.Tensor, bitmasks: torch.Tensor, first: int = 0
) -> None:
    """See `mask_tokens`."""
    assert logits.stride(1) == 1 and mask_of_row.is_contiguous() and bitmasks.is_contiguous()
    num_tokens = logits.shape[1]
    mask_tokens_kernel[(len(logits), triton.cdiv(num_tokens, _MASK_BLOCK))](
        *strided(logits),
        mask_of_row,
        bitmasks,
        bitmasks.shape[1],
        first,
        num_tokens,
        BLOCK=_MASK_BLOCK,
        **programmatic_launch(logits.device, 4),
    )


@triton.jit
def mask_tokens_kernel(
    logits: tl.tensor, stride: tl.tensor, mask_of_row: tl.tensor, bitmasks: tl.tensor,
    num_words: tl.tensor, first: tl.tensor, num_tokens: tl.tensor, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
) -> None:  # fmt: skip
    """A block of one row per program. Only excluded logits and the only token's are written, none
    is read."""
    begin(PDL)
    row = tl.program_id(0).to(tl.int64)
    index = tl.load(mask_of_row + row).to(tl.int64)
    tokens = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    masked = tokens < tl.where(index >= 0, num_tokens, 0)
    has_only = tokens < tl.where(index < -1, num_tokens, 0)  # and nothing without a mask
    ids = first + tokens
    words = tl.load(bitmasks + index * num_words + ids // 32, mask=masked, other=-1)
    excluded = ((words >> (ids % 32)) & 1) == 0
    infinity = tl.full((BLOCK,), float("inf"), tl.float32)
    values = tl.where(has_only & (ids == -2 - index), 0.0, -infinity)
    values = values.to(logits.dtype.element_ty)
    tl.store(logits + row * stride + tokens, values, mask=has_only | (masked & excluded))
