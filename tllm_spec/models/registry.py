"""Loads a model from its folder; the table of architectures and their classes."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import nn

from tllm_spec.distributed.communicator import SINGLE, Communicator, Mapping
from tllm_spec.models.checkpoint import checkpoint_names, has_own_output
from tllm_spec.models.config import WITH_IMAGES, ModelConfig, text_part_of, token_ids_of
from tllm_spec.models.config_file import read_checked, read_config
from tllm_spec.models.deepseek import (
    DeepseekForCausalLM,
    GlmMoeDsaForCausalLM,
    read_deepseek,
    read_glm4_moe,
)
from tllm_spec.models.formats.kv_cache_formats import kv_cache_setting
from tllm_spec.models.formats.quantisation import Quantisation
from tllm_spec.models.formats.quantisation_readers import read_quantisation
from tllm_spec.models.formats.quantised_layers import (
    computed_as,
    log_quantised,
    prepare_quantised,
    widen_others,
    with_quantised,
)
from tllm_spec.models.gemma3 import Gemma3ForCausalLM, read_gemma3
from tllm_spec.models.gemma4 import Gemma4ForCausalLM, read_gemma4, read_gemma4_unified
from tllm_spec.models.gpt_oss import GptOssForCausalLM, read_gpt_oss
from tllm_spec.models.layers import Placement, specialize_for_cpu
from tllm_spec.models.linear import Linear
from tllm_spec.models.llama import (
    CausalLM,
    read_llama,
    read_mistral,
    read_mixtral,
    read_qwen2,
    read_qwen2_moe,
    read_qwen3,
    read_qwen3_moe,
)
from tllm_spec.models.llama4 import Llama4ForCausalLM, read_llama4
from tllm_spec.models.minimax_m2 import read_minimax_m2
from tllm_spec.models.ministral3 import Ministral3ForCausalLM, read_ministral3
from tllm_spec.models.mistral4 import Mistral4ForCausalLM, read_mistral4
from tllm_spec.models.olmo2 import Olmo2ForCausalLM, read_olmo2
from tllm_spec.models.phi3 import read_phi3
from tllm_spec.models.qwen3_next import Qwen3NextForCausalLM, read_qwen3_next
from tllm_spec.models.weights import fill_random, load_weights

LoadFormat = Literal["auto", "dummy"]


class Family(NamedTuple):
    """How an architecture is served."""

    model: type[CausalLM]
    read: Callable[[dict[str, Any]], ModelConfig]
    """Reads the text model's keys of config.json, without quantised weights."""


_QWEN3_NEXT = Family(Qwen3NextForCausalLM, read_qwen3_next)
_DEEPSEEK = Family(DeepseekForCausalLM, read_deepseek)
MODELS: dict[str, Family] = {
    "LlamaForCausalLM": Family(CausalLM, read_llama),
    "MistralForCausalLM": Family(CausalLM, read_mistral),
    "Qwen2ForCausalLM": Family(CausalLM, read_qwen2),
    "Qwen3ForCausalLM": Family(CausalLM, read_qwen3),
    "MixtralForCausalLM": Family(CausalLM, read_mixtral),
    "Qwen2MoeForCausalLM": Family(CausalLM, read_qwen2_moe),
    "Qwen3MoeForCausalLM": Family(CausalLM, read_qwen3_moe),
    "Llama4ForCausalLM": Family(Llama4ForCausalLM, read_llama4),
    "Gemma3ForCausalLM": Family(Gemma3ForCausalLM, read_gemma3),
    "Gemma4ForCausalLM": Family(Gemma4ForCausalLM, read_gemma4),
    "Gemma4UnifiedForCausalLM": Family(Gemma4ForCausalLM, read_gemma4_unified),
    "Ministral3ForCausalLM": Family(Ministral3ForCausalLM, read_ministral3),
    "Phi3ForCausalLM": Family(CausalLM, read_phi3),
    "Olmo2ForCausalLM": Family(Olmo2ForCausalLM, read_olmo2),
    "MiniMaxM2ForCausalLM": Family(CausalLM, read_minimax_m2),
    "GptOssForCausalLM": Family(GptOssForCausalLM, read_gpt_oss),
    "Glm4MoeForCausalLM": Family(CausalLM, read_glm4_moe),
    "Qwen3NextForCausalLM": _QWEN3_NEXT,
    "Qwen3_5ForCausalLM": _QWEN3_NEXT,
    "Qwen3_5MoeForCausalLM": _QWEN3_NEXT,
    "DeepseekV2ForCausalLM": _DEEPSEEK,
    "DeepseekV3ForCausalLM": _DEEPSEEK,
    "DeepseekV32ForCausalLM": _DEEPSEEK,
    "GlmMoeDsaForCausalLM": Family(GlmMoeDsaForCausalLM, read_deepseek),
    "Mistral4ForCausalLM": Family(Mistral4ForCausalLM, read_mistral4),
}


def model_config(path: Path) -> ModelConfig:
    """What `path/config.json` says, with further end tokens, and tokens that never follow, from
    `generation_config.json` if they are there.

    Raises:
        ValueError: the file is missing or unreadable, or asks for something that is not served.
    """
    config = model_config_of(read_config(path), path)
    generation = path / "generation_config.json"
    if not generation.is_file():
        return config
    keys = read_checked(generation)
    ends = dict.fromkeys(config.eos_token_ids + token_ids_of(keys.get("eos_token_id")))
    never = tuple(keys.get("suppress_tokens") or ())
    return replace(config, eos_token_ids=tuple(ends), suppressed_tokens=never)


