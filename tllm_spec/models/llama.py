"""The Llama family: Llama, Mistral, Qwen2 and Qwen3, dense or with experts (Mixtral, Qwen2-MoE,
Qwen3-MoE), built from a `ModelConfig`.

Module paths are the checkpoint's names, with q/k/v and gate/up fused."""

from abc import ABC, abstractmethod
from typing import Protocol

import torch
from torch import nn

from tllm_spec.attention.geometry import AttentionGeometry, place_of
from tllm_spec.attention.interface import ForwardContext
from tllm_spec.kernels.attention.rotary_write import HeadWeights, Rotary
from tllm_spec.kernels.slots.row_copies import gather_rows
from tllm_spec.models.checkpoint import OUTPUT
from tllm_spec.models.config import ModelConfig
from tllm_spec.models.layers import Embedding, HeadNorm, Module, Placement, RMSNorm
from tllm_spec.models.linear import ColumnLinear, OutputLinear, RowLinear
from tllm_spec.models.moe import SparseMoE
from tllm_spec.models.moe_config import MIXTRAL_NAMES
from tllm_spec.models.rotary import cos_sin_table
from tllm_spec.models.token_map import DraftTokens, reduced_output

# The interface between the engine and a model: tokens to hidden states, hidden states of chosen
# rows to logits.


class CausalLM(Module, ABC):
    """The base of every architecture. Parameters have no gradient; the caller sets
    `torch.inference_mode()`."""

    config: ModelConfig
    lm_head: OutputLinear
    draft_to_target: torch.Tensor | None = None
    """`[V_draft]` int64: of a draft model, the target's ids of its logits; None: they are equal."""
    read_as: torch.Tensor | None = None
    """`[V + 1]` int64: of a draft model, its own ids of the target's and of its mask token; None:
    they are equal."""

    @property
    def num_logits(self) -> int:
        """Logits of one row, on all ranks together."""
        ids = self.draft_to_target
        return self.config.vocab_size if ids is None else len(ids)

    def keep_tokens(self, tokens: DraftTokens, placement: Placement) -> None:
        """Limits the logits to those of `tokens`."""
        self.lm_head = reduced_output(self.lm_head, tokens.rows, placement)
        self.draft_to_target = tokens.ids.to(self.device)
        if tokens.read_as is not None:
            self.read_as = tokens.read_as.to(self.device)

    @property
    def dtype(self) -> torch.dtype:
        """The type of parameters and activations."""
        return next(self.parameters()).dtype

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    @abstractmethod
    def forward(
        self, input_ids: torch.Tensor, positions: torch.Tensor, context: ForwardContext
    ) -> torch.Tensor:
        """Tokens `[T]` at positions `[T]` to hidden states after the final norm, `[T, H]`, or `[R,
        H]` of the rows that the context wants."""

    @abstractmethod
    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """`[R, H]` to `[R, vocab_size]`, in the model's dtype; the sampler converts to float32.
        Where the output layer is sharded, to this rank's columns, `lm_head.shard`."""

    def ignores(self, name: str) -> bool:
        """Whether a checkpoint may have the tensor `name` although no parameter takes it: here the
        tensors of images, and the rotary frequencies and a copy of a tied output layer, which old
        checkpoints store."""
        is_tied, part = self.config.tie_word_embeddings, self.config.text_part
        is_tied_output = is_tied and part.parameter_name(name) == OUTPUT
        is_unused = part.is_of_images(name) or name.endswith("rotary_emb.inv_freq")
        return is_tied_output or is_unused


