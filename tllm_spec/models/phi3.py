"""Phi-3 and Phi-4-mini: fused projections in the checkpoint, and a rotary embedding of some of a
head's elements."""

from collections.abc import Iterator

import torch

from tllm_spec.models.config import ModelConfig
from tllm_spec.models.formats.weight_format import Part
from tllm_spec.models.layers import Placement, WeightSlot
from tllm_spec.models.linear import ColumnLinear
from tllm_spec.models.llama import MLP, Attention, DecoderLayer, LlamaForCausalLM
from tllm_spec.models.rotary import head_order


class FusedLinear(ColumnLinear):
    """The checkpoint has all parts in one tensor, under the module's own name."""

    def slots(self, path: str) -> Iterator[tuple[str, WeightSlot]]:
        assert self.bias is None
        rows, first = [], 0
        for name, size in self.parts.items():
            copies = self.copies.get(name, 1)
            start = size * (self.mapping.tp_rank // copies)
            rows.append(first + start + self.order(name))
            first += size * self.mapping.tp_size // copies
        part = Part((first, self.weight_format.shape[1]), order=torch.cat(rows))
        yield from self.weight_format.slots(path, slice(None), part)

    def order(self, name: str) -> torch.Tensor:
        """Rows of this rank's slice of a part, in the order of the parameter's: `[N]` int64."""
        return torch.arange(self.parts[name])


class PartlyRotatedQKV(FusedLinear):
    """`Phi3Attention` sets `head_order`, `[D]` int64: the checkpoint's element of a head for each
    one of q and k here."""

    head_order: torch.Tensor

    def order(self, name: str) -> torch.Tensor:
        rows = super().order(name)
        if name == "v_proj":
            return rows
        return rows.view(-1, len(self.head_order))[:, self.head_order].flatten()


class Phi3Attention(Attention):
    projection = PartlyRotatedQKV

    def __init__(self, config: ModelConfig, layer: int, placement: Placement) -> None:
        super().__init__(config, layer, placement)
        assert isinstance(self.qkv_proj, PartlyRotatedQKV)
        self.qkv_proj.head_order = head_order(config.rope, config.head_dim)


class FusedMLP(MLP):
    projection = FusedLinear


class Phi3Layer(DecoderLayer):
    def add_attention(self, config: ModelConfig, layer: int, placement: Placement) -> None:
        self.self_attn = Phi3Attention(config, layer, placement)

    def add_mlp(self, config: ModelConfig, layer: int, placement: Placement) -> None:
        self.mlp = FusedMLP(config, placement)


class Phi3ForCausalLM(LlamaForCausalLM):
    layer_type = Phi3Layer
