"""What `LLM.generate` takes and refuses; every mistake is refused by a sentence."""

import re
import sys
from typing import Any

import numpy as np
import pytest
from torch import Tensor

from tests.short_llm import llm as llm
from tllm_spec import RequestError, llmapi
from tllm_spec.config.llm_args import LlmArgs
from tllm_spec.executor.request_wire import RequestLimits
from tllm_spec.intake import Intake
from tllm_spec.llm import LLM
from tllm_spec.sampling_params import GREEDY_BELOW_TEMPERATURE, LARGEST_FACTOR, SamplingParams

THREE = SamplingParams(max_tokens=3)


@pytest.mark.parametrize(
    ("prompt", "sentence"),
    [
        (None, "prompt = None: text, a list of token ids"),
        (5, "prompt = 5: text"),
        (b"abc", "prompt = b'abc': text"),
        ({"prompt": [1, 2]}, r"prompt = \[1, 2\]: text is needed"),
        ({"prompt_token_ids": "abc"}, "prompt_token_ids = 'abc': a list of token ids is needed"),
        ([1, "a"], r"prompt_token_ids = \[1, 'a'\] must be integers"),
        ("ab\ud800", r"character 2 is U\+D800, one half of a surrogate pair"),
        ("a " * 6000, "maximum context length is 191 tokens, and the prompt has 12000 characters"),
    ],
)
def test_a_wrong_prompt_is_refused_by_a_sentence(llm: LLM, prompt: Any, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        llm.generate(prompt, THREE)


def test_a_wrong_prompt_in_a_list_does_not_affect_the_others(llm: LLM) -> None:
    prompts: Any = ["import os", None, 7]
    good, none, seven = llm.generate(prompts, THREE, use_tqdm=False)
    assert good.outputs[0].length == 3
    assert none.error.startswith("prompt = None") and seven.error.startswith("prompt = 7")


def test_token_ids_may_be_numpys_integers(llm: LLM) -> None:
    plain = llm.generate([5, 6, 7], THREE)
    assert llm.generate(list(np.array([5, 6, 7])), THREE).outputs == plain.outputs


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"sampling_params": 5}, "sampling_params = 5: SamplingParams or a mapping"),
        ({"sampling_params": "greedy"}, "sampling_params = 'greedy': SamplingParams or a mapping"),
        ({"priority": "high"}, "priority = 'high': a number is needed"),
        ({"priority": None}, "priority = None: a number is needed"),
    ],
)
def test_an_argument_of_the_wrong_type_is_refused_by_name(
    llm: LLM, options: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(ValueError, match=sentence):
        llm.generate("import os", **options)


@pytest.mark.parametrize(
    ("prompt", "params", "sentence"),
    [
        (
            [1] * 65,
            THREE,
            "the prompt has 65 tokens; at most 64 .* max_num_tokens without",
        ),
        ([1] * 300, THREE, "maximum context length is 191 tokens, and the prompt has 300 tokens"),
    ],
)
def test_a_request_that_can_never_run_is_refused_when_it_is_submitted(
    llm: LLM, prompt: list[int], params: SamplingParams, sentence: str
) -> None:
    with pytest.raises(ValueError, match=sentence):
        llm.generate_async(prompt, params)


def test_a_bad_word_outside_the_vocabulary_is_refused_by_name(llm: LLM) -> None:
    with pytest.raises(ValueError, match="bad_token_ids names token id 99999"):
        llm.generate("import os", SamplingParams(bad_token_ids=[99999]))


def test_a_lone_surrogate_in_a_stop_string_is_refused(llm: LLM) -> None:
    with pytest.raises(ValueError, match=r"stop: character 1 is U\+D800"):
        llm.generate("a", SamplingParams(stop=["x", "a\ud800"]))


def test_a_lone_surrogate_in_a_bad_word_is_refused_and_affects_no_other_request(llm: LLM) -> None:
    bad = SamplingParams(bad=["a", "b\ud800"])
    sentence = "bad: character 1 is U+D800, one half of a surrogate pair"
    with pytest.raises(ValueError, match=re.escape(sentence)):
        llm.generate("import os", bad)
    refused, good = llm.generate(["import os"] * 2, [bad, THREE], use_tqdm=False)
    assert refused.error.startswith(sentence) and good.outputs[0].length == 3


@pytest.mark.parametrize("temperature", [GREEDY_BELOW_TEMPERATURE, LARGEST_FACTOR])
@pytest.mark.parametrize("repetition", [1 / LARGEST_FACTOR, LARGEST_FACTOR])
@pytest.mark.parametrize("penalty", [-LARGEST_FACTOR, LARGEST_FACTOR])
def test_the_largest_penalties_and_temperatures_give_finite_logits(
    llm: LLM, penalty: float, repetition: float, temperature: float
) -> None:
    params = SamplingParams(
        presence_penalty=penalty,
        frequency_penalty=penalty,
        repetition_penalty=repetition,
        temperature=temperature,
        top_p=0.9,
        bad_token_ids=[7],
        ignore_eos=True,
    )
    assert llm.generate("import os", params).outputs[0].length == 32


@pytest.mark.parametrize(
    ("model", "sentence"), [(None, "model = None"), (5, "model = 5"), ("", "model '' is neither")]
)
def test_a_model_that_is_not_a_path_is_refused_by_name(model: Any, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        LLM(model)


def test_a_processor_that_exits_fails_only_its_own_request(llm: LLM) -> None:
    def exits(tokens: list[int], logits: Tensor) -> Tensor:
        sys.exit("no more")

    failed = llm.generate_async("import os", SamplingParams(max_tokens=3, logits_processor=exits))
    assert failed.result(timeout=60).error == "SystemExit: no more"
    assert llm.generate("import os", THREE).outputs[0].length == 3


def test_a_request_that_fails_raises_if_it_was_alone_and_marks_its_output_in_a_list(
    llm: LLM,
) -> None:
    def fails(tokens: list[int], logits: Tensor) -> Tensor:
        raise KeyError("no such token")

    failing = SamplingParams(max_tokens=3, logits_processor=fails)
    with pytest.raises(RequestError, match="KeyError: 'no such token'"):
        llm.generate("import os", failing)
    failed, good = llm.generate(["import os"] * 2, [failing, THREE], use_tqdm=False)
    assert failed.error == "KeyError: 'no such token'"
    assert good.error is None and good.outputs[0].length == 3


@pytest.mark.parametrize(
    ("prompt", "params"), [(None, THREE), ([1] * 65, THREE), ("import os", {"max_tokens": "a"})]
)
def test_what_is_wrong_with_a_request_is_a_request_error(
    llm: LLM, prompt: Any, params: Any
) -> None:
    for call in (llm.generate, llm.generate_async):
        with pytest.raises(llmapi.RequestError):
            call(prompt, params)


def test_a_request_that_excludes_every_token_is_refused(llm: LLM) -> None:
    everything = SamplingParams(bad_token_ids=list(range(llm.model_config.vocab_size)))
    with pytest.raises(ValueError, match="exclude every token of the vocabulary"):
        llm.generate("import os", everything)
    almost = SamplingParams(max_tokens=2, bad_token_ids=list(range(1, llm.model_config.vocab_size)))
    assert llm.generate("import os", almost).outputs[0].token_ids == [0, 0]


def test_a_long_text_is_refused_only_if_it_cannot_fit(llm: LLM) -> None:
    """Many spaces are few tokens, and a truncated prompt may be any text."""
    assert llm.generate(" " * 960, THREE).prompt_token_ids == [560] * 60
    params = SamplingParams(max_tokens=3, truncate_prompt_tokens=8)
    assert llm.generate("a " * 6000, params).error is None


def test_a_users_tokenizer_works_without_a_vocabulary(llm: LLM) -> None:
    tokenizer = llm.tokenizer
    assert tokenizer is not None

    class Bare:
        eos_token_id, chat_template = tokenizer.eos_token_id, None
        encode, decode = staticmethod(tokenizer.encode), staticmethod(tokenizer.decode)

    with LLM("zoo:llama", Bare(), max_seq_len=256) as with_bare:
        assert with_bare.generate(" " * 960, THREE).error is None


@pytest.mark.parametrize(
    "name",
    [
        *("lora_request", "prompt_adapter_request", "kv_cache_retention_config"),
        *("disaggregated_params", "scheduling_params", "conversation_params", "trace_headers"),
    ],
)
def test_arguments_of_tensorrt_llm_that_are_not_served_must_be_none(llm: LLM, name: str) -> None:
    assert llm.generate("import os", THREE, **{name: None}).error is None
    prompts = ["import os", "def f("]
    assert len(llm.generate(prompts, THREE, use_tqdm=False, **{name: [None, None]})) == 2
    for given in ("x", ["x"]):
        with pytest.raises(ValueError, match=rf"{name} = .* is refused: .*; accepted: None"):
            llm.generate(prompts, THREE, **{name: given})
    with pytest.raises(ValueError, match=name):
        llm.generate_async("import os", THREE, **{name: "x"})


def test_only_requests_with_the_same_salt_reuse_a_prefix_and_others_learn_whole_pages(
    llm: LLM,
) -> None:
    prompt, page_size = list(range(100, 160)), llm.args.kv_cache_config.tokens_per_block

    def cached_tokens(salt: str | None) -> int:
        return llm.generate(prompt, THREE, cache_salt=salt).cached_tokens

    assert [cached_tokens(salt) for salt in (None, "a", "b")] == [0, 0, 0]
    assert [cached_tokens(salt) for salt in ("a", "b")] == [59, 59]
    assert cached_tokens(None) == 59 // page_size * page_size
    both = llm.generate([prompt, prompt], THREE, use_tqdm=False, cache_salt=[None, "c"])
    assert [output.cached_tokens for output in both] == [32, 0]


@pytest.mark.parametrize("salt", ["", 5, "\ud800"])
def test_a_salt_is_a_text_that_is_not_empty(llm: LLM, salt: Any) -> None:
    with pytest.raises(ValueError, match="cache_salt"):
        llm.generate("import os", THREE, cache_salt=salt)


def test_an_unknown_argument_is_a_type_error(llm: LLM) -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'temperature'"):
        llm.generate("import os", temperature=1)


def test_kv_cache_events_are_refused_by_a_sentence(llm: LLM) -> None:
    for method in (llm.get_kv_cache_events, llm.get_kv_cache_events_async):
        with pytest.raises(ValueError, match="KV cache events are published"):
            method(timeout=2)


def test_a_prompt_longer_than_max_input_len_is_refused_with_the_options_name() -> None:
    args = LlmArgs(model="m", max_input_len=5, max_num_tokens=8)
    intake = Intake(args, None, RequestLimits(9, (), 64, 0, None))
    with pytest.raises(ValueError, match="at most 5 are accepted, which is max_input_len"):
        intake.submission([1] * 6, THREE)
