"""Fields of published `config.json` files of FP8 checkpoints, and of ModelOpt's
`hf_quant_config.json`. Lists of modules have the entries of every layer where the files do."""

from tests.models.published import FP8, LLAMA_31_8B, QWEN3, QWEN3_30B_A3B, V3, Raw, renamed, sized
from tests.models.published_states import QWEN3_5

BLOCKS: Raw = FP8 | {"weight_block_size": [128, 128]}

BLOCK_OF_128 = {"block_structure": [128, 128]}
MODELOPT: Raw = {"quant_method": "modelopt"}


def _unconverted(num_layers: int, *kinds: str) -> list[str]:
    layers = [f"model.layers.{layer}.{kind}" for layer in range(num_layers) for kind in kinds]
    return ["lm_head", *layers]


_NORMS = ("input_layernorm", "post_attention_layernorm")
QWEN3_8B_FP8: Raw = renamed(QWEN3, "Qwen3ForCausalLM")
QWEN3_8B_FP8 |= sized(151936, 40960, 36, 4096, 12288, 32, 8, max_window_layers=36)
QWEN3_8B_FP8["quantization_config"] = BLOCKS | {"modules_to_not_convert": _unconverted(36, *_NORMS)}
QWEN3_235B_FP8: Raw = QWEN3_30B_A3B | {"moe_intermediate_size": 1536}
QWEN3_235B_FP8 |= sized(151936, 40960, 94, 4096, 12288, 64, 4, max_window_layers=94)
QWEN3_235B_FP8["quantization_config"] = BLOCKS | {
    "modules_to_not_convert": _unconverted(94, "mlp.gate", *_NORMS)
}
# The names of the text model's layers next to what sees images.
_IN_16_BITS = ("conv1d", "in_proj_a", "in_proj_b")
QWEN3_5_FP8: Raw = QWEN3_5 | {
    "quantization_config": BLOCKS
    | {
        "modules_to_not_convert": [
            *("lm_head", "model.language_model.embed_tokens", "mtp.fc", "model.visual"),
            *(
                f"model.language_model.layers.{layer}.linear_attn.{part}"
                for layer in range(32)
                for part in _IN_16_BITS
            ),
        ]
    }
}
_EIGHT_BITS: Raw = {
    "block_structure": None,
    "dynamic": False,
    "group_size": None,
    "num_bits": 8,
    "symmetric": True,
    "type": "float",
}


def compressed(strategy: str, kind: str, **weights: object) -> Raw:
    """A quantization_config of llm-compressor; `kind` is its format."""
    group = {
        "input_activations": _EIGHT_BITS | {"strategy": "tensor"},
        "output_activations": None,
        "targets": ["Linear"],
        "weights": _EIGHT_BITS | {"strategy": strategy} | weights,
    }
    return {
        "config_groups": {"group_0": group},
        "format": kind,
        "global_compression_ratio": 1.5,
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        "quant_method": "compressed-tensors",
        "quantization_status": "frozen",
    }


def changed_group(**change: object) -> Raw:
    config = compressed("tensor", "float-quantized")
    return config | {"config_groups": {"group_0": config["config_groups"]["group_0"] | change}}


LLAMA_FP8: Raw = LLAMA_31_8B | {"quantization_config": compressed("tensor", "naive-quantized")}
BY_TOKEN: Raw = _EIGHT_BITS | {"dynamic": True, "strategy": "token"}
_DYNAMIC = compressed("channel", "float-quantized")
_DYNAMIC["config_groups"]["group_0"]["input_activations"] = BY_TOKEN
LLAMA_FP8_DYNAMIC: Raw = LLAMA_31_8B | {"quantization_config": _DYNAMIC}
_QUANTIZATION = {"kv_cache_quant_algo": "FP8", "quant_algo": "FP8"}
NVIDIA_FP8: Raw = {
    "producer": {"name": "modelopt", "version": "0.19.0"},
    "quantization": _QUANTIZATION | {"exclude_modules": ["lm_head"]},
}
# The same, as later versions of ModelOpt add it to config.json.
_STATIC = {"dynamic": False, "num_bits": 8, "type": "float"}
_GROUP = {"input_activations": _STATIC, "targets": ["Linear"], "weights": _STATIC}
NVIDIA_FP8_CONFIG: Raw = MODELOPT | {
    "config_groups": {"group_0": _GROUP},
    "ignore": ["lm_head"],
    "kv_cache_scheme": _STATIC,
    "producer": {"name": "modelopt", "version": "0.29.0"},
    "quant_algo": "FP8",
}
_MLP = ("mlp.down_proj", "mlp.gate_proj", "mlp.up_proj")
_ATTENTION = tuple(f"self_attn.{part}_proj" for part in "kqvo")
# Attention, the first and the last layer have 16 bits (arXiv 2407.21783, section 6.2).
LLAMA_405B_FP8: Raw = LLAMA_31_8B | {
    "hidden_size": 16384,
    "intermediate_size": 53248,
    "num_attention_heads": 128,
    "num_hidden_layers": 126,
    "quantization_config": {
        "activation_scale_ub": 1200.0,
        "modules_to_not_convert": [
            *(f"model.layers.{layer}.{module}" for layer in (0, 125) for module in _MLP),
            *_unconverted(126, *_ATTENTION)[1:],
        ],
        "quant_method": "fbgemm_fp8",
    },
}
# The configuration, what shares a scale, and the ending of a scale's name.
PUBLISHED_FP8: dict[str, tuple[Raw, str, str]] = {
    "DeepSeek-V3": (V3, "block", "_scale_inv"),
    "Qwen3-8B-FP8": (QWEN3_8B_FP8, "block", "_scale_inv"),
    "Qwen3-235B-A22B-FP8": (QWEN3_235B_FP8, "block", "_scale_inv"),
    "Qwen3.5-9B-FP8": (QWEN3_5_FP8, "block", "_scale_inv"),
    "RedHatAI's Llama-3.1-8B-FP8": (LLAMA_FP8, "tensor", "_scale"),
    "RedHatAI's Llama-3.1-8B-FP8-dynamic": (LLAMA_FP8_DYNAMIC, "row", "_scale"),
    "NVIDIA's Llama-3.1-8B-FP8": (
        LLAMA_31_8B | {"quantization_config": NVIDIA_FP8_CONFIG},
        "tensor",
        "_scale",
    ),
}
