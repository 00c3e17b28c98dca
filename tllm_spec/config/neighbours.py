"""What the names of the neighbours (TensorRT-LLM, vLLM, SGLang) are here: three lists.

A name in `*_RENAMED` is an option of ours under another name. A name in `*_IGNORED` is taken with
values that change nothing: a value that asks for something is warned of once. What is in neither is
refused: with the reason if `ABSENT` has one, as an unknown option otherwise."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any, NamedTuple

Values = tuple[object, ...]
Ignored = Mapping[str, Values]


class Renamed(NamedTuple):
    """An option of ours, dotted where it is nested, and its value for one of the neighbour's."""

    path: str
    value: Callable[[Any], Any] = lambda given: given


def _by_name(ours: Mapping[object, object]) -> Callable[[Any], Any]:
    """A value of theirs that the mapping has; any other stays, and is checked later."""
    return lambda given: ours.get(given, given) if isinstance(given, (str, bool)) else given


_OPPOSITE = _by_name({True: False, False: True})
_REUSE = "kv_cache_config.enable_block_reuse"
_SPECULATIVE = "speculative_config"
NUM_NODES = "speculative_num_draft_tokens"  # SGLang counts the root, too
NUM_CHILDREN = "speculative_eagle_topk"
ADAPTIVE, ADAPTIVE_FILE = "speculative_adaptive", "speculative_adaptive_config"

AUTO = "AUTO"  # the decoding type that the engine chooses

# Decoding types by the methods of vLLM and the algorithms of SGLang.
DECODING_TYPES: Mapping[object, object] = {
    "deepseek_mtp": "MTP",
    "dflash": "DFlash",
    "dspark": "DSpark",
    "draft_model": "Draft_Target",
    "eagle": "Eagle",
    "eagle3": "Eagle3",
    **dict.fromkeys(("mtp", "gemma4_mtp", "glm4_moe_mtp", "qwen3_5_mtp", "qwen3_next_mtp"), "MTP"),
    **dict.fromkeys(("ngram", "ngram_gpu"), "NGram"),
    "suffix": "SA",
    "DFLASH": "DFlash",
    "DSPARK": "DSpark",
    "EAGLE": "Eagle",
    "EAGLE3": "Eagle3",
    "NEXTN": "MTP",
    "NGRAM": "NGram",
    "STANDALONE": "Draft_Target",
}


def _schedule(ranges: Any) -> Any:
    """vLLM's `[[1, 16, 3], [17, 64, 1]]`: the first and the last batch size, and the drafts. Of
    sizes between and after its ranges the one before holds, as in a schedule of lower bounds."""
    try:
        rows = sorted((first, last, drafts) for first, last, drafts in ranges)
    except (TypeError, ValueError):
        return ranges
    if any(after[0] <= before[1] for before, after in pairwise(rows)):
        return ranges
    return {first: drafts for first, last, drafts in rows if first <= last}


