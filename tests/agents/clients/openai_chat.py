"""openai: a streamed call with its reasoning, and the answer after the tool's result."""

import json
import os

from openai import OpenAI

client, model = OpenAI(), os.environ["MODEL"]
tool = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
        },
    },
}
messages = [{"role": "user", "content": "What is the weather in Paris?"}]
name, arguments, call_id, reasoning, reason = "", "", "", "", None
for chunk in client.chat.completions.create(
    model=model, messages=messages, tools=[tool], stream=True
):
    for choice in chunk.choices:
        reason = choice.finish_reason or reason
        reasoning += getattr(choice.delta, "reasoning_content", None) or ""
        for call in choice.delta.tool_calls or []:
            call_id, name = call.id or call_id, call.function.name or name
            arguments += call.function.arguments or ""
assert (name, json.loads(arguments), reason) == ("get_weather", {"city": "Paris"}, "tool_calls")
assert reasoning == "I should look it up.", reasoning
function = {"name": name, "arguments": arguments}
messages += [
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": call_id, "type": "function", "function": function}],
    },
    {"role": "tool", "tool_call_id": call_id, "content": "21"},
]
answer = client.chat.completions.create(model=model, messages=messages, tools=[tool])
assert answer.choices[0].message.content == "It is 21 degrees in Paris.", answer
schema = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "celsius": {"type": "integer"}},
    "required": ["city", "celsius"],
    "additionalProperties": False,
}
answer = client.chat.completions.create(
    model=model,
    messages=[{"role": "user", "content": "An object, please."}],
    response_format={
        "type": "json_schema",
        "json_schema": {"name": "weather", "schema": schema, "strict": True},
    },
)
assert json.loads(answer.choices[0].message.content) == {"city": "Paris", "celsius": 21}, answer
