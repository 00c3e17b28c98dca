"""The shape of a model, read from a Hugging Face `config.json`.

Both spellings are read: transformers 4.x (`rope_theta`, `rope_scaling`, `torch_dtype`) and 5.x
(`rope_parameters`, `dtype`). A missing key has the default of transformers."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import torch

from tllm_spec.attention.geometry import AttentionGeometry, LayerGroup
from tllm_spec.distributed.communicator import Mapping
from tllm_spec.kernels.attention.visible_keys import KeySpan
from tllm_spec.models.config_file import read_checked, read_config, required, with_defaults
from tllm_spec.models.deepseek_config import (
    DEEPSEEK_DEFAULTS,
    DEEPSEEK_V32,
    MLAConfig,
    deepseek_moe,
    deepseek_sparse_layers,
    flat_deepseek_v32,
    mla_config,
    num_nextn_layers,
)
from tllm_spec.models.formats.fp8_formats import Fp8Format
from tllm_spec.models.formats.fp8_readers import QUANTIZATION_KEYS, fp8_format
from tllm_spec.models.formats.int4_formats import Int4Format
from tllm_spec.models.formats.int4_readers import int4_format
from tllm_spec.models.formats.kv_cache_formats import KVCacheSetting, kv_cache_setting
from tllm_spec.models.gemma3_config import (
    GEMMA3,
    GEMMA3_DEFAULTS,
    Gemma3Config,
    flat_gemma3,
    gemma3_config,
)
from tllm_spec.models.glm4_moe_config import GLM4_MOE, GLM4_MOE_DEFAULTS, flat_glm4_moe
from tllm_spec.models.gpt_oss_config import GPT_OSS, GPT_OSS_DEFAULTS, flat_gpt_oss
from tllm_spec.models.llama4_config import (
    LLAMA4,
    LLAMA4_DEFAULTS,
    Llama4Config,
    flat_llama4,
    llama4_config,
)
from tllm_spec.models.moe_config import (
    MOE_DEFAULTS,
    QWEN3_5_NAMES,
    QWEN_NAMES,
    MoEConfig,
    MoENames,
    moe_config,
    sparse_layers,
)
from tllm_spec.models.phi3_config import PHI3, PHI3_DEFAULTS, flat_phi3
from tllm_spec.models.qwen3_next_config import (
    DELTA_DEFAULTS,
    DeltaConfig,
    delta_config,
    flat_qwen3_next,
)
from tllm_spec.models.rotary import RopeConfig, rope_config

# Values of a `config.json` that follow from several keys, or have several spellings.


_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def dtype_of(raw: dict[str, Any]) -> torch.dtype:
    name = str(raw.get("dtype") or raw.get("torch_dtype") or "float32").removeprefix("torch.")
    if name not in _DTYPES:
        raise ValueError(f"dtype is {name!r}; accepted are {', '.join(_DTYPES)}.")
    return _DTYPES[name]


def head_dim_of(raw: dict[str, Any]) -> int:
    hidden_size, num_heads = int(raw["hidden_size"]), int(raw["num_attention_heads"])
    if not raw.get("head_dim") and hidden_size % num_heads:
        raise ValueError(
            f"hidden_size is {hidden_size}; without head_dim, it must be a multiple of "
            f"num_attention_heads, which is {num_heads}."
        )
    return int(raw.get("head_dim") or hidden_size // num_heads)


def token_ids_of(value: int | list[int] | None) -> tuple[int, ...]:
    if value is None:
        return ()
    return (value,) if isinstance(value, int) else tuple(value)


def sliding_layers_of(raw: dict[str, Any], architecture: str) -> frozenset[int]:
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
    if architecture in ("MistralForCausalLM", "MixtralForCausalLM", PHI3):
        return frozenset(layers)
    if types:
        return frozenset(layer for layer in layers if types[layer] == "sliding_attention")
    if not uses:
        return frozenset()
    if architecture == "Qwen3MoeForCausalLM":
        return frozenset(layers)
    num_before = raw.get("max_window_layers")
    num_before = 28 if num_before is None else num_before
    if architecture == "Qwen2MoeForCausalLM":
        return frozenset(layers[:num_before:2])
    return frozenset(layers[num_before:])


# Models that also see images, of which the text part is served: its architecture, its keys of
# `config.json`, and which tensors of the checkpoint are those of images.


@dataclass(frozen=True)
class TextPart:
    """The part of a model that is served: all of it, or of one that sees images the text model."""

    architecture: str
    """The name of the same text model without images."""
    images: tuple[str, ...] = ()
    """Prefixes of the names of images' tensors, after `model.` in some folders. Empty: the model
    sees no images."""
    expert_names: MoENames = QWEN_NAMES
    """The names of experts, where those of the architecture without images have `QWEN_NAMES`."""
    defaults: dict[str, Any] = field(default_factory=dict)
    """Keys of config.json that have other defaults than without images."""
    text_type: str | None = None
    """`model_type` of the text model, where it may be another one; None: it may not."""

    def keys(self, raw: dict[str, Any]) -> dict[str, Any]:
        """The keys of a config.json that describe the text model, at the top, under the name of the
        architecture without images. Raises ValueError for another text model."""
        text = raw.get("text_config") or {}
        if self.text_type not in (None, found := text.get("model_type", self.text_type)):
            raise ValueError(
                f"text_config has the model_type {found!r}; served is {self.text_type!r}."
            )
        flat = {**raw, **text}
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
_QWEN3_VL: dict[str, Any] = {"max_position_embeddings": 128000, "rope_theta": 5e5}
_WITH_IMAGES: dict[str, TextPart] = {
    "Llama4ForConditionalGeneration": TextPart("Llama4ForCausalLM", ("vision_model.", _PROJECTOR)),
    "Gemma3ForConditionalGeneration": TextPart("Gemma3ForCausalLM", ("vision_tower.", _PROJECTOR)),
    "Qwen3_5ForConditionalGeneration": TextPart("Qwen3_5ForCausalLM", ("visual.",)),
    # Without images transformers writes the experts one by one.
    "Qwen3_5MoeForConditionalGeneration": TextPart(
        "Qwen3_5MoeForCausalLM", ("visual.",), QWEN3_5_NAMES
    ),
    "Qwen3VLForConditionalGeneration": TextPart(
        "Qwen3ForCausalLM", ("visual.",), defaults=_QWEN3_VL
    ),
    "Qwen3VLMoeForConditionalGeneration": TextPart(
        "Qwen3MoeForCausalLM",
        ("visual.",),
        QWEN3_5_NAMES,
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
        "MistralForCausalLM", ("vision_tower.", _PROJECTOR), text_type="mistral"
    ),
}
WITH_IMAGES = tuple(_WITH_IMAGES)


def text_part_of(architecture: str) -> TextPart:
    """The served part of a model with this name in `architectures` of config.json."""
    return _WITH_IMAGES.get(architecture) or TextPart(architecture)


# The defaults of each architecture's configuration class in transformers.
_COMMON = {
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "rope_theta": 10000.0,
}
_DEFAULTS: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": _COMMON | {"eos_token_id": 2, "max_position_embeddings": 2048},
    "MistralForCausalLM": _COMMON
    | {
        "eos_token_id": 2,
        "max_position_embeddings": 131072,
        "num_key_value_heads": 8,
        "sliding_window": 4096,
    },
    "Qwen2ForCausalLM": _COMMON | {"max_position_embeddings": 32768, "num_key_value_heads": 32},
    "Qwen3ForCausalLM": _COMMON
    | {"max_position_embeddings": 32768, "num_key_value_heads": 32, "head_dim": 128},
    "MixtralForCausalLM": _COMMON
    | {
        "eos_token_id": 2,
        "max_position_embeddings": 131072,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e6,
    }
    | MOE_DEFAULTS["MixtralForCausalLM"],
    "Qwen2MoeForCausalLM": _COMMON
    | {"max_position_embeddings": 32768, "num_key_value_heads": 16, "intermediate_size": 5632}
    | MOE_DEFAULTS["Qwen2MoeForCausalLM"],
    "Qwen3MoeForCausalLM": _COMMON
    | {"max_position_embeddings": 32768, "num_key_value_heads": 4, "intermediate_size": 6144}
    | MOE_DEFAULTS["Qwen3MoeForCausalLM"],
    LLAMA4: _COMMON | LLAMA4_DEFAULTS,
    GEMMA3: GEMMA3_DEFAULTS,
    PHI3: PHI3_DEFAULTS,
    GPT_OSS: GPT_OSS_DEFAULTS,
    GLM4_MOE: GLM4_MOE_DEFAULTS,
    **DELTA_DEFAULTS,
    **DEEPSEEK_DEFAULTS,
}
# What brings a file into the keys of the other architectures.
_FLAT: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    LLAMA4: flat_llama4,
    GEMMA3: flat_gemma3,
    PHI3: flat_phi3,
    **dict.fromkeys(DELTA_DEFAULTS, flat_qwen3_next),
    GPT_OSS: flat_gpt_oss,
    GLM4_MOE: flat_glm4_moe,
    DEEPSEEK_V32: flat_deepseek_v32,
}
_NO_BIAS = ("MistralForCausalLM", "MixtralForCausalLM", PHI3)
_O_BIAS = (
    *("LlamaForCausalLM", "Qwen3ForCausalLM", "Qwen3MoeForCausalLM", *DELTA_DEFAULTS, GPT_OSS),
    *(LLAMA4, GEMMA3),
)
_QK_NORM = ("Qwen3ForCausalLM", "Qwen3MoeForCausalLM", *DELTA_DEFAULTS, GEMMA3)
_PARTLY_ROTATED = (*DELTA_DEFAULTS, GLM4_MOE)


Shape = TypeVar("Shape", bound="ModelConfig")


@dataclass(frozen=True)
class ModelConfig:
    """A decoder."""

    architecture: str
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
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    has_sinks: bool
    """Whether each query head has an attention sink."""
    qk_norm: bool
    hidden_act: str
    dtype: torch.dtype
    eos_token_ids: tuple[int, ...]
    moe: MoEConfig | None
    sparse_layers: frozenset[int]
    """The layers that have experts instead of a dense MLP."""
    llama4: Llama4Config | None
    gemma3: Gemma3Config | None
    mla: MLAConfig | None
    """Latent attention instead of heads with keys and values of their own."""
    delta: DeltaConfig | None
    """Layers with a recurrent state instead of attention; None: there are none."""
    num_nextn_layers: int
    """Layers of the checkpoint that follow the decoder's and predict further tokens (MTP)."""
    fp8: Fp8Format | None
    """How the checkpoint stores FP8 weights; None: it has none."""
    int4: Int4Format | None
    """How the checkpoint stores 4-bit weights; None: it has none."""
    kv_cache: KVCacheSetting | None
    """What the checkpoint says of the KV cache; None: nothing."""

    @classmethod
    def from_pretrained(cls, path: Path) -> "ModelConfig":
        """Read `path/config.json`, and further end tokens from `generation_config.json` if they
        are there.

        Raises:
            ValueError: the file is missing or unreadable, or asks for something that is not served.
        """
        config = cls.from_parsed(path, read_config(path))
        generation = path / "generation_config.json"
        if not generation.is_file():
            return config
        more = token_ids_of(read_checked(generation).get("eos_token_id"))
        return replace(config, eos_token_ids=tuple(dict.fromkeys(config.eos_token_ids + more)))

    @classmethod
    def from_parsed(cls, path: Path, raw: dict[str, Any]) -> "ModelConfig":
        """The same, from the parsed file and what else the folder says of quantised weights."""
        plain = cls.from_dict(raw | dict.fromkeys(QUANTIZATION_KEYS))
        return replace(plain, **_weight_formats(path, plain.architecture, raw))

    @classmethod
    def from_dict(cls, raw: dict[str, Any]) -> "ModelConfig":
        """The same, from the parsed file alone."""
        part = _text_part(raw)
        architecture, name = part.architecture, raw["architectures"][0]
        raw = _FLAT.get(architecture, dict)(part.keys(raw))
        raw = with_defaults(raw, _DEFAULTS[architecture])
        is_deepseek = architecture in (*DEEPSEEK_DEFAULTS, GLM4_MOE)
        _refuse_unserved(raw)
        bias = bool(raw.get("attention_bias"))
        num_heads = int(required(raw, "num_attention_heads"))
        sliding = sliding_layers_of(raw, architecture)
        config = cls(
            architecture=name,
            vocab_size=int(required(raw, "vocab_size")),
            hidden_size=int(required(raw, "hidden_size")),
            intermediate_size=int(required(raw, "intermediate_size")),
            num_layers=int(required(raw, "num_hidden_layers")),
            num_heads=num_heads,
            num_kv_heads=int(raw.get("num_key_value_heads") or num_heads),
            head_dim=head_dim_of(raw),
            rms_norm_eps=float(raw["rms_norm_eps"]),
            rope=rope_config(
                raw, is_phi3=architecture == PHI3, may_be_partial=architecture in _PARTLY_ROTATED
            ),
            max_position_embeddings=int(raw["max_position_embeddings"]),
            sliding_window=raw["sliding_window"] if sliding else None,
            sliding_layers=sliding,
            tie_word_embeddings=bool(raw["tie_word_embeddings"]),
            qkv_bias=_qkv_bias(raw, architecture),
            o_bias=bias and architecture in _O_BIAS,
            mlp_bias=bool(raw.get("mlp_bias")) and architecture == "LlamaForCausalLM",
            has_sinks=architecture == GPT_OSS,
            qk_norm=_qk_norm(raw, architecture),
            hidden_act=raw["hidden_act"],
            dtype=dtype_of(raw),
            eos_token_ids=token_ids_of(raw.get("eos_token_id")),
            llama4=llama4_config(raw) if architecture == LLAMA4 else None,
            gemma3=gemma3_config(raw) if architecture == GEMMA3 else None,
            moe=deepseek_moe(raw) if is_deepseek else moe_config(architecture, raw),
            sparse_layers=deepseek_sparse_layers(raw)
            if is_deepseek
            else sparse_layers(architecture, raw),
            mla=mla_config(architecture, raw),
            delta=delta_config(raw) if architecture in DELTA_DEFAULTS else None,
            num_nextn_layers=num_nextn_layers(raw)
            if is_deepseek or architecture in DELTA_DEFAULTS
            else 0,
            **_weight_formats(None, name, raw),
        )
        if config.num_heads % config.num_kv_heads:
            raise ValueError(
                f"num_key_value_heads is {config.num_kv_heads}; it must divide "
                f"num_attention_heads, which is {num_heads}."
            )
        if config.rope_dim % 2:
            raise ValueError(
                f"The rotary embedding has {config.rope_dim} elements a head; the number must be "
                "even."
            )
        return config

    @property
    def mlp_row_elements(self) -> int:
        """Elements that a token's largest MLP has at a time in addition to hidden states."""
        dense = 4 * self.intermediate_size
        return dense if self.moe is None else max(dense, self.moe.row_elements)

    @property
    def max_positions(self) -> int:
        """Positions that the model serves: as vLLM, `max_position_embeddings`, which may be the
        length before scaling, or the scaled length if it is longer."""
        rope = self.rope
        # Gemma 3 has the scaled length in max_position_embeddings, and not the original one.
        is_scaled = rope.kind in ("linear", "yarn") and self.gemma3 is None
        scaled = int(rope.factor * rope.original_max_positions) if is_scaled else 0
        return max(self.max_position_embeddings, scaled)

    @property
    def text_part(self) -> TextPart:
        """The text model, which is all that is loaded."""
        return text_part_of(self.architecture)

    @property
    def ropes(self) -> tuple[RopeConfig, ...]:
        """All rotary embeddings, each of which has a table."""
        return (self.rope,) if self.gemma3 is None else (self.rope, self.gemma3.local_rope)

    @property
    def rope_dim(self) -> int:
        """Elements of a key that are rotated."""
        return self.head_dim if self.mla is None else self.mla.rope_dim

    def within(self: Shape, max_positions: int) -> Shape:
        """The same for so many positions: without what changes attention after them only."""
        own = self
        if self.sliding_window is not None and self.sliding_window >= max_positions:
            own = replace(own, sliding_window=None, sliding_layers=frozenset())
        if self.llama4 is not None:
            own = replace(own, llama4=self.llama4.within(max_positions))
        return own

    def windowed(self: Shape, size: int | None) -> Shape:
        """The same with a sliding window of `size` tokens in every layer; None: without windows.
        Raises ValueError where layers have others, or no keys of heads."""
        if self.mla is not None or self.chunk_size is not None or self.gemma3 is not None:
            raise ValueError(f"attention of {self.architecture} takes no other window")
        if 0 < len(self.sliding_layers) < self.num_layers:
            raise ValueError("some layers have a window and others have none")
        layers = frozenset(range(self.num_layers))
        return replace(self, sliding_window=size, sliding_layers=layers)

    @property
    def chunk_size(self) -> int | None:
        """Positions of the chunks that some layers attend within."""
        return None if self.llama4 is None else self.llama4.chunk_size

    def layer_groups(self, mapping: Mapping) -> tuple[LayerGroup, ...]:
        """One rank's share of the heads: the layers in groups of equal attention, in the order of
        each group's first layer. Layers with a recurrent state are in none of them."""
        if self.mla is not None:
            geometry = self.mla.geometry(self.num_layers, self.num_heads, mapping)
            return (LayerGroup(tuple(range(self.num_layers)), geometry),)
        layers_of: dict[KeySpan | None, list[int]] = {}
        with_state = () if self.delta is None else self.delta.layers
        for layer in range(self.num_layers):
            if layer in with_state:
                continue
            layers_of.setdefault(self._span(layer), []).append(layer)
        return tuple(
            LayerGroup(tuple(layers), self._geometry(mapping, len(layers), span))
            for span, layers in layers_of.items()
        )

    def _geometry(
        self, mapping: Mapping, num_layers: int, span: KeySpan | None
    ) -> AttentionGeometry:
        return AttentionGeometry(
            num_layers=num_layers,
            num_heads=mapping.shard(self.num_heads, "num_attention_heads"),
            num_kv_heads=mapping.shard_kv_heads(self.num_kv_heads),
            head_dim=self.head_dim,
            scale=self.head_dim**-0.5 if self.gemma3 is None else self.gemma3.query_scale,
            span=span,
            has_sinks=self.has_sinks,
            feeds_codes=self.fp8 is not None and self.fp8.activations is not None,
        )

    def _span(self, layer: int) -> KeySpan | None:
        """The keys that the layer's queries see."""
        if self.sliding_window is not None and layer in self.sliding_layers:
            return KeySpan(self.sliding_window, slides=True)
        if self.llama4 is None or self.chunk_size is None or layer in self.llama4.nope_layers:
            return None
        return KeySpan(self.chunk_size, slides=False)


