"""Chat templates have limits: they are programs from a model's folder."""

import json
import shutil
from pathlib import Path

import pytest

from tllm_spec.text import template_process
from tllm_spec.text.chat_prompt import ChatPrompts, Conversation
from tllm_spec.text.messages import Messages
from tllm_spec.text.template_child import MAX_CHARS
from tllm_spec.text.template_process import RenderTime, TemplateOverLimit, has_own_renderer
from tllm_spec.text.tokenizer import MAX_TEMPLATE_CHARS, Tokenizer, load_tokenizer
from tllm_spec.text.visible_messages import Tools, visible
from tllm_spec.zoo.registry import resolve_model

USER = {"role": "user", "content": "hi"}
MANY = "{% for a in range(99999) %}"
# A variable chooses what the template does, so one tokenizer serves good conversations, too.
TEMPLATE = (
    "{% if do == 'loop' %}" + MANY * 4 + "{% endfor %}" * 4 + "{% endif %}"
    "{% if do == 'grow' %}{{ 'a' * 10 ** 10 }}{% endif %}"
    "{% if do == 'fill' %}{{ 'a' * size }}{% endif %}"
    "{{ bos_token }}{{ messages[0].content }}"
)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    tokenizer = load_tokenizer("zoo:llama")
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def rendered(tokenizer: Tokenizer, **variables: object) -> str:
    prompts = ChatPrompts(tokenizer, lambda text: None, allow_control_tokens=False)
    return prompts._rendered(Conversation([USER], variables), RenderTime())


def test_a_template_that_takes_too_long_is_ended_and_the_next_conversation_is_rendered(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = rendered(tokenizer)
    monkeypatch.setattr(template_process, "MAX_SECONDS", 0.2)
    with pytest.raises(TemplateOverLimit, match=r"the chat template took over 0\.2 s"):
        rendered(tokenizer, do="loop")
    monkeypatch.undo()
    assert rendered(tokenizer) == plain


def test_all_renderings_of_a_conversation_share_its_time(tokenizer: Tokenizer) -> None:
    prompts = ChatPrompts(tokenizer, lambda text: None, allow_control_tokens=False)
    time, conversation = RenderTime(), Conversation([USER])
    prompts._rendered(conversation, time)
    assert 0 < time.left < template_process.MAX_SECONDS
    time.left = 0.0
    with pytest.raises(TemplateOverLimit, match="took over 5 s"):
        prompts._rendered(conversation, time)


def test_a_template_over_a_limit_is_not_run_again() -> None:
    runs: list[Messages] = []

    def run(messages: Messages, tools: Tools) -> str:
        runs.append(messages)
        raise TemplateOverLimit("too long")

    with pytest.raises(TemplateOverLimit):
        visible([USER], None, run)
    assert len(runs) == 1


@pytest.mark.parametrize("variables", [{"do": "grow"}, {"do": "fill", "size": MAX_CHARS}])
def test_a_text_that_grows_too_large_is_refused(
    tokenizer: Tokenizer, variables: dict[str, object]
) -> None:
    with pytest.raises(TemplateOverLimit, match=f"made more than {MAX_CHARS} characters"):
        rendered(tokenizer, **variables)
    assert rendered(tokenizer, do="fill", size=1000).startswith("a" * 1000)


def test_the_text_is_the_one_that_the_tokenizer_makes() -> None:
    tokenizer = load_tokenizer("zoo:llama")
    tokenizer.chat_template = (
        "{{ bos_token }}{% for m in messages %}{{ m | tojson }}{% endfor %}{{ tools | tojson }}"
        "{{ x | tojson }}{% if add_generation_prompt %}é{% endif %}"
    )
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    prompts = ChatPrompts(tokenizer, lambda text: None, allow_control_tokens=True)
    conversation = Conversation([USER], {"x": {"a": [1, None, "😀"]}}, tools=tools)
    found = prompts._rendered(conversation, RenderTime())
    assert found == tokenizer.apply_chat_template(
        [USER], tools=tools, x={"a": [1, None, "😀"]}, tokenize=False, add_generation_prompt=True
    )


def test_a_users_tokenizer_renders_by_itself(tokenizer: Tokenizer) -> None:
    class Own(type(tokenizer)):  # type: ignore[misc]  # a class that is known at run time only
        def apply_chat_template(self, *args: object, **options: object) -> str:
            return "own"

    assert has_own_renderer(Own.__new__(Own)) and not has_own_renderer(tokenizer)


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
