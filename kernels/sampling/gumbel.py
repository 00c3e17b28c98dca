"""Counter-based Gumbel noise: a pure function of (seed, position, token id), on which
drafter-invariant sampling is built.

The noise is Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC11)
keyed by the request's seed. The counter is (token // 4, position, domain, 0), and token % 4 selects
the output word. Nothing is drawn from a stream, so the noise of a position is the same on any
device, in any batch, for any draft length.

This file is the reference, which defines the values: in torch, and for a CPU in NumPy, whose
operations on a few rows take a third of the time."""

from functools import cache

import numpy as np
import torch

from tllm_spec.kernels.dispatch import with_kernel

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10
_MASK = 0xFFFFFFFF
_HALF = np.uint64(32)

# Domains of independent random numbers at one position.
TARGET_DOMAIN = 0  # the token at a position; coupled drafts use the same noise
DRAFT_DOMAIN = 1  # independent drafts, for rejection sampling
COIN_DOMAIN = 2  # accept or reject a draft token
RESIDUAL_DOMAIN = 3  # the token drawn after a rejection


@cache
def _constants(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Multipliers `[2, 1, 1]`, the second one first, and key steps `[2]`. Cached, because the copy
    to the device cannot be captured in a CUDA graph."""
    multipliers = torch.tensor(_MULTIPLIERS, dtype=torch.int64, device=device).flip(0).view(2, 1, 1)
    return multipliers, torch.tensor(_KEY_STEPS, dtype=torch.int64, device=device)


def philox_bits(
    seeds: torch.Tensor, positions: torch.Tensor, num_tokens: int, domain: int
) -> torch.Tensor:
    """Random 32-bit words of token ids 0..num_tokens-1, as int64. seeds, positions: `[R]` int64.
    Returns `[R, num_tokens]`."""
    if seeds.device.type != "cpu":
        return philox_bits_torch(seeds, positions, num_tokens, domain)
    rows, quads = seeds.numel(), -(-num_tokens // 4)
    own = seeds.numpy().view(np.uint64)
    keys = np.stack((own, own >> _HALF))
    steps = np.arange(_ROUNDS, dtype=np.uint64)[:, None] * np.array(_KEY_STEPS, np.uint64)
    multipliers = np.array(_MULTIPLIERS[::-1], np.uint64).reshape(2, 1, 1)
    even = np.full((2, rows, quads), domain, np.uint64)
    even[0] = np.arange(quads, dtype=np.uint64)
    odd = np.zeros((2, rows, 1), np.uint64)
    odd[0] = positions.numpy().view(np.uint64)[:, None]
    for key in (keys + steps[:, :, None])[..., None]:
        product = even[::-1] * multipliers
        even = product >> _HALF
        even ^= odd
        even ^= key
        even &= np.uint64(_MASK)
        odd = product
    words = np.stack((even[0], odd[0], even[1], odd[1]), axis=-1)
    words &= np.uint64(_MASK)
    return torch.from_numpy(words.view(np.int64).reshape(rows, quads * 4)[:, :num_tokens])


def philox_bits_torch(
    seeds: torch.Tensor, positions: torch.Tensor, num_tokens: int, domain: int
) -> torch.Tensor:
    """`philox_bits` on any device.

    The words are int64 because torch has no unsigned multiplication: the product wraps mod 2**64,
    and its two halves are the high and low words after masking."""
    device, rows, quads = seeds.device, seeds.numel(), -(-num_tokens // 4)
    multipliers, key_steps = _constants(device)
    keys = torch.stack((seeds, seeds >> 32))  # [2, R]; their low words count, here and below
    rounds = torch.arange(_ROUNDS, device=device)
    round_keys = (keys + (rounds[:, None] * key_steps)[:, :, None]).unsqueeze(-1)  # [10, 2, R, 1]

    # even = words (0, 2) of the counter, odd = words (1, 3).
    even = torch.full((2, rows, quads), domain, dtype=torch.int64, device=device)
    even[0] = torch.arange(quads, device=device)
    odd = torch.zeros((2, rows, 1), dtype=torch.int64, device=device)
    odd[0] = positions.unsqueeze(-1)
    for key in round_keys.unbind(0):
        product = even.flip(0).mul_(multipliers)
        even = (product >> 32).bitwise_xor_(odd).bitwise_xor_(key).bitwise_and_(_MASK)
        odd = product
    words = torch.stack((even[0], odd[0], even[1], odd[1]), dim=-1)  # [R, quads, 4]
    return words.bitwise_and_(_MASK).view(rows, quads * 4)[:, :num_tokens]


def uniform(seeds: torch.Tensor, positions: torch.Tensor, domain: int) -> torch.Tensor:
    """One uniform number in (0, 1) per row, `[R]` float64."""
    return philox_bits(seeds, positions, 1, domain)[:, 0].to(torch.float64).add_(0.5).mul_(2.0**-32)


@with_kernel("sampling.choose_token.gumbel_noise_triton")
def gumbel_noise(
    seeds: torch.Tensor, positions: torch.Tensor, num_tokens: int, domain: int = TARGET_DOMAIN
) -> torch.Tensor:
    """Standard Gumbel noise `[R, num_tokens]` float32: argmax(logits + noise) is a sample of
    softmax(logits).

    The logarithms are computed in float64 and rounded once, so that devices agree on the float32
    value. A Triton kernel computes the same values in one pass."""
    bits = philox_bits(seeds, positions, num_tokens, domain)
    numbers = bits.to(torch.float64).add_(0.5).mul_(2.0**-32)
    return numbers.log_().neg_().log_().neg_().to(torch.float32)
