"""Messages of chats: what they hold, how templates render them, and the limits of templates."""

import json
import shutil
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import jinja2
import pytest

from tests.server.fake_llm import FakeLLM
from tllm_spec.text import chat_prompt
from tllm_spec.text.chat_prompt import (
    MAX_CHARS,
    MAX_MESSAGES,
    SPLIT,
    ChatPrompts,
    Conversation,
    control_tokens,
)
from tllm_spec.text.messages import Messages, TemplateOverLimit, Tools, checked, visible
from tllm_spec.text.tokenizer import MAX_TEMPLATE_CHARS, Tokenizer, load_tokenizer
from tllm_spec.zoo.registry import resolve_model


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load_tokenizer("zoo:llama")


def ids(tokenizer: Tokenizer, content: str, *, allow: bool = False) -> list[int]:
    prompts = ChatPrompts(tokenizer, lambda text: None, allow_control_tokens=allow)
    messages = [{"role": "user", "content": content}]
    return prompts.token_ids(Conversation(messages))


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
        prompts.token_ids(Conversation(messages))
    assert not tokenised


# A template that knows three roles, and calls without the text next to them.
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'system' %}[S]{{ m.content | trim }}"
    "{% elif m.role == 'user' %}[U]{{ m.content }}{% elif m.role == 'assistant' %}[A]"
    "{% if m.tool_calls %}{% for c in m.tool_calls %}{{ c.function.name }}{% endfor %}"
    "{% else %}{{ m.content.split('</think>')[-1] }}{% endif %}{% endif %}{% endfor %}"
)
USER = {"role": "user", "content": "hi"}


def text_of(template: str, *messages: dict[str, Any]) -> str:
    tokenizer = load_tokenizer("zoo:llama")
    tokenizer.chat_template = template
    prompts = ChatPrompts(tokenizer, lambda text: None, allow_control_tokens=False)
    conversation = Conversation(messages, add_generation_prompt=False)
    return tokenizer.decode(prompts.token_ids(conversation))


def test_a_developers_message_is_the_systems_where_the_template_does_not_know_the_role() -> None:
    developer = {"role": "developer", "content": " Be brief "}
    assert text_of(TEMPLATE, developer, USER) == "[S]Be brief[U]hi"
    strict = TEMPLATE.replace("{% endif %}{% endfor %}", "{% else %}{{ raise_exception('role') }}")
    assert text_of(strict + "{% endif %}{% endfor %}", developer, USER) == "[S]Be brief[U]hi"
    known = TEMPLATE.replace("[S]", "[{{ m.role }}]").replace("== 'system'", "!= 'user'")
    assert text_of(known, developer, USER) == "[developer]Be brief[U]hi"


@pytest.mark.parametrize(
    ("template", "message", "what"),
    [
        (TEMPLATE, {"role": "tool", "content": "21"}, "leaves out the content"),
        (TEMPLATE.replace("'system'", "'x'"), {"role": "developer", "content": "a"}, "'developer'"),
    ],
)
def test_a_message_that_the_template_leaves_out_is_refused(
    template: str, message: dict[str, Any], what: str
) -> None:
    with pytest.raises(ValueError, match=rf"messages\[1\] has role = .*{what}"):
        text_of(template, USER, message)


def test_what_a_template_changes_in_a_message_is_its_own_affair() -> None:
    thought = {"role": "assistant", "content": "a</think>b"}
    call = {"role": "assistant", "content": "so", "tool_calls": [{"function": {"name": "f"}}]}
    empty = {"role": "system", "content": ""}
    assert text_of(TEMPLATE, empty, USER, thought, call) == "[S][U]hi[A]b[A]f"


