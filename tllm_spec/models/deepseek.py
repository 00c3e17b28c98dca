"""DeepSeek V2, V3 (R1 and Kimi K2 have V3's architecture) and V3.2: latent attention, dense first
layers, then experts; GLM-5, which has V3.2's attention; and GLM-4.5, which has the same experts.

Module paths are the checkpoint's names, with the projections of the hidden state fused."""

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch

from tllm_spec.attention.indexed import chosen_keys
from tllm_spec.attention.interface import ForwardContext
from tllm_spec.attention.latent import LatentInputs, UpAdapters
from tllm_spec.config.option_checks import shown
from tllm_spec.kernels.attention.latent_write import LatentNorm
from tllm_spec.kernels.attention.rotary_write import Rotary
from tllm_spec.models.config import COMMON_DEFAULTS, ModelConfig, decoder_config
from tllm_spec.models.config_file import required, with_defaults
from tllm_spec.models.indexer import Indexer
from tllm_spec.models.layers import Module, Placement, RMSNorm, StoredWeight, WeightSlot
from tllm_spec.models.linear import ColumnLinear, RowLinear
from tllm_spec.models.llama import CausalLM, DecoderLayer
from tllm_spec.models.mla_config import IndexConfig, MLAConfig, read_indexer
from tllm_spec.models.moe_config import MoEConfig, MoENames, moe_config
from tllm_spec.models.rotary import rope_config

# The defaults of each architecture's configuration class in transformers.
_COMMON = COMMON_DEFAULTS | {
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}
_V3: dict[str, Any] = _COMMON | {
    "max_position_embeddings": 4096,
    "eos_token_id": 1,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 2048,
    "first_k_dense_replace": 3,
    "routed_scaling_factor": 2.5,
    "topk_method": "noaux_tc",
    "n_group": 8,
    "topk_group": 4,
    "norm_topk_prob": True,
    "rope_interleave": True,
}
DEEPSEEK_V32, GLM_5 = "DeepseekV32ForCausalLM", "GlmMoeDsaForCausalLM"
INDEXED = {"indexed_attention", "deepseek_sparse_attention"}  # as releases of transformers name it
_DEFAULTS: dict[str, dict[str, Any]] = {
    "DeepseekV2ForCausalLM": _COMMON
    | {
        "max_position_embeddings": 2048,
        "eos_token_id": 2,
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "moe_intermediate_size": 1407,
        "first_k_dense_replace": 0,
        "routed_scaling_factor": 1.0,
        "topk_method": "greedy",
    },
    "DeepseekV3ForCausalLM": _V3,
    DEEPSEEK_V32: _V3
    | {
        "max_position_embeddings": 163840,
        "index_topk": 2048,
        "index_head_dim": 128,
        "index_n_heads": 64,
    },
    GLM_5: _V3
    | {
        "vocab_size": 154880,
        "hidden_size": 6144,
        "intermediate_size": 12288,
        "num_hidden_layers": 78,
        "num_attention_heads": 64,
        "q_lora_rank": 2048,
        "qk_nope_head_dim": 192,
        "v_head_dim": 256,
        "n_group": 1,
        "topk_group": 1,
        "max_position_embeddings": 202752,
        "rms_norm_eps": 1e-5,
        "index_topk": 2048,
        "index_head_dim": 128,
        "index_n_heads": 32,
        "indexer_rope_interleave": True,
    },
}
_GLM: dict[str, Any] = COMMON_DEFAULTS | {
    "vocab_size": 151552,
    "hidden_size": 4096,
    "intermediate_size": 10944,
    "num_hidden_layers": 46,
    "num_attention_heads": 96,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "partial_rotary_factor": 0.5,
    "moe_intermediate_size": 1408,
    "num_experts_per_tok": 8,
    "n_shared_experts": 1,
    "n_routed_experts": 128,
    "routed_scaling_factor": 1.0,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "norm_topk_prob": True,
    "use_qk_norm": False,
}
DEEPSEEK_NAMES = MoENames(shared="shared_experts")
_LATENT = "kv_a_proj_with_mqa"


def read_deepseek(raw: dict[str, Any]) -> ModelConfig:
    """Raises ValueError for biases, and for what else is not served."""
    name = raw["architectures"][0]
    flat = with_defaults(raw, _DEFAULTS[name])
    if name not in (DEEPSEEK_V32, GLM_5):
        return read_latent(flat)
    flat = _without_layer_types(flat)
    return read_latent(flat, read_indexer(flat))


def read_latent(flat: dict[str, Any], indexer: IndexConfig | None = None) -> ModelConfig:
    """`flat` has the defaults filled in. Raises as `read_deepseek`."""
    if flat.get("attention_bias"):
        raise ValueError("attention_bias is true; DeepSeek models are served without biases.")
    rank, nope, rope = flat["q_lora_rank"], flat["qk_nope_head_dim"], flat["qk_rope_head_dim"]
    mla = MLAConfig(
        q_lora_rank=None if rank is None else int(rank),
        kv_lora_rank=int(flat["kv_lora_rank"]),
        nope_dim=int(nope),
        rope_dim=int(rope),
        value_dim=int(flat["v_head_dim"]),
        is_interleaved=bool(flat.get("rope_interleave", True)),
        scale=(nope + rope) ** -0.5 * _yarn_scale(flat),
        indexer=indexer,
    )
    return replace(_with_experts(decoder_config(flat), flat), mla=mla)


