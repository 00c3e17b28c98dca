"""`config.json` of published models with recurrent states, without what does not matter."""

from tests.models.published import COMMON, Raw, experts, renamed, sized

_DELTA: Raw = {
    "full_attention_interval": 4,
    "head_dim": 256,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_value_head_dim": 128,
}
QWEN3_NEXT: Raw = renamed(COMMON, "Qwen3NextForCausalLM", "qwen3_next") | _DELTA
QWEN3_NEXT |= sized(151936, 262144, 48, 2048, 5120, 16, 2, eos_token_id=151645)
QWEN3_NEXT |= experts(512, 10, 512) | {
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
    "partial_rotary_factor": 0.25,
    "rope_scaling": None,
    "rope_theta": 10000000,
    "shared_expert_intermediate_size": 512,
}
# Of a head that SpecForge trains for the model of 4B: its heads are wider than the hidden state.
QWEN3_5_EAGLE3: Raw = sized(248320, 32768, 1, 2560, 9216, 16, 4, eos_token_id=248044) | {
    "architectures": ["LlamaForCausalLMEagle3"],
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "draft_vocab_size": 32000,
    "head_dim": 256,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "model_type": "llama",
    "rms_norm_eps": 1e-6,
    "rope_scaling": None,
    "rope_theta": 10000000,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.57.0",
    "use_cache": True,
    "use_sliding_window": False,
}
QWEN3_5: Raw = {
    "architectures": ["Qwen3_5ForConditionalGeneration"],
    "image_token_id": 248056,
    "model_type": "qwen3_5",
    "text_config": _DELTA
    | sized(248320, 262144, 32, 4096, 12288, 16, 4, eos_token_id=248044)
    | {
        "attn_output_gate": True,
        "dtype": "bfloat16",
        "hidden_act": "silu",
        "mamba_ssm_dtype": "float32",
        "model_type": "qwen3_5_text",
        "mtp_num_hidden_layers": 1,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {
            "mrope_interleaved": True,
            "mrope_section": [11, 11, 10],
            "partial_rotary_factor": 0.25,
            "rope_theta": 10000000,
            "rope_type": "default",
        },
    },
    "tie_word_embeddings": False,
    "vision_config": {"depth": 27, "hidden_size": 1152, "model_type": "qwen3_5"},
}
