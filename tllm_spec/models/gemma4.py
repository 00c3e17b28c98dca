"""Gemma 4's text model: Gemma 3 with wider heads in the layers that see all keys, a norm of values,
a factor of each layer's output, and in some sizes keys that are values, an embedding of each layer,
layers without keys of their own, or experts next to the MLP."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from tllm_spec.attention.interface import ForwardContext
from tllm_spec.kernels.attention.rotary_write import HeadWeights, Rotary
from tllm_spec.kernels.experts.routing import moe_combine
from tllm_spec.kernels.gemm.norms import NormWeight, add_norm
from tllm_spec.kernels.slots.row_copies import gather_rows
from tllm_spec.models.config import FULL, SLIDING, Gemma4Parts, ModelConfig, decoder_config
from tllm_spec.models.config_file import required, with_defaults
from tllm_spec.models.gemma3 import ACTIVATION, Gemma3Layer, Gemma3Model, Gemma3Rotary
from tllm_spec.models.layers import (
    Embedding,
    HeadNorm,
    Module,
    Placement,
    RMSNorm,
    WeightSlot,
    in_float32,
)
from tllm_spec.models.linear import Linear
from tllm_spec.models.llama import Attention, CausalLM, DecoderLayer, layer_norm
from tllm_spec.models.moe import Experts, Router
from tllm_spec.models.moe_config import MoEConfig, moe_config
from tllm_spec.models.rotary import PROPORTIONAL, RopeConfig, rope_config

_DEFAULTS: dict[str, Any] = {
    "vocab_size": 262144,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 30,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "global_head_dim": 512,
    "hidden_activation": ACTIVATION,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-6,
    "eos_token_id": 1,
    "tie_word_embeddings": True,
    "sliding_window": 512,
    "vocab_size_per_layer_input": 262144,
    "hidden_size_per_layer_input": 256,
    "num_kv_shared_layers": 0,
}
_UNIFIED: dict[str, Any] = {
    "max_position_embeddings": 262144,
    "sliding_window": 1024,
    "hidden_size_per_layer_input": 0,
}
_ROPES: dict[str, dict[str, Any]] = {
    SLIDING: {"rope_theta": 1e4},
    FULL: {"rope_type": PROPORTIONAL, "partial_rotary_factor": 0.25, "rope_theta": 1e6},
}


def read_gemma4_unified(raw: dict[str, Any]) -> ModelConfig:
    return read_gemma4(with_defaults(raw, _UNIFIED))


def read_gemma4(raw: dict[str, Any]) -> ModelConfig:
    """Raises ValueError for what is not served."""
    flat = with_defaults(raw, _DEFAULTS)
    if (activation := flat["hidden_activation"]) != ACTIVATION:
        raise ValueError(f"hidden_activation is {activation!r}; only {ACTIVATION!r} is served.")
    if (direction := flat.get("use_bidirectional_attention")) not in (None, False, "vision"):
        raise ValueError(
            f"use_bidirectional_attention is {direction!r}; a text is served in one direction."
        )
    layers = range(required(flat, "num_hidden_layers"))
    types = list(flat.get("layer_types") or ())
    types = types or [SLIDING if (layer + 1) % 6 else FULL for layer in layers]
    types[-1] = FULL  # as transformers
    flat |= {"layer_types": types, "hidden_act": "silu", "use_sliding_window": None}
    config = decoder_config(flat, rope=_rope(flat, FULL), reads_bias=True)
    return replace(
        config,
        hidden_act=activation,
        qk_norm=True,
        query_scale=1.0,
        local_layers=frozenset(layer for layer in layers if types[layer] == SLIDING),
        local_rope=_rope(flat, SLIDING),
        gemma4=_parts(flat, types),
        softcap=flat.get("final_logit_softcapping") or None,
        moe=_experts(flat) if flat.get("enable_moe_block") else None,
    )


def _rope(flat: dict[str, Any], kind: str) -> RopeConfig:
    """The rotary embedding of a kind of layers."""
    given = flat.get("rope_parameters") or _ROPES
    fields = dict(given.get(kind) or _ROPES[kind])
    is_proportional = fields.get("rope_type") == PROPORTIONAL
    if is_proportional:
        fields["rope_type"] = "default"
    share = float(fields.pop("partial_rotary_factor", None) or 1.0)
    rope = rope_config(flat | {"rope_parameters": fields, "partial_rotary_factor": None})
    if is_proportional:
        return replace(rope, kind=PROPORTIONAL, partial_factor=share)
    if share != 1:
        raise ValueError(f"partial_rotary_factor is {share}; it is served if 'proportional'.")
    return rope


def _parts(flat: dict[str, Any], types: list[str]) -> Gemma4Parts:
    """Raises ValueError for shapes that are not served."""
    keys_are_values, num_kv_heads = bool(flat.get("attention_k_eq_v")), flat["num_key_value_heads"]
    heads = {"head_dim": flat["global_head_dim"], "num_key_value_heads": num_kv_heads}
    if keys_are_values and flat.get("num_global_key_value_heads"):
        heads["num_key_value_heads"] = flat["num_global_key_value_heads"]
    if (of_layers := flat.get("per_layer_config")) is not None:  # as transformers 5.24 writes it
        full = {layer for layer, kind in enumerate(types) if kind == FULL}
        found = [*of_layers.values()]
        if {*map(int, of_layers)} != full or any(each != found[0] for each in found):
            raise ValueError(
                "per_layer_config is served where all layers of full_attention, and no others, "
                "have the same heads."
            )
        heads |= found[0]
    shared, size = flat["num_kv_shared_layers"], flat["hidden_size_per_layer_input"]
    if shared and set(types[: len(types) - shared]) != set(types):
        raise ValueError(
            f"num_kv_shared_layers is {shared} of {len(types)} layers; a layer of each kind must "
            "have keys of its own."
        )
    if size and (rows := flat["vocab_size_per_layer_input"]) != flat["vocab_size"]:
        raise ValueError(
            f"vocab_size_per_layer_input is {rows}; it must be vocab_size, {flat['vocab_size']}."
        )
    for key, number in heads.items():
        if type(number) is not int or number < 1 or (key == "head_dim" and number % 2):
            raise ValueError(f"{key} of layers of full_attention is {number!r}.")
    if flat["num_attention_heads"] % heads["num_key_value_heads"]:
        raise ValueError("num_global_key_value_heads must divide num_attention_heads.")
    return Gemma4Parts(
        global_head_dim=heads["head_dim"],
        num_global_kv_heads=heads["num_key_value_heads"],
        keys_are_values=keys_are_values,
        num_shared_layers=shared,
        is_double_wide=bool(flat.get("use_double_wide_mlp")),
        per_layer_size=size,
    )


def _experts(flat: dict[str, Any]) -> MoEConfig:
    own = {"num_experts_per_tok": required(flat, "top_k_experts"), "norm_topk_prob": True}
    for key in ("moe_intermediate_size", "num_experts"):
        required(flat, key)
    return replace(moe_config(flat | own), activation=ACTIVATION)


@dataclass(frozen=True, kw_only=True)
class Gemma4Rotary(Gemma3Rotary):
    """And what each layer adds of the tokens themselves."""

    per_layer: torch.Tensor | None
    """`[T, L, P]`; None: the model has no embeddings of layers."""


class Gemma4HeadNorm(HeadNorm):
    """Where the projection has no values, they are its keys."""

    norms_values = True

    def normed(self, heads: torch.Tensor) -> tuple[torch.Tensor, HeadWeights | None]:
        """heads: q, k and, unless they are the keys, v."""
        if heads.shape[1] == len(self.weight):
            heads = torch.cat((heads, heads[:, self.num_heads :]), 1)
        return heads, self.head_weights


class Gemma4Attention(Attention):
    head_norm = Gemma4HeadNorm


class KeysAsValues(Attention):
    head_norm = Gemma4HeadNorm
    projections = ("q_proj", "k_proj")


class SharedKeys(Attention):
    """Attention to the keys and values of another layer."""

    projections = ("q_proj",)

    def write(
        self, hidden: torch.Tensor, norm: RMSNorm | None, rotary: Rotary, context: ForwardContext
    ) -> None:
        """There is nothing to write."""


def _attention(config: ModelConfig, layer: int, placement: Placement) -> Attention:
    assert config.gemma4 is not None
    if config.kv_layer(layer) != layer:
        return SharedKeys(config, layer, placement)
    if config.gemma4.keys_are_values and layer not in config.local_layers:
        return KeysAsValues(config, layer, placement)
    return Gemma4Attention(config, layer, placement)


class Gemma4Router(Module):
    """Softmax of all experts, of which the best are taken; each has one more factor. `scale`: the
    checkpoint's divided by the root of the hidden size, as transformers computes."""

    def __init__(self, config: MoEConfig, eps: float, placement: Placement) -> None:
        super().__init__()
        self.rule = config.routing
        self.scale = in_float32(placement).parameter(config.hidden_size)
        self.norm = NormWeight(self.scale, eps)
        self.per_expert_scale = placement.parameter(config.num_experts)
        self.proj = Router(config, placement)

    def slots(self, path: str) -> Iterator[tuple[str, WeightSlot]]:
        for name, slot in super().slots(path):
            is_scale = name.endswith("router.scale")
            yield name, replace(slot, factor=len(self.scale) ** -0.5) if is_scale else slot


