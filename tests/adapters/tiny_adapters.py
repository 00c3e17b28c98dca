"""Adapters a, b and c of small Llama checkpoints, and requests with them."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from tests.adapters.folders import Pairs, linear_shapes, random_pairs, write_adapter
from tests.executor.harness import Harness
from tllm_spec.lora_request import AdapterInfo

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")
# By name, with the layers that each has.
NAMES: Mapping[str, tuple[str, ...]] = {
    "a": ATTENTION + MLP,
    "b": ("q_proj", "v_proj"),
    "c": ("gate_proj", "down_proj"),
}
RANK = 4
# Strong enough for other texts, and weak enough for texts of which drafts are often right.
ALPHA = 2.0
LORA: Mapping[str, Any] = {"max_loras": 2, "max_lora_rank": 8}


def pairs_of(model: Path, name: str, seed: int = 0) -> Pairs:
    shapes = linear_shapes(load_file(model / "model.safetensors"), *NAMES[name])
    return random_pairs(shapes, RANK, 10 * seed + "abc".index(name))


def write_adapters(root: Path, model: Path, seed: int = 0, alpha: float = ALPHA) -> Path:
    """A folder for each of NAMES."""
    for name in NAMES:
        write_adapter(root / name, pairs_of(model, name, seed), r=RANK, lora_alpha=alpha)
    return root


def load(harness: Harness, root: Path, name: str, **options: bool) -> AdapterInfo:
    slots = harness.parts.adapters
    assert slots is not None
    folder = str(root / name)
    return slots.add(name, folder, slots.read(folder), **options)


def with_adapters(model: Path, root: Path, **options: Any) -> Harness:
    """An executor with the adapters of NAMES, two at once."""
    harness = Harness(model, **{"lora_config": LORA} | options)
    for name in NAMES:
        load(harness, root, name)
    return harness
