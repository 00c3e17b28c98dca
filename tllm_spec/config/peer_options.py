"""What options of vLLM and SGLang are called here, for the error message about an unknown option.

A `speculative_config` of vLLM with a `method` is accepted, and so are the flags of the peers'
command lines in `cli/peer_flags.py`. Other arguments of `LLM` and keys of YAML files have our
names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

FREE_MEMORY = (
    "kv_cache_config.free_gpu_memory_fraction (of what is free once the models are loaded)"
)

LLM_PEERS: Mapping[str, str] = {
    # vLLM
    "block_size": "kv_cache_config.tokens_per_block",
    "enable_prefix_caching": "kv_cache_config.enable_block_reuse",
    "enable_expert_parallel": "moe_expert_parallel_size",
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
# vLLM's options of speculation that mean the same here, under these names.
SPECULATIVE_NAMES: Mapping[str, str] = {
    "method": "decoding_type",
    "model": "speculative_model",
    "num_speculative_tokens": "max_draft_len",
    "prompt_lookup_max": "max_matching_ngram_size",
}
SPECULATIVE_PEERS: Mapping[str, str] = {
    **SPECULATIVE_NAMES,
    # vLLM
    "disable_by_batch_size": "max_concurrency",
    "draft_sample_method": "draft_sampling",
    "num_speculative_tokens_per_batch_size": "draft_len_schedule",
    "prompt_lookup_min": "max_matching_ngram_size (shorter matches are tried, too)",
    "rejection_sample_method": "use_rejection_sampling",
    "suffix_decoding_max_cached_requests": "is_public_pool (of decoding_type NGram)",
    "suffix_decoding_max_spec_factor": "max_draft_len",
    "suffix_decoding_max_tree_depth": "max_matching_ngram_size",
    # SGLang
    "speculative_adaptive": "adaptive",
    "speculative_algorithm": "decoding_type",
}
# Decoding types by the methods of vLLM and the algorithms of SGLang.
METHODS: Mapping[str, str] = {
    "deepseek_mtp": "MTP",
    "dflash": "DFlash",
    "draft_model": "Draft_Target",
    "eagle": "Eagle",
    "eagle3": "Eagle3",
    "mtp": "MTP",
    "ngram": "NGram",
}
ALGORITHMS: Mapping[str, str] = {
    "DFLASH": "DFlash",
    "EAGLE": "Eagle",
    "EAGLE3": "Eagle3",
    "NEXTN": "MTP",
    "NGRAM": "NGram",
    "STANDALONE": "Draft_Target",
}


def with_our_names(options: Mapping[str, Any]) -> dict[str, Any]:
    """vLLM's options of speculation under the names here. Others stay, and are checked later."""
    named = {SPECULATIVE_NAMES.get(name, name): value for name, value in options.items()}
    method = named.get("decoding_type")
    if isinstance(method, str):
        named["decoding_type"] = METHODS.get(method, method)
    if method == "draft_model" and named.get("parallel_drafting") is True:
        named["decoding_type"] = "PARD"
        del named["parallel_drafting"]
    return named