SPECULATIVE_RENAMED: Mapping[str, Renamed] = {
    "speculate": Renamed("decoding_type", _by_name({True: AUTO, False: None})),
    # TensorRT-LLM
    "speculative_model_dir": Renamed("speculative_model"),
    "num_nextn_predict_layers": Renamed("max_draft_len"),
    "prompt_lookup_num_tokens": Renamed("max_draft_len"),
    "enable_confidence_scheduling": Renamed("enable_adaptive_verification"),
    "confidence_cost_table_path": Renamed("round_times_path"),
    "confidence_sps_table_path": Renamed("round_times_path"),
    "confidence_min_predicted_gain": Renamed("adaptive.switch_margin"),
    "confidence_sts_path": Renamed("confidence_calibration_path"),
    # vLLM
    **dict.fromkeys(("method", "spec_method"), Renamed("decoding_type", _by_name(DECODING_TYPES))),
    **dict.fromkeys(("model", "spec_model"), Renamed("speculative_model")),
    **dict.fromkeys(("num_speculative_tokens", "spec_tokens"), Renamed("max_draft_len")),
    "num_speculative_tokens_per_batch_size": Renamed("draft_len_schedule", _schedule),
    "draft_sample_method": Renamed("draft_sampling", _by_name({"probabilistic": "coupled"})),
    "prompt_lookup_max": Renamed("max_matching_ngram_size"),
    # SGLang
    "speculative_algorithm": Renamed("decoding_type", _by_name(DECODING_TYPES)),
    "speculative_algo": Renamed("decoding_type", _by_name(DECODING_TYPES)),
    ADAPTIVE: Renamed("adaptive", _by_name({True: "newest", False: None})),
    ADAPTIVE_FILE: Renamed("adaptive"),
    "speculative_draft": Renamed("speculative_model"),
    "speculative_draft_model": Renamed("speculative_model"),
    "speculative_draft_model_path": Renamed("speculative_model"),
    "speculative_draft_window_size": Renamed("draft_window_size"),
    "speculative_draft_sink_size": Renamed("draft_sink_size"),
    "speculative_num_steps": Renamed("max_draft_len"),
    NUM_NODES: Renamed(
        "max_total_draft_tokens", lambda total: total - 1 if type(total) is int else total
    ),
    NUM_CHILDREN: Renamed("dynamic_tree_max_topK"),
    "speculative_dspark_block_size": Renamed("max_draft_len"),
    "speculative_dspark_sps_table_path": Renamed("round_times_path"),
    "speculative_dspark_confidence_sts_path": Renamed("confidence_calibration_path"),
    "speculative_accept_threshold_single": Renamed("threshold_single"),
    "speculative_accept_threshold_acc": Renamed("threshold_acc"),
    "speculative_ngram_max_match_window_size": Renamed("max_matching_ngram_size"),
    "speculative_ngram_max_trie_depth": Renamed("max_matching_ngram_size"),
    "speculative_ngram_external_corpus_path": Renamed("external_corpus_path"),
    "speculative_ngram_external_corpus_max_tokens": Renamed("external_corpus_max_tokens"),
}


def _in_reasoning(config: Any) -> Any:
    """The only option of `structured_outputs_config` that is served."""
    is_known = isinstance(config, Mapping) and set(config) == {"enable_in_reasoning"}
    return config["enable_in_reasoning"] if is_known else config