class Attention(Module):
    """q/k/v projection, optional q/k norm, rotary embedding and attention. The layer applies the
    output projection, since it adds to the residual stream. `input_size`: the hidden size unless
    given."""

    projection: type[ColumnLinear] = ColumnLinear
    head_norm: type[HeadNorm] = HeadNorm
    sinks: nn.Parameter | None
    """`[Hq]` float32 of attention sinks, if the geometry has them."""
    query_outputs = 1
    """Outputs of `q_proj` for each element of the queries."""

    def __init__(
        self, config: ModelConfig, layer: int, placement: Placement, input_size: int | None = None
    ) -> None:
        super().__init__()
        groups = config.layer_groups(placement.mapping)
        self.group, self.layer = place_of(layer, groups)
        geometry = groups[self.group].geometry
        assert isinstance(geometry, AttentionGeometry)
        self.num_heads, self.num_kv_heads = geometry.num_heads, geometry.num_kv_heads
        self.head_dim = config.head_dim
        q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        parts = {"q_proj": q_size * self.query_outputs, "k_proj": kv_size, "v_proj": kv_size}
        copies = placement.mapping.copies_of_kv_heads(config.num_kv_heads)
        self.qkv_proj = self.projection(
            input_size or config.hidden_size,
            parts,
            bias=config.qkv_bias,
            placement=placement,
            copies={"k_proj": copies, "v_proj": copies},
        )
        self.qk_norm: HeadNorm | None = (
            self.head_norm(
                self.num_heads, self.num_kv_heads, config.head_dim, config.rms_norm_eps, placement
            )
            if config.qk_norm
            else None
        )
        self.sinks = None
        self.o_proj = RowLinear(q_size, config.hidden_size, bias=config.o_bias, placement=placement)

    def forward(
        self, hidden: torch.Tensor, norm: RMSNorm | None, rotary: Rotary, context: ForwardContext
    ) -> torch.Tensor:
        """The input of `o_proj`, `[T, Hq * D]`, for hidden `[T, input_size]`. `norm` is applied to
        hidden first."""
        heads, head_weights = self._heads(hidden, norm)
        own = context.groups[self.group]
        return own.heads_backend.run(self.layer, heads, rotary, own.plan, head_weights, self.sinks)

    def write(
        self, hidden: torch.Tensor, norm: RMSNorm | None, rotary: Rotary, context: ForwardContext
    ) -> None:
        """The same, but only keys and values are computed and written."""
        heads, head_weights = self._heads(hidden, norm)
        own = context.groups[self.group]
        own.heads_backend.write(self.layer, heads, rotary, own.plan, head_weights)

    def _heads(
        self, hidden: torch.Tensor, norm: RMSNorm | None
    ) -> tuple[torch.Tensor, HeadWeights | None]:
        qkv = self.qkv_proj.forward(hidden, norm)
        heads = qkv.view(-1, self.num_heads + 2 * self.num_kv_heads, self.head_dim)
        return heads, None if self.qk_norm is None else self.qk_norm.head_weights


class MLP(Module):
    """SwiGLU."""

    projection: type[ColumnLinear] = ColumnLinear

    def __init__(self, config: ModelConfig, placement: Placement) -> None:
        super().__init__()
        hidden, inner, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        parts = {"gate_proj": inner, "up_proj": inner}
        self.gate_up_proj = self.projection(hidden, parts, bias=bias, placement=placement)
        self.down_proj = RowLinear(inner, hidden, bias=bias, placement=placement)

    def add_to(self, hidden: torch.Tensor, norm: RMSNorm) -> None:
        """Add the output for `norm(hidden)` to hidden `[T, H]` in place."""
        self.down_proj.add_gated_to(hidden, self.gate_up_proj, hidden, norm)


class SelfAttention(Protocol):
    """What a layer needs of its attention."""

    o_proj: RowLinear

    def forward(
        self, hidden: torch.Tensor, norm: RMSNorm | None, rotary: Rotary, context: ForwardContext
    ) -> torch.Tensor: ...

    def write(
        self, hidden: torch.Tensor, norm: RMSNorm | None, rotary: Rotary, context: ForwardContext
    ) -> None: ...