# Templates of published kinds: content that may be None, must be a text, or is joined to others;
# arguments as an object, item by item, or as the text that the model wrote.
BODIES = {
    "asks for None": "{% if m.content is none %}CALLS{% else %}{{ m.content }}{% endif %}",
    "joins": "{{ m.role + ':' + m.content }}CALLS",
    "prints": "{{ m.content }}CALLS",
}
ARGUMENTS = {
    "object": "{{ c.function.arguments | tojson }}",
    "items": "{% for k, v in c.function.arguments.items() %}{{ k }}={{ v | tojson }};{% endfor %}",
    "text": "{{ '' + c.function.arguments }}",
}


def template_with(body: str, arguments: str) -> str:
    calls = "{% for c in m.tool_calls or [] %}<{{ c.function.name }} " + arguments + ">{% endfor %}"
    return "{% for m in messages %}" + body.replace("CALLS", calls) + "{% endfor %}"


def history(arguments: str, **answer: Any) -> list[dict[str, Any]]:
    """A conversation whose second message is an answer of the server."""
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    calling = {"role": "assistant", "content": None, "tool_calls": [call]} | answer
    return [USER, calling, {"role": "tool", "tool_call_id": "1", "content": "sunny"}]


@pytest.mark.parametrize("arguments", ARGUMENTS)
@pytest.mark.parametrize("body", BODIES)
def test_an_answer_with_calls_and_no_content_is_taken_back(body: str, arguments: str) -> None:
    text = text_of(template_with(BODIES[body], ARGUMENTS[arguments]), *history('{"a": "b"}'))
    assert "hi" in text and "sunny" in text and "f" in text and "None" not in text
    assert '{"a": "b"}' in text or 'a="b"' in text


@pytest.mark.parametrize("drops_none", [False, True])
@pytest.mark.parametrize("arguments", ARGUMENTS)
@pytest.mark.parametrize("body", BODIES)
def test_the_form_of_an_answer_does_not_depend_on_what_drops_none(
    body: str, arguments: str, drops_none: bool
) -> None:
    """Some releases of transformers leave out names whose value is None, others do not."""
    template = jinja2.Template(template_with(BODIES[body], ARGUMENTS[arguments]))

    def rendered(messages: Messages, tools: Tools) -> str:
        given = [
            {name: value for name, value in each.items() if value is not None or not drops_none}
            for each in messages
        ]
        try:
            return template.render(messages=given, tools=tools)
        except (TypeError, jinja2.TemplateError) as error:
            raise ValueError("refused") from error

    shown = visible(checked(history('{"a": "b"}')), None, rendered)
    text = rendered(shown.messages, None)
    assert "None" not in text and "sunny" in text and ('{"a": "b"}' in text or 'a="b"' in text)
    assert ("<f " in text) == (not drops_none or body != "asks for None")


@pytest.mark.parametrize("cut", ['{"a": "b', '{"a', "[1, 2", "not JSON", ""])
@pytest.mark.parametrize("arguments", ARGUMENTS)
def test_arguments_that_are_no_object_are_taken_back(arguments: str, cut: str) -> None:
    assert "f" in text_of(template_with(BODIES["prints"], ARGUMENTS[arguments]), *history(cut))


TURNS = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('turns must alternate') }}{% endif %}[{{ m.role }}]{{ m.content }}"
    "{% endfor %}"
)


def test_calls_are_lines_of_text_where_the_template_knows_none() -> None:
    calling = history('{"a": "b"}', content="Let me see.")
    again = [*calling, calling[2] | {"content": "21"}, USER]
    assert text_of(TURNS, *again) == (
        '[user]hi[assistant]Let me see.\n{"name": "f", "arguments": {"a": "b"}}[user]sunny\n21\nhi'
    )
    with pytest.raises(ValueError, match="turns must alternate"):
        text_of(TURNS, USER, USER)


