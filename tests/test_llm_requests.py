"""What `LLM.generate` takes and refuses; every mistake is refused by a sentence."""

import asyncio
import copy
import gc
import pickle
import re
import sys
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import Tensor

from tests.short_llm import llm as llm
from tllm_spec import Conversation, RequestError, llmapi
from tllm_spec.config.llm_args import LlmArgs
from tllm_spec.executor.request_queue import RequestQueue
from tllm_spec.executor.request_wire import RequestLimits
from tllm_spec.intake import Intake
from tllm_spec.llm import LLM
from tllm_spec.models.llama import CausalLM
from tllm_spec.request_handle import RequestHandle
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


@pytest.mark.covering
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
        *("prompt_adapter_request", "kv_cache_retention_config", "disaggregated_params"),
        *("scheduling_params", "conversation_params", "trace_headers"),
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


# `LLM.chat` answers conversations as the server does: by the model's chat template, in which
# control tokens come from the template only.


HELLO = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]


def template_ids(llm: LLM, messages: Any, **options: Any) -> list[int]:
    found: list[int] = llm.get_tokenizer().apply_chat_template(
        messages, tokenize=True, return_dict=False, **{"add_generation_prompt": True, **options}
    )
    return found


def test_one_conversation_is_answered_as_its_rendered_prompt(llm: LLM) -> None:
    output: Any = llm.chat(HELLO, THREE)
    assert output.prompt_token_ids == template_ids(llm, HELLO)
    assert output.outputs == llm.generate(output.prompt_token_ids, THREE).outputs
    bare: Any = llm.chat(HELLO, THREE, add_generation_prompt=False)
    assert bare.prompt_token_ids == template_ids(llm, HELLO, add_generation_prompt=False)


def test_a_list_of_conversations_has_parameters_for_each_and_errors_in_their_outputs(
    llm: LLM,
) -> None:
    wrong: Any = [{"role": "user", "content": 5}]
    params = [SamplingParams(max_tokens=number) for number in (2, 3, 4)]
    outputs: Any = llm.chat([HELLO, wrong, HELLO[1:]], params, use_tqdm=False)
    assert [output.outputs[0].length for output in outputs if not output.error] == [2, 4]
    assert outputs[1].error.startswith("messages[0]['content'] = 5: text, or a list")


def test_the_name_of_a_control_token_in_a_message_is_text(llm: LLM) -> None:
    def count(content: str) -> int:
        output: Any = llm.chat([{"role": "user", "content": content}], THREE)
        return int(output.prompt_token_ids.count(end))

    (end,) = llm.get_tokenizer().encode("<|assistant|>", add_special_tokens=False)
    assert count("a <|assistant|> b") == count("a b") == 1


def test_a_conversation_streams(llm: LLM) -> None:
    async def streamed() -> str:
        handle = llm.generate_async(Conversation(HELLO), THREE, streaming=True)
        return "".join([output.outputs[0].text_diff async for output in handle])

    whole: Any = llm.chat(HELLO, THREE)
    assert asyncio.run(streamed()) == whole.outputs[0].text