def _weight_formats(path: Path | None, name: str, raw: dict[str, Any]) -> dict[str, Any]:
    """The fields `fp8` and `int4`, of which at most one is not None, and `kv_cache`. Raises
    ValueError for formats that are not served."""
    part = text_part_of(name)
    raw = part.keys(raw)
    int4 = int4_format(path, raw)
    fp8 = None if int4 is not None else fp8_format(path, raw)
    if (part.architecture in DELTA_DEFAULTS or part.expert_names.fused) and (int4 or fp8):
        raise ValueError(
            f"{name} has quantised weights; it is served with weights of 16 or 32 bits."
        )
    if part.architecture == GPT_OSS and (fp8 or (int4 and int4.packing != "mxfp4_experts")):
        raise ValueError(
            "GptOssForCausalLM has other quantised weights than MXFP4 experts (quant_method "
            "'mxfp4'), which are served, as are weights of 16 or 32 bits."
        )
    return {"int4": int4, "fp8": fp8, "kv_cache": kv_cache_setting(path, raw)}


def _text_part(raw: dict[str, Any]) -> TextPart:
    names, served = raw.get("architectures") or [], (*_DEFAULTS, *WITH_IMAGES)
    if len(names) != 1 or names[0] not in served:
        raise ValueError(f"architectures is {names}; it must be one of {', '.join(served)}.")
    return text_part_of(names[0])


def _refuse_unserved(raw: dict[str, Any]) -> None:
    if raw["architectures"] != [GEMMA3] and raw["hidden_act"] != "silu":
        raise ValueError(f"hidden_act is {raw['hidden_act']!r}; only 'silu' is served.")
    unknown = set(raw.get("layer_types") or ()) - {"full_attention", "sliding_attention"}
    if unknown:
        served = "'full_attention' and 'sliding_attention'"
        raise ValueError(f"layer_types has {sorted(unknown)}; served are {served}.")


def _qk_norm(raw: dict[str, Any], architecture: str) -> bool:
    has_key = architecture in (LLAMA4, GLM4_MOE)
    return architecture in _QK_NORM or (has_key and bool(raw["use_qk_norm"]))


def _qkv_bias(raw: dict[str, Any], architecture: str) -> bool:
    if architecture == "Qwen2MoeForCausalLM":
        return bool(raw.get("qkv_bias", True))
    has_key = bool(raw.get("attention_bias")) and architecture not in _NO_BIAS
    return architecture == "Qwen2ForCausalLM" or has_key