class Gemma4Layer(Gemma3Layer):
    """Experts, if there are any, get the residual stream, as the MLP does."""

    attention = staticmethod(_attention)

    def __init__(self, config: ModelConfig, layer: int, placement: Placement) -> None:
        super().__init__(config, layer, placement)
        assert config.gemma4 is not None
        self.number, self.communicator = layer, placement.communicator
        self.layer_scalar = placement.parameter(1)
        self.router: Gemma4Router | None = None
        if config.moe is not None:
            self.router = Gemma4Router(config.moe, config.rms_norm_eps, placement)
            self.experts = Experts(config.moe, placement)
            self.post_feedforward_layernorm_1 = layer_norm(config, placement)
            self.post_feedforward_layernorm_2 = layer_norm(config, placement)
            self.pre_feedforward_layernorm_2 = layer_norm(config, placement)
        self.has_own_input = config.gemma4.per_layer_size > 0
        if size := config.gemma4.per_layer_size:
            sizes = config.hidden_size, size
            self.per_layer_input_gate = Linear(*sizes, bias=False, placement=placement)
            self.per_layer_projection = Linear(*sizes[::-1], bias=False, placement=placement)
            self.post_per_layer_input_norm = layer_norm(config, placement)

    def forward(
        self,
        hidden: torch.Tensor,
        rotary: Rotary,
        context: ForwardContext,
        wanted: torch.Tensor | None = None,
    ) -> torch.Tensor:
        assert isinstance(rotary, Gemma4Rotary)
        hidden = super().forward(hidden, rotary, context, wanted)
        if rotary.per_layer is not None and len(hidden):
            own = rotary.per_layer[:, self.number]
            own = own if wanted is None else gather_rows(own, wanted)
            gated = self.per_layer_input_gate.gated(hidden, activation=ACTIVATION, ups=own)
            added = self.per_layer_projection.forward(gated)
            self.post_per_layer_input_norm.add_to(hidden, added, factor=self.layer_scalar)
        return hidden

    def add_branches(self, hidden: torch.Tensor, attended: torch.Tensor) -> None:
        added = self.mlp.forward(self._attended(hidden, attended), None)
        factor = None if self.has_own_input else self.layer_scalar
        if self.router is None:
            self.post_feedforward_layernorm.add_to(hidden, added, factor=factor)
            return
        routed, own = self._routed(hidden, self.router), self.post_feedforward_layernorm_2
        parallel = routed, own.kernel_weight, self.post_feedforward_layernorm.kernel_weight
        first = self.post_feedforward_layernorm_1.kernel_weight
        add_norm(hidden, added, first, factor=factor, parallel=parallel)

    def _routed(self, hidden: torch.Tensor, router: Gemma4Router) -> torch.Tensor:
        """What the experts put out, summed over all ranks."""
        own = self.pre_feedforward_layernorm_2, self.experts, router.norm, router.per_expert_scale
        routed = router.proj.tokens(hidden, *own)
        parts = self.experts.forward(routed.x, routed.rows)
        here = self.experts.own(routed.rows.experts)
        total = moe_combine(parts, routed.weights, router.rule.num_taken, None, here)
        if self.communicator.mapping.tp_size > 1:
            self.communicator.all_reduce(total)
        return total


