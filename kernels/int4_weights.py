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

from tllm_spec.kernels.dispatch import with_kernel

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


@with_kernel("int4_weights_triton.dequantise_int4_triton")
def dequantise_int4(
    stored: torch.Tensor, words: torch.Tensor, group: int, out: torch.Tensor
) -> None:
    """Fills `out` `[N, K]` bfloat16, float16 or float32, contiguous, with the weight, rounded
    once."""
    codes = unpacked(stored, out.shape[1])
    out.copy_(int4_dequantised(codes, words, group, out.dtype))
