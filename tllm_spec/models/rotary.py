"""The cosine and sine table of the rotary position embedding; `kernels/attention/rotary_write.py`
applies it.

Sources of the frequencies: RoFormer (arXiv 2104.09864), linear position interpolation (arXiv
2306.15595), YaRN (arXiv 2309.00071), LongRoPE (arXiv 2402.13753) and Meta's Llama 3.1 scaling.
Configurations are read as transformers reads them."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F

from tllm_spec.models.config_file import required
from tllm_spec.models.layers import Placement

# The rotary embedding that a `config.json` asks for, in both spellings of transformers.


# The keys that a rope_type needs. yarn without a factor has the ratio of the two lengths.
_ROPE_NEEDS: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": (),
}
# Gemma 4: the pairs of a whole head's halves have its frequencies, of which only the first, a
# share of `partial_factor`, are used.
PROPORTIONAL = "proportional"
_PHI3_NEEDS = {"default": (), "longrope": ("short_factor", "long_factor")}


@dataclass(frozen=True)
class RopeConfig:
    """Rotary embedding; `rotary.py` says which fields a `kind` uses."""

    kind: str
    theta: float
    original_max_positions: int
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    partial_factor: float = 1.0
    """Share of a head's elements that are rotated."""
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()
    is_interleaved: bool = False
    """Whether the elements of a checkpoint's pair are neighbours instead of half a head apart."""
    is_long: bool = False
    """Whether longrope has its long factors, otherwise the short ones."""

    def for_length(self, max_seq_len: int) -> "RopeConfig":
        """The same for requests of so many tokens: longrope has its long factors if they may be
        longer than the original length."""
        return replace(self, is_long=max_seq_len > self.original_max_positions)


def rope_config(
    raw: Mapping[str, Any], *, is_phi3: bool = False, may_be_partial: bool = False
) -> RopeConfig:
    """Reads a file with the keys of `ModelConfig`. is_phi3: as `flat_phi3` returns it.
    may_be_partial: some elements of a head may not be rotated, as also in Phi-3. The type `mrope`
    and its sections are of images: a text has the same positions on all axes. Raises ValueError
    for what is not served."""
    needs = _PHI3_NEEDS if is_phi3 else _ROPE_NEEDS
    fields: dict[str, Any] = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    partial = fields.get("partial_rotary_factor", raw.get("partial_rotary_factor"))
    if partial not in (None, 1.0) and not (is_phi3 or may_be_partial):
        raise ValueError(f"partial_rotary_factor is {partial}; only 1.0 is served.")
    if may_be_partial:
        rotated_elements(float(partial or 1.0), raw)
    if any(isinstance(value, dict) for value in fields.values()):
        raise ValueError("rope_parameters differ by layer type; served is one set for all layers.")
    kind = fields.get("rope_type") or fields.get("type") or "default"
    if kind == "mrope":
        kind = "default"
    if kind not in needs:
        raise ValueError(f"rope_type is {kind!r}; served are {', '.join(needs)}.")
    absent = [key for key in needs[kind] if fields.get(key) is None]
    if absent:
        raise ValueError(f"rope_type is {kind!r}, which needs {' and '.join(absent)}.")
    max_positions = int(raw["max_position_embeddings"])
    original = raw.get("original_max_position_embeddings") or fields.get(
        "original_max_position_embeddings"
    )
    original = int(original or max_positions)
    return RopeConfig(
        kind=kind,
        theta=float(fields.get("rope_theta") or required(raw, "rope_theta")),
        original_max_positions=original,
        factor=float(fields.get("factor") or max_positions / original),
        low_freq_factor=float(fields.get("low_freq_factor") or 1.0),
        high_freq_factor=float(fields.get("high_freq_factor") or 1.0),
        beta_fast=float(fields.get("beta_fast") or 32.0),
        beta_slow=float(fields.get("beta_slow") or 1.0),
        attention_factor=fields.get("attention_factor"),
        mscale=fields.get("mscale"),
        mscale_all_dim=fields.get("mscale_all_dim"),
        truncate=bool(fields.get("truncate", True)),
        partial_factor=float(partial or 1.0),
        short_factor=tuple(fields.get("short_factor") or ()),
        long_factor=tuple(fields.get("long_factor") or ()),
        is_long=max_positions > original,
    )


def rotated_elements(share: float, raw: Mapping[str, Any]) -> int:
    """How many of a head's elements are rotated. Raises ValueError unless the number is even, and
    so is that of the others."""
    size = required(raw, "hidden_size") // required(raw, "num_attention_heads")
    head_dim = raw.get("head_dim") or size
    rotated = int(head_dim * share)
    if head_dim % 2 or rotated % 2 or not 0 < rotated <= head_dim:
        raise ValueError(
            f"partial_rotary_factor is {share}; of {head_dim} elements a head, an even number must "
            "be rotated, and an even number left alone."
        )
    return rotated


def cos_sin_table(
    rope: RopeConfig, head_dim: int, max_positions: int, placement: Placement
) -> torch.Tensor:
    """Cosines and signed sines, `[max_positions, 2, 1, D]`, computed in float32 and rounded once.

    The sines of the first half are negated, so that the rotation needs a roll and no negation. The
    pairs at the end of both halves that are not rotated have the angle 0."""
    rotated = int(head_dim * rope.partial_factor)
    size = head_dim if rope.kind == PROPORTIONAL else rotated
    inverse_frequencies, amplitude = _frequencies(rope, size)
    positions = torch.arange(max_positions, dtype=torch.float32)
    angles = torch.outer(positions, inverse_frequencies[: rotated // 2])
    cos, sin = angles.cos() * amplitude, angles.sin() * amplitude
    unrotated = (head_dim - rotated) // 2
    cos, sin = F.pad(cos, (0, unrotated), value=1.0), F.pad(sin, (0, unrotated))
    cos_sin = torch.stack((torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)), dim=1)
    return cos_sin[:, :, None].to(placement.memory, placement.dtype)


def head_order(rope: RopeConfig, head_dim: int) -> torch.Tensor | None:
    """`[D]` int64: the checkpoint's element of a head of q and k for each one here; None: the same.
    The checkpoint rotates a head's first elements, and pairs their halves, or neighbours. The
    kernels pair the halves of the whole head, so the other elements, whose angle is 0, are at the
    ends of both."""
    rotated = int(head_dim * rope.partial_factor)
    is_whole = rotated == head_dim and not rope.is_interleaved
    if is_whole or rope.kind == PROPORTIONAL:
        return None
    elements = torch.arange(rotated)
    halves = elements.view(-1, 2).t() if rope.is_interleaved else elements.view(2, -1)
    others = torch.arange(rotated, head_dim).view(2, -1)
    return torch.cat((halves, others), 1).flatten()


def _frequencies(rope: RopeConfig, head_dim: int) -> tuple[torch.Tensor, float]:
    """Inverse frequencies `[D / 2]`, and the factor of cosines and sines."""
    inverse = 1.0 / rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    if rope.kind in ("linear", PROPORTIONAL):
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
