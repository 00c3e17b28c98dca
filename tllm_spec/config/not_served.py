"""TensorRT-LLM's options of `LLM` and `generate` that have no effect here: the values that are
accepted, and why no other is."""

from __future__ import annotations

from collections.abc import Mapping

from tllm_spec.config.option_checks import NotServed

ONE_WAY = "a layer is sliced over all devices; use tensor_parallel_size"
NO_ATTENTION_DP = "every device has a part of all requests' attention; use tensor_parallel_size"
NO_CONTEXT_PARALLEL = "a request's KV cache is divided by heads only; use tensor_parallel_size"
NO_SESSION = "ranks are started by mpirun or by the model"
NO_STATISTICS = "per-request iteration statistics are not collected; use enable_iter_perf_stats"
NO_BATCH_WAIT = "a round never waits for more requests"
LOCAL_FILES = "models are local folders; nothing is downloaded"
NO_LORA = "LoRA is not served"
NO_BEAMS = "there is no beam search"
NO_ENGINE_FILES = "there are no engine files to build; models are loaded from their checkpoints"
NO_QUANTISING = (
    "weights are not quantised here; a checkpoint in FP8 or 4 bits is served as it is, with "
    "nothing to set (docs/quantization.md)"
)
NO_SPARSE = "attention reads every token"
TEXT_ONLY = "only text models are served"
ONE_SAMPLER = "there is one sampler, and every request of a batch has its own options"
ONE_MOE = "kernels of experts are chosen by device and size"
NO_COMPILER = "the model is not compiled"
ONE_PROCESS = "prefill and decoding run in one process"
NO_KV_EVENTS = "KV cache events are published by kv_cache_config.kv_events_config"
NO_HOST_CACHE = "evicted pages stay in host memory in the order of their last use"
NO_RECURRENT_STATE = "layers with a recurrent state are not served"
ALL_TOKENS = "every layer keeps all tokens"

# TensorRT-LLM's defaults of options that are mappings.
MOE_DEFAULTS: Mapping[str, object] = {
    "backend": "AUTO",
    "max_num_tokens": None,
    "load_balancer": None,
    "disable_finalize_fusion": False,
    "use_low_precision_moe_combine": False,
}
# Names of TensorRT-LLM's kernels for experts.
MOE_KERNELS = frozenset(
    (
        "CUTLASS",
        "CUTEDSL",
        "DEEPGEMM",
        "DENSEGEMM",
        "MEGAMOE_DEEPGEMM",
        "TRITON",
        "TRTLLM",
        "VANILLA",
        "WIDEEP",
    )
)
# Attention data parallelism that is not switched on; the numbers matter only where it is.
ATTENTION_DP_OFF: Mapping[str, object] = {
    "enable_balance": False,
    "timeout_iters": int,
    "batching_wait_iters": int,
}
NOTHING_QUANTISED: Mapping[str, object] = {"quant_algo": None, "kv_cache_quant_algo": None}

