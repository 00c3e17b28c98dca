"""What the quickstarts of TensorRT-LLM, vLLM and SGLang's users do, with the names of this package:
their own arguments, from the first call to the printed text."""

from typing import Any

import pytest

from tllm_spec import LLM, SamplingParams, llmapi
from tllm_spec.config.llm_args import LlmArgs

PROMPTS = ["Hello, my name is", "The capital of France is", "The future of AI is"]
# What the advanced quickstart of each version passes by default: of the options of 1.0 and later,
# of those before, and the classes whose fields have been renamed since.
COMMON: dict[str, Any] = {
    "backend": "pytorch",
    "disable_overlap_scheduler": False,
    "attn_backend": "TRTLLM",
    "load_format": "auto",
    "print_iter_log": False,
    "enable_iter_perf_stats": False,
    "max_seq_len": None,
    "max_batch_size": 2048,
    "max_num_tokens": 8192,
    "enable_attention_dp": False,
    "tensor_parallel_size": 1,
    "pipeline_parallel_size": 1,
    "moe_expert_parallel_size": -1,
    "moe_tensor_parallel_size": -1,
    "moe_cluster_parallel_size": -1,
    "enable_chunked_prefill": False,
    "trust_remote_code": False,
    "gather_generation_logits": False,
    "max_beam_width": 1,
}
NEWEST = {"sampler_type": "auto", "torch_compile_config": None}
OLD = {"kv_cache_dtype": "auto", "enable_trtllm_sampler": False, "moe_backend": "CUTLASS"}
OLDEST = OLD | {
    "use_cuda_graph": False,
    "cuda_graph_padding_enabled": False,
    "cuda_graph_batch_sizes": None,
    "torch_compile_enabled": False,
    "torch_compile_piecewise_cuda_graph": False,
}


def newest_options() -> dict[str, Any]:
    attention = llmapi.AttentionDpConfig(
        enable_balance=False, timeout_iters=0, batching_wait_iters=0
    )
    return NEWEST | {
        "attention_dp_config": attention,
        "cuda_graph_config": llmapi.CudaGraphConfig(batch_sizes=None, enable_padding=False),
        "kv_cache_config": llmapi.KvCacheConfig(
            enable_block_reuse=True, free_gpu_memory_fraction=0.9, dtype="auto"
        ),
        "moe_config": llmapi.MoeConfig(backend="CUTLASS", use_low_precision_moe_combine=False),
    }


def old_options() -> dict[str, Any]:
    return OLD | {
        "cuda_graph_config": llmapi.CudaGraphConfig(batch_sizes=[1, 2], padding_enabled=True),
        "kv_cache_config": llmapi.KvCacheConfig(
            enable_block_reuse=True, free_gpu_memory_fraction=None
        ),
    }


OPTIONS = {"newest": newest_options, "old": old_options, "oldest": lambda: dict(OLDEST)}


def sampling_params(**newer: Any) -> SamplingParams:
    return SamplingParams(
        max_tokens=8,
        temperature=None,
        top_k=None,
        top_p=None,
        return_context_logits=False,
        return_generation_logits=False,
        logprobs=False,
        n=1,
        use_beam_search=False,
        **newer,
    )


@pytest.mark.parametrize("version", OPTIONS)
def test_the_options_of_tensorrt_llms_quickstarts_are_taken(version: str) -> None:
    args = LlmArgs(model="m", **COMMON, **OPTIONS[version]())
    graphs = args.cuda_graph_config
    assert graphs is not None and graphs.enable_padding is (version != "newest")
    assert args.max_batch_size == 2048 and args.attn_backend == "auto"


def test_options_of_older_versions_that_would_change_something_are_refused_with_todays() -> None:
    with pytest.raises(ValueError, match=r"moe_backend = 'cuda' is refused: .*'CUTLASS'"):
        LlmArgs(model="m", moe_backend="cuda")


def test_vllms_speculative_config_is_taken_by_its_method() -> None:
    of_vllm = {"method": "eagle3", "model": "head", "num_speculative_tokens": 2}
    own = {"decoding_type": "Eagle3", "speculative_model": "head", "max_draft_len": 2}
    assert LlmArgs(model="m", speculative_config=of_vllm) == LlmArgs(
        model="m", speculative_config=own
    )
    with pytest.raises(
        ValueError, match=r"disable_by_batch_size = 4 is refused: use max_concurrency"
    ):
        LlmArgs(model="m", speculative_config=of_vllm | {"disable_by_batch_size": 4})


@pytest.mark.slow
@pytest.mark.parametrize("version", OPTIONS)
@pytest.mark.parametrize("algorithm", [None, "EAGLE3", "DRAFT_TARGET", "NGRAM", "MTP"])
def test_tensorrt_llms_advanced_quickstart_runs(version: str, algorithm: str | None) -> None:
    """The same texts in every way, as its printed lines."""
    model, spec = "zoo:llama", None
    if algorithm == "MTP":
        model, spec = (
            "zoo:deepseek",
            llmapi.MTPDecodingConfig(
                num_nextn_predict_layers=1,
                use_relaxed_acceptance_for_thinking=False,
                relaxed_topk=1,
                relaxed_delta=0.0,
            ),
        )
    elif algorithm == "EAGLE3":
        spec = llmapi.EagleDecodingConfig(
            max_draft_len=3, speculative_model_dir="zoo:llama-eagle3", eagle3_one_model=True
        )
    elif algorithm == "DRAFT_TARGET":
        spec = llmapi.DraftTargetDecodingConfig(
            max_draft_len=3, speculative_model_dir="zoo:llama-draft"
        )
    elif algorithm == "NGRAM":
        spec = llmapi.NGramDecodingConfig(
            max_draft_len=3,
            max_matching_ngram_size=5,
            is_keep_all=True,
            is_use_oldest=True,
            is_public_pool=True,
        )
    newer = {"best_of": 1, "additional_model_outputs": None} if version == "newest" else {}
    with LLM(model=model, speculative_config=spec, **COMMON, **OPTIONS[version]()) as llm:
        found = [
            (output.prompt, beam.text)
            for output in llm.generate(PROMPTS, sampling_params(**newer))
            for beam in output.outputs
        ]
        llm.check_integrity()
    with LLM(model=model) as llm:
        plain = llm.generate(PROMPTS, SamplingParams(max_tokens=8))
    assert found == [(output.prompt, output.outputs[0].text) for output in plain]


@pytest.mark.slow
def test_vllms_quickstarts_run() -> None:
    """Sampled prompts, then a batch of conversations."""
    head = {"method": "eagle3", "model": "zoo:llama-eagle3", "num_speculative_tokens": 2}
    sampling = SamplingParams(temperature=0.8, top_p=0.95)
    with LLM(model="zoo:llama", speculative_config=head) as llm:
        outputs = llm.generate(PROMPTS, sampling)
        assert [output.prompt for output in outputs] == PROMPTS
        assert all(output.outputs[0].text for output in outputs)
        conversation = [
            {"role": "user", "content": "Hello"},
            {"role": "assistant", "content": "Hello! How can I assist you today?"},
            {"role": "user", "content": "Write an essay."},
        ]
        answers = llm.chat([conversation] * 3, sampling, use_tqdm=False)
        assert len(answers) == 3 and all(answer.outputs[0].text for answer in answers)
        llm.check_integrity()
