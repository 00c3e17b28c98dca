"""Configurations and command lines of the neighbours as their users write them: each is taken and
means an option here, or is refused by one message with all reasons."""

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from tllm_spec.cli.serve import read_command_line
from tllm_spec.config.llm_args import LlmArgs

DRAFT = {"speculative_model": "zoo:llama-draft"}
HEAD = {"speculative_model": "zoo:llama-eagle3"}


def speculates(decoding_type: str, max_draft_len: int, **options: Any) -> dict[str, Any]:
    spec = {"decoding_type": decoding_type, "max_draft_len": max_draft_len, **options}
    return {"speculative_config": spec}


# TensorRT-LLM's YAML files, with what else they may be written as here.
YAML_TAKEN: dict[str, tuple[str, dict[str, Any]]] = {
    "deepseek-r1-latency": (
        """
        moe_config: {backend: TRTLLM}
        kv_cache_config: {free_gpu_memory_fraction: 0.75}
        speculative_config: {decoding_type: MTP, max_draft_len: 3}
        """,
        {"kv_cache_config": {"free_gpu_memory_fraction": 0.75}, **speculates("MTP", 3)},
    ),
    "gpt-oss-120b-latency": (
        "{moe_config: {backend: TRTLLM}, stream_interval: 20, num_postprocess_workers: 4}",
        {"stream_interval": 20},
    ),
    "llama-3.3-70b": (
        "{trust_remote_code: true, kv_cache_config: {dtype: fp8}, enable_attention_dp: false}",
        {"kv_cache_config": {"dtype": "fp8"}},
    ),
    "qwen3-next": (
        "{cuda_graph_config: {enable_padding: true}, moe_config: {backend: CUTLASS}}",
        {"cuda_graph_config": {"enable_padding": True}},
    ),
    "r1-h200-1": (
        "{speculative_config: {decoding_type: MTP, num_nextn_predict_layers: 3}}",
        speculates("MTP", 3),
    ),
    "super-v3-mtp": (
        "{speculative_config: {decoding_type: MTP, max_draft_len: 2}, moe_config: null}",
        speculates("MTP", 2),
    ),
    "deepseek-v4-pro-latency": ("{moe_config: {use_low_precision_moe_combine: true}}", {}),
    "qwen3.8-flash-next": (
        "{kv_cache_config: {mamba_ssm_cache_dtype: bfloat16}}",
        {"kv_cache_config": {"mamba_ssm_cache_dtype": "bfloat16"}},
    ),
    "qwen3.8-low-latency-mtp3": (
        """
        moe_config: {backend: TRTLLM, max_num_tokens: 32768}
        kv_cache_config: {mamba_ssm_cache_dtype: bfloat16}
        speculative_config: {decoding_type: MTP, max_draft_len: 3}
        """,
        {"kv_cache_config": {"mamba_ssm_cache_dtype": "bfloat16"}, **speculates("MTP", 3)},
    ),
    "snapshots": (
        """
        kv_cache_config:
          use_kv_cache_manager_v2: true
          mamba_state_config: {periodic_snapshot_interval: 512}
        """,
        {"kv_cache_config": {"state_snapshot_tokens": 512}},
    ),
    "glm-5": ("{custom_tokenizer: glm_moe_dsa}", {}),
    "suffix automaton": (
        """
        speculative_config:
          {decoding_type: MTP, max_draft_len: 3, use_sa_spec: true, sa_spec_threshold: 6}
        """,
        speculates("MTP", 3, sa_config={"threshold": 6}),
    ),
    "suffix automaton of the usual threshold": (
        "{speculative_config: {decoding_type: MTP, max_draft_len: 3, use_sa_spec: true}}",
        speculates("MTP", 3, sa_config={"threshold": 4}),
    ),
    "eagle3 of 1.4": (
        """
        speculative_config:
          decoding_type: Eagle3
          max_draft_len: 3
          speculative_model: zoo:llama-eagle3
          spec_dec_variant: 3
          num_eagle_layers: 1
          moe_backend: TRTLLM
          moe_tactic: null
        """,
        speculates("Eagle3", 3, **HEAD),
    ),
}
YAML_REFUSED: dict[str, tuple[str, set[str]]] = {
    "qwen3": ("{enable_attention_dp: true}", {"enable_attention_dp"}),
    "qwen3.5": (
        "{enable_attention_dp: true, kv_cache_config: {mamba_ssm_cache_dtype: bfloat16}}",
        {"enable_attention_dp"},
    ),
    "kimi-k2-thinking": (
        "{enable_attention_dp: true, cache_transceiver_config: {backend: UCX}}",
        {"enable_attention_dp", "cache_transceiver_config"},
    ),
    "minimax-m3": (
        "{enable_attention_dp: true, sparse_attention_config: {algorithm: dsa}}",
        {"enable_attention_dp", "sparse_attention_config"},
    ),
    "experts of two devices": (
        "{moe_config: {backend: DEEPGEMM, load_balancer: x.yaml}, enable_attention_dp: true}",
        {"enable_attention_dp", "moe_config"},
    ),
    "own tokenizer": ("{custom_tokenizer: my.module.Tokenizer}", {"custom_tokenizer"}),
    "eagle3 of mistral": (
        """
        speculative_config:
          decoding_type: Eagle3
          max_draft_len: 3
          speculative_model: zoo:llama-eagle3
          eagle3_model_arch: mistral_large3
          max_non_leaves_per_layer: 4
        """,
        {
            "speculative_config.eagle3_model_arch",
            "speculative_config.max_non_leaves_per_layer",
        },
    ),
}


