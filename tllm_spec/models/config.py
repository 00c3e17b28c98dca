"""The shape of a model. Its family's file reads it from a Hugging Face `config.json`
(`registry.model_config`).

Both spellings are read: transformers 4.x (`rope_theta`, `rope_scaling`, `torch_dtype`) and 5.x
(`rope_parameters`, `dtype`). A missing key has the default of transformers."""

from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch

from tllm_spec.attention.geometry import AttentionGeometry, LayerGroup
from tllm_spec.distributed.communicator import Mapping
from tllm_spec.kernels.attention.visible_keys import KeySpan
from tllm_spec.kernels.states.gated_delta import DeltaShape
from tllm_spec.models.config_file import required, with_defaults
from tllm_spec.models.formats.kv_cache_formats import KVCacheSetting
from tllm_spec.models.formats.quantisation import PLAIN, Quantisation
from tllm_spec.models.mla_config import IndexConfig, MLAConfig
from tllm_spec.models.moe_config import MoEConfig, MoENames
from tllm_spec.models.rotary import RopeConfig, rope_config

# The defaults that most architectures' configuration classes have in transformers.
COMMON_DEFAULTS: dict[str, Any] = {
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "rope_theta": 10000.0,
}
SLIDING, FULL = "sliding_attention", "full_attention"
_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class TextPart:
    """The part of a model that is served: all of it, or of one that sees images the text model."""

    architecture: str
    """The name of the same text model without images."""
    images: tuple[str, ...] = ()
    """Prefixes of the names of images' tensors, after `model.` in some folders. Empty: the model
    sees no images."""
    expert_names: MoENames | None = None
    """The names of experts, where they are not those of the architecture without images."""
    defaults: dict[str, Any] = field(default_factory=dict)
    """Keys of config.json that have other defaults than without images."""
    text_types: dict[str, str] = field(default_factory=dict)
    """Architectures by `model_type` of the text model, the default first, where there are several;
    `architecture` is one of them."""

    def of(self, raw: dict[str, Any]) -> "TextPart":
        """With the text model that a config.json names. Raises ValueError for another one."""
        default = next(iter(self.text_types), "")
        found = (raw.get("text_config") or {}).get("model_type", default)
        if self.text_types and found not in self.text_types:
            served = " or ".join(map(repr, self.text_types))
            raise ValueError(f"text_config has the model_type {found!r}; served is {served}.")
        return replace(self, architecture=self.text_types.get(found, self.architecture))

    def keys(self, raw: dict[str, Any]) -> dict[str, Any]:
        """The keys of a config.json that describe the text model, at the top, under the name of the
        architecture without images."""
        flat = {**raw, **(raw.get("text_config") or {})}
        if raw.get("tie_word_embeddings") is not None:  # the output layer is the whole model's
            flat["tie_word_embeddings"] = raw["tie_word_embeddings"]
        return with_defaults(flat, self.defaults) | {"architectures": [self.architecture]}

    def parameter_name(self, name: str) -> str:
        """The name without images of the checkpoint's tensor `name`. With images its layers are in
        `model.language_model.`, in older folders in `language_model.model.` or `model.`."""
        if not self.images:
            return name
        if name.startswith("model.language_model."):
            return name.replace("language_model.", "", 1)
        return name.removeprefix("language_model.")

    def is_of_images(self, name: str) -> bool:
        """Whether the checkpoint's tensor `name` is not the text model's."""
        return name.removeprefix("model.").startswith(self.images)