LLM_RENAMED: Mapping[str, Renamed] = {
    # TensorRT-LLM's flags and older names; some are of options without effect
    "beam_width": Renamed("max_beam_width"),
    "cluster_size": Renamed("moe_cluster_parallel_size"),
    "cp": Renamed("context_parallel_size"),
    "cp_size": Renamed("context_parallel_size"),
    "cuda_graph_batch_sizes": Renamed("cuda_graph_config.batch_sizes"),
    "data_type": Renamed("dtype"),
    "ep": Renamed("moe_expert_parallel_size"),
    "ep_size": Renamed("moe_expert_parallel_size"),
    "iter_stats_max_iterations": Renamed("max_stats_len"),
    "kv_cache_dtype": Renamed("kv_cache_config.dtype", _by_name({"fp8_e4m3": "fp8"})),
    "kv_cache_free_gpu_memory_fraction": Renamed("kv_cache_config.free_gpu_memory_fraction"),
    "pp": Renamed("pipeline_parallel_size"),
    "pp_size": Renamed("pipeline_parallel_size"),
    "tp": Renamed("tensor_parallel_size"),
    "tp_size": Renamed("tensor_parallel_size"),
    # vLLM
    "async_scheduling": Renamed("disable_overlap_scheduler", _OPPOSITE),
    "attention_backend": Renamed(
        "attn_backend",
        lambda name: (
            name.upper().removesuffix("_ATTN") if isinstance(name, str) and name != "auto" else name
        ),
    ),
    "dtype": Renamed("dtype", _by_name({"half": "float16", "float": "float32"})),
    "load_format": Renamed("load_format", _by_name({"safetensors": "auto"})),
    "block_size": Renamed("kv_cache_config.tokens_per_block"),
    "enable_prefix_caching": Renamed(_REUSE),
    "enable_lora": Renamed("lora_config", _by_name({True: {}, False: None})),
    "enforce_eager": Renamed("cuda_graph_config", _by_name({True: None, False: {}})),
    "gpu_memory_utilization": Renamed("kv_cache_config.gpu_memory_utilization"),
    "kv_events_config": Renamed("kv_cache_config.kv_events_config"),
    "lora_modules": Renamed("lora_config.lora_dir"),
    "lora_target_modules": Renamed("lora_config.lora_target_modules"),
    "mamba_ssm_cache_dtype": Renamed("kv_cache_config.mamba_ssm_cache_dtype"),
    "max_cpu_loras": Renamed("lora_config.max_cpu_loras"),
    "max_lora_rank": Renamed("lora_config.max_lora_rank"),
    "max_loras": Renamed("lora_config.max_loras"),
    "max_model_len": Renamed("max_seq_len"),
    "max_num_batched_tokens": Renamed("max_num_tokens"),
    "max_num_seqs": Renamed("max_batch_size"),
    "structured_outputs_config": Renamed("enable_in_reasoning", _in_reasoning),
    "scheduling_policy": Renamed("scheduler_config.waiting_queue_policy"),
    # SGLang
    "context_length": Renamed("max_seq_len"),
    "cuda_graph_max_bs": Renamed("cuda_graph_config.max_batch_size"),
    "cuda_graph_max_bs_decode": Renamed("cuda_graph_config.max_batch_size"),
    "disable_cuda_graph": Renamed("cuda_graph_config", _by_name({True: None, False: {}})),
    "disable_overlap_schedule": Renamed("disable_overlap_scheduler"),
    "disable_piecewise_cuda_graph": Renamed(
        "prefill_cuda_graph_backend", _by_name({True: "disabled", False: "auto"})
    ),
    "disable_radix_cache": Renamed(_REUSE, _OPPOSITE),
    "enable_deterministic_inference": Renamed("deterministic"),
    "enable_memory_saver": Renamed("enable_sleep_mode"),
    "grammar_backend": Renamed("guided_decoding_backend"),
    "lora_paths": Renamed("lora_config.lora_dir"),
    **dict.fromkeys(
        ("mem_fraction", "mem_fraction_static"), Renamed("kv_cache_config.mem_fraction_static")
    ),
    "mamba_ssm_dtype": Renamed("kv_cache_config.mamba_ssm_cache_dtype"),
    "max_loaded_loras": Renamed("lora_config.max_cpu_loras"),
    "max_loras_per_batch": Renamed("lora_config.max_loras"),
    "max_running_requests": Renamed("max_batch_size"),
    "max_total_tokens": Renamed("kv_cache_config.max_tokens"),
    "page_size": Renamed("kv_cache_config.tokens_per_block"),
    "model_path": Renamed("model"),
    "tokenizer_path": Renamed("tokenizer"),
    **{
        name: Renamed(f"{_SPECULATIVE}.{name}")
        for name in (*SPECULATIVE_RENAMED, "speculative_model", "speculative_token_map")
        if name.startswith("spec") and name != "speculative_model_dir"
    },
    ADAPTIVE: Renamed(f"{_SPECULATIVE}.{ADAPTIVE}", _by_name({True: "newest"})),
}
# vLLM's flags of one hyphen.
SHORT_FLAGS: Mapping[str, str] = {
    "-cc": "--compilation_config",
    "-dp": "--data_parallel_size",
    "-pp": "--pipeline_parallel_size",
    "-sc": "--speculative_config",
    "-tp": "--tensor_parallel_size",
}


def _snapshot_interval(config: Any) -> Any:
    """The only option of `mamba_state_config` that is served."""
    is_known = isinstance(config, Mapping) and set(config) == {"periodic_snapshot_interval"}
    return config["periodic_snapshot_interval"] if is_known else config


KV_CACHE_RENAMED: Mapping[str, Renamed] = {
    "mamba_state_config": Renamed("state_snapshot_tokens", _snapshot_interval)
}
CUDA_GRAPH_RENAMED: Mapping[str, Renamed] = {"padding_enabled": Renamed("enable_padding")}

