"""Which layers of a model keep the quantised weights of its checkpoint, and what the log says of
the others and of settings without an effect."""

import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from tllm_spec.models.checkpoint import checkpoint_names, names_of_type
from tllm_spec.models.config import ModelConfig
from tllm_spec.models.formats.four_bit_packings import PACKINGS
from tllm_spec.models.formats.gguf_tensors import Q4_0, gguf_names
from tllm_spec.models.formats.quantisation import BLOCK
from tllm_spec.models.formats.quantised_tensors import together
from tllm_spec.models.gpt_oss import BLOCKS
from tllm_spec.models.layers import Module, Placement, WeightSlot
from tllm_spec.zoo.registry import is_gguf

logger = logging.getLogger(__name__)

FIRST_CAPABILITY = (8, 9)  # of a GPU that converts E4M3


@dataclass(frozen=True)
class Reason:
    """Why weights are dequantised at load."""

    text: str
    level: int = logging.WARNING


ON_CPU = Reason("a CPU would dequantise them in each forward", logging.INFO)
OLD_GPU = Reason("GPUs convert FP8 from compute capability {}.{} on".format(*FIRST_CAPABILITY))
CUT = Reason(f"the inputs of a rank do not end with a block of {BLOCK}, which shares a scale")
FUSED = Reason("they are fused with weights that the checkpoint has in 16 bits")
WIDE = Reason("what reads them takes no FP8", logging.INFO)
WIDE_FOUR_BIT = Reason("what reads them takes no codes of 4 bits")


def with_quantised(placement: Placement, config: ModelConfig) -> Placement:
    """The placement for weights that the checkpoint quantises, and that stay so on the device. CPUs
    keep those of layers that quantise activations to FP8."""
    form, device = config.quantisation, placement.device
    if form.four_bit is not None:
        return replace(placement, quantised=form) if multiplies_four_bit(device) else placement
    if multiplies_fp8(device):
        return replace(placement, quantised=form)
    if form.activations is None or device.type != "cpu":
        return placement
    return replace(placement, quantised=replace(form, fp8=None))


def computed_as(config: ModelConfig, fp8_activations: bool) -> ModelConfig:
    """Without quantised activations if `fp8_activations` is false."""
    if fp8_activations:
        return config
    return replace(config, quantisation=replace(config.quantisation, activations=None))


def multiplies_fp8(device: torch.device) -> bool:
    """Whether the device has kernels that multiply E4M3 weights. CPUs have none."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= FIRST_CAPABILITY


def multiplies_four_bit(device: torch.device) -> bool:
    """Whether the device has a kernel that multiplies 4-bit weights. CPUs have none."""
    return device.type == "cuda"


def prepare_quantised(
    parts: Mapping[str, Module],
    path: Path,
    config: ModelConfig,
    load_format: str,
    placement: Placement,
) -> None:
    """Called before loading: `widen_others`. One line of the log names all quantised weights that
    are dequantised.

    Args:
        parts: of a model, by what comes before their paths in the checkpoint.
        path: the checkpoint's folder.
        config: the checkpoint's; nothing happens if it has no quantised weights.
        load_format: `auto`, or `dummy` without tensors.
        placement: of the parts.
    """
    if config.quantisation.is_plain:
        return
    is_stored = widen_others(parts, path, config, load_format, placement)
    dequantised: list[tuple[Reason, str, torch.Tensor]] = []
    for prefix, part in parts.items():
        dequantised += _dequantised(part, is_stored, placement, prefix)
    _log(path, dequantised, *(("FP8", 1) if config.quantisation.four_bit is None else ("4-bit", 2)))


def log_quantised(path: Path, config: ModelConfig, placement: Placement) -> None:
    """How linear layers with quantised weights are computed, and what the checkpoint in the folder
    `path` says of activations without an effect."""
    own = placement.quantised
    if own.four_bit is not None:
        logger.info("%s: activations have the model's type next to 4-bit weights (W4A16)", path)
    if own.activations is not None:
        how = _SCALED[own.activations.shared_by]
        logger.info("%s: activations are quantised to FP8 %s (W8A8)", path, how)
    elif own.fp8 is not None:
        logger.info("%s: activations have the model's type next to FP8 weights (W8A16)", path)
    for sentence in config.quantisation.unused:
        logger.info("%s: %s", path, sentence)


_SCALED = {
    "token": "with one dynamic scale a token",
    "block": f"with one dynamic scale for {BLOCK} inputs of a token",
    "tensor": "with the checkpoint's static scales, the largest where layers or experts share an "
    "input",
}


def _quantised_modules(path: Path, config: ModelConfig, load_format: str) -> Callable[[str], bool]:
    """Tells whether the checkpoint quantises the weight of a module: by the tensors' types, by
    the names of 4-bit codes, or without tensors (`dummy`) by config.json's lists."""
    form, parameter_name = config.quantisation, config.text_part.parameter_name
    if load_format == "dummy":
        return form.keeps
    if is_gguf(path):
        matrices = frozenset(gguf_names(path, Q4_0))
        return lambda module: f"{module}.weight" in matrices
    codes = None
    if form.packing is not None:
        names = frozenset(map(parameter_name, checkpoint_names(path)))
        if form.packing == "mxfp4_experts":
            return lambda module: together(module) + BLOCKS in names
        codes = PACKINGS[form.packing].codes
    if codes is not None and codes != "weight":
        return lambda module: f"{module}.{codes}" in names
    of_type = names_of_type(path, "F8_E4M3" if codes is None else "U8")
    stored = frozenset(map(parameter_name, of_type))
    return lambda module: f"{module}.weight" in stored or together(module) in stored


