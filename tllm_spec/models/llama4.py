"""Llama 4's text model: layers with and without a rotary embedding, unweighted q/k norm, and
experts in some layers. Served up to the length from which attention is chunked or scaled."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from tllm_spec.attention.interface import ForwardContext
from tllm_spec.kernels.rotary_write import Rotary
from tllm_spec.models.config import ModelConfig
from tllm_spec.models.layers import HeadNorm
from tllm_spec.models.linear import ColumnLinear
from tllm_spec.models.llama import MLP, Attention, DecoderLayer, LlamaForCausalLM
from tllm_spec.models.module import Placement, WeightSlot
from tllm_spec.models.moe import LLAMA4_NAMES, SparseMoE


@dataclass(frozen=True)
class InterleavedSlot(WeightSlot):
    """Rows of heads whose rotary pairs are adjacent in the checkpoint; here a head has the first
    members of all pairs, then the second ones."""

    head_dim: int = 0

    def load(self, tensor: torch.Tensor) -> None:
        pairs = tensor.unflatten(0, (-1, self.head_dim // 2, 2))  # type: ignore[no-untyped-call] # torch's
        super().load(pairs.transpose(1, 2).flatten(0, 2))


class InterleavedQKV(ColumnLinear):
    """`Llama4Attention` sets `head_dim`."""

    head_dim: int

    def slots(self, path: str) -> Iterator[tuple[str, WeightSlot]]:
        for name, slot in super().slots(path):
            if ".v_proj." in name:
                yield name, slot
            else:
                yield name, InterleavedSlot(**vars(slot), head_dim=self.head_dim)


class UnweightedHeadNorm(HeadNorm):
    """Weights of 1, which no checkpoint has. It precedes the rotation, which keeps a head's
    length."""

    def __init__(self, attention: Attention, eps: float, placement: Placement) -> None:
        super().__init__(
            attention.num_heads, attention.num_kv_heads, attention.head_dim, eps, placement
        )
        self.weight.fill_(1.0)

    def slots(self, path: str) -> Iterator[tuple[str, WeightSlot]]:
        return iter(())


class Llama4Attention(Attention):
    """With a rotary embedding, and then the q/k norm, or with neither."""

    projection = InterleavedQKV

    def __init__(self, config: ModelConfig, layer: int, placement: Placement) -> None:
        super().__init__(replace(config, qk_norm=False), layer, placement)
        assert config.llama4 is not None and isinstance(self.qkv_proj, InterleavedQKV)
        self.qkv_proj.head_dim = config.head_dim
        if config.qk_norm and layer not in config.llama4.nope_layers:
            self.qk_norm = UnweightedHeadNorm(self, config.rms_norm_eps, placement)


class Llama4Layer(DecoderLayer):
    """A layer without a rotary embedding rotates by 0."""

    unrotated: torch.Tensor | None = None
    """Of such a layer: a rotary table of one row, `[1, 2, 1, D]`."""

    def add_attention(self, config: ModelConfig, layer: int, placement: Placement) -> None:
        self.self_attn = Llama4Attention(config, layer, placement)
        assert config.llama4 is not None
        if layer in config.llama4.nope_layers:
            shape = (1, 2, 1, config.head_dim)
            self.unrotated = torch.zeros(shape, dtype=placement.dtype, device=placement.device)
            self.unrotated[:, 0] = 1.0

    def add_mlp(self, config: ModelConfig, layer: int, placement: Placement) -> None:
        assert config.moe is not None
        if layer in config.sparse_layers:
            mlp: SparseMoE | MLP = SparseMoE(config.moe, placement, LLAMA4_NAMES)
        else:
            mlp = MLP(config, placement)
        self.add_under("feed_forward", "mlp", mlp)

    def forward(
        self,
        hidden: torch.Tensor,
        rotary: Rotary,
        context: ForwardContext,
        wanted: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if self.unrotated is not None:
            rotary = Rotary(self.unrotated, torch.zeros_like(rotary.positions))
        return super().forward(hidden, rotary, context, wanted)


class Llama4ForCausalLM(LlamaForCausalLM):
    """Raises ValueError where a request could be so long that attention is not plain."""

    layer_type = Llama4Layer

    def __init__(self, config: ModelConfig, max_positions: int, placement: Placement) -> None:
        assert config.llama4 is not None
        config.llama4.check_positions(max_positions)
        super().__init__(config, max_positions, placement)


class Llama4ForConditionalGeneration(Llama4ForCausalLM):
    """The text part of the model that also sees images."""

    def parameter_name(self, name: str) -> str:
        return name.removeprefix("language_model.")

    def ignores(self, name: str) -> bool:
        is_of_images = name.startswith(("vision_model.", "multi_modal_projector."))
        return is_of_images or super().ignores(name)