# Values that change nothing, besides null. A type stands for all of its values, a frozenset for any
# of its members, and of a mapping a part is taken, too.
_FLAG: Values = (True, False)
_OFF: Values = (False,)
# Attention kernels that stand for those that are chosen here.
OTHER_ATTENTION = frozenset(
    (
        *("CUTLASS_MLA", "FA3", "FA4", "FLASH", "FLASHINFER_MLA", "FLASHMLA", "FLASH_ATTN_MLA"),
        *("TRITON_MLA", "TRTLLM", "TRTLLM_MHA", "TRTLLM_MLA"),
    )
)
_KERNELS_OF_EXPERTS = frozenset(
    (
        *("AUTO", "CUTLASS", "CUTEDSL", "DEEPGEMM", "DENSEGEMM", "MEGAMOE_DEEPGEMM"),
        *("TRITON", "TRTLLM", "VANILLA", "WIDEEP"),
    )
)
_MOE = {
    "backend": _KERNELS_OF_EXPERTS,
    "max_num_tokens": int,
    "load_balancer": None,
    "disable_finalize_fusion": False,
    "use_low_precision_moe_combine": bool,
}
LLM_IGNORED: Ignored = {
    "allreduce_strategy": ("AUTO",),
    "attention_dp_config": (
        {"enable_balance": False, "timeout_iters": int, "batching_wait_iters": int},
    ),
    "backend": ("pytorch",),
    "batch_wait_max_tokens_ratio": (0, 0.0),
    "batch_wait_timeout_iters": (0,),
    "batch_wait_timeout_ms": (0, 0.0),
    "batching_type": ("INFLIGHT",),
    "cache_transceiver_config": ({"backend": None},),
    "checkpoint_format": ("HF",),
    "context_parallel_size": (1,),
    "cp_config": ({},),
    "custom_tokenizer": (frozenset(("deepseek_v32", "deepseek_v4", "glm_moe_dsa")),),
    "generation_config": ("trtllm",),
    "hf_revision": ("main",),
    "limit_mm_per_prompt": ({"audio": 0, "image": 0, "video": 0},),
    "lora_backend": (frozenset(("csgmv", "triton", "triton_v2")),),
    "lora_dtype": ("auto",),
    "lora_eviction_policy": ("lru",),
    "max_beam_width": (1,),
    "moe_backend": (_KERNELS_OF_EXPERTS,),
    "moe_cluster_parallel_size": (-1, 1),
    "speculative_ngram_match_type": ("BFS", "PROB"),
    **dict.fromkeys(
        (
            *("garbage_collection_gen0_threshold", "speculative_ngram_min_match_window_size"),
            *("max_lora_chunk_size", "num_postprocess_workers", "torch_compile_max_bs"),
            *("speculative_ngram_capacity", "speculative_ngram_external_sam_budget"),
            *("speculative_ngram_max_bfs_breadth", "speculative_ngram_min_bfs_breadth"),
        ),
        (int,),
    ),
    "moe_config": (_MOE,),
    "perf_metrics_max_requests": (0, 1000),
    "pipeline_parallel_size": (1,),
    "quant_config": ({"quant_algo": None, "kv_cache_quant_algo": None},),
    "revision": ("main",),
    "sampler_type": ("auto", "TorchSampler"),
    "task_id": (-1,),  # of LoRA, in data sets
    "tokenizer_mode": ("auto",),
    "tokenizer_revision": ("main",),
    **dict.fromkeys(
        (
            *("batched_logits_processor", "build_config", "calib_config"),
            *("checkpoint_loader", "extended_runtime_perf_knob_config"),
            *("kv_cache_compression_config", "kv_connector_config"),
            *("mpi_session", "multimodal_config", "orchestrator_type", "peft_cache_config"),
            *("postprocess_tokenizer_dir", "prometheus_metrics_config", "quantization"),
            *("ray_placement_config", "request_stats_max_iterations"),
            *("sparse_attention_config", "torch_compile_config"),
        ),
        (),
    ),
    **dict.fromkeys(
        (
            *("enable_attention_dp", "enable_build_cache", "enable_log_requests"),
            *("enable_early_first_token_response", "enable_iter_req_stats"),
            *("enable_layerwise_nvtx_marker", "enable_lm_head_tp_in_adp"),
            *("enable_trtllm_sampler", "force_dynamic_quantization"),
            *("gather_generation_logits", "mm_encoder_only", "normalize_log_probs", "telemetry"),
        ),
        _OFF,
    ),
    **dict.fromkeys(
        (
            *("disable_custom_all_reduce", "disable_log_requests", "disable_log_stats"),
            *("disable_mm_encoder", "enable_auto_tool_choice", "enable_autotuner"),
            *("enable_metrics", "enable_torch_compile", "per_request_spec_decode_metrics"),
            *("enable_in_graph_sampling", "enable_min_latency", "enable_mixed_sampler"),
            *("fail_fast_on_attention_window_too_large", "mixed_sampler"),
            *("fully_sharded_loras", "specialize_active_lora", "trust_remote_code"),
            *("torch_compile_enabled", "torch_compile_piecewise_cuda_graph"),
            # TensorRT-LLM's oldest quickstart writes these as false, its defaults.
            *("use_cuda_graph", "cuda_graph_padding_enabled"),
        ),
        _FLAG,
    ),
}
KV_CACHE_IGNORED: Ignored = {
    "attention_dp_events_gather_period_ms": (5,),
    "copy_on_partial_reuse": (True,),
    "disk_cache_size": (0,),
    "enable_swa_scratch_reuse": _OFF,
    "event_buffer_max_size": (0,),
    "iteration_stats_interval": (1,),
    "kv_cache_event_hash_algo": ("auto",),
    "max_gpu_total_bytes": (0,),
    "max_util_for_resume": (0.95,),
    "onboard_blocks": (True,),
    "use_kv_cache_manager_v2": ("auto", *_FLAG),
    "use_uvm": _OFF,
    **dict.fromkeys(
        (
            *("avg_seq_len", "block_reuse_config", "cross_kv_cache_fraction"),
            *("disk_cache_path", "max_attention_window", "pool_ratio"),
            *("secondary_offload_min_priority", "sink_token_length"),
        ),
        (),
    ),
}
# vLLM's options of a queue of events, which there is none of here.
KV_EVENTS_IGNORED: Ignored = {"hwm": (100_000,), "max_queue_size": (100_000,)}
SCHEDULER_IGNORED: Ignored = {
    "context_chunking_policy": ("FIRST_COME_FIRST_SERVED",),
    "dynamic_batch_config": (),
    "enable_prefix_aware_scheduling": _FLAG,
    "reorder_policy_config": (),
    "use_python_scheduler": _FLAG,
}
CUDA_GRAPH_IGNORED: Ignored = {"mode": ("decode",)}
# Those that only some decoding types have here may be null in the others.
SPECULATIVE_IGNORED: Ignored = {
    "acceptance_window": (0,),
    "advanced_sampling_mode": ("full",),
    "allow_advanced_sampling": _FLAG,
    "attention_backend": (OTHER_ATTENTION | {"FLASHINFER", "FLASH_ATTN", "TRITON_ATTN"},),
    "disable_padded_drafter_batch": _FLAG,
    "draft_tensor_parallel_size": (int,),
    "enable_fused_confidence_scheduler": _FLAG,
    "enable_penalty": _FLAG,
    "enable_ragged_verify": (True,),
    "greedy_sampling": (True,),
    "max_batch_size": (int,),
    "max_model_len": (int,),
    "min_runtime_draft_len": (0,),
    "moe_backend": (_KERNELS_OF_EXPERTS,),
    "num_eagle_layers": (1,),
    "parallel_drafting": _OFF,
    "prompt_lookup_min": (int,),
    "rejection_sample_method": ("standard",),
    "sa_spec_threshold": (4,),
    "spec_dec_variant": (1, 3),
    "speculative_model_subfolder": ("",),
    "suffix_decoding_max_cached_requests": (int,),
    "suffix_decoding_max_spec_factor": (float,),
    "suffix_decoding_max_tree_depth": (int,),
    "suffix_decoding_min_token_prob": (float,),
    "use_heterogeneous_vocab": _FLAG,
    "use_sa_spec": _OFF,
    **dict.fromkeys(
        (
            *("acceptance_length_threshold", "code_revision", "disable_by_batch_size"),
            *("load_format", "max_non_leaves_per_layer", "moe_tactic", "posterior_threshold"),
            *("quantization", "revision", "sa_config", "speculative_model"),
            "speculative_token_map",
        ),
        (),
    ),
}