def widen_others(
    parts: Mapping[str, Module],
    path: Path,
    config: ModelConfig,
    load_format: str,
    placement: Placement,
) -> Callable[[str], bool]:
    """Layers of which not all weights are quantised get weights of the placement's dtype. The
    arguments are those of `prepare_quantised`. Returns `_quantised_modules`."""
    is_stored = _quantised_modules(path, config, load_format)
    for prefix, part in parts.items() if not placement.quantised.is_plain else ():
        _widen(part, is_stored, placement, prefix)
    return is_stored


def _widen(
    model: Module, is_stored: Callable[[str], bool], placement: Placement, prefix: str
) -> None:
    for path, module in model.named_modules():
        if not isinstance(module, Module):
            continue
        weights = _weights(list(module.slots(path)))
        if any(slot.is_quantised and not is_stored(prefix + name) for name, slot in weights):
            module.widen(placement)


def _weights(slots: list[tuple[str, WeightSlot]]) -> Iterator[tuple[str, WeightSlot]]:
    """Names of the modules in the checkpoint, and the slots of their matrices."""
    for name, slot in slots:
        if len(slot.shape) == 2:
            yield name.removesuffix(".weight"), slot


def _dequantised(
    model: Module, is_stored: Callable[[str], bool], placement: Placement, prefix: str
) -> Iterator[tuple[Reason, str, torch.Tensor]]:
    """Weights that the checkpoint quantises and this rank does not: why, the last part of the
    module's name, and the weight."""
    for path, module in model.named_modules():
        weights = list(_weights(list(module.slots(path)))) if isinstance(module, Module) else []
        are_stored = [is_stored(prefix + name) for name, _ in weights]
        for (name, slot), one_stored in zip(weights, are_stored, strict=True):
            if one_stored and not slot.is_quantised and slot.destination is not None:
                reason = _reason(slot.destination, slot, placement, all(are_stored))
                yield reason, name[name.rfind(".") + 1 :], slot.destination


def _reason(
    weight: torch.Tensor, slot: WeightSlot, placement: Placement, all_stored: bool
) -> Reason:
    """all_stored: whether all weights of its layer are, in the checkpoint."""
    if placement.quantised.four_bit is not None:
        return WIDE_FOUR_BIT if all_stored else FUSED
    if placement.quantised.fp8 is None:
        return OLD_GPU if placement.device.type == "cuda" else ON_CPU
    if not all_stored:
        return FUSED
    return WIDE if placement.of_inputs(weight.shape[1], slot.shape[1]).quantised.fp8 else CUT


def _log(
    path: Path, found: list[tuple[Reason, str, torch.Tensor]], what: str, per_byte: int
) -> None:
    """At the highest level of the reasons. per_byte: quantised weights in a byte."""
    if not found:
        return
    shown = []
    for reason in dict.fromkeys(reason for reason, _, _ in found):
        own = [(kind, weight) for each, kind, weight in found if each is reason]
        kinds = ", ".join(sorted({kind for kind, _ in own}))
        num_bytes = sum(weight.nbytes for _, weight in own)
        stored = sum(weight.numel() for _, weight in own) // per_byte
        shown.append(
            f"{kinds} ({num_bytes:,} bytes on a device instead of {stored:,}), since {reason.text}"
        )
    level = max(reason.level for reason, _, _ in found)
    message = "%s: %s weights are dequantised at load: %s"
    logger.log(level, message, path, what, "; ".join(shown))
