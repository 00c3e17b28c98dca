"""The zoo's DeepSeek V3 model for training: transformers' model with experts that need no loop, and
the load balance by a correction bias; its MTP modules; its checkpoint in the published format.

All experts run as two GEMMs, and the routing weights of those that were not chosen are zero. So
gradients are those of the chosen experts, and nothing waits for the device."""

import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.deepseek_v3.modeling_deepseek_v3 import (
    DeepseekV3DecoderLayer,
    DeepseekV3RMSNorm,
    DeepseekV3TopkRouter,
    apply_rotary_pos_emb_interleave,
)

from tllm_spec.training.draft_head import Batch, Cache, attend, extended, unrolled, weighted
from tllm_spec.training.language_model import build_model
from tllm_spec.training.trainer import Settings, add_dropout
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
    """Writes a model's checkpoint: weights in bf16 and correction biases in fp32, the configuration
    files of `shape`, and the tokenizer of `zoo:llama`. added: further tensors, such as MTP
    modules'."""
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


# MTP modules (arXiv 2412.19437, section 2.2) for training, in plain torch, with the tensor names
# of published checkpoints. The engine has its own implementation for inference.
#
# As in `draft_head.py`, entry `j` of a module reads (the target's hidden state of token j after the
# final norm, embedding of token j+1) and predicts token j+2, and all chains of a text run in
# parallel. Later entries of a chain read the output of the step before. EAGLE-style, one module
# makes every step; "vanilla", step k is module k's. Each module has entries of its own.


_OUTER = ("enorm", "hnorm", "eh_proj", "shared_head")