def model_config_of(raw: dict[str, Any], path: Path | None = None) -> ModelConfig:
    """The same, from the parsed file, and from what else the folder says of quantised weights.
    Without the folder `path`, from the file alone."""
    names, served = raw.get("architectures") or [], (*MODELS, *WITH_IMAGES)
    if len(names) != 1 or names[0] not in served:
        raise ValueError(f"architectures is {names}; it must be one of {', '.join(served)}.")
    part = text_part_of(names[0]).of(raw)
    keys, family = part.keys(raw), MODELS[part.architecture]
    config = family.read(keys)
    if config.moe is not None and part.expert_names is not None:
        config = replace(config, moe=replace(config.moe, names=part.expert_names))
    if config.num_heads % config.num_kv_heads:
        raise ValueError(
            f"num_key_value_heads is {config.num_kv_heads}; it must divide "
            f"num_attention_heads, which is {config.num_heads}."
        )
    if config.rope_dim % 2:
        raise ValueError(
            f"The rotary embedding has {config.rope_dim} elements a head; the number must be even."
        )
    config = replace(
        config,
        architecture=names[0],
        text_architecture=part.architecture,
        quantisation=read_quantisation(path, keys),
        kv_cache=kv_cache_setting(path, keys),
    )
    family.model.check_weights(config)
    return config


def model_type(config: ModelConfig) -> type[CausalLM]:
    """The class of a model with this configuration."""
    return MODELS[config.text_part.architecture].model


def check_shards(path: Path, tp_size: int, ep_size: int) -> None:
    """Raises ValueError if a size of the model that `path/config.json` describes cannot be split
    over the ranks. The model's own layers check, on a device without memory."""
    config = model_config(path)
    placement = Placement(
        config.dtype,
        torch.device("meta"),
        Mapping(0, tp_size, tp_size, ep_size),
        quantised=Quantisation(four_bit=config.quantisation.four_bit),
    )
    model_type(config)(config, max_positions=1, placement=placement)


def blank_model(
    path: Path, *, dtype: torch.dtype, device: torch.device, mapping: Mapping, fp8_activations: bool
) -> CausalLM:
    """A rank's model as `load_model` makes it for `device`, on a device without memory. Its rotary
    table has one row."""
    config = computed_as(model_config(path), fp8_activations)
    placement = blank_placement(config, dtype, device, mapping)
    model = model_type(config)(config, max_positions=1, placement=placement)
    if not placement.quantised.is_plain:
        load_format = "auto" if checkpoint_names(path) else "dummy"
        widen_others({"": model}, path, config, load_format, placement)
    return model


def blank_placement(
    config: ModelConfig, dtype: torch.dtype, device: torch.device, mapping: Mapping
) -> Placement:
    """The placement of a blank model's weights, in the formats that they have on `device`."""
    placement = with_quantised(Placement(dtype, device, mapping), config)
    return replace(placement, device=torch.device("meta"))


def weight_bytes(model: nn.Module, device: torch.device) -> int:
    """What the weights of a blank model take on `device`, with a CPU's faster forms of them."""
    num_bytes = sum(each.numel() * each.dtype.itemsize for each in model.parameters())
    if device.type != "cpu" or {each.dtype for each in model.parameters()} != {torch.float32}:
        return num_bytes
    linears = (each for each in model.modules() if isinstance(each, Linear))
    return num_bytes + sum(each.cpu_copy_bytes for each in linears)


def load_model(
    path: Path,
    *,
    dtype: torch.dtype,
    device: torch.device,
    load_format: LoadFormat = "auto",
    max_positions: int,
    max_seq_len: int | None = None,
    communicator: Communicator = SINGLE,
    batch_invariant: bool = False,
    fp8_activations: bool = True,
    staged: bool = False,
) -> CausalLM:
    """Build the model that `path/config.json` describes and load its weights.

    Args:
        path: folder in Hugging Face's format; `dummy` needs its config.json only.
        dtype: of parameters and activations.
        device: where they live.
        load_format: `auto` reads safetensors, `dummy` fills random weights.
        max_positions: rows of the rotary table, which no request may exceed.
        max_seq_len: tokens of a request without drafts, by which longrope has its factors; None:
            what the config serves.
        communicator: this rank's, with its place.
        batch_invariant: whether a row's logits have the same bits in every batch; slower.
        fp8_activations: whether activations are quantised where the checkpoint says so.
        staged: as in `Placement`.

    Raises:
        ValueError: the config or the checkpoint is not served; the message says why.
    """
    config = replace(model_config(path).within(max_positions), dtype=dtype)
    if max_seq_len is not None:
        config = replace(config, rope=config.rope.for_length(max_seq_len))
    config = computed_as(config, fp8_activations)
    is_tied = config.tie_word_embeddings and load_format == "auto"
    if is_tied and has_own_output(path, dtype, config.text_part.parameter_name):
        config = replace(config, tie_word_embeddings=False)
    own = communicator.mapping, batch_invariant, communicator
    placement = with_quantised(Placement(dtype, device, *own, staged=staged), config)
    model = model_type(config)(config, max_positions, placement)
    log_quantised(path, config, placement)
    prepare_quantised({"": model}, path, config, load_format, placement)
    if load_format == "dummy":
        fill_random(model)
    else:
        load_weights(model, path, is_shown=communicator.mapping.rank == 0)
    specialize_for_cpu(model, placement)
    return model
