"""DeepSeek V2 and V3 (R1 and Kimi K2 have V3's architecture): latent attention, dense first layers,
then experts.

Module paths are the checkpoint's names, with the projections of the hidden state fused."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch

from tllm_spec.attention.interface import ForwardContext
from tllm_spec.attention.latent import LatentBackend, LatentInputs
from tllm_spec.kernels.attention.latent_write import LatentNorm
from tllm_spec.kernels.attention.rotary_write import Rotary
from tllm_spec.models.config import ModelConfig
from tllm_spec.models.deepseek_config import MLAConfig
from tllm_spec.models.formats.weight_format import Part
from tllm_spec.models.layers import Module, Placement, RMSNorm, WeightSlot, sibling
from tllm_spec.models.linear import Linear, RowLinear
from tllm_spec.models.llama import MLP, DecoderLayer, LlamaForCausalLM
from tllm_spec.models.moe import SparseMoE
from tllm_spec.models.moe_config import DEEPSEEK_NAMES


@dataclass(frozen=True)
class RotatedPart:
    """Outputs of one checkpoint tensor: for each head `plain_dim` elements, then `rope_dim` that
    are rotated. `num_heads` are this rank's, of `total_heads`, from `first_head` on."""

    num_heads: int
    plain_dim: int
    rope_dim: int
    total_heads: int = 1
    first_head: int = 0

    @property
    def head_size(self) -> int:
        return self.plain_dim + self.rope_dim

    @property
    def size(self) -> int:
        return self.num_heads * self.head_size

    def order(self) -> torch.Tensor:
        """Rows of a checkpoint whose rotated elements are pairs of neighbours, so that they become
        the two halves that the kernels rotate. Queries and keys change alike, so the scores do
        not."""
        rows = torch.arange(self.size).view(self.num_heads, -1)
        plain, rotated = rows.split_with_sizes((self.plain_dim, self.rope_dim), 1)
        return torch.cat((plain, rotated[:, ::2], rotated[:, 1::2]), 1).flatten()


class RotatedLinear(Linear):
    """Projections to latents, queries and keys, fused from the checkpoint's `parts`. A rank has the
    queries of its heads, and all of the latents."""

    def __init__(
        self,
        in_features: int,
        parts: dict[str, RotatedPart],
        *,
        is_interleaved: bool,
        placement: Placement,
    ) -> None:
        size = sum(part.size for part in parts.values())
        super().__init__(in_features, size, bias=False, placement=placement)
        self.parts, self.is_interleaved = parts, is_interleaved

    def slots(self, path: str) -> Iterator[tuple[str, WeightSlot]]:
        first = 0
        for name, part in self.parts.items():
            order = part.order() if self.is_interleaved and part.rope_dim else None
            shape = (part.total_heads * part.head_size, self.weight_format.shape[1])
            start, own = part.first_head * part.head_size, slice(first, first + part.size)
            own_part = Part(shape, 0, start, order)
            yield from self.weight_format.slots(sibling(path, name), own, own_part)
            first += part.size


class LatentUp(Module):
    """The projections of the latent to this rank's heads' keys and values, `[H * (N + V), R]`,
    row-major: attention reads views of it."""

    def __init__(self, config: MLAConfig, num_heads: int, placement: Placement) -> None:
        super().__init__()
        size = config.nope_dim + config.value_dim
        self.weight = placement.parameter(num_heads * size, config.kv_lora_rank)
        self.heads = self.weight.view(num_heads, size, config.kv_lora_rank)
        self.mapping = placement.mapping

    def slots(self, path: str) -> Iterator[tuple[str, WeightSlot]]:
        rows, rank = self.weight.shape
        shape = (rows * self.mapping.tp_size, rank)
        yield f"{path}.weight", WeightSlot(self.weight, shape, 0, rows * self.mapping.tp_rank)