def vllm(**options: Any) -> str:
    return f"--speculative-config {shlex.quote(json.dumps(options))}"


DRAFT_MODEL = {"method": "draft_model", "model": "zoo:llama-draft", "num_speculative_tokens": 3}
LINES_TAKEN: dict[str, dict[str, Any]] = {
    # vLLM
    vllm(method="draft_model", model="x", num_speculative_tokens=4, parallel_drafting=True): (
        speculates("PARD", 4, speculative_model="x")
    ),
    vllm(method="mtp", num_speculative_tokens=1): speculates("MTP", 1),
    vllm(method="qwen3_next_mtp", num_speculative_tokens=2): speculates("MTP", 2),
    vllm(method="ngram", num_speculative_tokens=4, prompt_lookup_max=4, prompt_lookup_min=2): (
        speculates("NGram", 4, max_matching_ngram_size=4)
    ),
    vllm(method="suffix", num_speculative_tokens=8, suffix_decoding_max_tree_depth=24): (
        speculates("SA", 8)
    ),
    vllm(
        **DRAFT_MODEL, num_speculative_tokens_per_batch_size=[[1, 16, 3], [32, 64, 1], [65, 99, 0]]
    ): speculates("Draft_Target", 3, **DRAFT, draft_len_schedule={1: 3, 32: 1, 65: 0}),
    vllm(**DRAFT_MODEL, draft_tensor_parallel_size=1): speculates("Draft_Target", 3, **DRAFT),
    vllm(**DRAFT_MODEL, max_model_len=2048): speculates("Draft_Target", 3, **DRAFT),
    vllm(**DRAFT_MODEL, attention_backend="FLASH_ATTN"): speculates("Draft_Target", 3, **DRAFT),
    vllm(**DRAFT_MODEL, draft_sample_method="greedy"): (
        speculates("Draft_Target", 3, **DRAFT, draft_sampling="greedy")
    ),
    vllm(**DRAFT_MODEL, draft_sample_method="probabilistic", rejection_sample_method="standard"): (
        speculates("Draft_Target", 3, **DRAFT, draft_sampling="coupled")
    ),
    vllm(
        **DRAFT_MODEL,
        rejection_sample_method="synthetic",
        synthetic_acceptance_rates=[0.8, 0.5, 0.3],
    ): speculates("Draft_Target", 3, **DRAFT, synthetic_acceptance_rates=[0.8, 0.5, 0.3]),
    vllm(model="zoo:llama-draft", num_speculative_tokens=2): speculates("Draft_Target", 2, **DRAFT),
    vllm(model="zoo:llama-eagle3", num_speculative_tokens=2): speculates("Eagle3", 2, **HEAD),
    "--speculative-config.method mtp --speculative-config.num_speculative_tokens 2": (
        speculates("MTP", 2)
    ),
    "-tp 1 -sc.method mtp": speculates("MTP", 1),
    "-tp=2 -sc.method=mtp": {"tensor_parallel_size": 2, **speculates("MTP", 1)},
    "--spec-method mtp --spec-tokens 2": speculates("MTP", 2),
    "--spec-model zoo:llama-eagle3 --spec-tokens 2": speculates("Eagle3", 2, **HEAD),
    vllm(method="ngram_gpu", num_speculative_tokens=4, prompt_lookup_max=4): (
        speculates("NGram", 4, max_matching_ngram_size=4)
    ),
    vllm(method="gemma4_mtp", model="x", num_speculative_tokens=4): (
        speculates("MTP", 4, speculative_model="x")
    ),
    vllm(**DRAFT_MODEL, quantization=None, revision=None, disable_by_batch_size=None): (
        speculates("Draft_Target", 3, **DRAFT)
    ),
    "--attention-backend FLASH_ATTN --max-num-seqs 4": {"max_batch_size": 4},
    "--enable-lora": {"lora_config": {}},
    "--enable-lora --max-loras 2 --max-lora-rank 16 --max-cpu-loras 8 --fully-sharded-loras "
    "--lora-modules sql=/adapters/1 /adapters/chat --lora-target-modules q_proj v_proj": {
        "lora_config": {
            "lora_dir": {"sql": "/adapters/1", "chat": "/adapters/chat"},
            "lora_target_modules": ["q_proj", "v_proj"],
            "max_loras": 2,
            "max_lora_rank": 16,
            "max_cpu_loras": 8,
        }
    },
    """--lora-modules '{"name": "sql", "path": "x", "base_model_name": "m"}'""": {
        "lora_config": {"lora_dir": {"sql": "x"}}
    },
    "--no-enable-log-requests --per-request-spec-decode-metrics --disable-log-stats": {},
    """--limit-mm-per-prompt '{"image": 0, "video": 0}'""": {},
    # SGLang
    "--speculative-algorithm STANDALONE --speculative-draft-model-path zoo:llama-draft "
    "--speculative-num-steps 3 --speculative-eagle-topk 2 --speculative-num-draft-tokens 7": (
        speculates(
            *("Draft_Target", 3),
            **DRAFT,
            use_dynamic_tree=True,
            dynamic_tree_max_topK=2,
            max_total_draft_tokens=6,
        )
    ),
    "--speculative-algorithm EAGLE3 --speculative-draft-model-path zoo:llama-eagle3 "
    "--speculative-num-steps 3 --speculative-eagle-topk 1 --speculative-num-draft-tokens 4": (
        speculates("Eagle3", 3, **HEAD)
    ),
    "--speculative-algo EAGLE3 --speculative-draft zoo:llama-eagle3 --speculative-num-steps 3": (
        speculates("Eagle3", 3, **HEAD)
    ),
    "--speculative-algorithm EAGLE --speculative-num-steps 3 --speculative-eagle-topk 1 "
    "--speculative-num-draft-tokens 4": speculates("MTP", 3),
    "--speculative-algorithm NEXTN --speculative-num-steps 1": speculates("MTP", 1),
    "--speculative-algorithm NGRAM --speculative-num-draft-tokens 16": speculates("NGram", 15),
    "--speculative-algorithm DFLASH --speculative-draft-model-path x "
    "--speculative-num-draft-tokens 16": speculates("DFlash", 15, speculative_model="x"),
    "--speculative-algorithm DSPARK --speculative-draft-model-path x "
    "--speculative-dspark-block-size 7": speculates("DSpark", 7, speculative_model="x"),
    "--speculative-algorithm NEXTN --speculative-eagle-topk 1 --speculative-num-draft-tokens 4": (
        speculates("MTP", 3)
    ),
    "--speculative-algorithm NGRAM --speculative-num-draft-tokens 16 "
    "--speculative-ngram-max-match-window-size 12": (
        speculates("NGram", 15, max_matching_ngram_size=12)
    ),
    "--speculative-algorithm NGRAM --speculative-num-draft-tokens 16 "
    "--speculative-ngram-max-trie-depth 18 --speculative-ngram-min-bfs-breadth 1 "
    "--speculative-ngram-max-bfs-breadth 10 --speculative-ngram-match-type PROB "
    "--speculative-ngram-capacity 100000": speculates("NGram", 15, max_matching_ngram_size=18),
    "--speculative-algorithm NEXTN --speculative-num-steps 3 --speculative-adaptive": (
        speculates("MTP", 3, adaptive="newest")
    ),
    "--lora-paths a=x b=y --max-loras-per-batch 8 --max-loaded-loras 9 --lora-backend triton "
    "--lora-target-modules all --lora-eviction-policy lru --max-lora-chunk-size 16": {
        "lora_config": {"lora_dir": {"a": "x", "b": "y"}, "max_loras": 8, "max_cpu_loras": 9}
    },
    "--enable-torch-compile --torch-compile-max-bs 8 --attention-backend fa3": {},
    "--cuda-graph-max-bs-decode 8 --enable-metrics --disable-piecewise-cuda-graph": {
        "cuda_graph_config": {"max_batch_size": 8},
        "prefill_cuda_graph_backend": "disabled",
    },
    "--reasoning-parser glm45 --tool-call-parser glm47": {"reasoning_parser": "glm45"},
}
REFUSED: dict[str, list[str]] = {
    # vLLM
    vllm(**DRAFT_MODEL, rejection_sample_method="synthetic", quantization="fp8"): [
        "rejection_sample_method = 'synthetic' is refused: use synthetic_acceptance_rates",
        "quantization = 'fp8' is refused: weights are not quantised here",
    ],
    vllm(**DRAFT_MODEL, num_speculative_tokens_per_batch_size=[[1, 16, 3], [8, 64, 1]]): [
        "draft_len_schedule = [[1, 16, 3], [8, 64, 1]]"
    ],
    "--lora-modules 'a b=x' --lora-dtype float16": [
        "lora_config.lora_dir = 'a b=x': lora_name = 'a b=x': 1 to 128 letters",
        "lora_dtype = 'float16' is refused",
    ],
    "--kv-transfer-config '{}' --gpu-memory-utilization 1.5": [
        "--kv_transfer_config is refused: prefill and decoding run in one server",
        "kv_cache_config.gpu_memory_utilization = 1.5: must be less than or equal to 1",
    ],
    "-O3 --weight-transfer-config '{}' --kv-transfer-config '{}'": [
        "-O3 is not a known flag",
        "--weight_transfer_config is not a known flag",
        "--kv_transfer_config is refused",
    ],
    vllm(method="medusa", model="x", rejection_sample_method="block"): [
        "decoding_type = 'medusa' is not served yet",
        "rejection_sample_method = 'block' is refused",
    ],
    vllm(model="no/hub/id", num_speculative_tokens=3, revision="main"): [
        "decoding_type is required",
        "speculative_config.revision = 'main' is refused: models are local folders",
    ],
    # SGLang
    "--mem-fraction 0": [
        "kv_cache_config.mem_fraction_static = 0: must be",
    ],
    "--enable-dp-attention --disaggregation-mode prefill --lora-paths a=b --no-enable-lora "
    "--lora-eviction-policy fifo": [
        "--enable_dp_attention is refused: every device has a part",
        "--disaggregation_mode is refused: prefill and decoding run in one server",
        "lora_eviction_policy = 'fifo' is refused",
    ],
}


