"""Loads a model from its folder; the table of architectures and their classes."""

from dataclasses import replace
from pathlib import Path
from typing import Literal

import torch
from torch import nn

from tllm_spec.distributed.communicator import SINGLE, Communicator, Mapping
from tllm_spec.models.checkpoint import has_own_output
from tllm_spec.models.config import ModelConfig
from tllm_spec.models.deepseek import DeepseekForCausalLM
from tllm_spec.models.formats.quantised_layers import (
    computed_as,
    log_quantised,
    prepare_quantised,
    with_quantised,
)
from tllm_spec.models.gemma3 import Gemma3ForCausalLM
from tllm_spec.models.glm4_moe import Glm4MoeForCausalLM
from tllm_spec.models.gpt_oss import GptOssForCausalLM
from tllm_spec.models.layers import Placement, specialize_for_cpu
from tllm_spec.models.linear import Linear
from tllm_spec.models.llama import CausalLM, LlamaForCausalLM
from tllm_spec.models.llama4 import Llama4ForCausalLM
from tllm_spec.models.phi3 import Phi3ForCausalLM
from tllm_spec.models.qwen3_next import Qwen3NextForCausalLM
from tllm_spec.models.weights import fill_random, load_weights

LoadFormat = Literal["auto", "dummy"]

MODELS: dict[str, type[LlamaForCausalLM]] = {
    "LlamaForCausalLM": LlamaForCausalLM,
    "MistralForCausalLM": LlamaForCausalLM,
    "Qwen2ForCausalLM": LlamaForCausalLM,
    "Qwen3ForCausalLM": LlamaForCausalLM,
    "Phi3ForCausalLM": Phi3ForCausalLM,
    "MixtralForCausalLM": LlamaForCausalLM,
    "Qwen2MoeForCausalLM": LlamaForCausalLM,
    "Qwen3MoeForCausalLM": LlamaForCausalLM,
    "Qwen3NextForCausalLM": Qwen3NextForCausalLM,
    "Qwen3_5ForCausalLM": Qwen3NextForCausalLM,
    "Qwen3_5MoeForCausalLM": Qwen3NextForCausalLM,
    "Llama4ForCausalLM": Llama4ForCausalLM,
    "Gemma3ForCausalLM": Gemma3ForCausalLM,
    "GptOssForCausalLM": GptOssForCausalLM,
    "Glm4MoeForCausalLM": Glm4MoeForCausalLM,
    "DeepseekV2ForCausalLM": DeepseekForCausalLM,
    "DeepseekV3ForCausalLM": DeepseekForCausalLM,
    "DeepseekV32ForCausalLM": DeepseekForCausalLM,
}


def check_config(path: Path) -> None:
    """Raises ValueError if the model that `path/config.json` describes is not served."""
    ModelConfig.from_pretrained(path)


def check_shards(path: Path, tp_size: int, ep_size: int) -> None:
    """Raises ValueError if a size of the model that `path/config.json` describes cannot be split
    over the ranks. The model's own layers check, on a device without memory."""
    config = ModelConfig.from_pretrained(path)
    placement = Placement(
        config.dtype,
        torch.device("meta"),
        Mapping(0, tp_size, tp_size, ep_size),
        int4=None if config.int4 is None else config.int4.groups,
    )
    MODELS[config.text_part.architecture](config, max_positions=1, placement=placement)


def blank_model(
    path: Path, *, dtype: torch.dtype, device: torch.device, mapping: Mapping, fp8_activations: bool
) -> CausalLM:
    """A rank's model as `load_model` makes it for `device`, on a device without memory. Its rotary
    table has one row."""
    config = computed_as(ModelConfig.from_pretrained(path), fp8_activations)
    placement = blank_placement(config, dtype, device, mapping)
    return MODELS[config.text_part.architecture](config, max_positions=1, placement=placement)


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

    Raises:
        ValueError: the config or the checkpoint is not served; the message says why.
    """
    config = ModelConfig.from_pretrained(path).within(max_positions)
    if max_seq_len is not None:
        config = replace(config, rope=config.rope.for_length(max_seq_len))
    config = computed_as(config, fp8_activations)
    model_type = MODELS[config.text_part.architecture]
    is_tied = config.tie_word_embeddings and load_format == "auto"
    if is_tied and has_own_output(path, dtype, config.text_part.parameter_name):
        config = replace(config, tie_word_embeddings=False)
    placement = Placement(dtype, device, communicator.mapping, batch_invariant, communicator)
    placement = with_quantised(placement, config)
    model = model_type(config, max_positions, placement)
    log_quantised(path, config, placement)
    prepare_quantised({"": model}, path, config, load_format, placement)
    if load_format == "dummy":
        fill_random(model)
    else:
        load_weights(model, path, is_shown=communicator.mapping.rank == 0)
    specialize_for_cpu(model, placement)
    return model