class LatentAttention(Module):
    """Projections and attention. The layer applies the output projection, since it adds to the
    residual stream. `input_size`: the hidden size unless given."""

    q_b_proj: RotatedLinear | None

    def __init__(
        self, config: ModelConfig, layer: int, placement: Placement, input_size: int | None = None
    ) -> None:
        super().__init__()
        assert config.mla is not None
        self.layer, mla = layer, config.mla
        input_size = input_size or config.hidden_size
        mapping, total = placement.mapping, config.num_heads
        self.config, self.num_heads = mla, mapping.shard(total, "num_attention_heads")
        first = self.num_heads * mapping.tp_rank
        queries = RotatedPart(self.num_heads, mla.nope_dim, mla.rope_dim, total, first)
        latent = {"kv_a_proj_with_mqa": RotatedPart(1, mla.kv_lora_rank, mla.rope_dim)}
        rotated = partial(RotatedLinear, is_interleaved=mla.is_interleaved, placement=placement)
        if mla.q_lora_rank is None:
            self.a_proj = rotated(input_size, {"q_proj": queries} | latent)
            self.q_b_proj = None
        else:
            rank = RotatedPart(1, mla.q_lora_rank, 0)
            self.a_proj = rotated(input_size, {"q_a_proj": rank} | latent)
            self.q_a_layernorm = RMSNorm(mla.q_lora_rank, mla.norm_eps, placement)
            self.q_b_proj = rotated(mla.q_lora_rank, {"q_b_proj": queries})
        self.latent_dim = mla.kv_lora_rank + mla.rope_dim
        self.kv_a_layernorm = RMSNorm(mla.kv_lora_rank, mla.norm_eps, placement)
        self.norm = LatentNorm(self.kv_a_layernorm.weight, mla.norm_eps)
        self.kv_b_proj = LatentUp(mla, self.num_heads, placement)
        self.o_proj = RowLinear(
            total * mla.value_dim, config.hidden_size, bias=False, placement=placement
        )

    def forward(
        self, hidden: torch.Tensor, norm: RMSNorm | None, rotary: Rotary, context: ForwardContext
    ) -> torch.Tensor:
        """The input of `o_proj`, `[T, H * V]`, for `norm(hidden)` `[T, input_size]`."""
        q, latent = self._project(hidden, norm)
        if self.q_b_proj is not None:
            q = self.q_b_proj.forward(q, self.q_a_layernorm)
        heads = q.contiguous().view(len(q), self.num_heads, -1)
        inputs = LatentInputs(heads, latent, self.norm, self.kv_b_proj.heads)
        return self._backend(context).run(self.layer, inputs, rotary, context.groups[0].plan)

    def write(
        self, hidden: torch.Tensor, norm: RMSNorm | None, rotary: Rotary, context: ForwardContext
    ) -> None:
        """The same, but only latents and keys are computed and written."""
        _, latent = self._project(hidden, norm)
        plan = context.groups[0].plan
        self._backend(context).write(self.layer, latent, self.norm, rotary, plan)

    def _project(
        self, hidden: torch.Tensor, norm: RMSNorm | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        both = self.a_proj.forward(hidden, norm)
        return both[:, : -self.latent_dim], both[:, -self.latent_dim :]

    def _backend(self, context: ForwardContext) -> LatentBackend:
        backend = context.groups[0].backend
        assert isinstance(backend, LatentBackend)
        return backend


class DeepseekLayer(DecoderLayer):
    """A decoder layer with latent attention. `layer`: also its index in the KV pool."""

    def add_attention(self, config: ModelConfig, layer: int, placement: Placement) -> None:
        self.self_attn = LatentAttention(config, layer, placement)

    def add_mlp(self, config: ModelConfig, layer: int, placement: Placement) -> None:
        if config.moe is None or layer not in config.sparse_layers:
            self.mlp = MLP(config, placement)
        else:
            self.mlp = SparseMoE(config.moe, placement, DEEPSEEK_NAMES)


class DeepseekForCausalLM(LlamaForCausalLM):
    """The decoder with its output layer."""

    layer_type = DeepseekLayer

    def __init__(self, config: ModelConfig, max_positions: int, placement: Placement) -> None:
        super().__init__(config, max_positions, placement)
        # The checkpoint's layers after the decoder's predict further tokens (mtp.py loads them).
        numbers = range(config.num_layers, config.num_layers + config.num_nextn_layers)
        self._nextn = tuple(f"model.layers.{number}." for number in numbers)

    def ignores(self, name: str) -> bool:
        return name.startswith(self._nextn) or super().ignores(name)
