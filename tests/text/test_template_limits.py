"""Chat templates are programs from a model's folder: what a client sends them has limits."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tllm_spec.text import chat_prompt
from tllm_spec.text.chat_prompt import MAX_CHARS, MAX_MESSAGES, ChatPrompts, Conversation
from tllm_spec.text.messages import Messages, TemplateOverLimit, Tools, visible
from tllm_spec.text.tokenizer import MAX_TEMPLATE_CHARS, Tokenizer, load_tokenizer
from tllm_spec.zoo.registry import resolve_model

USER = {"role": "user", "content": "hi"}
TEMPLATE = (
    "{% if do == 'fail' %}{{ raise_exception('not so') }}{% endif %}"
    "{% if do == 'fill' %}{{ 'a' * size }}{% endif %}"
    "{% for message in messages %}{{ message.content }}{{ shown }}{% endfor %}"
)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    tokenizer = load_tokenizer("zoo:llama")
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def rendered(tokenizer: Tokenizer, number: int = 1, **variables: Any) -> list[int]:
    prompts = ChatPrompts(tokenizer, lambda text: None, allow_control_tokens=False)
    return prompts.token_ids(Conversation([USER] * number, variables))


def test_a_text_that_grows_too_large_is_refused(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(TemplateOverLimit, match=f"made more than {MAX_CHARS} characters"):
        rendered(tokenizer, do="fill", size=MAX_CHARS)
    with pytest.raises(ValueError, match="do not fit the model's chat template"):
        rendered(tokenizer, do="fill", size="a")
    with pytest.raises(ValueError, match=r"do not fit the model's chat template: .*not so"):
        rendered(tokenizer, do="fail")
    monkeypatch.setattr(chat_prompt, "MAX_CHARS", 1000)
    assert len(rendered(tokenizer, do="fill", size=900)) > 9


def test_what_a_template_could_repeat_for_each_message_is_limited(tokenizer: Tokenizer) -> None:
    with pytest.raises(ValueError, match=f"messages has {MAX_MESSAGES + 1} entries; at most 4096"):
        rendered(tokenizer, MAX_MESSAGES + 1)
    with pytest.raises(ValueError, match="chat_template_kwargs has 20013 characters for each of 9"):
        rendered(tokenizer, 900, shown="a" * 20_000)
    assert rendered(tokenizer, 9, shown="a" * 200)


def test_a_template_over_a_limit_is_not_run_again() -> None:
    runs: list[Messages] = []

    def run(messages: Messages, tools: Tools) -> str:
        runs.append(messages)
        raise TemplateOverLimit("too long")

    with pytest.raises(TemplateOverLimit):
        visible([USER], None, run)
    assert len(runs) == 1


def test_a_folder_with_a_large_template_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(resolve_model("zoo:llama"), folder)
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text())
    for size in (MAX_TEMPLATE_CHARS, MAX_TEMPLATE_CHARS + 1):
        path.write_text(json.dumps({**config, "chat_template": "a" * size}))
        if size == MAX_TEMPLATE_CHARS:
            load_tokenizer(folder)
            continue
        with pytest.raises(ValueError, match=f"chat template has more than {MAX_TEMPLATE_CHARS}"):
            load_tokenizer(folder)