@pytest.mark.parametrize(
    ("variables", "shown"),
    [
        ({}, "-"),
        ({"reasoning_effort": "high"}, "True"),
        ({"reasoning_effort": "none"}, "False"),
        ({"enable_thinking": True}, "True"),
        ({"enable_thinking": False, "reasoning_effort": "high"}, "False"),
        ({"thinking": False, "enable_thinking": True}, "False"),
    ],
)
def test_effort_and_thinking_set_the_switch_of_the_template(
    variables: dict[str, Any], shown: str
) -> None:
    tokenizer = load_tokenizer("zoo:llama")
    tokenizer.chat_template = "{{ messages[0].content }}{{ thinking | default('-') }}"
    prompts = ChatPrompts(tokenizer, lambda text: None, allow_control_tokens=False)
    assert tokenizer.decode(prompts.token_ids(Conversation([USER], variables))) == f"hi{shown}"


def test_names_without_a_value_and_an_empty_answer_are_nothing_to_a_template() -> None:
    template = (
        "{% for m in messages %}[{{ m.keys() | sort | join(' ') }}]{{ m.content }}{% endfor %}"
    )
    nothing = {"tool_calls": None, "name": None, "reasoning_content": None}
    answers = [{"role": "assistant", "content": None} | nothing, {"role": "assistant"}]
    answers.append({"role": "assistant", "content": "b", "tool_calls": []})
    keys = "[content role]"
    assert text_of(template, USER | nothing, *answers) == f"{keys}hi{keys}{keys}{keys}b"


TOOLS = [{"type": "function", "function": {"name": name, "parameters": {}}} for name in "fg"]
WITH_TOOLS = "{% for t in tools %}{{ t | tojson }}{% endfor %}{{ messages[0].content }}"
FIRST_TOOL = "{{ tools[0].function.name }}{{ messages[0].content }}"
STRICT = "{% if tools[0].function.name not in 'fg' %}{{ raise_exception('x') }}{% endif %}"


@pytest.mark.parametrize(
    ("template", "is_refused"),
    [(TEMPLATE, True), (FIRST_TOOL, True), (WITH_TOOLS, False), (STRICT, False)],
)
def test_tools_that_the_template_leaves_out_are_refused_unless_a_call_is_forced(
    template: str, is_refused: bool
) -> None:
    tokenizer = load_tokenizer("zoo:llama")
    tokenizer.chat_template = template
    prompts = ChatPrompts(tokenizer, lambda text: None, allow_control_tokens=False)
    prompts.token_ids(Conversation([USER], tools=TOOLS, needs_tools=False))
    with pytest.raises(ValueError, match="leaves them out") if is_refused else nullcontext():
        prompts.token_ids(Conversation([USER], tools=TOOLS))


@pytest.mark.parametrize("template", [TEMPLATE, "{{ messages[0].name }}" + TEMPLATE])
def test_names_that_the_template_leaves_out_are_reported_once(
    template: str, caplog: pytest.LogCaptureFixture
) -> None:
    tokenizer = load_tokenizer("zoo:llama")
    tokenizer.chat_template = template
    prompts = ChatPrompts(tokenizer, lambda text: None, allow_control_tokens=False)
    for _ in range(2):
        prompts.token_ids(Conversation([USER | {"name": "Ann"}]))
    assert caplog.text.count("messages have a name") == (template == TEMPLATE)
    assert "Ann" not in caplog.text


# Contents are text, or parts of which some are images.
WITH_IMAGES = (
    "{% for m in messages %}[{{ m.role }}]{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}{% if part.type == 'image' %}[image]{% else %}{{ part.text }}"
    "{% endif %}{% endfor %}{% endif %}{% endfor %}{% if add_generation_prompt %}[A]{% endif %}"
)


