"""How weights of 4 bits are stored. For the group g of the input k, `w[n, k] = scale[n, g] *
(code[n, k] - zero[n, g])`; or of E2M1 numbers `w[n, k] = scale[n, g] * E2M1[code[n, k]]`.

Codes are stored in blocks of 2 * HALF inputs. Byte i of a block has its input i in the low four
bits, and the input i + HALF in the high ones. So half of a block, or a shorter group, has one scale
of each output, and its codes are multiplied as they lie.

A group has a word, whose type says what the codes are. Of whole numbers it is an int32: a float32
scale whose last four bits are the zero point. A scale thereby keeps 20 bits of its significand;
those of checkpoints have at most 11. Of E2M1 numbers it is the scale: float32 (NVFP4), or a uint8
where scales are powers of two (MXFP4): the bits of a float32's exponent. A row has such bytes for
whole blocks, so that kernels read those of a block together."""

import torch

from tllm_spec.kernels.dispatch import tl, triton, with_kernel
from tllm_spec.kernels.launch import begin, programmatic_launch

HALF = 64
BLOCK = 2 * HALF
GROUPS = (16, 32, 64, 128)
MXFP4_GROUP = 32
EXPONENTS = BLOCK // MXFP4_GROUP  # of a block
# The numbers of codes 0 to 7; those of 8 to 15 are their negatives.
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def row_bytes(in_features: int) -> int:
    """Bytes of the codes of one output."""
    return -(-in_features // BLOCK) * HALF


def packed(codes: torch.Tensor) -> torch.Tensor:
    """codes `[N, K]` uint8 below 16 as `[N, row_bytes(K)]` uint8."""
    padding = -codes.shape[1] % BLOCK
    halves = torch.nn.functional.pad(codes, (0, padding)).view(len(codes), -1, 2, HALF)
    return (halves[:, :, 0] | halves[:, :, 1] << 4).flatten(1)


def unpacked(stored: torch.Tensor, in_features: int) -> torch.Tensor:
    """The inverse of `packed`: `[N, K]` uint8."""
    blocks = stored.view(len(stored), -1, HALF)
    return torch.stack((blocks & 15, blocks >> 4), 2).flatten(1)[:, :in_features]


def group_words(scales: torch.Tensor, zeros: torch.Tensor) -> torch.Tensor:
    """scales and zeros (0 to 15) `[N, G]` as int32 words `[N, G]`."""
    bits = scales.float().contiguous().view(torch.int32)
    return (bits + 8 & ~15) | zeros.int()


def exponent_words(scales: torch.Tensor) -> torch.Tensor:
    """float32 powers of two `[..., G]` as uint8 words `[..., ceil(G / 4) * 4]`."""
    exponents = (scales.contiguous().view(torch.int32) >> 23).to(torch.uint8)
    return torch.nn.functional.pad(exponents, (0, -exponents.shape[-1] % EXPONENTS))


def row_words(in_features: int, group: int, dtype: torch.dtype) -> int:
    """Words of one output."""
    if dtype == torch.uint8:
        return -(-in_features // BLOCK) * EXPONENTS
    return -(-in_features // group)


def scales_of(words: torch.Tensor) -> torch.Tensor:
    """float32, of the words' shape."""
    if words.dtype == torch.uint8:
        return (words.int() << 23).view(torch.float32)
    return words if words.dtype == torch.float32 else (words & ~15).view(torch.float32)


def kernel_words(words: torch.Tensor) -> torch.Tensor:
    """The words as the kernels take them: the bytes of a block are one number."""
    return words.view(torch.uint32) if words.dtype == torch.uint8 else words


def is_exact(words: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether weights are exact in the 16-bit `dtype` of activations: MXFP4's are in bfloat16."""
    return words.dtype == torch.uint8 and dtype == torch.bfloat16


def num_sums(words: torch.Tensor, group: int, dtype: torch.dtype) -> int:
    """Sums of a tile that tensor cores compute at a time for activations of `dtype`: one for each
    group in a block of inputs. Groups of exact weights share one."""
    return 1 if is_exact(words, dtype) or dtype == torch.float32 else BLOCK // group


def int4_dequantised(
    codes: torch.Tensor, words: torch.Tensor, group: int, dtype: torch.dtype
) -> torch.Tensor:
    """codes `[N, K]` with their words: `[N, K]` in `dtype`, rounded once."""

    def by_input(of_group: torch.Tensor) -> torch.Tensor:
        return of_group.repeat_interleave(group, 1)[:, : codes.shape[1]]

    if words.dtype == torch.int32:
        numbers = codes.float() - by_input(words & 15)
    else:
        table = torch.tensor([*E2M1, *(-number for number in E2M1)], device=codes.device)
        numbers = table[codes.int()]
    return numbers.mul_(by_input(scales_of(words))).to(dtype)


def check_int4(stored: torch.Tensor, words: torch.Tensor, group: int, in_features: int) -> None:
    """Asserts the layout of a weight `[..., N, K]`."""
    assert group in GROUPS and stored.dtype == torch.uint8
    assert words.dtype in (torch.int32, torch.float32, torch.uint8)
    assert words.dtype != torch.uint8 or group == MXFP4_GROUP
    assert stored.is_contiguous() and words.is_contiguous()
    assert stored.shape[-1] == row_bytes(in_features)
    assert words.shape == (*stored.shape[:-1], row_words(in_features, group, words.dtype))


@with_kernel("dequantise_int4_triton")
def dequantise_int4(
    stored: torch.Tensor, words: torch.Tensor, group: int, out: torch.Tensor
) -> None:
    """Fills `out` `[N, K]` bfloat16, float16 or float32, contiguous, with the weight, rounded
    once."""
    codes = unpacked(stored, out.shape[1])
    out.copy_(int4_dequantised(codes, words, group, out.dtype))


# py.


BLOCKS_OF_PROGRAM, NUM_WARPS = 32, 4


def _assembly(shift: int, magic: int, one: int, kind: str) -> tl.constexpr:
    """Two bytes, `$1`, to two 16-bit floats, `$0`: the 4 bits from `shift` on, as the last bits of
    the smallest of those with whole numbers there, plus the pair `$2`. Times one, since only GPUs
    from compute capability 9.0 on add bfloat16."""
    return tl.constexpr(f"""{{
        .reg .b32 pair, one;
        mov.b32 pair, {{$1, 0}};
        prmt.b32 pair, pair, 0, 0x4140;
        shr.u32 pair, pair, {shift};
        lop3.b32 pair, pair, 0x000f000f, {magic:#010x}, 0xea;
        mov.b32 one, {one:#010x};
        fma.rn.{kind} $0, pair, one, $2;
    }}""")


def _float_assembly(shift: int, place: int, factor: int, kind: str) -> tl.constexpr:
    """The same of E2M1 codes: signs are moved to the end, other bits to `place`, and multiplied by
    `factor`."""
    if place + 3 < 12:  # then a product has both copies of a code side by side
        copies = f"mul.lo.u32 pair, pair, {(1 << 12 | 1 << place) >> shift};"
    else:
        copies = f"""shl.b32 sign, pair, {12 - shift};
        shl.b32 pair, pair, {place - shift};
        or.b32 pair, pair, sign;"""
    return tl.constexpr(f"""{{
        .reg .b32 pair, sign, zero, factor;
        mov.b32 pair, {{$1, 0}};
        prmt.b32 pair, pair, 0, 0x4140;
        and.b32 pair, pair, {0x000F000F << shift:#010x};
        {copies}
        and.b32 pair, pair, {0x80008000 | 0x00070007 << place:#010x};
        mov.b32 zero, 0x80008000;
        mov.b32 factor, {factor:#010x};
        fma.rn.{kind} $0, pair, factor, zero;
    }}""")


_LOW_BFLOAT16, _HIGH_BFLOAT16 = (
    _assembly(shift, 0x43004300, 0x3F803F80, "bf16x2") for shift in (0, 4)
)
_LOW_FLOAT16, _HIGH_FLOAT16 = (
    _assembly(shift, 0x64006400, 0x3C003C00, "f16x2") for shift in (0, 4)
)

# The exponents' biases are 1, 127 and 15.
_LOW_E2M1_BFLOAT16, _HIGH_E2M1_BFLOAT16 = (
    _float_assembly(shift, 6, 0x7E807E80, "bf16x2") for shift in (0, 4)
)
_LOW_E2M1_FLOAT16, _HIGH_E2M1_FLOAT16 = (
    _float_assembly(shift, 9, 0x74007400, "f16x2") for shift in (0, 4)
)


@triton.jit
def _e2m1(codes: tl.tensor) -> tl.tensor:
    """E2M1 numbers of int32 codes, in float32."""
    exponent, mantissa = codes >> 1 & 3, codes & 1
    halves = tl.where(exponent > 0, (mantissa + 2) << (exponent - 1 & 3), mantissa)
    return tl.where(codes & 8 != 0, -0.5, 0.5) * halves.to(tl.float32)


@triton.jit
def _numbers(
    codes: tl.tensor, word: tl.tensor, HIGH: tl.constexpr, dtype: tl.constexpr, WIDEN: tl.constexpr
) -> tl.tensor:
    """A weight without its scale in `dtype`, exactly, or in float32 with WIDEN. codes: `[outputs,
    inputs]` uint8, of which the 4 high or low bits count; word: `[outputs]`, float32 of E2M1."""
    if WIDEN or dtype == tl.float32:
        codes = (codes >> 4 if HIGH else codes & 15).to(tl.int32)
        if word.dtype == tl.float32:
            numbers = _e2m1(codes)
        else:
            numbers = (codes - (word & 15)[:, None]).to(tl.float32)
    # Otherwise two numbers at a time, in a quarter of the instructions that converting them takes.
    elif word.dtype == tl.float32:
        if dtype == tl.bfloat16:
            numbers = tl.inline_asm_elementwise(
                _HIGH_E2M1_BFLOAT16 if HIGH else _LOW_E2M1_BFLOAT16,
                "=r,h", [codes], dtype=tl.bfloat16, is_pure=True, pack=2,
            )  # fmt: skip
        else:
            numbers = tl.inline_asm_elementwise(
                _HIGH_E2M1_FLOAT16 if HIGH else _LOW_E2M1_FLOAT16,
                "=r,h", [codes], dtype=tl.float16, is_pure=True, pack=2,
            )  # fmt: skip
    elif dtype == tl.bfloat16:
        offset = (-128 - (word & 15)).to(tl.float32).to(dtype)
        offset = tl.broadcast_to(offset[:, None], codes.shape)
        numbers = tl.inline_asm_elementwise(
            _HIGH_BFLOAT16 if HIGH else _LOW_BFLOAT16,
            "=r,h,r", [codes, offset], dtype=tl.bfloat16, is_pure=True, pack=2,
        )  # fmt: skip
    else:
        offset = tl.broadcast_to((-1024 - (word & 15)).to(dtype)[:, None], codes.shape)
        numbers = tl.inline_asm_elementwise(
            _HIGH_FLOAT16 if HIGH else _LOW_FLOAT16,
            "=r,h,r", [codes, offset], dtype=tl.float16, is_pure=True, pack=2,
        )  # fmt: skip
    return numbers


@triton.jit
def load_inputs(
    x_rows: tl.tensor, real_row: tl.tensor, inputs: tl.tensor,
    IN: tl.constexpr, BLOCK: tl.constexpr, WIDEN: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """`[inputs, rows]` of x, 0 after the last input, and in rows that are not real. real_row: None:
    all rows are."""
    if real_row is None and IN % BLOCK == 0:
        x = tl.load(x_rows + inputs[:, None])
    elif real_row is None:
        x = tl.load(x_rows + inputs[:, None], mask=(inputs < IN)[:, None], other=0.0)
    else:
        mask = real_row[None, :]
        if IN % BLOCK != 0:
            mask = mask & (inputs < IN)[:, None]
        x = tl.load(x_rows + inputs[:, None], mask=mask, other=0.0)
    return x.to(tl.float32) if WIDEN else x


@triton.jit
def _group(
    first: tl.tensor, IN: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr
) -> tl.tensor:
    """The group of the input `first`, or of the last one."""
    return first // GROUP if IN % BLOCK == 0 else tl.minimum(first, IN - 1) // GROUP


@triton.jit
def _power_of_two(exponents: tl.tensor, number: tl.constexpr) -> tl.tensor:
    """Scale `number` of a block, in float32. exponents: those of the block."""
    return ((exponents >> 8 * number & 255) << 23).to(tl.float32, bitcast=True)


@triton.jit
def add_int4_dot(
    total: tl.tensor, x_rows: tl.tensor, real_row: tl.tensor, w_rows: tl.tensor,
    word_rows: tl.tensor, start: tl.tensor, IN: tl.constexpr, GROUP: tl.constexpr,
    BLOCK: tl.constexpr, WIDEN: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """`total + w x` for the block of inputs from `start` on. total: `[outputs, rows]`; x_rows,
    w_rows and word_rows: where the rows of x, of codes and of their groups' words begin."""
    HALF: tl.constexpr = BLOCK // 2
    PART: tl.constexpr = min(GROUP, HALF)
    dtype: tl.constexpr = x_rows.dtype.element_ty
    HAS_EXPONENTS: tl.constexpr = word_rows.dtype.element_ty == tl.uint32
    if HAS_EXPONENTS:
        exponents = tl.load(word_rows + start // BLOCK)
    if HAS_EXPONENTS and dtype != tl.float16:
        total = _add_exact(total, x_rows, real_row, w_rows, exponents, start, IN, BLOCK, WIDEN)
    else:
        for part in tl.static_range(HALF // PART):
            low = start + part * PART + tl.arange(0, PART)
            codes = tl.load(w_rows + (start // 2 + part * PART + tl.arange(0, PART))[None, :])
            x_low = load_inputs(x_rows, real_row, low, IN, BLOCK, WIDEN)
            x_high = load_inputs(x_rows, real_row, low + HALF, IN, BLOCK, WIDEN)
            if HAS_EXPONENTS:
                word = _power_of_two(exponents, part)
                high_word = _power_of_two(exponents, HALF // PART + part)
            else:
                word = tl.load(word_rows + _group(start + part * PART, IN, GROUP, BLOCK))
                high_word = word
                if GROUP < BLOCK:
                    high_group = _group(start + HALF + part * PART, IN, GROUP, BLOCK)
                    high_word = tl.load(word_rows + high_group)
            w_low = _numbers(codes, word, False, dtype, WIDEN)
            w_high = _numbers(codes, high_word, True, dtype, WIDEN)
            if GROUP == BLOCK:
                product = tl.dot(w_low, x_low, input_precision="ieee")
                product = tl.dot(w_high, x_high, product, input_precision="ieee")
                total = _add_scaled(total, product, word)
            else:
                low_product = tl.dot(w_low, x_low, input_precision="ieee")
                high_product = tl.dot(w_high, x_high, input_precision="ieee")
                total = _add_scaled(_add_scaled(total, low_product, word), high_product, high_word)
    return total


@triton.jit
def _add_exact(
    total: tl.tensor, x_rows: tl.tensor, real_row: tl.tensor, w_rows: tl.tensor,
    exponents: tl.tensor, start: tl.tensor, IN: tl.constexpr, BLOCK: tl.constexpr,
    WIDEN: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """As `add_int4_dot` of E2M1 numbers times powers of two, which are exact in bfloat16. Their
    products are added in the order of the inputs, as those of a weight in bfloat16."""
    PART: tl.constexpr = BLOCK // 4
    within = tl.arange(0, PART)
    codes = w_rows + (start // 2 + within)[None, :]
    first, second = tl.load(codes), tl.load(codes + PART)
    for number in tl.static_range(4):
        x = load_inputs(x_rows, real_row, start + number * PART + within, IN, BLOCK, WIDEN)
        scale = _power_of_two(exponents, number)
        own = first if number % 2 == 0 else second
        w = _numbers(own, scale, number >= 2, x_rows.dtype.element_ty, WIDEN)
        total = tl.dot(w * scale.to(w.dtype)[:, None], x, total, input_precision="ieee")
    # Sums that are in flight over the end of the loop make ptxas run one wgmma after the other.
    if not WIDEN:
        total = tl.inline_asm_elementwise(
            "", "=f,0", [total], dtype=tl.float32, is_pure=True, pack=1
        )
    return total


@triton.jit
def _scale(word: tl.tensor) -> tl.tensor:
    """In float32."""
    return word if word.dtype == tl.float32 else (word & -16).to(tl.float32, bitcast=True)


@triton.jit
def _add_scaled(total: tl.tensor, product: tl.tensor, word: tl.tensor) -> tl.tensor:
    """`total + product` times the scale that the word `[outputs]` of its group has."""
    scale = _scale(word)
    # An explicit FMA has the same bits wherever the compiler might contract and where not.
    return tl.fma(product, tl.broadcast_to(scale[:, None], total.shape), total)


def dequantise_int4_triton(
    stored: torch.Tensor, words: torch.Tensor, group: int, out: torch.Tensor
) -> None:
    """See `dequantise_int4`."""
    in_features = out.shape[1]
    check_int4(stored, words, group, in_features)
    assert len(out) == len(stored) and out.is_contiguous()
    num_blocks = len(stored) * -(-in_features // BLOCK)
    dequantise_int4_kernel[(-(-num_blocks // BLOCKS_OF_PROGRAM),)](
        stored,
        kernel_words(words),
        out,
        num_blocks,
        IN=in_features,
        GROUP=group,
        BLOCK=BLOCK,
        BLOCKS=BLOCKS_OF_PROGRAM,
        WIDEN=out.device.type == "cpu",
        num_warps=NUM_WARPS,
        **programmatic_launch(out.device),
    )


@triton.jit(do_not_specialize=["num_blocks"])
def dequantise_int4_kernel(
    stored: tl.tensor, words: tl.tensor, out: tl.tensor, num_blocks: tl.tensor, IN: tl.constexpr,
    GROUP: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr, WIDEN: tl.constexpr,
    PDL: tl.constexpr,
) -> None:  # fmt: skip
    """A program has BLOCKS of the `num_blocks` blocks of inputs; all blocks of a row follow each
    other."""
    begin(PDL)
    blocks = (tl.program_id(0) * BLOCKS + tl.arange(0, BLOCKS)).to(tl.int64)
    HALF: tl.constexpr = BLOCK // 2
    is_block, per_row = blocks < num_blocks, tl.cdiv(IN, BLOCK)
    rows, firsts = blocks // per_row, blocks % per_row * BLOCK
    within = tl.arange(0, HALF)
    places = blocks[:, None] * HALF + within[None, :]
    # Each code is read once: what was written should stay in the L2 cache instead.
    codes = tl.load(stored + places, mask=is_block[:, None], other=0, eviction_policy="evict_first")
    # E2M1 numbers times powers of two are exact in bfloat16.
    dtype: tl.constexpr = tl.bfloat16 if out.dtype.element_ty == tl.bfloat16 else tl.float32
    HAS_EXPONENTS: tl.constexpr = words.dtype.element_ty == tl.uint32
    if HAS_EXPONENTS:
        exponents = tl.load(words + blocks, mask=is_block, other=0)[:, None]
    for half in tl.static_range(2):
        inputs = firsts[:, None] + half * HALF + within[None, :]
        real = is_block[:, None] & (inputs < IN)
        if HAS_EXPONENTS:
            shift = (half * HALF + within[None, :]) // GROUP * 8
            scale = _power_of_two(exponents >> shift, 0)
            values = _numbers(codes, scale, half == 1, dtype, WIDEN)
            values = values * scale.to(values.dtype)
        else:
            own = (codes >> 4 * half & 15).to(tl.int32)
            places = rows[:, None] * tl.cdiv(IN, GROUP) + inputs // GROUP
            word = tl.load(words + places, mask=real, other=0)
            if word.dtype == tl.float32:
                values = _e2m1(own) * word
            else:
                values = (own - (word & 15)).to(tl.float32) * _scale(word)
        pointers = out + rows[:, None] * IN + inputs
        tl.store(pointers, values.to(out.dtype.element_ty), mask=real)
