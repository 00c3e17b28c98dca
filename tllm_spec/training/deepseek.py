"""The zoo's DeepSeek V3 model for training: transformers' model with experts that need no loop, and
the load balance by a correction bias; its checkpoint in the published format.

All experts run as two GEMMs, and the routing weights of those that were not chosen are zero. So
gradients are those of the chosen experts, and nothing waits for the device."""

import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter

from tllm_spec.training.language_model import build_model
from tllm_spec.training.trainer import Settings
from tllm_spec.zoo.registry import resolve_model

SHAPE = resolve_model("zoo:deepseek")
BIAS_SPEED = 1e-3
"""Change of the correction bias in a step (arXiv 2412.19437, section 4.2)."""
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")
_EXPERT = re.compile(r"(.*mlp\.experts\.)(\d+)\.(gate|up|down)_proj\.weight")


class Router(DeepseekV3TopkRouter):  # type: ignore[misc] # transformers has no types
    """In fp32, also under autocast, as in the engine."""

    def forward(self, hidden_states: Tensor) -> Any:
        with torch.autocast(hidden_states.device.type, enabled=False):
            return super().forward(hidden_states.float())


class DenseExperts(nn.Module):
    """transformers' experts with the same parameters. `load` `[E]`: tokens that each expert got
    since the last `balance`."""

    load: Tensor
    gate_up_proj: Tensor
    down_proj: Tensor

    def __init__(self, experts: Any) -> None:
        super().__init__()
        self.gate_up_proj, self.down_proj = experts.gate_up_proj, experts.down_proj
        self.register_buffer("load", torch.zeros(len(self.down_proj)), persistent=False)

    def forward(self, hidden: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
        """`[T, H]`, with the chosen experts and their weights, each `[T, k]`, to `[T, H]`."""
        num_experts = len(self.down_proj)
        shares = weights.new_zeros(len(hidden), num_experts).scatter(1, indices, weights)
        if self.training:
            self.load += (shares.detach() > 0).sum(0)
        both = F.linear(hidden, self.gate_up_proj.flatten(0, 1)).view(len(hidden), num_experts, -1)
        gate, up = both.chunk(2, -1)
        mixed = F.silu(gate) * up * shares.unsqueeze(-1).to(both.dtype)
        return F.linear(mixed.flatten(1), self.down_proj.transpose(0, 1).flatten(1))


def with_dense_experts(model: Any) -> Any:
    """Replaces routers and experts of a model or a layer, in place."""
    for module in list(model.modules()):
        if hasattr(module, "experts"):
            module.experts = DenseExperts(module.experts)
            router = Router(module.config).to(module.gate.weight.device)
            router.load_state_dict(module.gate.state_dict())
            module.gate = router
    return model


def mixtures(model: nn.Module) -> list[Any]:
    """The MoE blocks of the layers."""
    return [module for module in model.modules() if hasattr(module, "experts")]


@torch.no_grad()
def balance(model: nn.Module) -> None:
    """One update of the correction biases: experts with more tokens than the mean become less
    likely, the others more likely."""
    for block in mixtures(model):
        load = block.experts.load
        block.gate.e_score_correction_bias += BIAS_SPEED * (load.mean() - load).sign()
        load.zero_()


def deepseek_config(folder: Path) -> Any:
    """Raises ValueError for another architecture, or without the layers that are trained here."""
    config = AutoConfig.from_pretrained(folder, dtype=torch.float32)
    if config.model_type != "deepseek_v3" or not config.q_lora_rank:
        raise ValueError(
            f"{folder} is not a DeepSeek V3 with q_lora_rank; the zoo trains no other MLA model"
        )
    return config


def build_target(shape: Path, settings: Settings, device: torch.device) -> Any:
    """A new fp32 model with the shape in `shape/config.json`, without MTP modules."""
    deepseek_config(shape)
    return build_model(shape, settings, device, with_dense_experts)


def load_target(folder: Path, device: torch.device) -> Any:
    """A trained model in fp32, without gradients and MTP modules."""
    model = AutoModelForCausalLM.from_config(deepseek_config(folder), attn_implementation="sdpa")
    own = model.config.num_hidden_layers
    stored = {
        name: tensor
        for name, tensor in load_file(folder / "model.safetensors").items()
        if not (found := re.match(r"model\.layers\.(\d+)\.", name)) or int(found[1]) < own
    }
    stored["lm_head.weight"] = stored["model.embed_tokens.weight"]
    model = with_dense_experts(model)
    model.load_state_dict({name: tensor.float() for name, tensor in stacked(stored).items()})
    return model.to(device).eval().requires_grad_(False)


def save_model(
    model: Any, shape: Path, output: Path, added: Mapping[str, Tensor] = MappingProxyType({})
) -> None:
    """Writes the checkpoint: weights in bf16 and correction biases in fp32, the configuration files
    of `shape`, and the tokenizer of `zoo:llama`. added: further tensors, such as MTP modules'."""
    output.mkdir(parents=True, exist_ok=True)
    kept = {
        name: tensor.to(torch.float32 if "correction_bias" in name else torch.bfloat16)
        .cpu()
        .contiguous()
        for name, tensor in published(model.state_dict() | dict(added))
        if name != "lm_head.weight"  # tied to the embedding
    }
    save_file(kept, output / "model.safetensors", metadata={"format": "pt"})
    for name in ("config.json", "generation_config.json"):
        shutil.copyfile(shape / name, output / name)
    for name in TOKENIZER_FILES:
        shutil.copyfile(resolve_model("zoo:llama") / name, output / name)


def published(tensors: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """transformers' tensors by their published names: one tensor for each expert and projection."""
    for name, tensor in tensors.items():
        base = name.rpartition(".")[0]
        if name.endswith("experts.gate_up_proj"):
            for index, both in enumerate(tensor):
                gate, up = both.chunk(2)
                yield f"{base}.{index}.gate_proj.weight", gate
                yield f"{base}.{index}.up_proj.weight", up
        elif name.endswith("experts.down_proj"):
            for index, down in enumerate(tensor):
                yield f"{base}.{index}.down_proj.weight", down
        else:
            yield name, tensor


def stacked(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The inverse of `published`."""
    found: dict[str, Tensor] = {}
    parts: dict[str, dict[str, dict[int, Tensor]]] = {}
    for name, tensor in tensors.items():
        if match := _EXPERT.fullmatch(name):
            parts.setdefault(match[1], {}).setdefault(match[3], {})[int(match[2])] = tensor
        else:
            found[name] = tensor
    for base, block in parts.items():
        gate, up, down = (
            torch.stack([block[part][index] for index in range(len(block[part]))])
            for part in ("gate", "up", "down")
        )
        found[f"{base}gate_up_proj"], found[f"{base}down_proj"] = torch.cat((gate, up), 1), down
    return found
