"""anthropic: a streamed call with thinking, and the answer after its result."""

import os

from anthropic import Anthropic

client, model = Anthropic(), os.environ["MODEL"]
schema = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
tools = [{"name": "get_weather", "description": "The temperature.", "input_schema": schema}]
messages = [{"role": "user", "content": "What is the weather in Paris?"}]
options = {"model": model, "max_tokens": 1024, "tools": tools}
with client.messages.stream(messages=messages, **options) as stream:
    answer = stream.get_final_message()
assert answer.stop_reason == "tool_use", answer
thinking, call = answer.content
assert (thinking.type, thinking.thinking) == ("thinking", "I should look it up."), answer
assert (call.name, call.input) == ("get_weather", {"city": "Paris"}), answer
result = {"type": "tool_result", "tool_use_id": call.id, "content": "21"}
messages += [
    {"role": "assistant", "content": [each.model_dump() for each in answer.content]},
    {"role": "user", "content": [result]},
]
answer = client.messages.create(messages=messages, **options)
assert answer.content[0].text == "It is 21 degrees in Paris.", answer
assert answer.stop_reason == "end_turn", answer
count = client.messages.count_tokens(model=model, messages=messages, tools=tools)
read = answer.usage.cache_read_input_tokens
assert count.input_tokens == answer.usage.input_tokens + read, (count, answer.usage)
