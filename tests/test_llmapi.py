"""`tllm_spec.llmapi`: every name of TensorRT-LLM's module exists; those of classes that are not
served raise the sentence that the YAML form is refused with."""

from typing import Any

import pytest

import tllm_spec
from tests.decoding_options import speculate
from tests.test_import_time import loaded_after
from tllm_spec import llmapi
from tllm_spec.config.llm_args import LlmArgs
from tllm_spec.config.speculative_config import TYPES_NOT_SERVED

# What tensorrt_llm.llmapi and its documents export, of releases 1.0 to the newest.
NAMES = [
    *("AsyncLLM", "AttentionDpConfig", "AutoDecodingConfig", "BatchingType", "BlockReuseConfig"),
    *("BuildCacheConfig", "BuildConfig", "CacheTransceiverConfig", "CalibConfig"),
    *("CapacitySchedulerPolicy", "CompletionOutput", "ContextChunkingPolicy"),
    *("ConversationParams", "CudaGraphConfig", "DFlashDecodingConfig", "DSparkDecodingConfig"),
    *("DecodeCudaGraphConfig", "DeepSeekSparseAttentionConfig", "DisaggScheduleStyle"),
    *("DisaggregatedParams", "DraftTargetDecodingConfig", "DynamicBatchConfig"),
    *("Eagle3DecodingConfig", "EagleDecodingConfig", "ExtendedRuntimePerfKnobConfig"),
    *("GuidedDecodingParams", "KVEventsConfig", "KvCacheConfig", "KvCacheRetentionConfig", "LLM"),
    *("LlmArgs", "LoRARequest", "LogitsProcessor", "LookaheadDecodingConfig"),
    *("MTPDecodingConfig", "MambaStateConfig", "MedusaDecodingConfig", "MoeConfig"),
    *("MpiCommSession", "MultimodalConfig", "MultimodalEncoder", "NGramDecodingConfig"),
    *("PARDDecodingConfig", "PrefillCudaGraphBackend", "PrometheusMetricsConfig", "QuantAlgo"),
    *("QuantConfig", "ReorderRequestPolicyConfig", "RequestError", "RequestOutput"),
    *("RocketSparseAttentionConfig", "SADecodingConfig", "SAEnhancerConfig", "SamplingParams"),
    *("SaveHiddenStatesDecodingConfig", "SchedulerConfig", "SchedulingParams"),
    *("SkipSoftmaxAttentionConfig", "ThinkingBudgetLogitsProcessor", "TorchCompileConfig"),
    *("TorchLlmArgs", "TriAttentionKvCacheCompressionConfig", "TrtLlmArgs"),
    *("UserProvidedDecodingConfig", "add_thinking_budget_logits_processor"),
]
NOT_SERVED = sorted({*TYPES_NOT_SERVED.values(), *llmapi.OPTION_OF, *llmapi.WITHOUT_OPTION})


@pytest.mark.parametrize("name", NAMES)
def test_every_name_of_tensorrt_llms_module_can_be_imported(name: str) -> None:
    namespace: dict[str, Any] = {}
    exec(f"from tllm_spec.llmapi import {name}", namespace)
    assert namespace[name] is getattr(llmapi, name) and name in llmapi.__all__


def test_every_name_of_ours_is_the_object_of_the_package() -> None:
    for name in tllm_spec.__all__:
        assert getattr(llmapi, name) is getattr(tllm_spec, name)


@pytest.mark.parametrize("name", NOT_SERVED)
def test_a_class_that_is_not_served_says_so_when_it_is_used(name: str) -> None:
    kind = getattr(llmapi, name)
    assert not isinstance(5, kind)
    for use in (lambda: kind(max_draft_len=3), lambda: kind.SOME_MEMBER):
        with pytest.raises(ValueError, match=r"refused|not served yet") as refusal:
            use()
        assert len(str(refusal.value)) < 250


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("TorchCompileConfig", {"torch_compile_config": {}}),
        ("MedusaDecodingConfig", speculate({"decoding_type": "Medusa"})),
        ("SaveHiddenStatesDecodingConfig", speculate({"decoding_type": "SaveState"})),
        ("DynamicBatchConfig", {"scheduler_config": {"dynamic_batch_config": {}}}),
        ("BlockReuseConfig", {"kv_cache_config": {"block_reuse_config": {}}}),
    ],
)
def test_the_python_name_and_the_yaml_form_give_the_same_sentence(
    name: str, options: dict[str, Any]
) -> None:
    with pytest.raises(ValueError) as of_yaml:
        LlmArgs(model="m", **options)
    with pytest.raises(ValueError) as of_python:
        getattr(llmapi, name)()
    # The YAML form has the path of the option, and the value as it was written there.
    sentence = str(of_python.value).replace(f"{name}()", "{}")
    assert str(of_yaml.value).endswith(sentence)


@pytest.mark.parametrize(
    ("name", "option", "values", "others"),
    [
        ("MoeConfig", "moe_config", {"backend": "AUTO"}, {"backend": "cuda"}),
        ("QuantConfig", "quant_config", {"quant_algo": None}, {"quant_algo": "FP8"}),
    ],
)
def test_a_class_may_be_used_with_values_that_change_nothing(
    name: str, option: str, values: dict[str, Any], others: dict[str, Any]
) -> None:
    kind = getattr(llmapi, name)
    for given in ({}, values):
        assert LlmArgs(model="m", **{option: kind(**given)}) == LlmArgs(model="m")
    with pytest.raises(ValueError) as of_yaml:
        LlmArgs(model="m", **{option: others})
    with pytest.raises(ValueError, match=f"= {name}") as of_python:
        kind(**others)
    assert str(of_yaml.value).endswith(str(of_python.value).partition(" is refused")[2])


def test_the_members_of_policies_are_served_or_refused_like_their_values() -> None:
    policy, chunking = llmapi.CapacitySchedulerPolicy, llmapi.ContextChunkingPolicy
    config = llmapi.SchedulerConfig(
        capacity_scheduler_policy=policy.MAX_UTILIZATION,
        context_chunking_policy=chunking.FIRST_COME_FIRST_SERVED,
    )
    assert config.capacity_scheduler_policy == "MAX_UTILIZATION"
    assert type(config.capacity_scheduler_policy) is str
    assert LlmArgs(model="m", batching_type=llmapi.BatchingType.INFLIGHT) == LlmArgs(model="m")
    with pytest.raises(ValueError) as refusal:
        llmapi.SchedulerConfig(
            capacity_scheduler_policy=policy.STATIC_BATCH,
            context_chunking_policy=chunking.EQUAL_PROGRESS,
        )
    assert len(str(refusal.value).splitlines()) == 2


def test_an_unknown_name_is_an_import_error() -> None:
    with pytest.raises(ImportError):
        exec("from tllm_spec.llmapi import NoSuchConfig")


def test_nothing_heavy_is_loaded_before_a_name_needs_it() -> None:
    code = "from tllm_spec.llmapi import MTPDecodingConfig, KvCacheConfig, SamplingParams"
    assert loaded_after(code) == []
