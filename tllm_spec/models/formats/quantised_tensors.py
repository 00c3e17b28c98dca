"""The tensors of a checkpoint with quantised weights, joined with their scales and zero points."""

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from tllm_spec.kernels.gemm.int4_weights import group_words
from tllm_spec.models.checkpoint import checkpoint_tensors, listed
from tllm_spec.models.config import ModelConfig
from tllm_spec.models.formats.four_bit_packings import (
    EIGHTS,
    PACKINGS,
    SYMMETRIC_ZERO,
    FourBitTensor,
    Unpacked,
    four_bits,
)
from tllm_spec.models.formats.fp8 import Fp8Tensor
from tllm_spec.models.formats.gguf_tensors import gguf_tensors
from tllm_spec.models.formats.quantisation import (
    INPUT_SCALES,
    SCALE_SUFFIXES,
    FourBitGroups,
    Packing,
    Quantisation,
    granularity_of,
    is_left_out,
)
from tllm_spec.models.layers import StoredWeight
from tllm_spec.models.moe_config import MoEConfig
from tllm_spec.zoo.registry import is_gguf


def stored_tensors(
    path: Path, config: ModelConfig, wants: Callable[[str], bool]
) -> Iterator[tuple[str, torch.Tensor | StoredWeight]]:
    """The tensors of a checkpoint whose names are wanted. Raises ValueError for a file that is
    missing or not readable."""
    if is_gguf(path):
        return gguf_tensors(path, wants)
    form = config.quantisation
    tensors: Iterator[tuple[str, Any]] = checkpoint_tensors(path, wants)
    if form.four_bit is not None:
        tensors = four_bit_tensors(path, form, wants)
    elif not form.is_plain:
        tensors = fp8_tensors(path, form, wants)
    return tensors if config.moe is None else single_experts(tensors, config.moe)


_SINGLE = re.compile(r"(.*\.experts)\.\d+\.(gate|up|down)_proj\Z")
_TOGETHER = re.compile(r"(.*\.experts)\.(gate_up|down)_proj\Z")
_SCALES = re.compile(r".*\.(weight|experts\.(gate_up|down)_proj)_scale(_inv)?\Z")


def together(module: str) -> str:
    """The name of the tensor with all experts, for `module`, a linear layer of one. Others' names
    are as they are."""
    return _SINGLE.sub(lambda found: f"{found[1]}.{_TENSORS[found[2]]}", module)


_TENSORS = {"gate": "gate_up_proj", "up": "gate_up_proj", "down": "down_proj"}


def single_experts(
    tensors: Iterable[tuple[str, Any]], moe: MoEConfig
) -> Iterator[tuple[str, torch.Tensor | StoredWeight]]:
    """A matrix for each linear layer of each expert, also where the checkpoint has those of all
    experts in one tensor (`MoENames`)."""
    names, hidden, inner = moe.names, moe.hidden_size, moe.intermediate_size
    for name, tensor in tensors:
        found = _TOGETHER.match(name)
        if found is None or len(tensor.shape) != 3:
            yield name, tensor
            continue
        is_down = found[2] == "down"
        shape = (hidden, inner) if is_down else (2 * inner, hidden)
        has_outputs_first = tuple(tensor.shape[1:]) == shape
        if names.inputs_first or (names.inputs_first is None and not has_outputs_first):
            tensor = tensor.mT  # not quantised: `CausalLM.check_weights`
        if tuple(tensor.shape) != (moe.num_experts, *shape):
            raise ValueError(
                f"{name} has {list(tensor.shape)} experts, outputs and inputs; the config asks for "
                f"{[moe.num_experts, *shape]}."
            )
        parts = {names.gate: slice(inner), names.up: slice(inner, None)}
        for expert in range(tensor.shape[0]):
            for part, rows in ({names.down: slice(None)} if is_down else parts).items():
                yield f"{found[1]}.{expert}.{part}.weight", tensor[expert][rows]


