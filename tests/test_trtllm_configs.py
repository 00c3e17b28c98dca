"""Configurations as TensorRT-LLM's users have them: harmless values are taken, and one start names
everything that is not served."""

import logging
from typing import Any

import pytest
import yaml

from tests.decoding_options import eagle3, ngram, speculate
from tllm_spec import llmapi
from tllm_spec.config.llm_args import KvCacheConfig, LlmArgs
from tllm_spec.config.speculative_config import NGramDecodingConfig, UserProvidedDecodingConfig
from tllm_spec.executor.request_wire import RequestLimits
from tllm_spec.intake import Intake
from tllm_spec.sampling_params import SamplingParams

# The keys of TensorRT-LLM's curated configurations, and those that are refused here. Of the others
# some have no effect, which a warning says.
CURATED = {
    "llama-3.3-70b": (
        """
        max_batch_size: 1024
        max_num_tokens: 2048
        tensor_parallel_size: 1
        moe_expert_parallel_size: 1
        trust_remote_code: true
        enable_attention_dp: false
        cuda_graph_config: {enable_padding: true, max_batch_size: 1024}
        kv_cache_config: {dtype: fp8, free_gpu_memory_fraction: 0.9}
        """,
        set(),
    ),
    "qwen3": (
        """
        max_batch_size: 161
        max_num_tokens: 1160
        kv_cache_free_gpu_memory_fraction: 0.8
        tensor_parallel_size: 1
        moe_expert_parallel_size: 1
        cuda_graph_config: {enable_padding: true, batch_sizes: [1, 2, 4, 8, 16, 32, 64, 128]}
        print_iter_log: true
        enable_attention_dp: true
        """,
        {"enable_attention_dp"},
    ),
    "gpt-oss-latency": (
        """
        max_batch_size: 64
        max_num_tokens: 16384
        kv_cache_free_gpu_memory_fraction: 0.9
        tensor_parallel_size: 8
        moe_expert_parallel_size: 1
        trust_remote_code: true
        moe_config: {backend: TRTLLM}
        stream_interval: 20
        num_postprocess_workers: 4
        """,
        set(),
    ),
    "deepseek-r1-latency": (
        """
        max_batch_size: 4
        max_num_tokens: 32768
        tensor_parallel_size: 8
        moe_expert_parallel_size: 2
        trust_remote_code: true
        kv_cache_config: {free_gpu_memory_fraction: 0.75}
        moe_config: {backend: TRTLLM}
        speculative_config:
          decoding_type: MTP
          max_draft_len: 3
          use_relaxed_acceptance_for_thinking: true
        """,
        set(),
    ),
}
WITHOUT_EFFECT = {
    "gpt-oss-latency": ["moe_config", "num_postprocess_workers", "trust_remote_code"],
    "deepseek-r1-latency": ["moe_config", "trust_remote_code"],
    "llama-3.3-70b": ["trust_remote_code"],
}