_PROJECTOR = "multi_modal_projector."
_GEMMA4 = ("embed_vision.", "embed_audio.")
_QWEN3_VL: dict[str, Any] = {"max_position_embeddings": 128000, "rope_theta": 5e5}
WITH_IMAGES: dict[str, TextPart] = {
    "Llama4ForConditionalGeneration": TextPart("Llama4ForCausalLM", ("vision_model.", _PROJECTOR)),
    "Gemma3ForConditionalGeneration": TextPart("Gemma3ForCausalLM", ("vision_tower.", _PROJECTOR)),
    "Gemma4ForConditionalGeneration": TextPart(
        "Gemma4ForCausalLM", ("vision_tower.", "audio_tower.", *_GEMMA4)
    ),
    "Gemma4UnifiedForConditionalGeneration": TextPart(
        "Gemma4UnifiedForCausalLM", ("vision_embedder.", *_GEMMA4)
    ),
    "Qwen3_5ForConditionalGeneration": TextPart("Qwen3_5ForCausalLM", ("visual.",)),
    "Qwen3_5MoeForConditionalGeneration": TextPart("Qwen3_5MoeForCausalLM", ("visual.",)),
    "Qwen3VLForConditionalGeneration": TextPart(
        "Qwen3ForCausalLM", ("visual.",), defaults=_QWEN3_VL
    ),
    "Qwen3VLMoeForConditionalGeneration": TextPart(
        "Qwen3MoeForCausalLM",
        ("visual.",),
        MoENames(inputs_first=None),
        _QWEN3_VL
        | {
            "num_key_value_heads": 16,
            "intermediate_size": 5632,
            "num_experts": 60,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 1408,
            "norm_topk_prob": True,
        },
    ),
    "Qwen2_5_VLForConditionalGeneration": TextPart(
        "Qwen2ForCausalLM",
        ("visual.",),
        defaults={
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1e6,
            "eos_token_id": 151645,
        },
    ),
    "Mistral3ForConditionalGeneration": TextPart(
        "MistralForCausalLM",
        ("vision_tower.", _PROJECTOR),
        text_types={
            "mistral": "MistralForCausalLM",
            "ministral3": "Ministral3ForCausalLM",
            "mistral4": "Mistral4ForCausalLM",
        },
    ),
}


def text_part_of(architecture: str) -> TextPart:
    """The served part of a model with this name in `architectures` of config.json."""
    return WITH_IMAGES.get(architecture) or TextPart(architecture)


@dataclass(frozen=True)
class DeltaConfig:
    """The layers with a recurrent state instead of keys and values (gated delta net)."""

    layers: tuple[int, ...]
    heads: DeltaShape
    """On all ranks together."""
    is_split: bool
    """Whether the checkpoint has a tensor each for q, k and v, for z, for b and for a; otherwise
    two, by key heads."""

    def shape(self, mapping: Mapping) -> DeltaShape:
        """One rank's share of the heads. Raises ValueError if they cannot be split evenly."""
        return DeltaShape(
            mapping.shard(self.heads.num_key_heads, "linear_num_key_heads"),
            mapping.shard(self.heads.num_value_heads, "linear_num_value_heads"),
            self.heads.key_dim,
            self.heads.value_dim,
            self.heads.kernel_size,
        )


@dataclass(frozen=True)
class Temperature:
    """The queries at position p are scaled by log(floor((p + first) / floor_scale) + 1) *
    attn_scale + 1 (transformers' `Llama4TextAttention` and `Ministral3Attention`)."""

    floor_scale: int
    attn_scale: float
    first: int = 1


@dataclass(frozen=True)
class Gemma4Parts:
    """What Gemma 4 has beyond Gemma 3."""

    global_head_dim: int
    """Elements of a head in the layers that are not local."""
    num_global_kv_heads: int
    keys_are_values: bool
    """Whether the values of those layers are the projected keys."""
    num_shared_layers: int
    """The last layers, which have no keys and values of their own: they read those of the last
    other layer of their kind."""
    is_double_wide: bool
    """Whether the MLPs of those layers have twice the width."""
    per_layer_size: int
    """Elements of each layer's own embedding of a token; 0: there is none."""


