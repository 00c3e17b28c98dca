"""config.json of published models that also see images, without the keys that have no effect on
their text part, for fields and defaults that transformers' own files do not have."""

from tests.models.published import QWEN, Raw, experts, renamed, sized

_MROPE: Raw = {"mrope_section": [24, 20, 20], "mrope_interleaved": True, "rope_type": "default"}
_QWEN3_VL: Raw = sized(151936, 262144, 36, 2560, 9728, 32, 8, head_dim=128, rope_theta=5000000)
_QWEN3_VL |= {"attention_bias": False, "dtype": "bfloat16", "eos_token_id": 151645}
_QWEN3_VL |= {"hidden_act": "silu", "rms_norm_eps": 1e-6, "rope_scaling": _MROPE}
QWEN3_VL_30B: Raw = {
    "architectures": ["Qwen3VLMoeForConditionalGeneration"],
    "image_token_id": 151655,
    "model_type": "qwen3_vl_moe",
    "text_config": _QWEN3_VL
    | sized(151936, 262144, 48, 2048, 6144, 32, 4, decoder_sparse_step=1)
    | experts(128, 8, 768)
    | {"mlp_only_layers": [], "model_type": "qwen3_vl_moe_text", "norm_topk_prob": True},
    "tie_word_embeddings": False,
    "vision_config": {"depth": 27, "hidden_size": 1152, "model_type": "qwen3_vl_moe"},
}
QWEN3_VL_4B: Raw = QWEN3_VL_30B | {
    "architectures": ["Qwen3VLForConditionalGeneration"],
    "model_type": "qwen3_vl",
    "text_config": _QWEN3_VL | {"model_type": "qwen3_vl_text", "tie_word_embeddings": True},
    "tie_word_embeddings": True,
    "vision_config": {"depth": 24, "hidden_size": 1024, "model_type": "qwen3_vl"},
}
# All of the text model's keys are at the top.
QWEN2_5_VL_7B: Raw = renamed(QWEN, "Qwen2_5_VLForConditionalGeneration", "qwen2_5_vl")
QWEN2_5_VL_7B |= sized(152064, 128000, 28, 3584, 18944, 28, 4, max_window_layers=28)
QWEN2_5_VL_7B |= {
    "image_token_id": 151655,
    "rope_scaling": {"mrope_section": [16, 24, 24], "type": "mrope"},
    "sliding_window": 32768,
    "vision_config": {"depth": 32, "hidden_size": 1280, "model_type": "qwen2_5_vl"},
}
del QWEN2_5_VL_7B["attention_bias"]
MISTRAL_SMALL_3_1: Raw = {
    "architectures": ["Mistral3ForConditionalGeneration"],
    "image_token_index": 10,
    "model_type": "mistral3",
    "text_config": sized(131072, 131072, 40, 5120, 32768, 32, 8, head_dim=128)
    | {"model_type": "mistral", "hidden_act": "silu", "rms_norm_eps": 1e-5}
    | {"rope_theta": 1000000000.0, "sliding_window": None},
    "torch_dtype": "bfloat16",
    "vision_config": {"hidden_size": 1024, "model_type": "pixtral"},
}
WITH_IMAGES = {
    "Qwen3-VL-30B-A3B": QWEN3_VL_30B,
    "Qwen3-VL-4B": QWEN3_VL_4B,
    "Qwen2.5-VL-7B": QWEN2_5_VL_7B,
    "Mistral-Small-3.1": MISTRAL_SMALL_3_1,
}