def args_of(line: str) -> LlmArgs:
    return read_command_line(["zoo:llama", *shlex.split(line)], []).args


@pytest.mark.parametrize("name", YAML_TAKEN)
def test_a_yaml_of_tensorrt_llm_means_options_here(name: str) -> None:
    text, ours = YAML_TAKEN[name]
    assert LlmArgs(model="m", **yaml.safe_load(text)) == LlmArgs(model="m", **ours)


@pytest.mark.parametrize("name", YAML_REFUSED)
def test_a_yaml_of_tensorrt_llm_is_refused_for_all_that_is_not_served(name: str) -> None:
    text, keys = YAML_REFUSED[name]
    with pytest.raises(ValueError) as refusal:
        LlmArgs(model="m", **yaml.safe_load(text))
    assert {line.partition(" = ")[0] for line in str(refusal.value).splitlines()} == keys


def test_of_a_mapping_only_the_keys_in_the_way_are_refused() -> None:
    with pytest.raises(ValueError) as refusal:
        LlmArgs(model="m", moe_config={"backend": "TRTLLM", "load_balancer": "x.yaml"})
    line = str(refusal.value)
    assert line.startswith("moe_config = {'load_balancer': 'x.yaml'} is refused: ")
    assert "'WIDEEP'" in line and "frozenset" not in line


