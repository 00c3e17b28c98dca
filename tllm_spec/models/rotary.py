"""The cosine and sine table of the rotary position embedding; `kernels/attention/rotary_write.py`
applies it.

Sources of the frequencies: RoFormer (arXiv 2104.09864), linear position interpolation (arXiv
2306.15595), YaRN (arXiv 2309.00071), LongRoPE (arXiv 2402.13753) and Meta's Llama 3.1 scaling.
Configurations are read as transformers reads them."""

import math

import torch
import torch.nn.functional as F

from tllm_spec.models.module import Placement
from tllm_spec.models.rope_config import RopeConfig


def cos_sin_table(
    rope: RopeConfig, head_dim: int, max_positions: int, placement: Placement
) -> torch.Tensor:
    """Cosines and signed sines, `[max_positions, 2, 1, D]`, computed in float32 and rounded once.

    The sines of the first half are negated, so that the rotation needs a roll and no negation. The
    pairs at the end of both halves that are not rotated have the angle 0."""
    rotated = int(head_dim * rope.partial_factor)
    inverse_frequencies, amplitude = _frequencies(rope, rotated)
    angles = torch.outer(torch.arange(max_positions, dtype=torch.float32), inverse_frequencies)
    cos, sin = angles.cos() * amplitude, angles.sin() * amplitude
    unrotated = (head_dim - rotated) // 2
    cos, sin = F.pad(cos, (0, unrotated), value=1.0), F.pad(sin, (0, unrotated))
    cos_sin = torch.stack((torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)), dim=1)
    return cos_sin[:, :, None].to(placement.device, placement.dtype)


def head_order(rope: RopeConfig, head_dim: int) -> torch.Tensor:
    """`[D]` int64: the checkpoint's element of a head of q and k for each one here. The checkpoint
    rotates a head's first elements, and pairs their halves. The kernels pair the halves of the
    whole head, so the other elements, whose angle is 0, are at the ends of both."""
    rotated = int(head_dim * rope.partial_factor)
    halves = torch.arange(rotated).view(2, -1)
    others = torch.arange(rotated, head_dim).view(2, -1)
    return torch.cat((halves, others), 1).flatten()


def _frequencies(rope: RopeConfig, head_dim: int) -> tuple[torch.Tensor, float]:
    """Inverse frequencies `[D / 2]`, and the factor of cosines and sines."""
    inverse = 1.0 / rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    if rope.kind == "linear":
        return inverse / rope.factor, 1.0
    if rope.kind == "llama3":
        return _llama3(rope, inverse), 1.0
    if rope.kind == "longrope":
        factors = torch.tensor(rope.long_factor if rope.is_long else rope.short_factor)
        return inverse / factors, _longrope_amplitude(rope)
    if rope.kind == "yarn":
        return _yarn(rope, inverse, head_dim), _yarn_amplitude(rope)
    return inverse, 1.0


def _llama3(rope: RopeConfig, inverse: torch.Tensor) -> torch.Tensor:
    """Long wavelengths are stretched by `factor`, short ones are kept, those between are
    blended."""
    rotations = rope.original_max_positions * inverse / (2 * math.pi)
    kept = (rotations - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    return torch.lerp(inverse / rope.factor, inverse, kept.clamp(0, 1))


def _longrope_amplitude(rope: RopeConfig) -> float:
    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.factor <= 1:
        return 1.0
    return math.sqrt(1 + math.log(rope.factor) / math.log(rope.original_max_positions))


def _yarn(rope: RopeConfig, inverse: torch.Tensor, head_dim: int) -> torch.Tensor:
    """YaRN's "NTK-by-parts": the blend is linear in the dimension's index between two rotation
    counts."""

    def dimension(rotations: float) -> float:
        wavelength = rope.original_max_positions / (rotations * 2 * math.pi)
        return head_dim * math.log(wavelength) / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    width = high - low if high != low else 0.001
    stretched = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / width).clamp(0, 1)
    return torch.lerp(inverse, inverse / rope.factor, stretched)


def _yarn_amplitude(rope: RopeConfig) -> float:
    def mscale(weight: float) -> float:
        return 0.1 * weight * math.log(rope.factor) + 1.0 if rope.factor > 1 else 1.0

    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return mscale(rope.mscale) / mscale(rope.mscale_all_dim)
    return mscale(1.0)
