"""Fields of published `config.json` files that say how a model computes, and the same models with
few layers, heads and hidden units."""

from typing import Any

Raw = dict[str, Any]
# Keys that have the same value in most files.
COMMON: Raw = {
    "attention_bias": False,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
SIZES = ("vocab_size", "max_position_embeddings", "num_hidden_layers", "hidden_size")
SIZES += ("intermediate_size", "num_attention_heads", "num_key_value_heads")


def sized(*sizes: int, **further: int) -> Raw:
    """The values of `SIZES`, and of further keys."""
    return dict(zip(SIZES, sizes, strict=True)) | further


def experts(number: int, top_k: int, inner: int, *, key: str = "num_experts") -> Raw:
    """Their number with its key, how many a token takes, and their inner size."""
    return {key: number, "num_experts_per_tok": top_k, "moe_intermediate_size": inner}


def renamed(raw: Raw, architecture: str, model_type: str | None = None) -> Raw:
    names = {"architectures": [architecture]}
    return raw | names | ({"model_type": model_type} if model_type else {})


GLM_45_AIR: Raw = renamed(COMMON, "Glm4MoeForCausalLM")
GLM_45_AIR |= sized(151552, 131072, 46, 4096, 10944, 96, 8, head_dim=128)
GLM_45_AIR |= experts(128, 8, 1408, key="n_routed_experts") | {
    "attention_bias": True,
    "eos_token_id": [151329, 151336, 151338],
    "first_k_dense_replace": 1,
    "n_group": 1,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_nextn_predict_layers": 1,
    "partial_rotary_factor": 0.5,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1000000,
    "routed_scaling_factor": 1.0,
    "topk_group": 1,
    "use_qk_norm": False,
}
GLM_45: Raw = GLM_45_AIR | sized(151552, 131072, 92, 5120, 12288, 96, 8)
GLM_45 |= experts(160, 8, 1536, key="n_routed_experts")
GLM_45 |= {"first_k_dense_replace": 3, "routed_scaling_factor": 2.5, "use_qk_norm": True}

FP8: Raw = {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8"}
_BLOCKS = FP8 | {"weight_block_size": [128, 128]}
_YARN: Raw = {"type": "yarn", "factor": 40, "beta_fast": 32, "beta_slow": 1}
_YARN |= {"original_max_position_embeddings": 4096}
_DEEPSEEK: Raw = COMMON | {"moe_layer_freq": 1, "rope_theta": 10000}
_DEEPSEEK |= {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64}
_DEEPSEEK |= {"v_head_dim": 128}
V2_LITE: Raw = renamed(_DEEPSEEK, "DeepseekV2ForCausalLM")
V2_LITE |= sized(102400, 163840, 27, 2048, 10944, 16, 16)
V2_LITE |= experts(64, 6, 1408, key="n_routed_experts") | {
    "eos_token_id": 100001,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "n_shared_experts": 2,
    "norm_topk_prob": False,
    "q_lora_rank": None,
    "rope_scaling": _YARN | {"mscale": 0.707, "mscale_all_dim": 0.707},
    "routed_scaling_factor": 1.0,
    "scoring_func": "softmax",
    "topk_group": 1,
    "topk_method": "greedy",
}
V2: Raw = V2_LITE | sized(102400, 163840, 60, 5120, 12288, 128, 128, q_lora_rank=1536)
V2 |= experts(160, 6, 1536, key="n_routed_experts")
V2 |= {"n_group": 8, "routed_scaling_factor": 16.0, "topk_group": 3}
V2 |= {"topk_method": "group_limited_greedy"}
V3: Raw = renamed(_DEEPSEEK, "DeepseekV3ForCausalLM")
V3 |= sized(129280, 163840, 61, 7168, 18432, 128, 128, q_lora_rank=1536)
V3 |= experts(256, 8, 2048, key="n_routed_experts") | {
    "eos_token_id": 1,
    "first_k_dense_replace": 3,
    "n_group": 8,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_nextn_predict_layers": 1,
    "quantization_config": _BLOCKS,
    "rope_scaling": _YARN | {"mscale": 1.0, "mscale_all_dim": 1.0},
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "topk_group": 4,
    "topk_method": "noaux_tc",
}
V3_2: Raw = renamed(V3, "DeepseekV32ForCausalLM", "deepseek_v32")
V3_2 |= {"index_head_dim": 128, "index_n_heads": 64, "index_topk": 2048}
V3_2 |= {"quantization_config": _BLOCKS | {"scale_fmt": "ue8m0"}}
KIMI_K2: Raw = V3 | sized(163840, 131072, 61, 7168, 18432, 64, 64, n_routed_experts=384)
KIMI_K2 |= {
    "model_type": "kimi_k2",
    "eos_token_id": 163585,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "num_nextn_predict_layers": 0,
    "rope_scaling": V3["rope_scaling"] | {"factor": 32.0, "beta_fast": 1.0},
    "rope_theta": 50000.0,
    "routed_scaling_factor": 2.827,
    "topk_group": 1,
}
QWEN: Raw = COMMON | {"eos_token_id": 151645, "rope_theta": 1000000.0}
QWEN |= {"sliding_window": None, "use_sliding_window": False}
QWEN3: Raw = QWEN | {"head_dim": 128, "rope_scaling": None}
QWEN3_30B_A3B: Raw = renamed(QWEN3, "Qwen3MoeForCausalLM") | experts(128, 8, 768)
QWEN3_30B_A3B |= sized(151936, 40960, 48, 2048, 6144, 32, 4, max_window_layers=48)
QWEN3_30B_A3B |= {"decoder_sparse_step": 1, "mlp_only_layers": [], "norm_topk_prob": True}
QWEN2_57B_A14B: Raw = renamed(QWEN, "Qwen2MoeForCausalLM") | experts(64, 8, 2560)
QWEN2_57B_A14B |= sized(151936, 131072, 28, 3584, 18944, 28, 4, max_window_layers=28)
QWEN2_57B_A14B |= {"eos_token_id": 151643, "norm_topk_prob": False, "sliding_window": 65536}
QWEN2_57B_A14B |= {"decoder_sparse_step": 1, "shared_expert_intermediate_size": 20480}
del QWEN2_57B_A14B["attention_bias"]
MIXTRAL_8X7B: Raw = renamed(COMMON, "MixtralForCausalLM")
MIXTRAL_8X7B |= sized(32000, 32768, 32, 4096, 14336, 32, 8, num_local_experts=8)
MIXTRAL_8X7B |= {"eos_token_id": 2, "num_experts_per_tok": 2, "rms_norm_eps": 1e-5}
MIXTRAL_8X7B |= {"rope_theta": 1000000.0, "sliding_window": None}
del MIXTRAL_8X7B["attention_bias"]
MINIMAX_M2: Raw = renamed(COMMON, "MiniMaxM2ForCausalLM") | {"quantization_config": _BLOCKS}
MINIMAX_M2 |= sized(200064, 196608, 62, 3072, 1536, 48, 8, head_dim=128, rotary_dim=64)
MINIMAX_M2 |= {
    "eos_token_id": 200020,
    "num_experts_per_tok": 8,
    "num_local_experts": 256,
    "qk_norm_type": "per_layer",
    "rope_theta": 5000000,
    "scoring_func": "sigmoid",
    "use_qk_norm": True,
    "use_routing_bias": True,
}
LLAMA3_ROPE: Raw = {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 8192}
LLAMA3_ROPE |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA_31_8B: Raw = renamed(COMMON, "LlamaForCausalLM")
LLAMA_31_8B |= sized(128256, 131072, 32, 4096, 14336, 32, 8)
LLAMA_31_8B |= {"eos_token_id": [128001, 128008, 128009], "mlp_bias": False, "rms_norm_eps": 1e-5}
LLAMA_31_8B |= {"rope_scaling": LLAMA3_ROPE, "rope_theta": 500000.0}
_SCOUT_TEXT: Raw = COMMON | sized(202048, 10485760, 48, 5120, 8192, 40, 8, head_dim=128)
_SCOUT_TEXT |= {
    "attention_chunk_size": 8192,
    "attn_scale": 0.1,
    "attn_temperature_tuning": True,
    "eos_token_id": [200001, 200007, 200008],
    "floor_scale": 8192,
    "interleave_moe_layer_step": 1,
    "intermediate_size_mlp": 16384,
    "model_type": "llama4_text",
    "no_rope_layers": [],
    "num_experts_per_tok": 1,
    "num_local_experts": 16,
    "rms_norm_eps": 1e-5,
    "rope_scaling": LLAMA3_ROPE | {"factor": 16.0, "high_freq_factor": 1.0},
    "rope_theta": 500000.0,
    "use_qk_norm": True,
}
del _SCOUT_TEXT["tie_word_embeddings"]
SCOUT: Raw = {
    "architectures": ["Llama4ForConditionalGeneration"],
    "model_type": "llama4",
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "text_config": _SCOUT_TEXT,
    "vision_config": {"hidden_size": 1408, "model_type": "llama4_vision_model"},
}
_MAVERICK_TEXT: Raw = _SCOUT_TEXT | {
    "attn_temperature_tuning": 4,
    "interleave_moe_layer_step": 2,
    "max_position_embeddings": 1048576,
    "moe_layers": list(range(1, 48, 2)),
    "num_local_experts": 128,
    "rope_scaling": None,
    "use_qk_norm": False,
}
MAVERICK: Raw = SCOUT | {"text_config": _MAVERICK_TEXT}
GEMMA3_270M: Raw = renamed({}, "Gemma3ForCausalLM", "gemma3_text")
GEMMA3_270M |= sized(262144, 32768, 18, 640, 2048, 4, 1, head_dim=256, sliding_window=512)
GEMMA3_270M |= {
    "_sliding_window_pattern": 6,
    "attention_bias": False,
    "attn_logit_softcapping": None,
    "eos_token_id": 1,
    "final_logit_softcapping": None,
    "hidden_activation": "gelu_pytorch_tanh",
    "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 3,
    "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-6,
    "rope_local_base_freq": 10000.0,
    "rope_scaling": None,
    "rope_theta": 1000000.0,
    "torch_dtype": "bfloat16",
    "use_bidirectional_attention": False,
}
GEMMA3_4B: Raw = {
    "architectures": ["Gemma3ForConditionalGeneration"],
    "eos_token_id": [1, 106],
    "image_token_index": 262144,
    "mm_tokens_per_image": 256,
    "model_type": "gemma3",
    "text_config": {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    },
    "torch_dtype": "bfloat16",
    "vision_config": {"hidden_size": 1152, "model_type": "siglip_vision_model"},
}
_GEMMA3_27B_TEXT: Raw = GEMMA3_4B["text_config"] | {
    "head_dim": 128,
    "hidden_size": 5376,
    "intermediate_size": 21504,
    "num_attention_heads": 32,
    "num_hidden_layers": 62,
    "num_key_value_heads": 16,
    "query_pre_attn_scalar": 168,
}
GEMMA3_27B: Raw = GEMMA3_4B | {"text_config": _GEMMA3_27B_TEXT}
_LONG = {"long_factor": [1.0 + i for i in range(48)], "short_factor": [1.0] * 48}
PHI4_MINI: Raw = renamed(COMMON, "Phi3ForCausalLM", "phi3")
PHI4_MINI |= sized(200064, 131072, 32, 3072, 8192, 24, 8, sliding_window=262144)
PHI4_MINI |= {
    "eos_token_id": 199999,
    "original_max_position_embeddings": 4096,
    "partial_rotary_factor": 0.75,
    "rms_norm_eps": 1e-5,
    "rope_scaling": _LONG | {"type": "longrope"},
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
}
GEMMA3 = {"Gemma-3-270m": GEMMA3_270M, "Gemma-3-4b": GEMMA3_4B, "Gemma-3-27b": GEMMA3_27B}
PUBLISHED = {
    "DeepSeek-V2-Lite": V2_LITE,
    "DeepSeek-V2": V2,
    "DeepSeek-V3 and R1": V3,
    "Kimi-K2": KIMI_K2,
    "Qwen3-30B-A3B": QWEN3_30B_A3B,
    "Qwen2-57B-A14B": QWEN2_57B_A14B,
    "Mixtral-8x7B": MIXTRAL_8X7B,
    "MiniMax-M2": MINIMAX_M2,
    "GLM-4.5-Air": GLM_45_AIR,
    "GLM-4.5": GLM_45,
    "Llama-4-Scout": SCOUT,
    "Llama-4-Maverick": MAVERICK,
}


def shrunk(raw: Raw) -> Raw:
    """Smaller in numbers of layers, heads, hidden units and tokens only, and without FP8. The
    layers are the first ones; four of them have every kind."""
    if "text_config" in raw:
        return raw | {"text_config": shrunk(raw["text_config"])}
    raw = {key: value for key, value in raw.items() if key != "quantization_config"}
    group = raw["num_attention_heads"] // raw["num_key_value_heads"]
    has_head_dim = "head_dim" in raw or "kv_lora_rank" in raw
    sizes = {
        "vocab_size": 128,
        "hidden_size": 64 if has_head_dim else 16 * group,
        "num_attention_heads": max(group, 2),
        "num_key_value_heads": 1 if group > 1 else 2,
        "num_hidden_layers": 4,
        "intermediate_size": 96,
        "intermediate_size_mlp": 80,
        "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 40,
        "q_lora_rank": 48,
        "eos_token_id": 1,
        "num_nextn_predict_layers": 0,
        "moe_layers": [1, 3],
    }
    return raw | {key: size for key, size in sizes.items() if raw.get(key) is not None}


_GPT_OSS_YARN: Raw = {"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0}
_GPT_OSS_YARN |= {"original_max_position_embeddings": 4096, "truncate": False}
_MXFP4_LEFT_OUT = ["model.layers.*.self_attn", "model.layers.*.mlp.router"]
_MXFP4_LEFT_OUT += ["model.embed_tokens", "lm_head"]
GPT_OSS_20B: Raw = renamed({}, "GptOssForCausalLM", "gpt_oss")
GPT_OSS_20B |= sized(201088, 131072, 24, 2880, 2880, 64, 8, head_dim=64, sliding_window=128)
GPT_OSS_20B |= {
    "attention_bias": True,
    "eos_token_id": 200002,
    "experts_per_token": 4,
    "hidden_act": "silu",
    "initial_context_length": 4096,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
    "num_experts_per_tok": 4,
    "num_local_experts": 32,
    "pad_token_id": 199999,
    "quantization_config": {
        "modules_to_not_convert": _MXFP4_LEFT_OUT,
        "quant_method": "mxfp4",
    },
    "rms_norm_eps": 1e-5,
    "rope_scaling": _GPT_OSS_YARN,
    "rope_theta": 150000,
    "swiglu_limit": 7.0,
    "tie_word_embeddings": False,
}
GPT_OSS_120B: Raw = GPT_OSS_20B | {
    "layer_types": ["sliding_attention", "full_attention"] * 18,
    "num_hidden_layers": 36,
    "num_local_experts": 128,
}
GPT_OSS = {"gpt-oss-20b": GPT_OSS_20B, "gpt-oss-120b": GPT_OSS_120B}