class DecoderLayer(Module):
    """Pre-norm block that adds to the residual stream, in place if all rows are wanted."""

    norm_type: type[RMSNorm] = RMSNorm
    input_layernorm: RMSNorm | None
    self_attn: SelfAttention
    mlp: MLP | SparseMoE

    def __init__(self, config: ModelConfig, layer: int, placement: Placement) -> None:
        super().__init__()
        sizes = config.hidden_size, config.rms_norm_eps, placement
        self.input_layernorm = self.norm_type(*sizes)
        self.add_attention(config, layer, placement)
        self.post_attention_layernorm = self.norm_type(*sizes)
        self.add_mlp(config, layer, placement)

    def add_attention(self, config: ModelConfig, layer: int, placement: Placement) -> None:
        self.self_attn = Attention(config, layer, placement)

    def add_mlp(self, config: ModelConfig, layer: int, placement: Placement) -> None:
        if config.moe is None or layer not in config.sparse_layers:
            self.mlp = MLP(config, placement)
        elif config.architecture == "MixtralForCausalLM":
            experts = SparseMoE(config.moe, placement, MIXTRAL_NAMES)
            self.add_under("block_sparse_moe", "mlp", experts)
        else:
            self.mlp = SparseMoE(config.moe, placement, config.text_part.expert_names)

    def forward(
        self,
        hidden: torch.Tensor,
        rotary: Rotary,
        context: ForwardContext,
        wanted: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The residual stream hidden `[T, H]` after the block, or `[R, H]` of the rows `wanted`."""
        if wanted is not None and not len(wanted):
            self.self_attn.write(hidden, self.input_layernorm, rotary, context)
            return hidden[:0]
        attended = self.self_attn.forward(hidden, self.input_layernorm, rotary, context)
        if wanted is not None:
            hidden, attended = gather_rows(hidden, wanted), gather_rows(attended, wanted)
        self.add_branches(hidden, attended)
        return hidden

    def add_branches(self, hidden: torch.Tensor, attended: torch.Tensor) -> None:
        """Add the output projection of attention, then the MLP, to hidden `[R, H]` in place."""
        self.self_attn.o_proj.add_to(hidden, attended)
        self.mlp.add_to(hidden, self.post_attention_layernorm)


class LlamaModel(Module):
    """Embedding, layers and final norm."""

    def __init__(
        self,
        config: ModelConfig,
        max_positions: int,
        placement: Placement,
        layer_type: type[DecoderLayer] = DecoderLayer,
    ) -> None:
        super().__init__()
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size, placement)
        self.layers = nn.ModuleList(
            layer_type(config, layer, placement) for layer in range(config.num_layers)
        )
        self.norm = layer_type.norm_type(config.hidden_size, config.rms_norm_eps, placement)
        self.cos_sin = cos_sin_table(config.rope, config.rope_dim, max_positions, placement)

    def rotary(self, positions: torch.Tensor) -> Rotary:
        """The rotary embedding of one forward's rows."""
        return Rotary(self.cos_sin, positions)

    def embed(self, input_ids: torch.Tensor) -> torch.Tensor:
        """The residual stream before the first layer, `[T, H]`."""
        return self.embed_tokens.forward(input_ids)

    def forward(
        self, input_ids: torch.Tensor, positions: torch.Tensor, context: ForwardContext
    ) -> torch.Tensor:
        rotary = self.rotary(positions)
        hidden = self.embed(input_ids)
        last, spec = len(self.layers) - 1, context.spec
        for layer_id, layer in enumerate(self.layers):
            wanted = context.wanted if layer_id == last else None
            hidden = layer.forward(hidden, rotary, context, wanted)
            if spec is not None:
                spec.maybe_capture_hidden_states(layer_id, hidden)
        normed = self.norm.forward(hidden) if len(hidden) else hidden
        if spec is not None:
            spec.maybe_capture_hidden_states(last + 1, normed)
        return normed


class LlamaForCausalLM(CausalLM):
    """The decoder with its output layer, which may share the embedding's weight."""

    model_type: type[LlamaModel] = LlamaModel
    layer_type: type[DecoderLayer] = DecoderLayer

    def __init__(self, config: ModelConfig, max_positions: int, placement: Placement) -> None:
        super().__init__()
        self.config = config
        self.model = self.model_type(config, max_positions, placement, self.layer_type)
        tied = self.model.embed_tokens.weight if config.tie_word_embeddings else None
        self.lm_head = OutputLinear(
            config.hidden_size, config.vocab_size, placement=placement, tied=tied
        )

    def forward(
        self, input_ids: torch.Tensor, positions: torch.Tensor, context: ForwardContext
    ) -> torch.Tensor:
        return self.model.forward(input_ids, positions, context)

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.lm_head.forward(hidden)