Shape = TypeVar("Shape", bound="ModelConfig")


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A decoder."""

    architecture: str
    text_architecture: str | None = None
    """The text model's own; None: as `text_part_of` has it."""
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeConfig
    max_position_embeddings: int
    sliding_window: int | None
    """Keys that a query of the `sliding_layers` sees, its own included; None: there are none."""
    sliding_layers: frozenset[int]
    tie_word_embeddings: bool
    hidden_act: str
    dtype: torch.dtype
    eos_token_ids: tuple[int, ...]
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    is_fused: bool = False
    """Whether the checkpoint has one tensor for q, k and v, and one for gates and ups."""
    has_sinks: bool = False
    """Whether each query head has an attention sink."""
    qk_norm: bool = False
    norms_all_heads: bool = False
    """Whether that norm is over all heads of q together, and over all of k."""
    offset_norms: bool = False
    """Whether the checkpoint has the differences of norms' weights from 1."""
    query_scale: float | None = None
    """Factor of the scores before the softmax; None: the root of a head's size, inverted."""
    moe: MoEConfig | None = None
    sparse_layers: frozenset[int] = frozenset()
    """The layers that have experts instead of a dense MLP."""
    nope_layers: frozenset[int] = frozenset()
    """The layers without a rotary embedding (Llama 4)."""
    chunk_size: int | None = None
    """Positions of the chunks that layers with a rotary embedding attend within (Llama 4)."""
    temperature: Temperature | None = None
    """How the `nope_layers` scale their queries, or all layers of Ministral 3 and Mistral 4."""
    local_rope: RopeConfig | None = None
    """Another rotary embedding of the `local_layers`, which also have the window (Gemma 3)."""
    local_layers: frozenset[int] = frozenset()
    gemma4: Gemma4Parts | None = None
    softcap: float | None = None
    """A logit x of the output layer becomes softcap * tanh(x / softcap)."""
    suppressed_tokens: tuple[int, ...] = ()
    """Tokens that never follow (`suppress_tokens` of generation_config.json)."""
    mla: MLAConfig | None = None
    """Latent attention instead of heads with keys and values of their own."""
    delta: DeltaConfig | None = None
    """Layers with a recurrent state instead of attention; None: there are none."""
    num_nextn_layers: int = 0
    """Layers of the checkpoint that follow the decoder's and predict further tokens (MTP)."""
    quantisation: Quantisation = PLAIN
    """How the checkpoint stores weights."""
    kv_cache: KVCacheSetting | None = None
    """What the checkpoint says of the KV cache; None: nothing."""
    unknown_keys: tuple[str, ...] = field(default=(), compare=False)
    """Keys of a head's config.json that are taken to change nothing."""

    @property
    def mlp_row_elements(self) -> int:
        """Elements that a token's largest MLP has at a time in addition to hidden states."""
        dense = 4 * self.of_layer(self.num_layers - 1).intermediate_size
        experts = 0 if self.moe is None else self.moe.row_elements
        if self.gemma4 is None:
            return max(dense, experts)
        # A layer has both, and all layers' embeddings are kept, while they are made three times.
        return dense + experts + 3 * self.num_layers * self.gemma4.per_layer_size

    @property
    def max_positions(self) -> int:
        """Positions that the model serves: as vLLM, `max_position_embeddings`, which may be the
        length before scaling, or the scaled length if it is longer."""
        rope = self.rope
        # Gemma 3 has the scaled length in max_position_embeddings, and not the original one.
        is_scaled = rope.kind in ("linear", "yarn") and self.local_rope is None
        scaled = int(rope.factor * rope.original_max_positions) if is_scaled else 0
        return max(self.max_position_embeddings, scaled)

    @property
    def text_part(self) -> TextPart:
        """The text model, which is all that is loaded."""
        part = text_part_of(self.architecture)
        return replace(part, architecture=self.text_architecture or part.architecture)

    @property
    def ropes(self) -> tuple[RopeConfig, ...]:
        """All rotary embeddings, each of which has a table."""
        return (self.rope,) if self.local_rope is None else (self.rope, self.local_rope)

    @property
    def rope_dim(self) -> int:
        """Elements of a key that `rope` rotates."""
        if self.gemma4 is not None:
            return self.gemma4.global_head_dim
        return self.head_dim if self.mla is None else self.mla.rope_dim

    def of_layer(self: Shape, layer: int) -> Shape:
        """The same with the sizes that the layer has."""
        own, parts = self, self.gemma4
        if parts is None:
            return self
        if layer not in self.local_layers:
            own = replace(
                own, head_dim=parts.global_head_dim, num_kv_heads=parts.num_global_kv_heads
            )
        if parts.is_double_wide and self.kv_layer(layer) != layer:
            own = replace(own, intermediate_size=2 * own.intermediate_size)
        return own

    def kv_layer(self, layer: int) -> int:
        """The layer whose keys and values the layer reads."""
        end = self.num_layers - (self.gemma4.num_shared_layers if self.gemma4 else 0)
        if layer < end:
            return layer
        is_local = layer in self.local_layers
        return max(each for each in range(end) if (each in self.local_layers) == is_local)

    def within(self: Shape, max_positions: int) -> Shape:
        """The same for so many positions: without what changes attention after them only."""
        own = self
        if self.sliding_window is not None and self.sliding_window >= max_positions:
            own = replace(own, sliding_window=None, sliding_layers=frozenset())
        if self.chunk_size is not None and self.chunk_size >= max_positions:
            own = replace(own, chunk_size=None)
        if self.temperature is not None and self.temperature.floor_scale > max_positions:
            own = replace(own, temperature=None)
        if self.mla is not None:
            own = replace(own, mla=self.mla.within(max_positions))
        return own

    @property
    def indexer(self) -> IndexConfig | None:
        """That of the layers with latents; None: they have none, or need none."""
        return None if self.mla is None else self.mla.used_indexer

    def windowed(self: Shape, size: int | None) -> Shape:
        """The same with a sliding window of `size` tokens in every layer; None: without windows.
        Raises ValueError where layers have others, or no keys of heads."""
        if self.mla is not None or self.chunk_size is not None or self.local_rope is not None:
            raise ValueError(f"attention of {self.architecture} takes no other window")
        if 0 < len(self.sliding_layers) < self.num_layers:
            raise ValueError("some layers have a window and others have none")
        layers = frozenset(range(self.num_layers))
        return replace(self, sliding_window=size, sliding_layers=layers)

    def layer_groups(self, mapping: Mapping) -> tuple[LayerGroup, ...]:
        """One rank's share of the heads: the layers in groups of equal attention, in the order of
        each group's first layer. Layers with a recurrent state are in none of them."""
        if self.mla is not None:
            num_heads = mapping.shard(self.num_heads, "num_attention_heads")
            return self.mla.layer_groups(self.num_layers, num_heads)
        layers_of: dict[AttentionGeometry, list[int]] = {}
        with_state = () if self.delta is None else self.delta.layers
        for layer in range(self.num_layers):
            if layer not in with_state and self.kv_layer(layer) == layer:
                geometry = self.of_layer(layer)._geometry(mapping, self._span(layer))
                layers_of.setdefault(geometry, []).append(layer)
        return tuple(
            LayerGroup(tuple(layers), replace(geometry, num_layers=len(layers)))
            for geometry, layers in layers_of.items()
        )

    def _geometry(self, mapping: Mapping, span: KeySpan | None) -> AttentionGeometry:
        """One layer's."""
        return AttentionGeometry(
            num_layers=1,
            num_heads=mapping.shard(self.num_heads, "num_attention_heads"),
            num_kv_heads=mapping.shard_kv_heads(self.num_kv_heads),
            head_dim=self.head_dim,
            scale=self.head_dim**-0.5 if self.query_scale is None else self.query_scale,
            span=span,
            has_sinks=self.has_sinks,
            feeds_codes=self.quantisation.activations is not None,
        )

    def _span(self, layer: int) -> KeySpan | None:
        """The keys that the layer's queries see."""
        if self.sliding_window is not None and layer in self.sliding_layers:
            return KeySpan(self.sliding_window, slides=True)
        if self.chunk_size is None or layer in self.nope_layers:
            return None
        return KeySpan(self.chunk_size, slides=False)