@pytest.mark.parametrize("name", [name for name, (_, refused) in CURATED.items() if not refused])
def test_a_curated_configuration_starts_with_a_warning_for_each_option_without_effect(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    LlmArgs(model="m", **yaml.safe_load(CURATED[name][0]))
    named = sorted(line.partition(" = ")[0] for line in caplog.messages)
    assert named == WITHOUT_EFFECT[name]
    assert all(" has no effect: " in line for line in caplog.messages)


@pytest.mark.parametrize("name", [name for name, (_, refused) in CURATED.items() if refused])
def test_a_curated_configuration_names_all_that_is_not_served_in_one_start(name: str) -> None:
    text, refused = CURATED[name]
    with pytest.raises(ValueError) as refusal:
        LlmArgs(model="m", **yaml.safe_load(text))
    lines = str(refusal.value).splitlines()
    assert {line.partition(" = ")[0] for line in lines} == refused
    assert len(lines) == len(refused)


def test_refused_and_mistaken_options_are_named_together() -> None:
    with pytest.raises(ValueError) as refusal:
        LlmArgs(model="m", pipeline_parallel_size=2, dtype="fp8", **speculate(ngram(sa_config={})))
    keys = {line.partition(" = ")[0] for line in str(refusal.value).splitlines()}
    assert keys == {"pipeline_parallel_size", "dtype", "speculative_config.sa_config"}


def test_the_default_attention_of_tensorrt_llm_is_auto_with_one_log_line(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    assert LlmArgs(model="m", attn_backend="TRTLLM") == LlmArgs(model="m")
    assert len(caplog.messages) == 1 and "'TRTLLM' is taken as 'auto'" in caplog.text


@pytest.mark.parametrize(
    "options",
    [
        {"kv_cache_dtype": "auto", "trust_remote_code": False},
        {"kv_cache_config": {"dtype": "auto", "use_kv_cache_manager_v2": False}},
        {"garbage_collection_gen0_threshold": 20000, "enable_mixed_sampler": True},
        {"scheduler_config": {"use_python_scheduler": True}, "batching_type": "INFLIGHT"},
        {"moe_config": {}, "quant_config": {}, "cp_config": {}, "cache_transceiver_config": {}},
        {"moe_config": {"backend": "AUTO"}},
        {"kv_cache_config": {"cross_kv_cache_fraction": None, "onboard_blocks": True}},
        {"kv_cache_config": {"mamba_ssm_cache_dtype": "auto", "max_util_for_resume": 0.95}},
        {"perf_metrics_max_requests": 0},
        {"attention_dp_config": {"enable_balance": False, "timeout_iters": 0}},
        {"enable_lm_head_tp_in_adp": False, "disable_mm_encoder": True},
        {"kv_cache_config": {"free_gpu_memory_fraction": None}},
        {"quant_config": {"quant_algo": None, "kv_cache_quant_algo": None}},
    ],
)
def test_values_that_change_nothing_are_taken(options: dict[str, Any]) -> None:
    assert LlmArgs(model="m", **options) == LlmArgs(model="m")


@pytest.mark.parametrize(
    "options",
    [
        {"moe_config": {"backend": "CUTLAS"}},
        {"moe_config": {"backend": "AUTO", "bakend": None}},
        {"moe_config": {"disable_finalize_fusion": 0}},
        {"quant_config": {"quant_algo": None, "kv_cache_quant_algo": "FP8"}},
        {"cp_config": {"cp_type": "ULYSSES"}},
        {"cache_transceiver_config": {"backend": "DEFAULT"}},
    ],
)
def test_a_mapping_with_any_other_value_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"is refused: .*; accepted: None or \{"):
        LlmArgs(model="m", **options)


@pytest.mark.parametrize(
    "options",
    [
        {"max_total_draft_tokens": 4},
        {"prompt_lookup_num_tokens": 4},
        {"use_sa_spec": False, "sa_spec_threshold": 4, "sa_config": None},
        {"moe_backend": None, "spec_dec_variant": None, "speculative_model_subfolder": None},
        {"acceptance_rate_window_size": 0, "acceptance_rate_threshold": 0.5},
        {"acceptance_rate_window_size": 0},
        {"speculative_model_dir": None, "load_format": None},
    ],
)
def test_fields_of_a_decoding_config_are_taken_at_values_that_change_nothing(
    options: dict[str, Any],
) -> None:
    plain = NGramDecodingConfig(max_draft_len=4)
    assert NGramDecodingConfig(**{"max_draft_len": 4, **options}) == plain


def test_the_old_name_of_the_draft_length_is_enough() -> None:
    assert NGramDecodingConfig(prompt_lookup_num_tokens=3).max_draft_len == 3


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (ngram(max_total_draft_tokens=8), "max_total_draft_tokens = 8 is refused: drafts are"),
        (ngram(use_sa_spec=True), "use_sa_spec = True is refused: use sa_config"),
        (ngram(sa_config={}), "sa_config = {} is an option of Draft_Target .*, not of NGram"),
        (
            ngram(prompt_lookup_num_tokens=3),
            "prompt_lookup_num_tokens = 3 means max_draft_len = 3, which is given as 4",
        ),
        (
            eagle3(speculative_model_dir="other"),
            "= 'other' means speculative_model = 'other', which is given as 'some/head'",
        ),
    ],
)
def test_values_that_would_change_something_are_refused(
    options: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(ValueError, match=sentence):
        LlmArgs(model="m", **speculate(options))


def test_the_memory_fraction_of_the_flags_may_stand_in_a_configuration() -> None:
    for cache in (None, {"tokens_per_block": 16}, KvCacheConfig(tokens_per_block=16)):
        args = LlmArgs(model="m", kv_cache_config=cache, kv_cache_free_gpu_memory_fraction=0.5)
        assert args.kv_cache_config.free_gpu_memory_fraction == 0.5
        assert args.kv_cache_config.tokens_per_block == (16 if cache else 32)
    with pytest.raises(ValueError, match=r"fraction = 0.5, which is given as 0\.4"):
        LlmArgs(
            model="m",
            kv_cache_config=KvCacheConfig(free_gpu_memory_fraction=0.4),
            kv_cache_free_gpu_memory_fraction=0.5,
        )


def test_user_provided_drafters_refuse_options_of_a_draft_model() -> None:
    with pytest.raises(ValueError, match="speculative_model = 'd' is refused"):
        UserProvidedDecodingConfig(max_draft_len=2, drafter=object(), speculative_model_dir="d")


def test_mtp_in_the_targets_own_folder_is_mtp_without_a_folder() -> None:
    config = {"decoding_type": "MTP", "speculative_model_dir": "models/../m"}
    own = LlmArgs(model="m", speculative_config=config).speculative_config
    assert own == LlmArgs(model="m", speculative_config={"decoding_type": "MTP"}).speculative_config
    assert own is not None and own.max_draft_len == 1
    other = LlmArgs(model="m", speculative_config={**config, "speculative_model_dir": "n"})
    assert getattr(other.speculative_config, "speculative_model", None) == "n"


def test_the_classes_of_the_quickstart_take_its_values() -> None:
    quickstart = LlmArgs(
        model="m",
        attention_dp_config=llmapi.AttentionDpConfig(
            enable_balance=False, timeout_iters=0, batching_wait_iters=0
        ),
        moe_config=llmapi.MoeConfig(backend="CUTLASS"),
        kv_cache_config=KvCacheConfig(free_gpu_memory_fraction=None),
    )
    assert quickstart == LlmArgs(model="m")
    with pytest.raises(ValueError, match="is refused"):
        llmapi.AttentionDpConfig(enable_balance=True)


def test_another_grammar_compiler_is_refused_with_what_llguidance_takes() -> None:
    with pytest.raises(ValueError, match="'llguidance' is needed, which takes the same JSON schem"):
        LlmArgs(model="m", guided_decoding_backend="outlines")
    for name in ("xgrammar", "llguidance", "guidance", None):
        assert LlmArgs(model="m", guided_decoding_backend=name).guided_decoding_backend == name


def test_a_multimodal_prompt_is_refused_by_the_name_of_its_part() -> None:
    intake = Intake(LlmArgs(model="m"), None, RequestLimits(9, (), 64, 0, None))
    with pytest.raises(ValueError, match="multi_modal_data of a prompt is refused: only text"):
        intake.submission({"prompt": "a", "multi_modal_data": {}}, SamplingParams())