@pytest.mark.parametrize("file", ["tokenizer_config.json", "chat_template.json", "jinja"])
def test_the_template_of_a_model_with_images_renders_text(file: str, tmp_path: Path) -> None:
    """Where it is: with the tokenizer, with the processor of images, or in a file of its own."""
    shutil.copy(resolve_model("zoo:llama") / "tokenizer.json", tmp_path)
    settings = json.loads((resolve_model("zoo:llama") / "tokenizer_config.json").read_text())
    settings.pop("chat_template")
    files: dict[str, Any] = {"tokenizer_config.json": settings}
    files["config.json"] = {"model_type": "qwen3_vl"}
    if file != "jinja":
        files[file] = files.get(file, {}) | {"chat_template": WITH_IMAGES}
    else:
        (tmp_path / "chat_template.jinja").write_text(WITH_IMAGES)
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content))
    tokenizer = load_tokenizer(tmp_path)
    prompts = ChatPrompts(tokenizer, lambda text: None, allow_control_tokens=False)
    parts = [{"type": "text", "text": "a "}, {"type": "text", "text": "b"}]
    messages = [{"role": "system", "content": "c"}, {"role": "user", "content": parts}]
    assert tokenizer.decode(prompts.token_ids(Conversation(messages))) == "[system]c[user]a b[A]"


def test_text_parts_are_joined_and_arguments_of_calls_are_objects() -> None:
    parts = [{"type": "text", "text": "a"}, {"text": "b"}]
    call = {"id": "1", "function": {"name": "f", "arguments": '{"x": 1}'}}
    assistant = {"role": "assistant", "tool_calls": [call]}
    user, answer = checked([{"role": "user", "content": parts}, assistant])
    assert user["content"] == "ab" and answer["content"] is None
    assert answer["tool_calls"] == [{"id": "1", "function": {"name": "f", "arguments": {"x": 1}}}]
    assert checked([user, answer]) == [user, answer]


@pytest.mark.parametrize(
    ("message", "sentence"),
    [
        ("hi", r"messages\[0\] = 'hi': a mapping like"),
        ({"role": 1, "content": "a"}, "a mapping like"),
        ({"role": "user"}, r"\['content'\] = None: text"),
        ({"role": "user", "content": [{"type": "image_url"}]}, "only text is served"),
        ({"role": "assistant", "tool_calls": ["f"]}, r"\['tool_calls'\]: a call like"),
    ],
)
def test_what_is_not_a_message_is_refused(message: Any, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        checked([message])


LIMITS_TEMPLATE = (
    "{% if do == 'fail' %}{{ raise_exception('not so') }}{% endif %}"
    "{% if do == 'fill' %}{{ 'a' * size }}{% endif %}"
    "{% for message in messages %}{{ message.content }}{{ shown }}{% endfor %}"
)


@pytest.fixture(scope="module")
def limits_tokenizer() -> Tokenizer:
    limits_tokenizer = load_tokenizer("zoo:llama")
    limits_tokenizer.chat_template = LIMITS_TEMPLATE
    return limits_tokenizer


def rendered(limits_tokenizer: Tokenizer, number: int = 1, **variables: Any) -> list[int]:
    prompts = ChatPrompts(limits_tokenizer, lambda text: None, allow_control_tokens=False)
    return prompts.token_ids(Conversation([USER] * number, variables))


def test_a_text_that_grows_too_large_is_refused(
    limits_tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(TemplateOverLimit, match=f"made more than {MAX_CHARS} characters"):
        rendered(limits_tokenizer, do="fill", size=MAX_CHARS)
    with pytest.raises(ValueError, match="do not fit the model's chat template"):
        rendered(limits_tokenizer, do="fill", size="a")
    with pytest.raises(ValueError, match=r"do not fit the model's chat template: .*not so"):
        rendered(limits_tokenizer, do="fail")
    monkeypatch.setattr(chat_prompt, "MAX_CHARS", 1000)
    assert len(rendered(limits_tokenizer, do="fill", size=900)) > 9


def test_what_a_template_could_repeat_for_each_message_is_limited(
    limits_tokenizer: Tokenizer,
) -> None:
    with pytest.raises(ValueError, match=f"messages has {MAX_MESSAGES + 1} entries; at most 4096"):
        rendered(limits_tokenizer, MAX_MESSAGES + 1)
    with pytest.raises(ValueError, match="chat_template_kwargs has 20013 characters for each of 9"):
        rendered(limits_tokenizer, 900, shown="a" * 20_000)
    assert rendered(limits_tokenizer, 9, shown="a" * 200)


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