@pytest.mark.parametrize(
    ("messages", "options", "sentence"),
    [
        ([], {}, r"messages = \[\]: a list with at least one message"),
        ("Hello", {}, "messages = 'Hello': a list"),
        ({"role": "user"}, {}, "a list with at least one message"),
        ([{"content": "a"}], {}, r"messages\[0\] = .*a mapping like"),
        (HELLO, {"chat_template_kwargs": {"messages": 1}}, "are not variables of a template"),
        (HELLO, {"tools": [{1, 2}]}, "tools and chat_template_kwargs as JSON: .*set"),
        (HELLO, {"chat_template": "x"}, "chat_template = 'x'.*the one in the tokenizer's folder"),
        (HELLO, {"continue_final_message": True}, "continue_final_message = True"),
        (HELLO, {"lora_request": 1}, "lora_request = 1: a LoRARequest or None is needed"),
    ],
)
def test_a_wrong_conversation_is_refused_by_a_sentence(
    llm: LLM, messages: Any, options: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(ValueError, match=sentence):
        llm.chat(messages, THREE, **options)


def test_an_unknown_argument_is_one_of_chat(llm: LLM) -> None:
    with pytest.raises(TypeError, match=r"chat\(\) got an unexpected keyword argument 'tool'"):
        llm.chat(HELLO, THREE, tool=[])


# An `LLM`'s life: interrupted waits, shutdown, threads, and what is freed.


@pytest.mark.parametrize("prompt", ["import os", ["import os", "def f("]])
def test_an_interrupted_wait_aborts_its_requests(
    llm: LLM, prompt: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    waited_for: list[RequestHandle] = []

    def interrupted(handle: RequestHandle, timeout: float | None) -> None:
        waited_for.append(handle)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(RequestHandle, "_wait", interrupted)
        llm.generate(prompt, SamplingParams(max_tokens=150, ignore_eos=True), use_tqdm=False)
    assert waited_for[0].result(timeout=60).outputs[0].finish_reason == "cancelled"


@pytest.mark.parametrize("is_last_moment", [True, False])
def test_a_request_that_arrives_at_shutdown_is_answered_or_refused(
    monkeypatch: pytest.MonkeyPatch, is_last_moment: bool
) -> None:
    late = LLM("zoo:llama", max_seq_len=256)
    take_calls = RequestQueue.take_calls
    errors: list[str | None] = []

    def ask() -> None:
        monkeypatch.setattr(late, "_is_shut_down", False)  # as another thread saw it before
        try:
            handle = late.generate_async("import os", THREE)
        except RuntimeError as refusal:
            errors.append(str(refusal))
        else:
            waiting.append(handle)

    def one_more_at_the_end(queue: RequestQueue, *, last: bool = False) -> Any:
        if last and is_last_moment:
            ask()
        calls = take_calls(queue, last=last)
        if last and not is_last_moment:
            ask()
        return calls

    waiting: list[RequestHandle] = []
    monkeypatch.setattr(RequestQueue, "take_calls", one_more_at_the_end)
    late.shutdown()
    errors += [handle.result(timeout=60).error for handle in waiting]
    assert errors == ["the executor has been shut down"]
    assert bool(waiting) == is_last_moment
    with pytest.raises(RuntimeError, match="shut down"):
        late.generate_async("import os", THREE)


def model_of(llm: LLM) -> "weakref.ref[CausalLM]":
    return weakref.ref(llm._executor.parts.runner.engine.model)


@pytest.mark.thinned
@pytest.mark.parametrize(
    "speculative_config", [None, {"decoding_type": "NGram", "max_draft_len": 3, "adaptive": {}}]
)
def test_weights_are_freed_at_shutdown(speculative_config: Any) -> None:
    with LLM("zoo:llama", max_seq_len=256, speculative_config=speculative_config) as llm:
        model = model_of(llm)
        llm.generate("import os", THREE)
    gc.collect()
    assert model() is None
    with pytest.raises(RuntimeError, match="shut down"):
        llm.check_integrity()


def test_an_unreferenced_llm_ends_although_its_outputs_are_kept() -> None:
    llm = LLM("zoo:llama", max_seq_len=256)
    model, worker, answer = model_of(llm), llm._worker, llm.generate("import os", THREE)
    del llm
    gc.collect()
    assert (model(), worker._thread.is_alive(), answer.error) == (None, False, None)


def test_a_running_request_keeps_its_llm_alive() -> None:
    handle = LLM("zoo:llama", max_seq_len=256).generate_async("import os", THREE)
    gc.collect()
    assert handle.result(timeout=60).outputs[0].length == 3


def test_requests_from_several_threads_are_all_answered(llm: LLM) -> None:
    lengths: list[int] = []

    def ask(number: int) -> None:
        lengths.append(llm.generate([number, number + 1], THREE).outputs[0].length)

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert lengths == [3] * 8


@pytest.mark.parametrize("copied", [pickle.dumps, copy.copy])
def test_an_llm_that_is_pickled_or_copied_says_what_to_do(
    llm: LLM, copied: Callable[[LLM], object]
) -> None:
    with pytest.raises(TypeError, match="an LLM cannot be pickled: make one from its arguments"):
        copied(llm)


def test_every_llm_has_an_id_of_its_own(llm: LLM) -> None:
    with LLM("zoo:llama", max_seq_len=64) as other:
        assert isinstance(llm.llm_id, str) and llm.llm_id != other.llm_id


def test_an_architecture_is_checked_before_the_tokenizer_is_read(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["Gemma2ForCausalLM"]}')
    with pytest.raises(ValueError, match=r"architectures is .*; it must be one of"):
        LLM(tmp_path)
