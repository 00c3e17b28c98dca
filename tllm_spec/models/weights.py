"""Fills a model's parameters from safetensors files or with random numbers.

Tensors are copied one at a time from the memory-mapped file into the (fused, sharded) parameter, so
the host holds no second copy. `Module.slots` says where each tensor goes."""

import logging
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import torch

from tllm_spec.kernels.gemm.int4_weights import exponent_words, group_words
from tllm_spec.models.checkpoint import EMBEDDING, OUTPUT, checkpoint_names, listed, stored_pair
from tllm_spec.models.config import TextPart
from tllm_spec.models.formats.four_bit_packings import SYMMETRIC_ZERO
from tllm_spec.models.layers import HeadNorm, Module, RMSNorm, StoredWeight, WeightSlot
from tllm_spec.models.llama import CausalLM
from tllm_spec.progress import Progress, progress

logger = logging.getLogger(__name__)

FP8_AT_ONCE = 1 << 26  # random elements
# After the name of a quantised parameter.
SCALES = "_scales"
ORDER = "_order"
INPUT_SCALE, DUMMY_INPUT_SCALE = "input_scale", 2.0**-6  # of activations up to 7
FACTORS = ("scale", "scalar")  # of Gemma 4's layers and experts
CODES_DEVIATION = 4.61  # of equally frequent codes of 4 bits
E2M1_DEVIATION = 2.93  # of equally frequent numbers of MXFP4
NO_REMEDIES: Mapping[str, str] = {}
UNTIED = (
    "config.json says that the output layer is not the embedding (tie_word_embeddings is false, or "
    "is missing): set it to true if the model has none of its own, else files of the checkpoint "
    "are missing."
)


def load_weights(model: CausalLM, path: Path, *, is_shown: bool = True) -> None:
    """Fill `model` from the checkpoint in the folder `path`. Where the output layer is tied, either
    tensor fills both. is_shown: how far it is.

    Raises:
        ValueError: there is no checkpoint, or tensors are missing or surplus; the message names
            them.
    """
    parameter_name = model.config.text_part.parameter_name
    pair = stored_pair(path, parameter_name) if model.config.tie_word_embeddings else {}
    only_output = None if EMBEDDING in pair else pair.get(OUTPUT)

    def wants(name: str) -> bool:
        return name == only_output or not model.ignores(name)

    stored = (
        (EMBEDDING if name == only_output else parameter_name(name), tensor)
        for name, tensor in model.stored_tensors(path, model.config, wants)
    )
    if is_shown:
        _log_left_out(path, model.config.text_part)
    misfit = f"The checkpoint in {path} does not fit {model.config.architecture}"
    number = len(weight_table(model))
    with progress("weights", number, "tensors", every=5, is_shown=is_shown) as bar:
        fill(model, _counted(stored, bar), misfit, {OUTPUT: UNTIED})


def _log_left_out(path: Path, part: TextPart) -> None:
    """Names the tensors that are not the text model's by what they begin with."""
    names = [name for name in checkpoint_names(path) if part.is_of_images(name)]
    if names:
        parts = sorted({name.removeprefix("model.").split(".")[0] for name in names})
        message = "%s: only text is served: %d tensors are left out, of %s"
        logger.info(message, path, len(names), ", ".join(parts))


def _counted(
    tensors: Iterable[tuple[str, torch.Tensor | StoredWeight]], bar: Progress
) -> Iterator[tuple[str, torch.Tensor | StoredWeight]]:
    for each in tensors:
        yield each
        bar.advance()


def fill(
    model: Module,
    tensors: Iterable[tuple[str, torch.Tensor | StoredWeight]],
    misfit: str,
    remedies: Mapping[str, str] = NO_REMEDIES,
) -> None:
    """Fill `model` from named tensors. A surplus bias of zeros is left out. remedies: sentences by
    the name of a missing tensor.

    Raises:
        ValueError: tensors are missing or surplus; the message names them after `misfit`.
    """
    missing = weight_table(model)
    surplus: list[str] = []
    for name, tensor in tensors:
        if name in missing:
            load_tensor(name, tensor, missing.pop(name))
        elif not _is_zero_bias(name, tensor):
            surplus.append(name)
    if missing or surplus:
        found = [f"{misfit}: missing {listed(missing)}; surplus {listed(surplus)}."]
        found += [remedy for name, remedy in remedies.items() if name in missing]
        raise ValueError(" ".join(found))


