"""Chooses the token of each row: argmax of logits / temperature + Gumbel noise, or plain argmax
where the temperature is 0.

Logits have the model's dtype and become float32 in registers, so no float32 copy of the logits is
written. Filters are given as one number per row (`filter_cut`). On CUDA this is one fused Triton
kernel and a small one that reduces its parts; elsewhere the plain-torch reference, which is the
definition."""

import torch

from tllm_spec.kernels.dispatch import tl, triton, with_kernel
from tllm_spec.kernels.launch import begin, programmatic_launch, strided
from tllm_spec.kernels.sampling.gumbel import TARGET_DOMAIN, gumbel_noise


@with_kernel("choose_token_triton")
def choose_token(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    cut: torch.Tensor | None = None,
) -> torch.Tensor:
    """logits `[R, V]` float32, bfloat16 or float16; temperature `[R]` float32; seeds and positions
    `[R]` int64; cut `[R]` float32: values of logits / temperature below it count as -inf in rows
    with a temperature. Returns `[R]` int64.

    Ties, infinite values included, go to the lowest token id. -1 where the row holds a NaN or only
    -inf."""
    values = drawn_values(logits, temperature, seeds, positions, cut=cut)
    return choose_best.reference(values)


@with_kernel("choose_best_triton")
def choose_best(logits: torch.Tensor) -> torch.Tensor:
    """`choose_token` where every temperature is 0."""
    best, tokens = logits.max(dim=-1)
    return torch.where(best > -torch.inf, tokens, -1)


@with_kernel("choose_draft_triton")
def choose_draft(
    logits: torch.Tensor,
    token_map: torch.Tensor | None,
    temperature: torch.Tensor | None = None,
    seeds: torch.Tensor | None = None,
    positions: torch.Tensor | None = None,
    cut: torch.Tensor | None = None,
) -> torch.Tensor:
    """`choose_token` for a draft model, or `choose_best` without a temperature. token_map `[V]`
    int64: the target's id of each column, which keys the noise and is returned; None: the column
    itself.

    Ties go to the first column. Rows with a NaN or only -inf give column 0, so a draft is always a
    valid token."""
    values = logits
    if temperature is not None:
        values = drawn_values(logits, temperature, seeds, positions, token_map, cut=cut)
    columns = choose_best.reference(values).clamp_min(0)
    return columns if token_map is None else token_map.index_select(0, columns)


@with_kernel("offer_token_triton")
def offer_token(
    logits: torch.Tensor,
    first: int,
    ids: torch.Tensor | None = None,
    temperature: torch.Tensor | None = None,
    seeds: torch.Tensor | None = None,
    positions: torch.Tensor | None = None,
) -> torch.Tensor:
    """The best value and its column of some columns of the logits, from `first` on: `[R, 2]` int32,
    the value as the bits of a float32. As `choose_token`, or `choose_best` without a temperature.
    ids `[V]` int64: token ids of the columns, which key the noise.

    Column -1 with +inf where the row holds a NaN, and with -inf where it holds only that."""
    values = drawn_values(logits, temperature, seeds, positions, ids)
    best, columns = values.max(dim=-1)
    columns = torch.where(best > -torch.inf, columns + first, -1)
    bits = best.nan_to_num(torch.inf, torch.inf, -torch.inf).view(torch.int32)
    return torch.stack((bits, columns.to(torch.int32)), 1)