def fp8_tensors(
    path: Path, form: Quantisation, wants: Callable[[str], bool]
) -> Iterator[tuple[str, torch.Tensor | Fp8Tensor]]:
    """As `checkpoint_tensors`, without scales as tensors of their own.

    Raises:
        ValueError: a scale is missing, surplus or of a wrong shape.
    """

    def is_wanted(name: str) -> bool:
        return wants(name) and not is_left_out(name)

    # A weight and its scales may be in different files; all scales together are small.
    scales = dict(
        checkpoint_tensors(path, lambda name: bool(_SCALES.match(name)) and is_wanted(name))
    )
    input_scales = _input_scales(path, form, wants)
    for name, tensor in checkpoint_tensors(
        path, lambda name: not _SCALES.match(name) and is_wanted(name)
    ):
        if tensor.dtype != torch.float8_e4m3fn:
            yield name, tensor
            continue
        beside = [name + suffix for suffix in SCALE_SUFFIXES if name + suffix in scales]
        if not beside:
            raise ValueError(f"{path} has no {name}{form.scale_suffix} for the FP8 tensor {name}.")
        expanded = form.row_scales if tensor.dim() == 2 else form.expert_scales
        scale = expanded(scales.pop(beside[0]), tensor.shape, name)
        yield name, Fp8Tensor(tensor, scale, input_scales.get(name.removesuffix(".weight")))
    if scales:
        raise ValueError(f"{path} has scales of tensors that are not FP8: {sorted(scales)[:10]}.")


def _input_scales(
    path: Path, form: Quantisation, wants: Callable[[str], bool]
) -> dict[str, torch.Tensor]:
    """The static scales of activations `[]`, by module."""
    if form.activations is None or form.activations.shared_by != "tensor":
        return {}

    def is_wanted(name: str) -> bool:
        module, _, last = name.rpartition(".")
        return last in INPUT_SCALES and wants(f"{module}.weight")

    found = {}
    for name, scale in checkpoint_tensors(path, is_wanted):
        if scale.numel() != 1 or not scale.is_floating_point() or not scale.item() > 0:
            raise ValueError(f"{path}: {name} is {scale.tolist()}; it must be a number above 0.")
        found[name.rpartition(".")[0]] = scale.float().view(())
    return found


def four_bit_tensors(
    path: Path, form: Quantisation, wants: Callable[[str], bool]
) -> Iterator[tuple[str, torch.Tensor | StoredWeight]]:
    """As `checkpoint_tensors`, with one tensor `weight` for each module in 4 bits, or in FP8 next
    to such.

    Raises:
        ValueError: a tensor of a module is missing, surplus, or of a wrong shape or type.
    """
    assert form.packing is not None and form.four_bit is not None
    packing = PACKINGS[form.packing]
    kinds = {packing.scales, *packing.required, *packing.optional}

    def is_wanted(name: str) -> bool:
        return wants(name) and not is_left_out(name)

    # A module's tensors may be in different files; those next to the codes are small.
    parts: defaultdict[str, dict[str, torch.Tensor]] = defaultdict(dict)
    for name, tensor in checkpoint_tensors(
        path, lambda name: _kind(name) in kinds and is_wanted(name)
    ):
        parts[_module(name)][_kind(name)] = tensor
    packing = PACKINGS[_stored_packing(path, form, parts)]
    for name, tensor in checkpoint_tensors(
        path, lambda name: _kind(name) not in kinds and is_wanted(name)
    ):
        module = _module(name)
        if tensor.dtype == torch.float8_e4m3fn and "weight_scale" in parts.get(module, ()):
            scale = parts[module].pop("weight_scale")
            granularity = granularity_of(scale, tensor.shape)
            scales = Quantisation(granularity).row_scales(scale, tensor.shape, name)
            yield name, Fp8Tensor(tensor, scales)
            continue
        is_wide = packing.codes == "weight" and tensor.dtype != packing.dtype
        if _kind(name) != packing.codes or is_wide:
            yield name, tensor
            continue
        own = parts.pop(module, {}) | {packing.codes: tensor}
        for kind in packing.needed(
            has_zeros=form.is_symmetric is False, is_ordered=form.four_bit.is_ordered
        ):
            if kind not in own:
                raise ValueError(f"{path} has no {module}.{kind} for {name}.")
        for kind in {packing.codes, "qzeros", "weight_zero_point"} & own.keys():
            if own[kind].dtype != packing.dtype or own[kind].dim() != 2:
                wanted = str(packing.dtype).removeprefix("torch.")
                raise ValueError(
                    f"{module}.{kind} is {own[kind].dtype} of the shape {list(own[kind].shape)}; "
                    f"it must be a matrix of {wanted} words."
                )
        yield f"{module}.weight", checked(packing.unpack(own), form.four_bit, module)
    if names := [f"{module}.{kind}" for module, own in parts.items() for kind in own]:
        raise ValueError(f"{path} has tensors next to no {packing.codes}: {listed(names)}.")


