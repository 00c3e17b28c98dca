"""The rotary embedding that a `config.json` asks for, in both spellings of transformers."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from tllm_spec.models.config_file import required

# The keys that a rope_type needs. yarn without a factor has the ratio of the two lengths.
_ROPE_NEEDS: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": (),
}
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
        _check_share(float(partial or 1.0), raw)
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


def _check_share(share: float, raw: Mapping[str, Any]) -> None:
    """Raises ValueError unless an even number of a head's elements is rotated, and another one
    left alone."""
    size = required(raw, "hidden_size") // required(raw, "num_attention_heads")
    head_dim = raw.get("head_dim") or size
    rotated = int(head_dim * share)
    if head_dim % 2 or rotated % 2 or not 0 < rotated <= head_dim:
        raise ValueError(
            f"partial_rotary_factor is {share}; of {head_dim} elements a head, an even number must "
            "be rotated, and an even number left alone."
        )