def drawn_values(
    logits: torch.Tensor,
    temperature: torch.Tensor | None,
    seeds: torch.Tensor | None,
    positions: torch.Tensor | None,
    token_map: torch.Tensor | None = None,
    *,
    cut: torch.Tensor | None = None,
) -> torch.Tensor:
    """What tokens are compared by, `[R, V]` float32: one float32 division and one float32 addition
    of the noise of their ids, each rounded once; or logits in rows without a temperature."""
    values = logits.to(torch.float32)
    if temperature is None:
        return values
    assert seeds is not None and positions is not None
    num_tokens = values.shape[1] if token_map is None else int(token_map.max()) + 1
    noise = gumbel_noise(seeds, positions, num_tokens)
    if token_map is not None:
        noise = noise.index_select(1, token_map)
    scaled = values / temperature.unsqueeze(1)
    if cut is not None:
        scaled.masked_fill_(scaled < cut.unsqueeze(1), -torch.inf)
    return torch.where((temperature == 0).unsqueeze(1), values, scaled.add_(noise))


# Exactness: the Philox words are integers and equal the reference's. Division and addition are
# single IEEE float32 operations (`div_rn`; Triton's `/` is an approximation), so a sum equals the
# reference's if the noise does. The two logarithms are float64 (libdevice; numpy under the
# interpreter) and may differ from the reference's in the last float64 bit. After rounding to
# float32 they differ for about one word in 2**28. That changes a token only if the two best sums
# are adjacent float32 numbers.
#
# Work for R rows of V tokens: 4 R V bytes of logits read once, and 16 R V / 1024 bytes of parts
# written and read. With a temperature a token takes about 240 instructions, 63 of them float64
# (two logarithms), so many rows are bound by instructions.


_BLOCK = 1024  # tokens per program with noise
_LONG_BLOCK = 4096  # without noise, if there are enough rows to fill the device


def choose_token_triton(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    cut: torch.Tensor | None = None,
) -> torch.Tensor:
    """See `choose_token`. All arguments may have a stride between rows."""
    parts = _best_of_parts(logits, temperature, seeds, positions, cut, None)
    return _chosen(parts, -1)


def choose_best_triton(logits: torch.Tensor) -> torch.Tensor:
    """See `choose_best`."""
    parts = _best_of_parts(logits, None, None, None, None, None)
    return _chosen(parts, -1)


def choose_draft_triton(
    logits: torch.Tensor,
    token_map: torch.Tensor | None,
    temperature: torch.Tensor | None = None,
    seeds: torch.Tensor | None = None,
    positions: torch.Tensor | None = None,
    cut: torch.Tensor | None = None,
) -> torch.Tensor:
    """See `choose_draft`. All arguments may have a stride between rows."""
    columns = temperature, seeds, positions
    parts = _best_of_parts(logits, *columns, cut, token_map)
    return _chosen(parts, 0, token_map)


def _chosen(
    parts: tuple[torch.Tensor, torch.Tensor],
    nothing: int,
    token_map: torch.Tensor | None = None,
    offers: torch.Tensor | None = None,
    first: int = 0,
) -> torch.Tensor:
    """The token of each row, `[R]`, from the best of its parts, or the filled `offers`."""
    device, (num_rows, num_parts) = parts[0].device, parts[0].shape
    chosen = offers
    if chosen is None:
        chosen = torch.empty(num_rows, dtype=torch.int64, device=device)
    _choose_among_parts[(num_rows,)](
        *(*parts, token_map, chosen if offers is None else None, offers, first, num_parts),
        triton.next_power_of_2(num_parts),
        nothing,
        **programmatic_launch(device, 1),
    )
    return chosen


def offer_token_triton(
    logits: torch.Tensor,
    first: int,
    ids: torch.Tensor | None = None,
    temperature: torch.Tensor | None = None,
    seeds: torch.Tensor | None = None,
    positions: torch.Tensor | None = None,
) -> torch.Tensor:
    """See `offer_token`. All arguments may have a stride between rows."""
    offers = torch.empty((len(logits), 2), dtype=torch.int32, device=logits.device)
    parts = _best_of_parts(logits, temperature, seeds, positions, None, ids)
    return _chosen(parts, -1, None, offers, first)