def read_glm4_moe(raw: dict[str, Any]) -> ModelConfig:
    """GLM-4.5 and GLM-4.6: attention that rotates half of a head's elements, and DeepSeek V3's
    experts."""
    flat = with_defaults(raw, _GLM) | {"topk_method": "noaux_tc"}
    config = decoder_config(flat, rope=rope_config(flat, may_be_partial=True))
    bias, qk_norm = bool(flat.get("attention_bias")), bool(flat["use_qk_norm"])
    return replace(_with_experts(config, flat), qkv_bias=bias, qk_norm=qk_norm)


def _with_experts(config: ModelConfig, flat: dict[str, Any]) -> ModelConfig:
    """With dense first layers, then experts, and layers that predict further tokens (MTP). A key of
    these that is absent means none, as in published checkpoints."""
    step = int(flat.get("moe_layer_freq") or 1)
    layers = range(int(flat["first_k_dense_replace"]), config.num_layers)
    return replace(
        config,
        moe=_moe_config(flat),
        sparse_layers=frozenset(layer for layer in layers if layer % step == 0),
        num_nextn_layers=int(flat.get("num_nextn_predict_layers") or 0),
    )


def _without_layer_types(flat: dict[str, Any]) -> dict[str, Any]:
    """Without the types of layers, which transformers writes. Raises ValueError for types of MLPs
    that do not follow from `first_k_dense_replace`."""
    dense, number = flat["first_k_dense_replace"], required(flat, "num_hidden_layers")
    expected = ["dense" if layer < dense else "sparse" for layer in range(number)]
    if flat.get("mlp_layer_types") not in (None, expected):
        raise ValueError(
            f"mlp_layer_types is {shown(flat['mlp_layer_types'])}; served is 'dense' for the first "
            f"first_k_dense_replace = {dense} layers and 'sparse' for the others."
        )
    if set(flat.get("layer_types") or ()) - INDEXED:
        raise ValueError(
            f"layer_types is {shown(flat['layer_types'])}; served is 'indexed_attention'."
        )
    return flat | {"layer_types": None}


def _yarn_scale(raw: dict[str, Any]) -> float:
    fields = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    kind, weight = fields.get("rope_type") or fields.get("type"), fields.get("mscale_all_dim")
    factor = fields.get("factor") or 1.0
    if kind in (None, "default") or not weight or factor <= 1:
        return 1.0
    return float((0.1 * weight * math.log(factor) + 1.0) ** 2)


def _moe_config(raw: dict[str, Any]) -> MoEConfig | None:
    """Raises ValueError for a way of routing that is not served."""
    if not raw["n_routed_experts"]:
        return None
    config = moe_config(raw | {"num_local_experts": raw["n_routed_experts"]})
    method, scoring = raw["topk_method"], cast(Any, raw.get("scoring_func"))
    if scoring is None:
        scoring = "sigmoid" if method == "noaux_tc" else "softmax"
    if method not in ("greedy", "group_limited_greedy", "noaux_tc"):
        raise ValueError(
            f"topk_method is {method!r}; served are 'greedy', 'group_limited_greedy' and "
            "'noaux_tc'."
        )
    if scoring not in ("softmax", "sigmoid"):
        raise ValueError(f"scoring_func is {scoring!r}; served are 'softmax' and 'sigmoid'.")
    if method != "noaux_tc" and raw.get("norm_topk_prob"):
        raise ValueError(
            f"norm_topk_prob is true with topk_method {method!r}; served is false, or 'noaux_tc'."
        )
    has_groups = method != "greedy"
    num_groups = int(raw.get("n_group") or 1) if has_groups else 1
    top_groups = int(raw.get("topk_group") or 1) if has_groups else 1
    if raw["n_routed_experts"] % num_groups or top_groups > num_groups:
        raise ValueError(
            f"n_group is {num_groups} and topk_group is {top_groups}; the former must divide "
            f"n_routed_experts, which is {raw['n_routed_experts']}, and be no less than the latter."
        )
    return replace(
        config,
        scoring=scoring,
        routed_scaling_factor=float(raw["routed_scaling_factor"]),
        num_groups=num_groups,
        top_groups=top_groups,
        has_correction_bias=method == "noaux_tc",
        float32_router=True,
        shared_intermediate_size=config.intermediate_size * int(raw.get("n_shared_experts") or 0),
        names=DEEPSEEK_NAMES,
    )


def _rows(num_heads: int, plain: int, rotated: int) -> torch.Tensor:
    """Rows of heads of `plain` elements, then `rotated` ones, which in the checkpoint are pairs of
    neighbours, so that they become the two halves that the kernels rotate. Queries and keys change
    alike, so the scores do not."""
    rows = torch.arange(num_heads * (plain + rotated)).view(num_heads, -1)
    own, pairs = rows.split_with_sizes((plain, rotated), 1)
    return torch.cat((own, pairs[:, ::2], pairs[:, 1::2]), 1).flatten()