# Arguments of `LLM.generate`, and vLLM's of `LLM.chat`.
GENERATE_IGNORED: Ignored = dict.fromkeys(
    (
        *("conversation_params", "disaggregated_params", "kv_cache_retention_config"),
        *("prompt_adapter_request", "scheduling_params", "trace_headers"),
    ),
    (),
)
CHAT_IGNORED: Ignored = {
    **GENERATE_IGNORED,
    "chat_template": (),
    "chat_template_content_format": ("auto",),
    "continue_final_message": _OFF,
    "mm_processor_kwargs": ({},),
}

_TEXT = "only text is served"
_NO_BEAMS = "there is no beam search"
_SLICED = "a layer is sliced over all devices; use tensor_parallel_size"
_SHARED = "every device has a part of all requests' attention; use tensor_parallel_size"
_ONE_PROCESS = "prefill and decoding run in one server"
_NO_QUANTISING = (
    "weights are not quantised here; a checkpoint in FP8 or 4 bits is served as it is, with "
    "nothing to set (docs/quantization.md)"
)
_LAYERS_SAY = "config.json says which tokens a layer sees"
# Why there is no such option. A name of several words stands for all names that have these words,
# one after the other; the first that fits is taken.
ABSENT: Mapping[str, str] = {
    "lora_path": "a request names a loaded adapter; POST /v1/load_lora_adapter loads a folder",
    "peft": "use lora_config.max_loras and lora_config.max_cpu_loras",
    **dict.fromkeys(("beam", "early_stopping", "length_penalty"), _NO_BEAMS),
    "attention_dp": _SHARED,
    "dp_attention": _SHARED,
    "pipeline_parallel_size": _SLICED,
    "moe_cluster_parallel_size": _SLICED,
    "context_parallel_size": "a request's KV cache is divided by heads only; use "
    "tensor_parallel_size",
    **dict.fromkeys(
        (
            *("cache_transceiver_config", "disagg", "disaggregated", "disaggregation"),
            *("kv_transfer_config", "metadata_server_config_file"),
        ),
        _ONE_PROCESS,
    ),
    "server_role": _ONE_PROCESS,
    "logits_processor": "use SamplingParams.logits_processor",
    "logits": "logits are not returned; logprobs are",
    **dict.fromkeys(("quantization", "quant_config", "calib_config"), _NO_QUANTISING),
    "revision": "models are local folders; nothing is downloaded",
    "trace_headers": "spans of requests are those of tllm-serve --otlp_traces_endpoint",
    "sparse_attention": "a layer attends as config.json says",
    "max_attention_window": _LAYERS_SAY,
    "sink_token_length": _LAYERS_SAY,
    "engine_dir": "there are no compiled engines to load",
    "build_config": "there are no compiled engines to load",
    "medusa": "Medusa is not served",
    **dict.fromkeys(("multimodal", "mm", "media", "video", "visual", "modality"), _TEXT),
    "custom_tokenizer": "--tokenizer takes a folder in Hugging Face's format",
    "chat_template": "the chat template is the one in the tokenizer's folder",
    "custom_module_dirs": "no Python code is imported from folders",
    "grpc": "the server speaks HTTP",
    "telemetry": "no usage data is collected",
    "target_input_len": "limits are not tuned to a length; prompts have those of the data set",
    "use_sa_spec": "use sa_config",
    "sa_spec_threshold": "use sa_config.threshold",
    "acceptance_length_threshold": "use acceptance_rate_threshold",
    "disable_by_batch_size": "use max_concurrency",
    "rejection_sample_method": "use synthetic_acceptance_rates for benchmarks, or "
    "use_rejection_sampling",
    "enable_expert_parallel": "use moe_expert_parallel_size",
    "chunked_prefill_size": "use enable_chunked_prefill: true and max_num_tokens",
    "max_prefill_tokens": "use max_num_tokens",
    "compilation_config": "use cuda_graph_config",
    "seed": "a request has its own seed",
    "tools": "use /v1/chat/completions for tools",
    "function": "use tools, which replace it",
    "previous_response_id": "nothing is stored",
    "background": "nothing is stored",
}