class NextnModule(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.enorm = DeepseekV3RMSNorm(size, eps)
        self.hnorm = DeepseekV3RMSNorm(size, eps)
        self.eh_proj = nn.Linear(2 * size, size, bias=False)
        self.layer: Any = with_dense_experts(
            DeepseekV3DecoderLayer(config, config.num_hidden_layers - 1)
        )
        self.shared_head = nn.ModuleDict({"norm": DeepseekV3RMSNorm(size, eps)})

    def read(
        self, hidden: Tensor, embeddings: Tensor, rotary: tuple[Tensor, Tensor], cache: Cache | None
    ) -> tuple[Tensor, Tensor, Cache]:
        """The next step of all chains up to its entries: the residual `[B, S, H]`, queries, and
        the cache with the entries. Arguments as in `forward`."""
        x = self.eh_proj(torch.cat((self.enorm(embeddings), self.hnorm(hidden)), -1)).float()
        layer = self.layer
        query, key, value = entries(layer.self_attn, layer.input_layernorm(x), rotary)
        return x, query, extended(cache, key, value)

    def forward(
        self,
        hidden: Tensor,
        embeddings: Tensor,
        rotary: tuple[Tensor, Tensor],
        starts: Tensor,
        cache: Cache | None,
    ) -> tuple[Tensor, Cache]:
        """The next step of all chains: `[B, S, H]` after the final norm, and the entries.

        Args:
            hidden: `[B, S, H]`: the target's after its final norm, then the step before's result.
            embeddings: `[B, S, H]` of the token after.
            rotary: cosines and sines of the entries' positions.
            starts: `[S]`, the chains' numbers.
            cache: of the steps before; None: this is the first.
        """
        x, query, cache = self.read(hidden, embeddings, rotary, cache)
        mixed, layer = attend(query, cache, starts), self.layer
        x = x + layer.self_attn.o_proj(mixed.transpose(1, 2).flatten(2))
        x = x + layer.mlp(layer.post_attention_layernorm(x))
        output: Tensor = self.shared_head["norm"](x)
        return output, cache


class NextnModules(nn.Module):
    """The modules of a checkpoint with their target, which is not trained. is_vanilla: module k
    makes step k, and the later ones only note what they read; otherwise the first one makes every
    step."""

    target: Any
    is_vanilla = False
    mask_token = None

    def __init__(self, target: Any) -> None:
        super().__init__()
        self.config = target.config
        count = target.config.num_nextn_predict_layers
        self.steps = nn.ModuleList(NextnModule(target.config) for _ in range(count))
        self.__dict__["target"] = target

    @property
    def draft_ids(self) -> Tensor:
        return torch.arange(self.config.vocab_size, device=self.target.device)

    def vanilla(self) -> "NextnModules":
        """The same modules."""
        view = copy(self)
        view.is_vanilla = True
        return view

    @classmethod
    def from_pretrained(cls, folder: Path, target: Any) -> "NextnModules":
        """In fp32, on the target's device, without gradients."""
        modules = cls(target)
        stored = load_file(folder / "model.safetensors")
        for index, module in enumerate(modules.steps):
            prefix = f"model.layers.{target.config.num_hidden_layers + index}."
            own = {
                name.removeprefix(prefix): tensor.float()
                for name, tensor in stored.items()
                if name.startswith(prefix)
            }
            module.load_state_dict(
                {
                    name if name.startswith(_OUTER) else f"layer.{name}": tensor
                    for name, tensor in stacked(own).items()
                }
            )
        return modules.to(target.device).eval().requires_grad_(False)

    def checkpoint(self) -> dict[str, Tensor]:
        """The tensors by their names in a checkpoint, experts stacked. The target's embedding and
        output layer are not repeated."""
        first = self.config.num_hidden_layers
        return {
            f"model.layers.{first + index}.{name.removeprefix('layer.')}": tensor
            for index, module in enumerate(self.steps)
            for name, tensor in module.state_dict().items()
        }

    def target_states(self, target: Any, tokens: Tensor) -> tuple[Tensor, Tensor]:
        hidden = target.model(input_ids=tokens, use_cache=False)[0]
        return hidden, target.lm_head(hidden)

    def fuse(self, features: Tensor) -> Tensor:
        return features

    def forward(
        self,
        hidden: Tensor,
        embeddings: Tensor,
        starts: Tensor,
        caches: Sequence[Cache | None] | None = None,
    ) -> tuple[Tensor, list[Any]]:
        """As that of `DraftHead`; hidden: at the first step the target's states after its final
        norm."""
        modules: list[Any] = list(self.steps) if self.is_vanilla else [self.steps[0]]
        last = None if caches is None else caches[-1]
        step = 0 if last is None else len(last.own) + 1
        now = step if self.is_vanilla else 0
        inputs = hidden, embeddings, self.target.model.rotary_emb(hidden, (starts + step)[None])
        kept = [None] * len(modules) if caches is None else list(caches)
        for later in range(now + 1, len(modules)):
            kept[later] = modules[later].read(*inputs, kept[later])[-1]
        hidden, kept[now] = modules[now](*inputs, starts, kept[now])
        return hidden, kept

    def logits(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self.target.lm_head(hidden)
        return logits


def entries(
    attention: Any, hidden: Tensor, rotary: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values of latent attention, expanded for all heads, `[B, heads, S, D]`."""
    config = attention.config
    nope, rope, value_dim = config.qk_nope_head_dim, config.qk_rope_head_dim, config.v_head_dim
    query = attention.q_b_proj(attention.q_a_layernorm(attention.q_a_proj(hidden)))
    query = query.unflatten(-1, (-1, nope + rope)).transpose(1, 2)
    latent, shared = attention.kv_a_proj_with_mqa(hidden).split((config.kv_lora_rank, rope), -1)
    both = attention.kv_b_proj(attention.kv_a_layernorm(latent))
    key, value = (
        both.unflatten(-1, (-1, nope + value_dim)).transpose(1, 2).split((nope, value_dim), -1)
    )
    turned, shared = apply_rotary_pos_emb_interleave(
        query[..., nope:], shared.unsqueeze(1), *rotary
    )
    shared = shared.expand(-1, key.shape[1], -1, -1).to(key.dtype)
    query = torch.cat((query[..., :nope], turned.to(query.dtype)), -1)
    return query, torch.cat((key, shared), -1), value


# Loss and validation of MTP modules: every step of their chains is compared with the target's
# distribution.
#
# The first module is trained on its own outputs, as it drafts EAGLE-style. The others are trained
# as "vanilla" steps after it, on outputs that they do not change.


def build_modules(target: Any, run: Settings) -> NextnModules:
    """New modules that begin as copies of the target's last layer and pass on the mean of both
    inputs."""
    modules = NextnModules(target)
    last, norm = target.model.layers[-1].state_dict(), target.model.norm.state_dict()
    half = 0.5 * torch.eye(target.config.hidden_size)
    for module in modules.steps:
        assert isinstance(module, NextnModule)
        module.layer.load_state_dict(last)
        module.shared_head["norm"].load_state_dict(norm)
        with torch.no_grad():
            module.eh_proj.weight.copy_(torch.cat((half, half), 1))
            module.eh_proj.weight += 0.02 * torch.randn_like(module.eh_proj.weight)
        add_dropout(module.layer, run.dropout)
    return modules.to(target.device)


def modules_figures(modules: NextnModules, unroll: int, tokens: Tensor) -> dict[str, Tensor]:
    """The loss along `[B, T]` tokens, and how often each draft is the target's best token:
    `agreement` with the first module for every step, `vanilla` with a module for each."""
    number, target = len(modules.steps), modules.target
    with torch.autocast("cuda", torch.bfloat16, enabled=tokens.is_cuda):
        with torch.no_grad():  # once for both ways to draft
            states = (target.model(input_ids=tokens, use_cache=False)[0],) * 2
        losses, agreements = unrolled(modules, target, Batch.whole(tokens, unroll, states), unroll)
        found = {"loss": weighted(losses), "agreement": agreements}
        if number > 1:
            batch = Batch.whole(tokens, number, states)
            losses, agreements = unrolled(modules.vanilla(), target, batch, number)
            # The first step is the same as above.
            found |= {"loss": found["loss"] + weighted(losses[1:]), "vanilla": agreements}
    return found


def save_with_modules(modules: NextnModules, shape: Path, output: Path) -> None:
    """The target's checkpoint with the modules after its layers."""
    save_model(modules.target, shape, output, modules.checkpoint())