def decoder_config(
    raw: dict[str, Any],
    *,
    rope: RopeConfig | None = None,
    always_slides: bool = False,
    reads_bias: bool = False,
) -> ModelConfig:
    """What the keys say that most families have; `raw` has the family's defaults filled in.

    Args:
        rope: the rotary embedding, where the keys need another reading.
        reads_bias: whether `attention_bias` says that all of attention's projections have biases.
        always_slides: whether every layer has the sliding window, whatever other keys say.

    Raises:
        ValueError: a key is missing, or its value is not served.
    """
    if raw["hidden_act"] != "silu":
        raise ValueError(f"hidden_act is {raw['hidden_act']!r}; only 'silu' is served.")
    if unknown := set(raw.get("layer_types") or ()) - {SLIDING, FULL}:
        served = f"{FULL!r} and {SLIDING!r}"
        raise ValueError(f"layer_types has {sorted(unknown)}; served are {served}.")
    num_heads = int(required(raw, "num_attention_heads"))
    sliding = _sliding_layers(raw, always=always_slides)
    has_bias = reads_bias and bool(raw.get("attention_bias"))
    return ModelConfig(
        architecture=raw["architectures"][0],
        vocab_size=int(required(raw, "vocab_size")),
        hidden_size=int(required(raw, "hidden_size")),
        intermediate_size=int(required(raw, "intermediate_size")),
        num_layers=int(required(raw, "num_hidden_layers")),
        num_heads=num_heads,
        num_kv_heads=int(raw.get("num_key_value_heads") or num_heads),
        head_dim=_head_dim(raw),
        rms_norm_eps=float(raw["rms_norm_eps"]),
        rope=rope_config(raw) if rope is None else rope,
        max_position_embeddings=int(raw["max_position_embeddings"]),
        sliding_window=raw["sliding_window"] if sliding else None,
        sliding_layers=sliding,
        tie_word_embeddings=bool(raw["tie_word_embeddings"]),
        hidden_act=raw["hidden_act"],
        dtype=_dtype(raw),
        eos_token_ids=token_ids_of(raw.get("eos_token_id")),
        qkv_bias=has_bias,
        o_bias=has_bias,
    )


