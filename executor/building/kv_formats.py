"""Whether KV pools have FP8 codes, and with which scales. The log says so."""

import logging
from collections.abc import Sequence
from pathlib import Path

import torch

from tllm_spec.attention.geometry import KVFormat
from tllm_spec.config.engine_config import KVCacheType
from tllm_spec.draft_network.network import ExternalDraft
from tllm_spec.executor.building.plan import BuildPlan
from tllm_spec.executor.speculative.drafting.heads import draft_folder
from tllm_spec.executor.speculative.drafting.loaded_draft import LoadedDraft
from tllm_spec.kernels.attention.kv_codes import UNSCALED, KVScales
from tllm_spec.models.config import ModelConfig
from tllm_spec.models.formats.kv_cache_formats import read_kv_scales
from tllm_spec.models.formats.quantised_layers import OLD_GPU, multiplies_fp8
from tllm_spec.models.llama import CausalLM
from tllm_spec.models.registry import LoadFormat
from tllm_spec.zoo.registry import resolve_model

logger = logging.getLogger(__name__)


def check_kv_cache(plan: BuildPlan) -> None:
    """Raises ValueError for an FP8 cache on a device that does not convert FP8."""
    draft = plan.draft_plan
    wanted = {
        "kv_cache_config.dtype": plan.args.kv_cache_config.dtype,
        "speculative_config.kv_cache_dtype": draft.option("kv_cache_dtype") if draft else None,
    }
    for name, dtype in wanted.items():
        if dtype == "fp8" and (why_not := _why_no_codes(plan.device)):
            raise ValueError(f"{name} = 'fp8': {why_not}; use 'auto' or 'model'")


def target_format(plan: BuildPlan, target: CausalLM) -> KVFormat:
    """The KV format of all layers of the target."""
    args, folder = plan.args, resolve_model(plan.args.model)
    return _own_format(plan, target, folder, args.kv_cache_config.dtype, args.load_format)


def draft_format(plan: BuildPlan, draft: LoadedDraft, of_target: KVFormat) -> KVFormat:
    """The KV format of all layers of a draft network. Heads and MTP modules follow their target,
    a draft model has its own options; networks outside of torch read numbers of their own type."""
    net, own = draft.model, draft.plan
    if isinstance(net, ExternalDraft):
        return KVFormat(net.dtype)
    if isinstance(net, CausalLM):
        wanted = own.option("kv_cache_dtype") or plan.args.kv_cache_config.dtype
        load_format = own.option("load_format") or plan.args.load_format
        return _own_format(plan, net, draft_folder(own), wanted, load_format)
    if of_target.scales is None:
        return KVFormat(net.dtype)
    groups = net.config.layer_groups(plan.mapping)
    num_layers = len({layer for group in groups for layer in group.layers})
    first = plan.config.num_layers
    scales = (UNSCALED,) * num_layers
    if own.num_modules and own.path is None and plan.args.load_format == "auto":
        folder, layers = resolve_model(plan.args.model), range(first, first + num_layers)
        scales = read_kv_scales(folder, layers, lambda name: name)
    return KVFormat(net.dtype, scales)


def _own_format(
    plan: BuildPlan, model: CausalLM, folder: Path, wanted: KVCacheType, load_format: LoadFormat
) -> KVFormat:
    if not _has_codes(wanted, model.config, plan.device, folder):
        return KVFormat(model.dtype)
    scales = (UNSCALED,) * model.config.num_layers
    if load_format == "auto":
        layers, part = range(model.config.num_layers), model.config.text_part
        scales = read_kv_scales(folder, layers, part.parameter_name)
    logger.info("%s: the KV cache is in FP8 (E4M3) with %s", folder, _described(scales))
    return KVFormat(model.dtype, scales)


def _has_codes(
    wanted: KVCacheType, config: ModelConfig, device: torch.device, folder: Path
) -> bool:
    setting = config.kv_cache
    if wanted != "auto" or setting is None:
        return wanted == "fp8"
    why_not = setting.why_not or _why_no_codes(device)
    if why_not is None:
        return True
    message = "%s: the KV cache has the model's own type, not that of %s: %s"
    logger.info(message, folder, setting.key, why_not)
    return False


def _why_no_codes(device: torch.device) -> str | None:
    return OLD_GPU.text if device.type == "cuda" and not multiplies_fp8(device) else None


def _described(scales: Sequence[KVScales]) -> str:
    if all(own == UNSCALED for own in scales):
        return "scales of 1.0"
    numbers = [number for own in scales for number in (own.key, own.value)]
    return f"the checkpoint's scales, {min(numbers):.3g} to {max(numbers):.3g}"
