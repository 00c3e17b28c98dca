"""Gemma 4's assistant: a small decoder that drafts without keys and values of its own. Its layers
attend to those of the target's last layers with their own, of either kind.

A step reads a token, by the target's embedding, with the target's hidden state before it, or the
one that the step before predicts. Position and keys are the same in all steps: those before the
newest token."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import nn

from tllm_spec.attention.interface import ForwardContext
from tllm_spec.kernels.attention.rotary_write import Rotary
from tllm_spec.models.config import ModelConfig
from tllm_spec.models.config_file import read_config, required, with_defaults
from tllm_spec.models.draft_head import (
    DraftHead,
    HeadRows,
    HeadSource,
    head_tensors,
    target_modules,
)
from tllm_spec.models.gemma4 import Gemma4Layer, Gemma4Model, Gemma4Rotary, read_gemma4
from tllm_spec.models.layers import Module, Placement, StoredWeight, WeightSlot, specialize_for_cpu
from tllm_spec.models.linear import Linear, OutputLinear
from tllm_spec.models.llama import CausalLM, layer_norm
from tllm_spec.models.rotary import cos_sin_table
from tllm_spec.models.token_map import DraftTokens
from tllm_spec.models.weights import fill, fill_random

_DEFAULTS: dict[str, Any] = {
    "use_ordered_embeddings": False,
    "num_centroids": 2048,
    "centroid_intermediate_top_k": 32,
}


@dataclass(frozen=True)
class AssistantConfig:
    """layers: the decoder's own. target_size: of the target's hidden states. num_centroids: groups
    of tokens, of which a step drafts from the best `top_k`; 0: from all tokens."""

    layers: ModelConfig
    target_size: int
    num_centroids: int
    top_k: int
    mask_token: None = None

    @staticmethod
    def from_pretrained(folder: Path) -> "AssistantConfig":
        """Raises ValueError for what is not served."""
        raw = with_defaults(read_config(folder), _DEFAULTS)
        text = {**required(raw, "text_config"), "num_kv_shared_layers": 0}
        text["architectures"] = ["Gemma4ForCausalLM"]
        layers = read_gemma4(text | {"hidden_size_per_layer_input": 0})
        number = raw["num_centroids"] if raw["use_ordered_embeddings"] else 0
        top_k = raw["centroid_intermediate_top_k"]
        if number and (layers.vocab_size % number or top_k > number):
            raise ValueError(
                f"num_centroids is {number} and centroid_intermediate_top_k {top_k}; the former "
                f"must divide vocab_size, {layers.vocab_size}, and not be below the latter."
            )
        return AssistantConfig(layers, required(raw, "backbone_hidden_size"), number, top_k)

    def for_target(self, target: ModelConfig) -> ModelConfig:
        """The target's layers followed by the assistant's, which share keys with them: the groups
        of its layers have the target's pages. Raises ValueError unless it was made for the
        target."""
        own, parts, of_target = self.layers, self.layers.gemma4, target.gemma4
        assert parts is not None
        if of_target is None:
            raise ValueError(f"Gemma 4's assistant drafts for Gemma 4, not {target.architecture}")
        pairs = {
            "vocab_size": (own.vocab_size, target.vocab_size),
            "backbone_hidden_size": (self.target_size, target.hidden_size),
            "head_dim": (own.head_dim, target.head_dim),
            "global_head_dim": (parts.global_head_dim, of_target.global_head_dim),
        }
        first, window = target.num_layers, target.sliding_window
        local = frozenset(first + layer for layer in own.local_layers)
        joined = replace(
            own,
            num_layers=first + own.num_layers,
            num_kv_heads=target.num_kv_heads,
            local_layers=target.local_layers | local,
            # Both ends count, as in transformers.
            sliding_window=None if window is None else window + 1,
            sliding_layers=target.sliding_layers | local,
            gemma4=replace(
                parts,
                num_global_kv_heads=of_target.num_global_kv_heads,
                num_shared_layers=of_target.num_shared_layers + own.num_layers,
            ),
        )
        differing = [
            f"{key}: {a}, and {b} of the target" for key, (a, b) in pairs.items() if a != b
        ]
        if any(own.num_heads % joined.of_layer(each).num_kv_heads for each in range(first)):
            differing.append("num_attention_heads is no multiple of the target's heads of keys")
        if len({layer in target.local_layers for layer in range(first)}) < 2:
            differing.append("the target's layers are all of one kind")
        if differing:
            raise ValueError(f"The assistant is not for this target: {'; '.join(differing)}")
        return joined


@dataclass(frozen=True)
class CentroidSlot(WeightSlot):
    """The tokens by centroid, `[V]` int64, become the centroids of this rank's tokens."""

    dtypes: ClassVar[tuple[torch.dtype, ...]] = (torch.int64, torch.int32)
    num_centroids: int = 1

    def load(self, tensor: torch.Tensor | StoredWeight) -> None:
        assert self.destination is not None and isinstance(tensor, torch.Tensor)
        places = torch.arange(len(tensor))
        owners = places.clone().index_copy_(0, tensor.long(), places)
        self.destination.copy_(self.own(owners // (len(tensor) // self.num_centroids)))


class Centroids(Module):
    """Groups of as many tokens each, of which the best are drafted from."""

    def __init__(self, config: AssistantConfig, output: OutputLinear, placement: Placement) -> None:
        super().__init__()
        self.top_k, self.number = config.top_k, config.num_centroids
        self.vocab_size = config.layers.vocab_size
        self.first = 0 if output.shard is None else output.shard.first
        size = config.layers.hidden_size
        self.centroids = Linear(size, self.number, bias=False, placement=placement)
        places = torch.arange(output.parts["lm_head"], device=placement.memory) + self.first
        self.owners = places // (self.vocab_size // self.number)

    def limit(self, hidden: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        """Logits `[R, V]` for hidden `[R, h]`, less than all others where the token's group is not
        among the best."""
        best = self.centroids.forward(hidden).topk(self.top_k).indices
        is_best = torch.zeros(len(hidden), self.number, dtype=torch.bool, device=hidden.device)
        taken = is_best.scatter_(1, best, True)[:, self.owners]
        lowest = logits.masked_fill(~taken, torch.inf).amin(1, keepdim=True) - 1
        return torch.where(taken, logits, lowest)

    def slots(self, path: str) -> Iterator[tuple[str, WeightSlot]]:
        own = self.owners, (self.vocab_size,), 0, self.first
        yield f"{path}.token_ordering", CentroidSlot(*own, num_centroids=self.number)


class Gemma4Assistant(DraftHead):
    """Its state between steps is that of its last norm, which predicts the target's next one."""

    has_keys = False
    target: Gemma4Model

    def __init__(
        self, config: AssistantConfig, target: CausalLM, max_positions: int, placement: Placement
    ) -> None:
        super().__init__()
        own, self.config = config.layers, config.for_target(target.config)
        first, size = target.config.num_layers, own.hidden_size
        self.borrowed = target_modules(target)
        self.embed_tokens = None
        self.lm_head = OutputLinear(size, own.vocab_size, placement=placement)
        self.pre_projection = Linear(2 * config.target_size, size, bias=False, placement=placement)
        self.post_projection = Linear(size, config.target_size, bias=False, placement=placement)
        layers = range(first, first + own.num_layers)
        self.layers = nn.ModuleList(Gemma4Layer(self.config, each, placement) for each in layers)
        self.norm = layer_norm(own, placement)
        self.masked_embedding: Centroids | None = None
        if config.num_centroids:
            self.masked_embedding = Centroids(config, self.lm_head, placement)
        tables = (own.rope, own.rope_dim), (self.config.ropes[1], own.head_dim)
        self.tables = [cos_sin_table(*each, max_positions, placement) for each in tables]
        assert isinstance(target.model, Gemma4Model)
        self.__dict__["target"] = target.model

    def forward(self, rows: HeadRows, context: ForwardContext, step: int = 0) -> torch.Tensor:
        """Hidden: of the target in the first step, then what the step before returned, `[T, h]`."""
        input_ids, positions, hidden = rows
        state = self.post_projection.forward(hidden) if step else hidden
        both = torch.cat((self.target.embed(input_ids), state), 1)
        total = self.pre_projection.forward(both)
        full, local = (Rotary(table, positions) for table in self.tables)
        rotary = Gemma4Rotary(full.table, positions, local=local, per_layer=None)
        for layer in self.layers:
            total = layer.forward(total, rotary, context)
        return self.norm.forward(total)

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        logits, groups = super().compute_logits(hidden), self.masked_embedding
        return logits if groups is None else groups.limit(hidden, logits)

    def keep_tokens(self, tokens: DraftTokens, placement: Placement) -> None:
        raise ValueError("speculative_token_map is refused: the assistant drafts all tokens")


def load_assistant(config: AssistantConfig, source: HeadSource) -> Gemma4Assistant:
    """In the target's dtype, on its device, sharded as its layers are. Raises ValueError if it does
    not fit the target, or tensors are missing or surplus."""
    placement = source.placement
    head = Gemma4Assistant(config, source.target, source.max_positions, placement)
    if source.load_format == "dummy":
        fill_random(head)
    else:
        renamed = {"embed_tokens": "lm_head"}
        tensors = head_tensors(source.path, "Gemma 4 assistant", ("inv_freq",), renamed)
        misfit = f"The checkpoint in {source.path} does not fit Gemma 4's assistant"
        fill(head, tensors.items(), misfit)
    specialize_for_cpu(head, placement)
    return head