def _is_zero_bias(name: str, tensor: torch.Tensor | StoredWeight) -> bool:
    """Quantisers of GPTQ write a bias of zeros for each layer, also for those that have none."""
    return name.endswith(".bias") and isinstance(tensor, torch.Tensor) and not tensor.any()


def fill_random(model: Module, seed: int = 0) -> None:
    """Norms and factors are 1. The rest is normal with a scale that keeps the size of activations,
    and depends on the seed only."""
    for module in model.modules():
        own = dict(module.named_parameters(recurse=False))
        for name, parameter in own.items():
            if isinstance(module, (RMSNorm, HeadNorm)):
                parameter.fill_(1.0)
            elif name.endswith(INPUT_SCALE):
                parameter.fill_(DUMMY_INPUT_SCALE)
            elif name.endswith(FACTORS):
                parameter.fill_(1.0)
            elif name.endswith(ORDER):
                torch.arange(len(parameter), out=parameter)
            elif not name.endswith(SCALES):
                generator = torch.Generator(parameter.device).manual_seed(seed)
                _fill_normal(parameter, own.get(name + SCALES), generator)
                seed += 1


def _fill_normal(
    parameter: torch.Tensor, scales: torch.Tensor | None, generator: torch.Generator
) -> None:
    """With standard deviation K ** -0.5, which in FP8 is the scale. Codes of 4 bits are uniform."""
    if parameter.dtype == torch.uint8:
        assert scales is not None
        parameter.random_(0, 256, generator=generator)
        scale = (2 * parameter.shape[-1]) ** -0.5
        if scales.dtype == torch.int32:
            zero = torch.tensor(SYMMETRIC_ZERO)
            scales.copy_(group_words(torch.tensor(scale / CODES_DEVIATION), zero))
        else:
            own = torch.full_like(scales, scale / E2M1_DEVIATION, dtype=torch.float32)
            if scales.dtype == torch.uint8:
                own = exponent_words(own * 2**0.5)  # the nearest power of two
            scales.copy_(own)
        return
    deviation = parameter.shape[-1] ** -0.5
    if scales is None:
        parameter.normal_(0.0, deviation, generator=generator)
        return
    scales.fill_(deviation)
    size = max(1, FP8_AT_ONCE // parameter.shape[-1])
    for rows in torch.split(parameter.flatten(0, -2), size):
        values = torch.empty(rows.shape, dtype=torch.bfloat16, device=rows.device)
        rows.copy_(values.normal_(generator=generator).to(torch.float8_e4m3fn))


def weight_table(model: Module) -> dict[str, WeightSlot]:
    """The slot of every tensor that a checkpoint of this model must have, by name."""
    table: dict[str, WeightSlot] = {}
    for path, module in model.named_modules():
        if isinstance(module, Module):
            table.update(module.slots(path))
    return table


def load_tensor(name: str, tensor: torch.Tensor | StoredWeight, slot: WeightSlot) -> None:
    """Raises ValueError if the tensor has another shape than the slot, or a type that the slot does
    not read."""
    if isinstance(tensor, torch.Tensor) and tensor.dtype not in slot.dtypes:
        raise ValueError(
            f"{name} is {_type_name(tensor.dtype)}, which its layer does not read; it reads "
            f"{', '.join(map(_type_name, slot.dtypes)) or 'FP8 with scales'}."
        )
    if tuple(tensor.shape) not in slot.shapes:
        raise ValueError(
            f"{name} has the shape {list(tensor.shape)}; the config asks for {list(slot.shape)}."
        )
    slot.load(tensor)


def _type_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
