"""The base of every architecture, and the Llama family: Llama, Mistral, Qwen2 and Qwen3, dense or
with experts (Mixtral, Qwen2-MoE, Qwen3-MoE).

Module paths are the checkpoint's names, with q/k/v and gate/up fused."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from tllm_spec.attention.geometry import AttentionGeometry, place_of
from tllm_spec.attention.interface import ForwardContext, HeadsInputs
from tllm_spec.kernels.attention.rotary_write import Rotary
from tllm_spec.kernels.gemm.norms import soft_cap
from tllm_spec.kernels.slots.row_copies import gather_rows
from tllm_spec.models.checkpoint import OUTPUT
from tllm_spec.models.config import COMMON_DEFAULTS, FULL, SLIDING, ModelConfig, decoder_config
from tllm_spec.models.config_file import with_defaults
from tllm_spec.models.formats.quantised_tensors import stored_tensors
from tllm_spec.models.layers import (
    AllHeadsNorm,
    Embedding,
    HeadNorm,
    Module,
    Placement,
    RMSNorm,
    StoredWeight,
    WeightSlot,
)
from tllm_spec.models.linear import ColumnLinear, OutputLinear, RowLinear
from tllm_spec.models.moe import SparseMoE
from tllm_spec.models.moe_config import MoENames, moe_config, sparse_layers
from tllm_spec.models.rotary import cos_sin_table, head_order
from tllm_spec.models.token_map import DraftTokens, reduced_output

_COMMON = COMMON_DEFAULTS
_MISTRAL = _COMMON | {
    "eos_token_id": 2,
    "max_position_embeddings": 131072,
    "num_key_value_heads": 8,
    "sliding_window": 4096,
}
_MIXTRAL = _COMMON | {
    "eos_token_id": 2,
    "max_position_embeddings": 131072,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e6,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
}
MIXTRAL_NAMES = MoENames("block_sparse_moe", gate="w1", up="w3", down="w2")
_QWEN2 = _COMMON | {"max_position_embeddings": 32768, "num_key_value_heads": 32}
_QWEN2_MOE = _COMMON | {
    "max_position_embeddings": 32768,
    "num_key_value_heads": 16,
    "intermediate_size": 5632,
    "num_experts": 60,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 1408,
    "shared_expert_intermediate_size": 5632,
}
_QWEN3_MOE = _COMMON | {
    "max_position_embeddings": 32768,
    "num_key_value_heads": 4,
    "intermediate_size": 6144,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
}


def read_llama(raw: dict[str, Any]) -> ModelConfig:
    flat = with_defaults(raw, _COMMON | {"eos_token_id": 2, "max_position_embeddings": 2048})
    return replace(decoder_config(flat, reads_bias=True), mlp_bias=bool(flat.get("mlp_bias")))


def read_mistral(raw: dict[str, Any]) -> ModelConfig:
    return decoder_config(with_defaults(raw, _MISTRAL), always_slides=True)


def read_mixtral(raw: dict[str, Any]) -> ModelConfig:
    """An expert has the size that a dense layer would have."""
    flat = with_defaults(raw, _MIXTRAL)
    flat |= {"moe_intermediate_size": flat.get("intermediate_size"), "norm_topk_prob": True}
    config = decoder_config(flat, always_slides=True)
    moe = replace(moe_config(flat), names=MIXTRAL_NAMES)
    return replace(config, moe=moe, sparse_layers=sparse_layers(flat))


def read_qwen2(raw: dict[str, Any]) -> ModelConfig:
    return replace(decoder_config(with_defaults(raw, _QWEN2)), qkv_bias=True)


def read_qwen2_moe(raw: dict[str, Any]) -> ModelConfig:
    """Without types of layers every second one of the first `max_window_layers` has the window."""
    flat = with_defaults(raw, _QWEN2_MOE)
    if flat.get("use_sliding_window") and not flat.get("layer_types"):
        number = flat.get("max_window_layers")
        windows = range(0, 28 if number is None else number, 2)
        layers = range(flat["num_hidden_layers"])
        flat["layer_types"] = [SLIDING if layer in windows else FULL for layer in layers]
    size = int(flat["shared_expert_intermediate_size"])
    return replace(
        decoder_config(flat),
        qkv_bias=bool(flat.get("qkv_bias", True)),
        moe=replace(moe_config(flat), shared_intermediate_size=size, shared_gate=True),
        sparse_layers=sparse_layers(flat),
    )


def read_qwen3(raw: dict[str, Any]) -> ModelConfig:
    flat = with_defaults(raw, _QWEN2 | {"head_dim": 128})
    return replace(decoder_config(flat, reads_bias=True), qk_norm=True)


def read_qwen3_moe(raw: dict[str, Any]) -> ModelConfig:
    """Without types of layers all or none have the window."""
    flat = with_defaults(raw, _QWEN3_MOE) | {"max_window_layers": 0}
    config = replace(decoder_config(flat, reads_bias=True), qk_norm=True)
    return replace(config, moe=moe_config(flat), sparse_layers=sparse_layers(flat))


class Attention(Module):
    """q/k/v projection, optional q/k norm, rotary embedding and attention. The layer applies the
    output projection, since it adds to the residual stream. `input_size`: the hidden size unless
    given."""

    head_norm: type[HeadNorm] = HeadNorm
    qk_norm: HeadNorm | None
    sinks: nn.Parameter | None
    """`[Hq]` float32 of this rank's attention sinks (kernels/attention/attention_sinks.py)."""
    query_outputs = 1
    """Outputs of `q_proj` for each element of the queries."""
    projections: tuple[str, ...] = ("q_proj", "k_proj", "v_proj")
    """Those that the checkpoint has."""

    def __init__(
        self, config: ModelConfig, layer: int, placement: Placement, input_size: int | None = None
    ) -> None:
        super().__init__()
        groups, mapping = config.layer_groups(placement.mapping), placement.mapping
        self.group, self.layer = place_of(config.kv_layer(layer), groups)
        geometry = groups[self.group].geometry
        assert isinstance(geometry, AttentionGeometry)
        config = config.of_layer(layer)
        self.num_heads, self.num_kv_heads = geometry.num_heads, geometry.num_kv_heads
        self.head_dim, self.mapping = config.head_dim, mapping
        q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        copies = max(mapping.tp_size // config.num_kv_heads, 1)  # ranks with the same head
        order = head_order(config.rope, config.head_dim)
        sizes = {"q_proj": q_size * self.query_outputs, "k_proj": kv_size, "v_proj": kv_size}
        self.qkv_proj = ColumnLinear(
            input_size or config.hidden_size,
            {name: sizes[name] for name in self.projections},
            bias=config.qkv_bias,
            placement=placement,
            copies={"k_proj": copies, "v_proj": copies},
            orders=self._row_orders(order),
            is_fused=config.is_fused,
        )
        self.qk_norm = None
        if config.qk_norm:
            num_keys = self.num_kv_heads if "k_proj" in self.projections else 0
            heads = self.num_heads, num_keys, config.head_dim
            is_offset, eps = config.offset_norms, config.rms_norm_eps
            kind = AllHeadsNorm if config.norms_all_heads else self.head_norm
            self.qk_norm = kind(
                *heads, eps, placement, is_offset=is_offset, order=order, kv_copies=copies
            )
        self.sinks = None
        if config.has_sinks:
            self.sinks = replace(placement, dtype=torch.float32).parameter(self.num_heads)
        self.o_proj = RowLinear(q_size, config.hidden_size, bias=config.o_bias, placement=placement)

    def _row_orders(self, order: torch.Tensor | None) -> dict[str, torch.Tensor]:
        """The checkpoint's rows in the order of this rank's, where they differ. order: of a head's
        elements, `[D]`."""
        if order is None:
            return {}
        heads = {"q_proj": self.num_heads, "k_proj": self.num_kv_heads}
        return {name: _rows(number, order) for name, number in heads.items()}

    def forward(
        self, hidden: torch.Tensor, norm: RMSNorm | None, rotary: Rotary, context: ForwardContext
    ) -> torch.Tensor:
        """The input of `o_proj`, `[T, Hq * D]`, for hidden `[T, input_size]`. `norm` is applied to
        hidden first."""
        backend, plan = context.groups[self.group]
        return backend.run(self.layer, self._inputs(hidden, norm), rotary, plan)

    def write(
        self, hidden: torch.Tensor, norm: RMSNorm | None, rotary: Rotary, context: ForwardContext
    ) -> None:
        """The same, but only keys and values are computed and written."""
        backend, plan = context.groups[self.group]
        backend.write(self.layer, self._inputs(hidden, norm), rotary, plan)

    def _inputs(self, hidden: torch.Tensor, norm: RMSNorm | None) -> HeadsInputs:
        """q, k and v, and the norm of heads that is left to do."""
        qkv = self.qkv_proj.forward(hidden, norm)
        heads = qkv.view(-1, qkv.shape[1] // self.head_dim, self.head_dim)
        own = (heads, None) if self.qk_norm is None else self.qk_norm.normed(heads)
        return HeadsInputs(*own, self.sinks)

    def slots(self, path: str) -> Iterator[tuple[str, WeightSlot]]:
        if self.sinks is not None:
            full, first = (
                self.num_heads * self.mapping.tp_size,
                self.num_heads * self.mapping.tp_rank,
            )
            yield f"{path}.sinks", WeightSlot(self.sinks, (full,), 0, first)


def layer_norm(config: ModelConfig, placement: Placement) -> RMSNorm:
    """A norm of the residual stream."""
    is_offset = config.offset_norms
    return RMSNorm(config.hidden_size, config.rms_norm_eps, placement, is_offset=is_offset)


def _rows(num_heads: int, order: torch.Tensor) -> torch.Tensor:
    """Rows of so many heads, each in the order `[D]`."""
    return torch.arange(num_heads * len(order)).view(num_heads, -1)[:, order].flatten()


class MLP(Module):
    """SwiGLU, or GeGLU."""

    def __init__(self, config: ModelConfig, placement: Placement) -> None:
        super().__init__()
        hidden, inner, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        self.gate_up_proj = ColumnLinear(
            hidden,
            {"gate_proj": inner, "up_proj": inner},
            bias=bias,
            placement=placement,
            is_fused=config.is_fused,
        )
        self.down_proj = RowLinear(inner, hidden, bias=bias, placement=placement)
        is_gelu = config.hidden_act == "gelu_pytorch_tanh"
        self.gates = {"activation": config.hidden_act} if is_gelu else {}

    def forward(self, hidden: torch.Tensor, norm: RMSNorm | None) -> torch.Tensor:
        """The output for `norm(hidden)`, `[T, H]`."""
        return self.down_proj.summed(self.gate_up_proj.gated(hidden, norm, **self.gates))

    def add_to(self, hidden: torch.Tensor, norm: RMSNorm) -> None:
        """Add the output for `norm(hidden)` to hidden `[T, H]` in place; SwiGLU only."""
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

    attention: Callable[[ModelConfig, int, Placement], SelfAttention] = Attention
    """The class of the layer's attention."""
    input_layernorm: RMSNorm | None
    self_attn: SelfAttention
    mlp: MLP | SparseMoE

    def __init__(self, config: ModelConfig, layer: int, placement: Placement) -> None:
        super().__init__()
        self.input_layernorm = layer_norm(config, placement)
        self.add_attention(config, layer, placement)
        self.post_attention_layernorm = layer_norm(config, placement)
        if config.moe is None or layer not in config.sparse_layers:
            mlp: MLP | SparseMoE = MLP(config.of_layer(layer), placement)
        else:
            mlp = SparseMoE(config.moe, placement)
        self.add_under("mlp" if config.moe is None else config.moe.names.layer, "mlp", mlp)

    def add_attention(self, config: ModelConfig, layer: int, placement: Placement) -> None:
        self.self_attn = type(self).attention(config, layer, placement)

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


class DecoderModel(Module):
    """Embedding, layers and final norm."""

    def __init__(
        self,
        config: ModelConfig,
        max_positions: int,
        placement: Placement,
        layer_type: type[DecoderLayer],
    ) -> None:
        super().__init__()
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size, placement)
        self.layers = nn.ModuleList(
            layer_type(config, layer, placement) for layer in range(config.num_layers)
        )
        self.norm = layer_norm(config, placement)
        self.add_tables(config, max_positions, placement)

    def add_tables(self, config: ModelConfig, max_positions: int, placement: Placement) -> None:
        """What `rotary` and `embed` read."""
        self.cos_sin = cos_sin_table(config.rope, config.rope_dim, max_positions, placement)

    def rotary(self, positions: torch.Tensor) -> Rotary:
        """The rotary embedding of one forward's rows."""
        return Rotary(self.cos_sin, positions)

    def embed(self, input_ids: torch.Tensor) -> torch.Tensor:
        """The residual stream before the first layer, `[T, H]`."""
        return self.embed_tokens.forward(input_ids)

    def begin(
        self, input_ids: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, Rotary]:
        """What the first layer gets: the residual stream, `[T, H]`, and the rotary embedding."""
        return self.embed(input_ids), self.rotary(positions)

    def forward(
        self, input_ids: torch.Tensor, positions: torch.Tensor, context: ForwardContext
    ) -> torch.Tensor:
        hidden, rotary = self.begin(input_ids, positions)
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


class CausalLM(Module):
    """The decoder with its output layer, which may share the embedding's weight: what the engine
    knows of a model. Parameters have no gradient; the caller sets `torch.inference_mode()`."""

    model_type: type[DecoderModel] = DecoderModel
    layer_type: type[DecoderLayer] = DecoderLayer
    nextn_names: tuple[str, ...] = ("enorm", "hnorm", "eh_proj", "shared_head.norm", "")
    """Below `nextn_prefix`: of the embedding's norm, the hidden state's, the projection of both,
    the norm before the output layer, and the decoder layer; "": its parts have no common name."""
    nextn_hides_first: bool = False
    """Whether such a layer reads zeros in place of the embedding at position 0."""
    draft_to_target: torch.Tensor | None = None
    """`[V_draft]` int64: of a draft model, the target's ids of its logits; None: they are equal."""
    read_as: torch.Tensor | None = None
    """`[V + 1]` int64: of a draft model, its own ids of the target's and of its mask token; None:
    they are equal."""

    def __init__(self, config: ModelConfig, max_positions: int, placement: Placement) -> None:
        super().__init__()
        self.config = config
        self.model = self.model_type(config, max_positions, placement, self.layer_type)
        tied = self.model.embed_tokens.weight if config.tie_word_embeddings else None
        self.lm_head = OutputLinear(
            config.hidden_size, config.vocab_size, placement=placement, tied=tied
        )
        self.suppressed = self._own_columns(config.suppressed_tokens)

    def _own_columns(self, tokens: tuple[int, ...]) -> torch.Tensor | None:
        """This rank's logits of the tokens, int64; None: it has none."""
        shard = self.lm_head.shard
        first, size = (0, self.config.vocab_size) if shard is None else (shard.first, shard.size)
        own = [token - first for token in tokens if first <= token < first + size]
        return torch.tensor(own, device=self.device) if own else None

    @classmethod
    def check_weights(cls, config: ModelConfig) -> None:
        """Raises ValueError for quantised weights that the architecture is not served with."""
        outputs_first = config.moe is None or config.moe.names.inputs_first is False
        if not outputs_first and not config.quantisation.is_plain:
            raise ValueError(
                f"{config.architecture} has quantised weights; it is served with weights of 16 or "
                "32 bits."
            )
        if config.quantisation.packing == "mxfp4_experts":
            raise ValueError(
                f"{config.architecture} has quant_method 'mxfp4', which is served for "
                "GptOssForCausalLM."
            )

    @property
    def num_logits(self) -> int:
        """Logits of one row, on all ranks together."""
        ids = self.draft_to_target
        return self.config.vocab_size if ids is None else len(ids)

    def keep_tokens(self, tokens: DraftTokens, placement: Placement) -> None:
        """Limits the logits to those of `tokens`."""
        self.lm_head = reduced_output(self.lm_head, tokens.rows, placement)
        self.draft_to_target, self.suppressed = tokens.ids.to(self.device), None
        if tokens.read_as is not None:
            self.read_as = tokens.read_as.to(self.device)

    @property
    def dtype(self) -> torch.dtype:
        """The type of parameters and activations."""
        return next(self.parameters()).dtype

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    def forward(
        self, input_ids: torch.Tensor, positions: torch.Tensor, context: ForwardContext
    ) -> torch.Tensor:
        """Tokens `[T]` at positions `[T]` to hidden states after the final norm, `[T, H]`, or `[R,
        H]` of the rows that the context wants."""
        return self.model.forward(input_ids, positions, context)

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """`[R, H]` to `[R, vocab_size]`, in the model's dtype; the sampler converts to float32.
        Where the output layer is sharded, to this rank's columns, `lm_head.shard`."""
        logits, softcap = self.lm_head.forward(hidden), self.config.softcap
        if softcap is not None:
            soft_cap(logits, softcap)
        if self.suppressed is not None:
            logits.index_fill_(1, self.suppressed, -torch.inf)
        return logits

    @staticmethod
    def nextn_prefix(number: int) -> str:
        """What the names begin with of the checkpoint's tensors of a module that predicts a further
        token (mtp.py loads it). number: counted from the decoder's first layer."""
        return f"model.layers.{number}."

    def ignores(self, name: str) -> bool:
        """Whether a checkpoint may have the tensor `name` although no parameter takes it: those of
        images and of further predictions, and the rotary frequencies and a copy of a tied output
        layer, which old checkpoints store."""
        is_tied, part = self.config.tie_word_embeddings, self.config.text_part
        is_tied_output = is_tied and part.parameter_name(name) == OUTPUT
        is_unused = part.is_of_images(name) or name.endswith("rotary_emb.inv_freq")
        first, number = self.config.num_layers, self.config.num_nextn_layers
        nextn = tuple(
            self.nextn_prefix(layer) + (f"{each}." if each and self.nextn_names[-1] else "")
            for layer in range(first, first + number)
            for each in self.nextn_names
        )
        return is_tied_output or is_unused or name.startswith(nextn)

    @classmethod
    def stored_tensors(
        cls, path: Path, config: ModelConfig, wants: Callable[[str], bool]
    ) -> Iterator[tuple[str, torch.Tensor | StoredWeight]]:
        """See `formats.quantised_tensors.stored_tensors`."""
        return stored_tensors(path, config, wants)
