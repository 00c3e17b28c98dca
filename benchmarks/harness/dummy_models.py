"""Further models without weights that speed is measured on, their tiny forms for a CPU, and engines
of any of them."""

import json
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness.engine import Rounds
from benchmarks.harness.models import EAGLE3_8B, LLAMA_8B, RATES, TINY, Config

TINY_LLAMA: Config = {**LLAMA_8B, **TINY, "num_hidden_layers": 7}
TINY_EAGLE3: Config = {**EAGLE3_8B, **TINY, "draft_vocab_size": 256}
QWEN3_30B: Config = {
    "architectures": ["Qwen3MoeForCausalLM"], "vocab_size": 151936, "hidden_size": 2048,
    "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4,
    "head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768,
    "norm_topk_prob": True, "max_position_embeddings": 40960, "rope_theta": 1000000.0,
    "torch_dtype": "bfloat16",
}  # fmt: skip
TINY_QWEN3: Config = QWEN3_30B | {
    "vocab_size": 512, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "num_experts": 8, "num_experts_per_tok": 2,
    "moe_intermediate_size": 32, "torch_dtype": "float32",
}  # fmt: skip
V3_STYLE: Config = {
    "architectures": ["DeepseekV3ForCausalLM"], "vocab_size": 129280, "hidden_size": 2048,
    "intermediate_size": 10944, "num_hidden_layers": 27, "num_attention_heads": 16,
    "num_key_value_heads": 16, "q_lora_rank": 1536, "kv_lora_rank": 512,
    "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "n_routed_experts": 64,
    "n_shared_experts": 1, "num_experts_per_tok": 8, "n_group": 8, "topk_group": 4,
    "moe_intermediate_size": 1408, "first_k_dense_replace": 1, "num_nextn_predict_layers": 1,
    "max_position_embeddings": 16384, "torch_dtype": "bfloat16",
}  # fmt: skip
QWEN3_NEXT: Config = {
    "architectures": ["Qwen3NextForCausalLM"], "vocab_size": 151936, "hidden_size": 2048,
    "num_hidden_layers": 12, "num_attention_heads": 16, "num_key_value_heads": 2,
    "head_dim": 256, "linear_num_key_heads": 16, "linear_num_value_heads": 32,
    "linear_key_head_dim": 128, "linear_value_head_dim": 128, "num_experts": 512,
    "num_experts_per_tok": 10, "moe_intermediate_size": 512, "rope_theta": 10000000.0,
    "shared_expert_intermediate_size": 512, "max_position_embeddings": 262144,
    "torch_dtype": "bfloat16",
}  # fmt: skip
TINY_QWEN3_NEXT: Config = QWEN3_NEXT | {
    "vocab_size": 512, "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4,
    "head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 8, "linear_value_head_dim": 8, "num_experts": 8,
    "num_experts_per_tok": 2, "moe_intermediate_size": 32, "torch_dtype": "float32",
    "shared_expert_intermediate_size": 32,
}  # fmt: skip
QWEN3_235B: Config = QWEN3_30B | {
    "hidden_size": 4096, "num_hidden_layers": 94, "num_attention_heads": 64,
    "moe_intermediate_size": 1536,
}  # fmt: skip
DEEPSEEK_V3: Config = V3_STYLE | {
    "hidden_size": 7168, "intermediate_size": 18432, "num_hidden_layers": 61,
    "num_attention_heads": 128, "num_key_value_heads": 128, "n_routed_experts": 256,
    "moe_intermediate_size": 2048, "first_k_dense_replace": 3,
    "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
}  # fmt: skip
GLM_5: Config = {
    "architectures": ["GlmMoeDsaForCausalLM"], "num_hidden_layers": 8,
    "num_nextn_predict_layers": 1, "index_share_for_mtp_iteration": True,
    "max_position_embeddings": 202752, "torch_dtype": "bfloat16",
    "quantization_config": DEEPSEEK_V3["quantization_config"],
}  # fmt: skip
TINY_V3: Config = V3_STYLE | {
    "vocab_size": 512, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 4, "q_lora_rank": 24, "kv_lora_rank": 32,
    "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16, "n_routed_experts": 16,
    "num_experts_per_tok": 4, "moe_intermediate_size": 32, "torch_dtype": "float32",
}  # fmt: skip
TINY_GLM_5: Config = TINY_V3 | {
    "architectures": ["GlmMoeDsaForCausalLM"], "n_group": 1, "topk_group": 1, "index_topk": 12,
    "index_head_dim": 16, "index_n_heads": 8,
}  # fmt: skip