def _stored_packing(
    path: Path, form: Quantisation, parts: Mapping[str, Mapping[str, torch.Tensor]]
) -> Packing:
    """The format's packing. If the zero points of all modules are 8 in one version of GPTQ, it is
    that one, since folders of either version say that they are of the other: only `sym: false`
    says that the declared one counts. Raises ValueError where all must be 8 and are not."""
    assert form.packing is not None
    eights = EIGHTS.get(form.packing, {})
    if form.is_symmetric is False or not eights:
        return form.packing
    found: set[int] = set()
    for own in parts.values():
        words = own.get("qzeros")
        if words is not None and words.dtype == torch.int32 and words.dim() == 2:
            found.update(four_bits(words).flatten().bincount().nonzero().flatten().tolist())
    if len(found) == 1 and found <= eights.keys():
        return eights[found.pop()]
    if found and form.is_symmetric:
        raise ValueError(
            f"{path}: its quantisation is symmetric (sym, zero_point), so all zero points are 8; "
            f"its qzeros hold {', '.join(map(str, sorted(found)))}, and only one number may be "
            f"there, {' or '.join(map(str, eights))}."
        )
    return form.packing


def checked(found: Unpacked, groups: FourBitGroups, module: str) -> FourBitTensor:
    """The weight with inputs in the order of their groups. Raises ValueError if sizes do not fit,
    or if the groups of the inputs are not those that the configuration describes."""
    out_features, in_features = found.codes.shape
    shape = (out_features, -(-in_features // (groups.size or in_features)))
    zeros = found.zeros
    if zeros is None:
        zeros = torch.full(shape, SYMMETRIC_ZERO, dtype=torch.uint8)
    for what, tensor in (("scales", found.scales), ("zero points", zeros)):
        if tuple(tensor.shape) != shape:
            raise ValueError(
                f"The {what} of {module} are {list(tensor.shape)} for each output and group; "
                f"4-bit weights of {[out_features, in_features]} in groups of "
                f"{groups.size or in_features} inputs need {list(shape)}."
            )
    order = _input_order(found.groups, groups, in_features, module)
    codes = found.codes if order is None else found.codes[:, order]
    words = found.scales if groups.is_float else group_words(found.scales, zeros)
    return FourBitTensor(codes, words, groups.size, order)


def _input_order(
    of_input: torch.Tensor | None, groups: FourBitGroups, in_features: int, module: str
) -> torch.Tensor | None:
    """The inputs, sorted by their groups; None: groups have no order of their own.

    of_input: `[K]`, the group of each input; None: neighbours share one."""
    neighbours = torch.arange(in_features) // (groups.size or in_features)
    of_input = neighbours if of_input is None else of_input.long()
    if not groups.is_ordered:
        if not torch.equal(of_input, neighbours):
            raise ValueError(
                f"g_idx of {module} has other groups than neighbouring inputs, although the "
                "configuration has no desc_act (actorder)."
            )
        return None
    order = of_input.argsort(stable=True)
    if not torch.equal(of_input[order], neighbours):
        raise ValueError(f"g_idx of {module} does not have {groups.size} inputs in each group.")
    return order


def _kind(name: str) -> str:
    return name[name.rfind(".") + 1 :]


def _module(name: str) -> str:
    return name[: name.rfind(".")]
