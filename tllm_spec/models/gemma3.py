"""Gemma 3's text model: norms before and after attention and MLP, GeGLU, scaled embeddings, and two
rotary embeddings, of layers with a sliding window and of those that see all keys."""

from dataclasses import dataclass

import torch

from tllm_spec.attention.interface import ForwardContext
from tllm_spec.kernels.attention.rotary_write import Rotary
from tllm_spec.kernels.gemm.norms import silu_and_mul
from tllm_spec.models.config import ModelConfig
from tllm_spec.models.layers import OffsetHeadNorm, OffsetRMSNorm, Placement, RMSNorm
from tllm_spec.models.llama import MLP, Attention, DecoderLayer, LlamaForCausalLM, LlamaModel
from tllm_spec.models.rotary import cos_sin_table


@dataclass(frozen=True, kw_only=True)
class Gemma3Rotary(Rotary):
    """The rotary embedding of layers that see all keys."""

    local: Rotary
    """The rotary embedding of layers with a sliding window."""


class Gemma3Attention(Attention):
    head_norm = OffsetHeadNorm


class GeGLU(MLP):
    def forward(self, hidden: torch.Tensor, norm: RMSNorm) -> torch.Tensor:
        """The output for `norm(hidden)`, `[T, H]`."""
        gate_up = self.gate_up_proj.forward(hidden, norm)
        return self.down_proj.summed(silu_and_mul(gate_up, "gelu_pytorch_tanh"))


class Gemma3Layer(DecoderLayer):
    norm_type = OffsetRMSNorm
    mlp: GeGLU

    def __init__(self, config: ModelConfig, layer: int, placement: Placement) -> None:
        super().__init__(config, layer, placement)
        assert config.gemma3 is not None
        self.is_local = layer in config.gemma3.local_layers
        sizes = config.hidden_size, config.rms_norm_eps, placement
        self.pre_feedforward_layernorm = OffsetRMSNorm(*sizes)
        self.post_feedforward_layernorm = OffsetRMSNorm(*sizes)

    def add_attention(self, config: ModelConfig, layer: int, placement: Placement) -> None:
        self.self_attn = Gemma3Attention(config, layer, placement)

    def add_mlp(self, config: ModelConfig, layer: int, placement: Placement) -> None:
        self.mlp = GeGLU(config, placement)

    def forward(
        self,
        hidden: torch.Tensor,
        rotary: Rotary,
        context: ForwardContext,
        wanted: torch.Tensor | None = None,
    ) -> torch.Tensor:
        assert isinstance(rotary, Gemma3Rotary)
        return super().forward(hidden, rotary.local if self.is_local else rotary, context, wanted)

    def add_branches(self, hidden: torch.Tensor, attended: torch.Tensor) -> None:
        """The norms after attention and MLP act on what they add."""
        self.post_attention_layernorm.add_to(hidden, self.self_attn.o_proj.summed(attended))
        added = self.mlp.forward(hidden, self.pre_feedforward_layernorm)
        self.post_feedforward_layernorm.add_to(hidden, added)


class Gemma3Model(LlamaModel):
    """The decoder, with a rotary table for layers with a window, too. Draft heads read the
    embedding unscaled."""

    def __init__(
        self,
        config: ModelConfig,
        max_positions: int,
        placement: Placement,
        layer_type: type[DecoderLayer],
    ) -> None:
        super().__init__(config, max_positions, placement, layer_type)
        assert config.gemma3 is not None
        rope = config.gemma3.local_rope
        self.local_cos_sin = cos_sin_table(rope, config.rope_dim, max_positions, placement)
        # In transformers the factor is a tensor of the weights' dtype.
        self.embedding_scale = torch.tensor(config.hidden_size**0.5, dtype=placement.dtype).item()

    def embed(self, input_ids: torch.Tensor) -> torch.Tensor:
        return super().embed(input_ids).mul_(self.embedding_scale)

    def rotary(self, positions: torch.Tensor) -> Gemma3Rotary:
        local = Rotary(self.local_cos_sin, positions)
        return Gemma3Rotary(self.cos_sin, positions, local=local)


class Gemma3ForCausalLM(LlamaForCausalLM):
    model_type = Gemma3Model
    layer_type = Gemma3Layer