class LatentUp(Module):
    """The projections of the latent to this rank's heads' keys and values, `[H * (N + V), R]`,
    row-major: attention reads views of it, and adds what `adapters` do."""

    adapters: UpAdapters | None = None

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

    q_b_proj: ColumnLinear | None
    indexer: Indexer | None

    def __init__(
        self, config: ModelConfig, layer: int, placement: Placement, input_size: int | None = None
    ) -> None:
        super().__init__()
        assert config.mla is not None
        self.layer, mla = layer, config.mla
        input_size = input_size or config.hidden_size
        mapping, total = placement.mapping, config.num_heads
        self.config, self.num_heads = mla, mapping.shard(total, "num_attention_heads")
        self.latent_dim = mla.kv_lora_rank + mla.rope_dim
        queries, latent = total * (mla.nope_dim + mla.rope_dim), _LATENT
        query_rows = _rows(self.num_heads, mla.nope_dim, mla.rope_dim)
        orders = {latent: _rows(1, mla.kv_lora_rank, mla.rope_dim)}
        orders |= {"q_proj": query_rows, "q_b_proj": query_rows}
        orders = orders if mla.is_interleaved else {}
        self.indexer, keys = None, dict[str, int]()
        if config.indexer is not None and layer not in config.indexer.shared_layers:
            self.indexer = Indexer(config, layer, placement)
            keys, orders = self.indexer.fused, orders | self.indexer.orders
        # A rank has the queries of its heads, and all of the latents.
        projection = partial(
            ColumnLinear,
            bias=False,
            placement=placement,
            copies=dict.fromkeys((latent, "q_a_proj", *keys), mapping.tp_size),
            orders=orders,
        )
        if mla.q_lora_rank is None:
            self.a_proj = projection(input_size, {"q_proj": queries, latent: self.latent_dim})
            self.q_b_proj = None
        else:
            parts = {"q_a_proj": mla.q_lora_rank, **keys, latent: self.latent_dim}
            self.a_proj = projection(input_size, parts)
            self.q_a_layernorm = RMSNorm(mla.q_lora_rank, mla.norm_eps, placement)
            self.q_b_proj = projection(mla.q_lora_rank, {"q_b_proj": queries})
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
        if self.indexer is not None and norm is not None:  # which reads the same
            hidden, norm = norm.forward(hidden), None
        q, keys, latent = self._project(hidden, norm)
        if self.indexer is not None:
            self.indexer.forward(hidden, keys, q, self.q_a_layernorm, rotary, context)
        heads, up = self._queries(q, rotary), self.kv_b_proj
        own = heads, latent, self.norm, up.heads
        inputs = LatentInputs(*own, chosen_keys(context), up.adapters)
        backend, plan = context.groups[0]
        return backend.run(self.layer, inputs, rotary, plan)

    def write(
        self, hidden: torch.Tensor, norm: RMSNorm | None, rotary: Rotary, context: ForwardContext
    ) -> None:
        """The same, but only latents and keys are computed and written."""
        if self.indexer is not None and norm is not None:
            hidden, norm = norm.forward(hidden), None
        _, keys, latent = self._project(hidden, norm)
        if self.indexer is not None:
            self.indexer.write(hidden, keys, rotary, context)
        backend, plan = context.groups[0]
        backend.write(self.layer, latent, self.norm, rotary, plan)

    def _queries(self, q: torch.Tensor, rotary: Rotary) -> torch.Tensor:
        """`[T, H, N + P]`, before their rotation, for the first projection's q."""
        if self.q_b_proj is not None:
            q = self.q_b_proj.forward(q, self.q_a_layernorm)
        return q.contiguous().view(len(q), self.num_heads, -1)

    def _project(
        self, hidden: torch.Tensor, norm: RMSNorm | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Latents of queries, or queries; keys of the indexer, where they are fused; and the latent
        with the shared key."""
        projected = self.a_proj.forward(hidden, norm)
        size = 0 if self.indexer is None else sum(self.indexer.fused.values())
        sizes = projected.shape[1] - size - self.latent_dim, size, self.latent_dim
        q, keys, latent = projected.split_with_sizes(sizes, 1)
        return q, keys, latent


class DeepseekLayer(DecoderLayer):
    """A decoder layer with latent attention. `layer`: also its index in the KV pool."""

    attention = LatentAttention


class DeepseekForCausalLM(CausalLM):
    layer_type = DeepseekLayer

    @classmethod
    def stored_tensors(
        cls, path: Path, config: ModelConfig, wants: Callable[[str], bool]
    ) -> Iterator[tuple[str, torch.Tensor | StoredWeight]]:
        """Without indexers that are not needed, or not used."""
        mla = config.mla

        def is_wanted(name: str) -> bool:
            return not (mla is not None and mla.leaves_out(name)) and wants(name)

        return super().stored_tensors(path, config, is_wanted)


class GlmMoeDsaForCausalLM(DeepseekForCausalLM):
    nextn_hides_first = True
