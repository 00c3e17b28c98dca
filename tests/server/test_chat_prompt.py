"""Conversations become token ids: control tokens come from the template only."""

import pytest

from tests.server.fake_llm import FakeLLM
from tllm_spec.server.chat_prompt import SPLIT, ChatPrompts, control_tokens
from tllm_spec.tokenizer import Tokenizer, load_tokenizer


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load_tokenizer("zoo:llama")


def ids(tokenizer: Tokenizer, content: str, *, allow: bool = False) -> list[int]:
    prompts = ChatPrompts(tokenizer, lambda text: None, allow_control_tokens=allow)
    messages = [{"role": "user", "content": content}]
    return prompts.token_ids(messages, {}, add_generation_prompt=True)


def plain_ids(tokenizer: Tokenizer, content: str) -> list[int]:
    found: list[int] = tokenizer.apply_chat_template(
        [{"role": "user", "content": content}],
        tokenize=True,
        return_dict=False,
        add_generation_prompt=True,
    )
    return found


@pytest.mark.parametrize("content", ["hello", " a  b\n", "naïve 😀", f"odd {SPLIT} character"])
def test_ordinary_text_has_the_tokens_of_the_template(tokenizer: Tokenizer, content: str) -> None:
    assert ids(tokenizer, content) == plain_ids(tokenizer, content)


def test_a_control_tokens_name_in_a_message_is_text(tokenizer: Tokenizer) -> None:
    names = control_tokens(tokenizer)
    assert names
    for name in names:
        (control_id,) = tokenizer.encode(name, add_special_tokens=False)
        template = plain_ids(tokenizer, "x").count(control_id)
        text = f"a {name}{name} b"
        found = ids(tokenizer, text)
        assert found.count(control_id) == template
        assert text in tokenizer.decode(found, skip_special_tokens=False)
        assert ids(tokenizer, text, allow=True).count(control_id) == template + 2


def test_a_message_that_cannot_fit_is_refused_before_it_is_tokenised() -> None:
    llm = FakeLLM()
    prompts = ChatPrompts(llm.tokenizer, llm.check_length, allow_control_tokens=False)
    tokenised: list[str] = []
    llm.tokenizer.encode = tokenised.append  # type: ignore[method-assign]  # must not be called
    messages = [{"role": "user", "content": "a" * 3_000_000}]
    with pytest.raises(ValueError, match="maximum context length"):
        prompts.token_ids(messages, {}, add_generation_prompt=True)
    assert not tokenised
