"""`LLM.chat` answers conversations as the server does: by the model's chat template, in which
control tokens come from the template only."""

import asyncio
from typing import Any

import pytest

from tests.short_llm import llm as llm
from tllm_spec import Conversation
from tllm_spec.llm import LLM
from tllm_spec.sampling_params import SamplingParams

THREE = SamplingParams(max_tokens=3)
HELLO = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]


def template_ids(llm: LLM, messages: Any, **options: Any) -> list[int]:
    found: list[int] = llm.get_tokenizer().apply_chat_template(
        messages, tokenize=True, return_dict=False, **{"add_generation_prompt": True, **options}
    )
    return found


def test_one_conversation_is_answered_as_its_rendered_prompt(llm: LLM) -> None:
    output: Any = llm.chat(HELLO, THREE)
    assert output.prompt_token_ids == template_ids(llm, HELLO)
    assert output.outputs == llm.generate(output.prompt_token_ids, THREE).outputs  # type: ignore[union-attr]
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
        (HELLO, {"lora_request": 1}, "lora_request = 1"),
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