def token_ids_of(value: int | list[int] | None) -> tuple[int, ...]:
    if value is None:
        return ()
    return (value,) if isinstance(value, int) else tuple(value)


def _dtype(raw: dict[str, Any]) -> torch.dtype:
    name = str(raw.get("dtype") or raw.get("torch_dtype") or "float32").removeprefix("torch.")
    if name not in _DTYPES:
        raise ValueError(f"dtype is {name!r}; accepted are {', '.join(_DTYPES)}.")
    return _DTYPES[name]


def _head_dim(raw: dict[str, Any]) -> int:
    hidden_size, num_heads = int(raw["hidden_size"]), int(raw["num_attention_heads"])
    if not raw.get("head_dim") and hidden_size % num_heads:
        raise ValueError(
            f"hidden_size is {hidden_size}; without head_dim, it must be a multiple of "
            f"num_attention_heads, which is {num_heads}."
        )
    return int(raw.get("head_dim") or hidden_size // num_heads)


def _sliding_layers(raw: dict[str, Any], *, always: bool) -> frozenset[int]:
    """The layers with a sliding window, as in transformers. Raises ValueError for a window without
    keys, and for `layer_types` of another number of layers."""
    window, layers = raw.get("sliding_window"), range(required(raw, "num_hidden_layers"))
    uses, types = raw.get("use_sliding_window"), raw.get("layer_types")
    if types and len(types) != len(layers):
        raise ValueError(f"layer_types has {len(types)} entries for {len(layers)} layers.")
    if not window or uses is False:
        return frozenset()
    if window < 1:
        raise ValueError(f"sliding_window is {window}; it must be at least 1.")
    if always:
        return frozenset(layers)
    if types:
        return frozenset(layer for layer in layers if types[layer] == SLIDING)
    num_before = raw.get("max_window_layers")
    return frozenset(layers[28 if num_before is None else num_before :] if uses else ())