@pytest.mark.parametrize("line", LINES_TAKEN)
def test_a_command_line_means_options_here(line: str) -> None:
    assert args_of(line) == LlmArgs(model="zoo:llama", **LINES_TAKEN[line])


@pytest.mark.parametrize("line", REFUSED)
def test_a_command_line_is_refused_with_all_reasons(line: str) -> None:
    with pytest.raises(ValueError) as refusal:
        args_of(line)
    for reason in REFUSED[line]:
        assert reason in str(refusal.value)
    assert len(str(refusal.value).splitlines()) == len(REFUSED[line])


def test_sglangs_file_of_adaptive_options_replaces_its_defaults(tmp_path: Path) -> None:
    path = tmp_path / "adaptive.json"
    path.write_text('{"1": {"candidate_steps": [1, 2]}}')
    for more in ("", "--speculative-adaptive"):
        line = f"--speculative-algorithm NEXTN --speculative-num-steps 3 {more}"
        found = args_of(f"{line} --speculative-adaptive-config {path}")
        assert found == LlmArgs(model="zoo:llama", **speculates("MTP", 3, adaptive=str(path)))


@pytest.mark.parametrize(
    ("config", "decoding_type"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, "Draft_Target"),
        ({"architectures": ["LlamaForCausalLM"], "pard_token": 7}, "PARD"),
        ({"architectures": ["LlamaForCausalLMEagle3"]}, "Eagle3"),
        ({"architectures": ["LlamaForCausalLMEagle"]}, "Eagle"),
        ({"architectures": ["DFlashDraftModel"]}, "DFlash"),
        ({"architectures": ["DeepseekV3ForCausalLMNextN"]}, "MTP"),
    ],
)
def test_a_folder_of_draft_weights_says_the_decoding_type_where_none_is_given(
    config: dict[str, Any], decoding_type: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = args_of(vllm(model=str(tmp_path), num_speculative_tokens=2)).speculative_config
    assert found is not None and found.decoding_type == decoding_type


def test_no_type_is_guessed_for_weights_that_are_not_there() -> None:
    with pytest.raises(ValueError, match="decoding_type is required"):
        args_of(vllm(model="no/eagle3/folder", num_speculative_tokens=2))
