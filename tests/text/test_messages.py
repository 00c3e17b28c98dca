"""Messages from Python become what chat templates read."""

from typing import Any

import pytest

from tllm_spec.text.messages import checked


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
