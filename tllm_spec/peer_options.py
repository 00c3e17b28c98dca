"""What options of vLLM and SGLang are called here, for the error message about an unknown option.

These names are not accepted: some of their values mean something else there."""

from __future__ import annotations

from collections.abc import Mapping

FREE_MEMORY = (
    "kv_cache_config.free_gpu_memory_fraction (of what is free once the models are loaded)"
)

LLM_PEERS: Mapping[str, str] = {
    # vLLM
    "block_size": "kv_cache_config.tokens_per_block",
    "enable_prefix_caching": "kv_cache_config.enable_block_reuse",
    "enforce_eager": "cuda_graph_config: null",
    "gpu_memory_utilization": FREE_MEMORY,
    "max_model_len": "max_seq_len",
    "max_num_batched_tokens": "max_num_tokens",
    "max_num_seqs": "max_batch_size",
    # SGLang
    "attention_backend": "attn_backend",
    "chunked_prefill_size": "enable_chunked_prefill: true and max_num_tokens",
    "context_length": "max_seq_len",
    "cuda_graph_max_bs": "cuda_graph_config.max_batch_size",
    "disable_cuda_graph": "cuda_graph_config: null",
    "disable_radix_cache": "kv_cache_config.enable_block_reuse: false",
    "enable_deterministic_inference": "deterministic",
    "max_prefill_tokens": "max_num_tokens",
    "max_running_requests": "max_batch_size",
    "max_total_tokens": "kv_cache_config.max_tokens",
    "mem_fraction_static": FREE_MEMORY,
    "model_path": "model",
    "page_size": "kv_cache_config.tokens_per_block",
    "speculative_algorithm": "speculative_config.decoding_type",
    "tokenizer_path": "tokenizer",
    "tp_size": "tensor_parallel_size",
}
SPECULATIVE_PEERS: Mapping[str, str] = {
    # vLLM
    "disable_by_batch_size": "max_concurrency",
    "method": "decoding_type",
    "model": "speculative_model",
    "num_speculative_tokens": "max_draft_len",
    "prompt_lookup_max": "max_matching_ngram_size",
    # SGLang
    "speculative_algorithm": "decoding_type",
}