GPT_OSS_20B: Config = {
    "architectures": ["GptOssForCausalLM"], "vocab_size": 201088, "hidden_size": 2880,
    "intermediate_size": 2880, "num_hidden_layers": 24, "num_attention_heads": 64,
    "num_key_value_heads": 8, "head_dim": 64, "num_local_experts": 32, "num_experts_per_tok": 4,
    "sliding_window": 128, "max_position_embeddings": 131072, "torch_dtype": "bfloat16",
    "quantization_config": {
        "quant_method": "mxfp4",
        "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router"],
    },
}  # fmt: skip
TINY_GPT_OSS: Config = GPT_OSS_20B | {
    "vocab_size": 512, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "num_local_experts": 8,
    "num_experts_per_tok": 2, "sliding_window": 12, "torch_dtype": "float32",
}  # fmt: skip
QWEN3_5_35B: Config = QWEN3_NEXT | {
    "architectures": ["Qwen3_5MoeForCausalLM"], "vocab_size": 248320, "num_experts": 256,
    "num_experts_per_tok": 8, "mtp_num_hidden_layers": 1,
    "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
}  # fmt: skip
TINY_QWEN3_5: Config = QWEN3_5_35B | {
    **TINY_QWEN3_NEXT, "architectures": ["Qwen3_5MoeForCausalLM"], "quantization_config": None
}  # fmt: skip
GEMMA4_E4B: Config = {
    "architectures": ["Gemma4ForCausalLM"], "vocab_size": 262144, "hidden_size": 2560,
    "intermediate_size": 10240, "num_hidden_layers": 42, "num_attention_heads": 8,
    "num_key_value_heads": 2, "num_kv_shared_layers": 18, "hidden_size_per_layer_input": 256,
    "sliding_window": 512, "max_position_embeddings": 131072, "torch_dtype": "bfloat16",
}  # fmt: skip
GEMMA4_26B: Config = GEMMA4_E4B | {
    "hidden_size": 2816, "intermediate_size": 2112, "num_hidden_layers": 30,
    "num_attention_heads": 16, "num_key_value_heads": 8, "num_global_key_value_heads": 2,
    "attention_k_eq_v": True, "num_kv_shared_layers": 0, "hidden_size_per_layer_input": 0,
    "sliding_window": 1024, "enable_moe_block": True, "num_experts": 128, "top_k_experts": 8,
    "moe_intermediate_size": 704,
}  # fmt: skip
TINY_GEMMA4: Config = GEMMA4_26B | {
    "vocab_size": 512, "hidden_size": 64, "intermediate_size": 32, "num_hidden_layers": 6,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "global_head_dim": 32,
    "num_global_key_value_heads": 1, "sliding_window": 12, "num_experts": 8, "top_k_experts": 2,
    "moe_intermediate_size": 32, "torch_dtype": "float32",
}  # fmt: skip
GEMMA3_12B: Config = {
    "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "vocab_size": 262208,
    "hidden_size": 3840, "intermediate_size": 15360, "num_hidden_layers": 48,
    "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 256, "sliding_window": 1024,
    "query_pre_attn_scalar": 256, "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
    "max_position_embeddings": 131072, "torch_dtype": "bfloat16",
}  # fmt: skip
TINY_GEMMA3: Config = GEMMA3_12B | {
    "vocab_size": 512, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 6,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "sliding_window": 12,
    "torch_dtype": "float32",
}  # fmt: skip


def assistant_of(target: Config) -> Config:
    """Four layers that read the keys of a Gemma 4, in the target's head sizes."""
    own = ("vocab_size", "num_attention_heads", "num_key_value_heads", "sliding_window",
           "num_global_key_value_heads", "attention_k_eq_v", "head_dim", "global_head_dim",
           "torch_dtype")  # fmt: skip
    text = {key: target[key] for key in own if key in target} | {
        "hidden_size": 256, "intermediate_size": 2048, "num_hidden_layers": 4,
        "num_kv_shared_layers": 4, "hidden_size_per_layer_input": 0,
        "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
    }  # fmt: skip
    return {
        "architectures": ["Gemma4AssistantForCausalLM"], "text_config": text,
        "backbone_hidden_size": target["hidden_size"], "torch_dtype": target["torch_dtype"],
    }  # fmt: skip


def dummy_engine(
    target: Config,
    *,
    batch_sizes: Sequence[int],
    prompt_len: int,
    device: str,
    room: int = 512,
    speculation: Mapping[str, Any] | None = None,
    head: Config | None = None,
    **options: Any,
) -> Rounds:
    """An engine of random weights. room: tokens that a request may generate in a round each. head:
    with `speculation`'s draft length and the synthetic acceptance of RATES; EAGLE-3's if that
    names no other type."""
    draft_len = 0 if speculation is None else speculation["max_draft_len"]
    kv_cache = {"enable_block_reuse": False} | ({"max_tokens": 8192} if device == "cpu" else {})
    with tempfile.TemporaryDirectory() as name:
        for part, config in (("target", target), ("draft", head or {})):
            Path(name, part).mkdir()
            Path(name, part, "config.json").write_text(json.dumps(config))
        if head is not None:
            given = {"decoding_type": "Eagle3"} | dict(speculation or {})
            if given["decoding_type"] != "MTP":  # which is loaded as the target is
                given["load_format"] = "dummy"
            speculation = {
                "speculative_model": str(Path(name, "draft")),
                "synthetic_acceptance_rates": RATES[:draft_len],
            } | given
        own = {
            "kv_cache_config": kv_cache,
            "cuda_graph_config": {"batch_sizes": list(batch_sizes)},
            "speculative_config": speculation,
        }
        return Rounds(
            str(Path(name, "target")),
            max_batch_size=max(batch_sizes),
            max_seq_len=prompt_len + room * (1 + draft_len),
            device=device,
            load_format="dummy",
            **own | options,
        )