# Names of TensorRT-LLM before version 1.0.
OLD_LLM_OPTIONS: Mapping[str, NotServed] = {
    "cuda_graph_batch_sizes": NotServed((None,), "use cuda_graph_config.batch_sizes"),
    "cuda_graph_padding_enabled": NotServed(
        (True,), "use cuda_graph_config.enable_padding", ignored=(False,)
    ),
    "mixed_sampler": NotServed((True, False), ONE_SAMPLER),
    "moe_backend": NotServed(("AUTO",), ONE_MOE, ignored=(MOE_KERNELS,)),
    "torch_compile_enabled": NotServed((False,), NO_COMPILER, ignored=(True,)),
    "torch_compile_piecewise_cuda_graph": NotServed((False,), NO_COMPILER, ignored=(True,)),
    "use_cuda_graph": NotServed((True,), "use cuda_graph_config: null", ignored=(False,)),
}
LLM_NOT_SERVED: Mapping[str, NotServed] = {
    **OLD_LLM_OPTIONS,
    "allreduce_strategy": NotServed(
        ("AUTO",), "for each size the fastest way is measured when the ranks meet"
    ),
    "attention_dp_config": NotServed((None,), NO_ATTENTION_DP, ignored=(ATTENTION_DP_OFF,)),
    "attn_backend": NotServed(
        ("auto", "TRTLLM", "VANILLA", "TRITON", "FLASHINFER"),
        "there are no other attention kernels",
    ),
    "backend": NotServed((None, "pytorch"), "there is one backend"),
    "batch_wait_max_tokens_ratio": NotServed((0, 0.0), NO_BATCH_WAIT),
    "batch_wait_timeout_iters": NotServed((0,), NO_BATCH_WAIT),
    "batch_wait_timeout_ms": NotServed((0, 0.0), NO_BATCH_WAIT),
    "batched_logits_processor": NotServed((None,), "use SamplingParams.logits_processor"),
    "batching_type": NotServed((None, "INFLIGHT"), "requests join and leave in every round"),
    "build_config": NotServed((None,), NO_ENGINE_FILES),
    "cache_transceiver_config": NotServed((None, {"backend": None}), ONE_PROCESS),
    "calib_config": NotServed((None,), NO_QUANTISING),
    "checkpoint_format": NotServed((None, "HF"), "checkpoints have Hugging Face's format"),
    "checkpoint_loader": NotServed((None,), "checkpoints have Hugging Face's format"),
    "context_parallel_size": NotServed((1,), NO_CONTEXT_PARALLEL),
    "cp_config": NotServed((None, {}), NO_CONTEXT_PARALLEL),
    "custom_tokenizer": NotServed((None,), "pass a tokenizer object as tokenizer"),
    "disable_mm_encoder": NotServed((False, True), TEXT_ONLY),
    "enable_attention_dp": NotServed((False,), NO_ATTENTION_DP),
    "enable_autotuner": NotServed(
        (True,),
        "the first start on a GPU always tunes GEMMs, unless deterministic is set",
        ignored=(False,),
    ),
    "enable_build_cache": NotServed((False,), NO_ENGINE_FILES),
    "enable_early_first_token_response": NotServed((False,), "every round answers at once"),
    "enable_in_graph_sampling": NotServed((True, False), "sampling is part of the graph"),
    "enable_iter_req_stats": NotServed((False,), NO_STATISTICS),
    "enable_layerwise_nvtx_marker": NotServed((False,), "there are no NVTX markers"),
    "enable_lm_head_tp_in_adp": NotServed((False,), NO_ATTENTION_DP),
    "enable_lora": NotServed((False,), NO_LORA),
    "enable_min_latency": NotServed((False,), "there is one set of kernels", ignored=(True,)),
    "enable_mixed_sampler": NotServed((True, False), ONE_SAMPLER),
    "enable_trtllm_sampler": NotServed((False,), ONE_SAMPLER),
    "extended_runtime_perf_knob_config": NotServed((None,), NO_ENGINE_FILES),
    "fail_fast_on_attention_window_too_large": NotServed((True, False), ALL_TOKENS),
    "force_dynamic_quantization": NotServed((False,), NO_QUANTISING),
    "garbage_collection_gen0_threshold": NotServed(
        (None, 20000), "the settings of Python's garbage collector are not changed", ignored=(int,)
    ),
    "gather_generation_logits": NotServed((False,), "logits are not returned; logprobs are"),
    "generation_config": NotServed(("trtllm",), "sampling defaults come from SamplingParams only"),
    "iter_stats_max_iterations": NotServed((None,), "use max_stats_len"),
    "kv_cache_compression_config": NotServed((None,), ALL_TOKENS),
    "kv_cache_dtype": NotServed(("auto",), "use kv_cache_config.dtype"),
    "kv_connector_config": NotServed((None,), "the KV cache stays in one process"),
    "lora_config": NotServed((None,), NO_LORA),
    "max_beam_width": NotServed((None, 1), NO_BEAMS),
    "mm_encoder_only": NotServed((False,), TEXT_ONLY),
    "moe_cluster_parallel_size": NotServed((None, -1, 1), ONE_WAY),
    "moe_config": NotServed(
        (None, MOE_DEFAULTS),
        ONE_MOE,
        ignored=({**MOE_DEFAULTS, "backend": MOE_KERNELS | {"AUTO"}},),
    ),
    "mpi_session": NotServed((None,), NO_SESSION),
    "multimodal_config": NotServed((None,), TEXT_ONLY),
    "normalize_log_probs": NotServed((False,), NO_BEAMS),
    "num_postprocess_workers": NotServed(
        (0,), "text is made in the front processes: tllm-serve --frontends", ignored=(int,)
    ),
    "orchestrator_type": NotServed((None,), NO_SESSION),
    "peft_cache_config": NotServed((None,), NO_LORA),
    "perf_metrics_max_requests": NotServed(
        (0, 1000), "the server keeps the latest 1,000 finished requests for /perf_metrics"
    ),
    "pipeline_parallel_size": NotServed((1,), ONE_WAY),
    "postprocess_tokenizer_dir": NotServed((None,), "text is made in the serving process"),
    "prefill_cuda_graph_backend": NotServed(
        ("auto", "disabled"), "a captured prefill is one whole graph"
    ),
    "prometheus_metrics_config": NotServed((None,), "the server's metrics have no settings"),
    "quantization": NotServed((None,), NO_QUANTISING),
    "quant_config": NotServed((None, NOTHING_QUANTISED), NO_QUANTISING),
    "ray_placement_config": NotServed((None,), NO_SESSION),
    "reasoning_parser": NotServed((None,), "it is an option of tllm-serve: --reasoning_parser"),
    "request_stats_max_iterations": NotServed((None,), NO_STATISTICS),
    "revision": NotServed((None,), LOCAL_FILES),
    "sampler_type": NotServed(("auto", "TorchSampler"), "there is one sampler"),
    "sparse_attention_config": NotServed((None,), NO_SPARSE),
    "tokenizer_mode": NotServed(("auto",), "the fast tokenizer is the only one"),
    "tokenizer_revision": NotServed((None,), LOCAL_FILES),
    "torch_compile_config": NotServed((None,), NO_COMPILER),
    "trust_remote_code": NotServed(
        (False,),
        "code that comes with a checkpoint is never run; the built-in architectures need none",
        ignored=(True,),
    ),
}
KV_CACHE_NOT_SERVED: Mapping[str, NotServed] = {
    "attention_dp_events_gather_period_ms": NotServed((5,), NO_KV_EVENTS),
    "avg_seq_len": NotServed((None,), "there is one pool of pages"),
    "block_reuse_config": NotServed((None,), "every finished prefix can be reused"),
    "copy_on_partial_reuse": NotServed((True,), "a partly matching page is always copied"),
    "cross_kv_cache_fraction": NotServed((None,), "there are no encoders"),
    "disk_cache_path": NotServed((None,), "evicted pages are not kept on disk"),
    "disk_cache_size": NotServed((None, 0), "evicted pages are not kept on disk"),
    "dtype": NotServed(
        ("auto", "fp8", "model"),
        "a cache of 4 bits (nvfp4) needs a scale for every 16 numbers, and one of int8 scales that "
        "follow the text; codes here have a constant scale for each layer",
    ),
    "enable_swa_scratch_reuse": NotServed((False,), ALL_TOKENS),
    "event_buffer_max_size": NotServed((0,), NO_KV_EVENTS),
    "iteration_stats_interval": NotServed((1,), "statistics are of every round"),
    "kv_cache_event_hash_algo": NotServed(("auto",), NO_KV_EVENTS),
    "mamba_ssm_cache_dtype": NotServed(("auto",), NO_RECURRENT_STATE),
    "mamba_state_config": NotServed((None,), NO_RECURRENT_STATE),
    "max_attention_window": NotServed((None,), ALL_TOKENS),
    "max_gpu_total_bytes": NotServed((0,), "use max_tokens or free_gpu_memory_fraction"),
    "max_util_for_resume": NotServed(
        (0.95,), "a paused request resumes once the scheduler has pages for it"
    ),
    "onboard_blocks": NotServed((True,), NO_HOST_CACHE),
    "pool_ratio": NotServed((None,), "there is one pool of pages"),
    "secondary_offload_min_priority": NotServed((None,), NO_HOST_CACHE),
    "sink_token_length": NotServed((None,), ALL_TOKENS),
    "use_kv_cache_manager_v2": NotServed(("auto", False), "there is one cache manager"),
    "use_uvm": NotServed((False,), "the cache is in device memory"),
}
SCHEDULER_NOT_SERVED: Mapping[str, NotServed] = {
    "capacity_scheduler_policy": NotServed(
        ("GUARANTEED_NO_EVICT", "MAX_UTILIZATION"), "requests join and leave in every round"
    ),
    "context_chunking_policy": NotServed(
        (None, "FIRST_COME_FIRST_SERVED"), "the oldest prompt's chunk comes first"
    ),
    "dynamic_batch_config": NotServed(
        (None,), "the batch is bounded by max_batch_size and max_num_tokens"
    ),
    "enable_prefix_aware_scheduling": NotServed(
        (False,), "requests are not reordered by their prefixes", ignored=(True,)
    ),
    "reorder_policy_config": NotServed((None,), "requests are not reordered"),
    "use_python_scheduler": NotServed((True, False), "the scheduler is always the Python one"),
}
CUDA_GRAPH_NOT_SERVED: Mapping[str, NotServed] = {
    "mode": NotServed(("decode",), "prefill has prefill_cuda_graph_backend")
}
GENERATE_NOT_SERVED: Mapping[str, NotServed] = {
    "conversation_params": NotServed((None,), "requests are independent of each other"),
    "disaggregated_params": NotServed((None,), ONE_PROCESS),
    "kv_cache_retention_config": NotServed((None,), "cached pages leave in the order of last use"),
    "lora_request": NotServed((None,), NO_LORA),
    "prompt_adapter_request": NotServed((None,), NO_LORA),
    "scheduling_params": NotServed((None,), NO_ATTENTION_DP),
    "trace_headers": NotServed((None,), "requests are not traced"),
}
# Arguments of vLLM's `LLM.chat`.
CHAT_NOT_SERVED: Mapping[str, NotServed] = {
    **GENERATE_NOT_SERVED,
    "chat_template": NotServed((None,), "the model's own template is used"),
    "chat_template_content_format": NotServed((None, "auto"), "parts of a message are joined"),
    "continue_final_message": NotServed((None, False), "an answer is a message of its own"),
    "mm_processor_kwargs": NotServed((None, {}), "only text is served"),
}