def _best_of_parts(
    logits: torch.Tensor,
    temperature: torch.Tensor | None,
    seeds: torch.Tensor | None,
    positions: torch.Tensor | None,
    cut: torch.Tensor | None,
    token_map: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The best value of each part of a row, and its token, `[R, parts]`."""
    assert logits.stride(1) == 1
    (num_rows, vocab_size), device = logits.shape, logits.device
    block = _BLOCK if temperature is not None or num_rows <= 16 else _LONG_BLOCK
    num_parts = triton.cdiv(vocab_size, block)
    part_values = torch.empty((num_rows, num_parts), dtype=torch.float32, device=device)
    part_tokens = torch.empty((num_rows, num_parts), dtype=torch.int32, device=device)
    # Fused multiply-adds would change the last bit of the logarithms.
    options = {**programmatic_launch(device), "enable_fp_fusion": False}
    _choose_part[(num_rows, num_parts)](
        *strided(logits, temperature, seeds, positions),
        cut,
        token_map,
        part_values,
        part_tokens,
        vocab_size,
        TARGET_DOMAIN,
        block,
        num_warps=4,
        **options,
    )
    return part_values, part_tokens


def gumbel_noise_triton(
    seeds: torch.Tensor, positions: torch.Tensor, num_tokens: int, domain: int = TARGET_DOMAIN
) -> torch.Tensor:
    """See `gumbel_noise`. seeds, positions: `[R]` int64. Returns `[R, num_tokens]` float32."""
    noise = torch.empty((seeds.numel(), num_tokens), dtype=torch.float32, device=seeds.device)
    _write_noise[(seeds.numel(), triton.cdiv(num_tokens, _BLOCK))](
        *strided(seeds, positions),
        noise,
        num_tokens,
        domain,
        _BLOCK,
        num_warps=4,
        enable_fp_fusion=False,
    )
    return noise


@triton.jit
def part_noise(
    seed: tl.tensor, position: tl.tensor, part: tl.tensor, domain: tl.constexpr, block: tl.constexpr
) -> tl.tensor:
    """Gumbel noise of one part's tokens, `[block]` float32. Philox runs once per four tokens."""
    quads = part * (block // 4) + tl.arange(0, block // 4)
    zeros = tl.zeros_like(quads)
    # tl.philox is Philox4x32-10 and takes the key's low word from the seed's low half, as the
    # reference does.
    word0, word1, word2, word3 = tl.philox(
        seed, quads, zeros + position.to(tl.int32), zeros + domain, zeros
    )
    return _gumbel(tl.interleave(tl.interleave(word0, word2), tl.interleave(word1, word3)))


@triton.jit
def noise_at(
    seed: tl.tensor, position: tl.tensor, tokens: tl.tensor, domain: tl.constexpr
) -> tl.tensor:
    """Gumbel noise of any token ids `[block]`. Philox runs once per token."""
    quads, word = (tokens // 4).to(tl.int32), tokens % 4
    zeros = tl.zeros_like(quads)
    word0, word1, word2, word3 = tl.philox(
        seed, quads, zeros + position.to(tl.int32), zeros + domain, zeros
    )
    return _gumbel(
        tl.where(word < 2, tl.where(word == 0, word0, word1), tl.where(word == 2, word2, word3))
    )


@triton.jit
def _gumbel(words: tl.tensor) -> tl.tensor:
    uniform = (words.to(tl.float64) + 0.5) * (1.0 / 4294967296.0)  # exact: 33 bits
    return (-tl.log(-tl.log(uniform))).to(tl.float32)


@triton.jit
def drawn(
    logits: tl.tensor, logits_stride: tl.tensor, temperatures: tl.tensor,
    temperatures_stride: tl.tensor, seeds: tl.tensor, seeds_stride: tl.tensor,
    positions: tl.tensor, positions_stride: tl.tensor, rows_per_request: tl.constexpr,
    cuts: tl.tensor, token_map: tl.tensor, row: tl.tensor, columns: tl.tensor, exists: tl.tensor,
    part: tl.tensor, domain: tl.constexpr, block: tl.constexpr,
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
                values += noise_at(seed, position, token, domain)
            elif part is not None:
                values += part_noise(seed, position, part, domain, block)
            else:
                values += noise_at(seed, position, columns, domain)
    return values


@triton.jit(do_not_specialize=["temperatures_stride", "seeds_stride", "positions_stride"])
def _choose_part(
    logits: tl.tensor, logits_stride: tl.tensor, temperatures: tl.tensor,
    temperatures_stride: tl.tensor, seeds: tl.tensor, seeds_stride: tl.tensor, positions: tl.tensor,
    positions_stride: tl.tensor, cuts: tl.tensor, token_map: tl.tensor, part_values: tl.tensor,
    part_tokens: tl.tensor, vocab_size: tl.tensor, domain: tl.constexpr, block: tl.constexpr,
    PDL: tl.constexpr,
) -> None:  # fmt: skip
    """The best of `block` tokens of one row: writes its value and id. NaN counts as +inf with id
    -1, so it also wins ties."""
    begin(PDL)
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    tokens = part * block + tl.arange(0, block)
    exists = tokens < vocab_size
    values = drawn(
        logits, logits_stride, temperatures, temperatures_stride, seeds, seeds_stride, positions,
        positions_stride, 1, cuts, token_map, row, tokens, exists, part, domain, block,
    )  # fmt: skip
    is_nan = values != values
    values = tl.where(is_nan, float("inf"), values)
    best = tl.max(values, axis=0)
    index = row * tl.num_programs(1) + part
    tl.store(part_values + index, best)
    token = tl.min(tl.where(values == best, tl.where(is_nan, -1, tokens), vocab_size), axis=0)
    tl.store(part_tokens + index, token)


@triton.jit(do_not_specialize=["first", "num_parts"])
def _choose_among_parts(
    part_values: tl.tensor, part_tokens: tl.tensor, token_map: tl.tensor, chosen: tl.tensor,
    offers: tl.tensor, first: tl.tensor, num_parts: tl.tensor, width: tl.constexpr,
    nothing: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """The best of a row's parts, mapped by `token_map`; `nothing` if it is NaN or -inf. With
    `offers`, its value and its token, counted from `first`."""
    begin(PDL)
    row, parts = tl.program_id(0).to(tl.int64), tl.arange(0, width)
    exists = parts < num_parts
    values = tl.load(part_values + row * num_parts + parts, mask=exists, other=float("-inf"))
    tokens = tl.load(part_tokens + row * num_parts + parts, mask=exists, other=2147483647)
    best = tl.max(values, axis=0)
    token = tl.min(tl.where(values == best, tokens, 2147483647), axis=0)
    token = tl.where(best > float("-inf"), token, nothing)
    token = tl.maximum(token, nothing)  # the id of a NaN is -1
    if offers is not None:
        tl.store(offers + 2 * row, best.to(tl.int32, bitcast=True))
        tl.store(offers + 2 * row + 1, tl.where(token < 0, token, token + first).to(tl.int32))
    elif token_map is not None:
        tl.store(chosen + row, tl.load(token_map + token))
    else:
        tl.store(chosen + row, token.to(tl.int64))


@triton.jit(do_not_specialize=["seeds_stride", "positions_stride"])
def _write_noise(
    seeds: tl.tensor, seeds_stride: tl.tensor, positions: tl.tensor, positions_stride: tl.tensor,
    noise: tl.tensor, num_tokens: tl.tensor, domain: tl.constexpr, block: tl.constexpr,
) -> None:  # fmt: skip
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    tokens = part * block + tl.arange(0, block)
    seed = tl.load(seeds + row * seeds_stride)
    position = tl.load(positions + row * positions_stride)
    values = part_noise(seed, position, part, domain, block)
    tl.store(noise + row * num_tokens + tokens, values, mask=tokens < num_tokens)