class Gemma4Model(Gemma3Model):
    """The decoder, with the embeddings of layers."""

    def __init__(
        self,
        config: ModelConfig,
        max_positions: int,
        placement: Placement,
        layer_type: type[DecoderLayer],
    ) -> None:
        super().__init__(config, max_positions, placement, layer_type)
        assert config.gemma4 is not None
        self.per_layer_size = size = config.gemma4.per_layer_size
        if size:
            width = config.num_layers * size
            self.embed_tokens_per_layer = Embedding(config.vocab_size, width, placement)
            self.per_layer_model_projection = Linear(
                config.hidden_size, width, bias=False, placement=placement
            )
            # The projection is divided by the root of the hidden size: its norm without the
            # division has a larger eps.
            eps = config.rms_norm_eps * config.hidden_size
            self.per_layer_projection_norm = RMSNorm(size, eps, placement)
            self.half_root = torch.full((1,), 2**-0.5, device=placement.memory)

    def begin(
        self, input_ids: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, Gemma4Rotary]:
        hidden, rotary = self.embed(input_ids), self.rotary(positions)
        per_layer = self._per_layer(input_ids, hidden) if self.per_layer_size else None
        own = Gemma4Rotary(self.cos_sin, positions, local=rotary.local, per_layer=per_layer)
        return hidden, own

    def _per_layer(self, input_ids: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """`[T, L, P]` of tokens `[T]` with embeddings `[T, H]`."""
        size = self.per_layer_size
        projected = self.per_layer_model_projection.forward(hidden).view(-1, size)
        own = self.embed_tokens_per_layer.forward(input_ids).view(-1, size).mul_(size**0.5)
        self.per_layer_projection_norm.add_to(own, projected, factor=self.half_root)
        return own.view(len(input_ids), -1, size)


class Gemma4ForCausalLM(CausalLM):
    model_type = Gemma4Model
    layer_type = Gemma4Layer

    def ignores(self, name: str) -> bool:
        """Some checkpoints have the keys and values of layers that read others'."""
        config, part = self.config, self.config.text_part
        shared = (
            f"model.layers.{layer}.self_attn.{each}"
            for layer in range(config.num_layers)
            if config.kv_layer(layer) != layer
            for each in ("k_proj.", "v_proj.", "k_norm.")
        )
        return super().ignores(name) or part.parameter_name(name).startswith(tuple(shared))
